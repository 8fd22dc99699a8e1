"""Layers of routed experts for `calibrate.py`: which are measured, which plans, and how.

A plan is measured as a model would run it: as the one row of the table of measured choices, so what
is timed is what the profile will bring about. For each number of tokens: tiles of 1 to 128 rows and
the route by warpgroups where it can serve, the fast forms, then the thread blocks of the best. Two
tokens are held against float64, all tokens against what the built-in plan gives, before a plan is
timed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import arms, choosing, moe_bank, timing
from bench.ruler import TOLERANCE
from exl3_plugin import ops, tuning
from exl3_plugin.checkpoint import read_checkpoint
from exl3_plugin.expert_names import check_experts, expert_layers
from exl3_plugin.experts import ExpertPlan, ExpertSizes, plan
from exl3_plugin.format import BLOCK
from exl3_plugin.shards import covering
from tests.moe import moe_oracle

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
LAYER_BYTES = 1 << 30
"""Experts of as many layers as fill this are rotated, two at least."""
CALLS = 16
"""Routings that are rotated where a call does not read a whole layer."""
TALL_FROM_ROWS = 4
"""Rows an expert, on average, from which the route by warpgroups is worth a reading."""
TILE_BLOCKS, STREAM_BLOCKS = (1, 2, 3), (0.5, 1.5, 2)
"""Thread blocks a multiprocessor that are tried."""
CLOSE = 0.02
"""Most that a token may differ from what the built-in plan gives, relative, in the L2 norm. The
roundings of bfloat16 account for a quarter of it."""
KEY = ("k", "inner", "experts", "global_experts", "slots", "half_bits", "family")
_SHAPE = re.compile(r"(?:(\d+)of)?(\d+)x(\d+):(\d+)x(\d+)")


@dataclass(frozen=True)
class ExpertLayer:
    """What a row of the table of measured choices is about."""

    sizes: ExpertSizes
    bits: float
    codebook: str

    @property
    def fields(self) -> dict[str, int]:
        """As in the table, see `KEY`."""
        family = tuning.MUL1_FAMILY if self.codebook == "mul1" else tuning.HALVES_FAMILY
        return {**self.sizes._asdict(), "half_bits": round(2 * self.bits), "family": family}

    @property
    def key(self) -> list[int]:
        """The values of `KEY`."""
        return [self.fields[name] for name in KEY]

    def __str__(self) -> str:
        return describe(*self.key)


def describe(
    k: int,
    inner: int,
    experts: int,
    global_experts: int,
    slots: int,
    half_bits: int,
    family: int,
    tokens: int | None = None,
) -> str:
    """A layer in words, from the values of `KEY`, or a point of it."""
    here = "" if experts == global_experts else f"{experts}of"
    codebook = "mul1" if family == tuning.MUL1_FAMILY else "mcg"
    words = f"{here}{global_experts}x{slots}:{k}x{inner} {half_bits / 2:g} bit {codebook}"
    return words if tokens is None else f"{words}, {tokens} tokens"


def parse_experts(text: str) -> list[ExpertSizes]:
    """`128x8:2048x768`, or `32of128x8:2048x768` where a rank has some of them, commas between.

    Experts x experts of a token : hidden size x columns between the products on this GPU.

    Raises:
        ValueError: anything else.
    """
    found = []
    for item in filter(None, (item.strip() for item in text.split(","))):
        match = _SHAPE.fullmatch(item)
        if match is None:
            raise ValueError(f"experts {item!r}: expected ExT:HxI, such as 128x8:2048x768")
        count, slots, hidden, inner = map(int, match.groups()[1:])
        here = count if match[1] is None else int(match[1])
        if not 0 < here <= count or not 0 < slots <= min(count, 16) or not hidden or not inner:
            raise ValueError(f"experts {item!r}: at most all are here, at most 16 serve a token")
        if hidden % BLOCK or inner % BLOCK:
            raise ValueError(f"experts {item!r}: H and I must be multiples of {BLOCK}")
        found.append(ExpertSizes(here, count, slots, hidden, inner))
    return found


def layers_of(model: Path, ranks: int, whole_experts: bool) -> list[ExpertLayer]:
    """The kinds of expert layers of a checkpoint, as one of `ranks` GPUs holds them.

    A layer counts by the rate and codebook of its first gate, as the kernels look it up.

    Args:
        model: a folder; headers are read, not weights.
        ranks: `--tensor-parallel-size`.
        whole_experts: `--enable-expert-parallel`.

    Raises:
        CheckpointError: it cannot be served.
        ValueError: its experts cannot be divided so.
    """
    checkpoint = read_checkpoint(model)
    check_experts(checkpoint)
    found: dict[ExpertLayer, None] = {}
    for layer in expert_layers(checkpoint):
        if whole_experts:
            shares = {count for count in _shares(layer.count, ranks) if count}
            cuts = {layer.gate.n}
        elif layer.width % ranks:
            raise ValueError(
                f"{model}: experts are {layer.width} columns wide, which {ranks} ranks cannot share"
            )
        else:
            share, shares = layer.width // ranks, {layer.count}
            cuts = {covering(rank * share, share).loaded for rank in range(ranks)}
        # 3inst and mcg are one family, of which mcg is measured.
        codebook = "mul1" if layer.gate.codebook == "mul1" else "mcg"
        for experts in sorted(shares):
            for inner in sorted(cuts):
                sizes = ExpertSizes(experts, layer.count, layer.slots, layer.gate.k, inner)
                found[ExpertLayer(sizes, layer.gate.bits, codebook)] = None
    return list(found)


def _shares(count: int, ranks: int) -> list[int]:
    """Experts of each rank: as vLLM places them, the first ranks get one more."""
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]


def fitted(
    device: ops.Device, tokens: int, layer: ExpertLayer, wanted: ExpertPlan
) -> ExpertPlan | None:
    """What a row of the table with this plan brings about; None where it cannot serve the layer.

    The kernels themselves are asked, which may take fewer blocks than asked for.
    """
    table = row(layer, tokens, wanted).numbers()
    got = plan(device, tokens, layer.sizes, layer.bits, layer.codebook, table=table)
    return got if got[:2] == wanted[:2] else None


def row(layer: ExpertLayer, tokens: int, wanted: ExpertPlan) -> tuning.ExpertOverride:
    """The row of the table that gives the layer a plan up to a number of tokens."""
    return tuning.ExpertOverride(**layer.fields, tokens_upto=tokens, **wanted._asdict())


def candidates(
    device: ops.Device, tokens: int, layer: ExpertLayer, default: ExpertPlan
) -> list[ExpertPlan]:
    """Plans worth measuring, the built-in one first.

    Tiles far lower than the rows of an expert decode its weights many times over, tiles far taller
    multiply padding. The two tallest are measured up to the end, beside the route by warpgroups.
    """
    sms, sizes = device.multiprocessors, layer.sizes
    average = tokens * sizes.slots / sizes.global_experts
    plans = [default]
    for rows in (1, 2, 4):
        if rows <= max(1, tokens):
            plans += [ExpertPlan(rows, form, sms) for form in (ops.EXACT, ops.FAST)]
    for rows in tuning.TILE_ROWS:
        too_low = 4 * rows < average and rows < 64
        if too_low or rows > max(16, 6 * average):
            continue
        forms = (ops.EXACT, ops.FAST) if rows in tuning.FAST_TILE_ROWS else (ops.EXACT,)
        plans += [ExpertPlan(rows, form, sms * (2 if rows <= 16 else 1)) for form in forms]
    if average >= TALL_FROM_ROWS:
        forms = (ops.EXACT, ops.FAST)
        plans += [ExpertPlan(tuning.WARPGROUP_ROWS, form, sms) for form in forms]
    found = [fitted(device, tokens, layer, one) for one in plans[1:]]
    return list(dict.fromkeys([default, *filter(None, found)]))


def with_blocks(
    device: ops.Device, tokens: int, layer: ExpertLayer, chosen: ExpertPlan
) -> list[ExpertPlan]:
    """The plan with other numbers of thread blocks."""
    if chosen.rows == tuning.WARPGROUP_ROWS:
        return []
    factors = STREAM_BLOCKS if chosen.rows < 8 else TILE_BLOCKS
    counts = dict.fromkeys(int(factor * device.multiprocessors) for factor in factors)
    found = [fitted(device, tokens, layer, chosen._replace(blocks=count)) for count in counts]
    return [one for one in dict.fromkeys(filter(None, found)) if one != chosen]


def places_of(here: int, experts: int, device: torch.device | str) -> torch.Tensor:
    """The map of a rank that holds the first experts."""
    places = torch.arange(experts, dtype=torch.int32, device=device)
    places[here:] = -1
    return places


class Proof:
    """What two tokens must give, whatever the plan and the other tokens are.

    They go to the same experts at every number of tokens, so that these are decoded once.
    """

    def __init__(self, bank: moe_bank.Layer, sizes: ExpertSizes):
        used = min(sizes.slots, sizes.experts)
        device = bank.experts.table.device
        self.oracle = moe_oracle.Layer([bank.stored(expert) for expert in range(used)], device)
        self.places = places_of(used, sizes.global_experts, device)
        self.ids = torch.arange(sizes.slots, dtype=torch.int32, device=device)

    def route(self, ids: torch.Tensor) -> torch.Tensor:
        """A routing in which the first and the last token go to the experts that are known."""
        ids = ids.clone()
        ids[0], ids[-1] = self.ids, self.ids.flip(0)
        return ids

    def expect(self, x, weights, ids, fast: bool, short: bool) -> moe_oracle.Expectation:
        """Of the first and the last token, by a plan of this form."""
        rows = [0, -1]
        return self.oracle.expect(
            x[rows], weights[rows], ids[rows], self.places, cuda=True, fast=fast, short=short
        )


def differs(y: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest relative difference of a token, in the L2 norm; inf where not finite."""
    off = (y.float() - reference.float()).norm(dim=1)
    off = off / reference.float().norm(dim=1).clamp(min=1e-30)
    return float(torch.nan_to_num(off, nan=math.inf).max())


@contextmanager
def forced(layer: ExpertLayer, tokens: int, wanted: ExpertPlan | None) -> Iterator[None]:
    """A table of measured choices with one row; without a plan an empty one."""
    rows = [] if wanted is None else row(layer, tokens, wanted).numbers()
    torch.ops.exl3.set_moe_table(rows)
    try:
        yield
    finally:
        torch.ops.exl3.set_moe_table([])


class Bank:
    """Random layers of one kind, their proof, and what is sent to them."""

    def __init__(self, layer: ExpertLayer, device: str):
        sizes, self.device = layer.sizes, device
        self.sizes = sizes
        self.shape = moe_bank.Shape(sizes.experts, sizes.k, sizes.inner, sizes.slots)
        one = int(self.shape.weights * sizes.experts * layer.bits / 8)
        self.layers = [
            moe_bank.random_layer(self.shape, layer.bits, layer.codebook, seed, device)
            for seed in range(max(2, math.ceil(LAYER_BYTES / one)))
        ]
        self.proof = Proof(self.layers[0], sizes)
        self.map = None
        if sizes.experts != sizes.global_experts:
            self.map = places_of(sizes.experts, sizes.global_experts, device)

    def given(self, tokens: int) -> list[tuple]:
        """(x, weights, ids, live experts here) of as many calls as rotate."""
        sizes, layers = self.sizes, len(self.layers)
        every_expert = tokens * sizes.slots >= 4 * sizes.global_experts
        count = layers * (1 if every_expert else max(1, CALLS // layers))
        whole = moe_bank.Shape(sizes.global_experts, sizes.k, sizes.inner, sizes.slots)
        xs = [torch.randn(tokens, sizes.k, device=self.device).bfloat16() for _ in range(2)]
        routings = moe_bank.routings(whole, tokens, count, device=self.device)
        return [
            (xs[i % 2], weights, ids, int((ids.unique() < sizes.experts).sum()))
            for i, (weights, ids, _) in enumerate(routings)
        ]

    def run(self, copy: int, x, weights, ids) -> torch.Tensor:
        """One call by the choice in force."""
        return self.layers[copy % len(self.layers)].experts.run(x, weights, ids, self.map)


class Calibration:
    """Measures layers of experts on one device.

    Args:
        read_gb_s: what its memory gives at most.
        device: what plans are chosen for.
        on: where tensors are.
    """

    def __init__(self, read_gb_s: float, device: ops.Device, on: str = "cuda"):
        self.read_gb_s, self.device, self.on = read_gb_s, device, on
        self.refused: list[str] = []
        self.failures: list[str] = []

    def layer(
        self, layer: ExpertLayer, ladder: Iterable[int], advance: Callable[[], None]
    ) -> list[dict[str, Any]]:
        """All measurements of one layer, as dictionaries of `tuning.ExpertMeasurement`."""
        bank = Bank(layer, self.on)
        measured = []
        for tokens in ladder:
            measured += self._point(layer, bank, tokens)
            advance()
        return measured

    def _point(self, layer: ExpertLayer, bank: Bank, tokens: int) -> list[dict[str, Any]]:
        device = self.device
        default = plan(device, tokens, layer.sizes, layer.bits, layer.codebook)
        given = bank.given(tokens)
        x, weights, ids, _ = given[0]
        operands = x, weights, bank.proof.route(ids)
        expected: dict[tuple[bool, bool], moe_oracle.Expectation] = {}

        def prove(one: ExpertPlan, y: torch.Tensor) -> None:
            form = moe_bank.form_of(one)
            if form not in expected:
                expected[form] = bank.proof.expect(*operands, *form)
            statistical, worst = expected[form].fractions(y[[0, -1]])
            where = f"{layer}, {tokens} tokens, plan {list(one)}"
            if not (statistical <= 1 and worst <= 0.5 and bool(torch.isfinite(y).all())):
                raise arms.WrongResult(
                    f"{where}: {statistical:.3g} of the statistical bound (limit 1), {worst:.3g} "
                    "of the worst case (limit 0.5)"
                )
            if (off := differs(y, reference)) > CLOSE:
                raise arms.WrongResult(
                    f"{where}: a token differs by {off:.2e} from the built-in plan's"
                )

        with forced(layer, tokens, None):
            reference = bank.run(0, *operands)
        prove(default, reference)

        def read(one: ExpertPlan, replays: int, is_new: bool) -> dict[str, Any] | None:
            where = f"{layer}, {tokens} tokens, plan {list(one)}"
            try:
                with forced(layer, tokens, None if one == default else one):
                    if is_new:
                        poison = torch.full_like(reference, math.nan)
                        del poison
                        prove(one, bank.run(0, *operands))
                    return self._reading(bank, given, replays, where)
            except RuntimeError as error:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()  # a fault of the device ends the run
                    torch.cuda.empty_cache()
                self.refused.append(f"cannot run here: {where}: {str(error).splitlines()[0]}")
                return None

        measured = choosing.measure(
            candidates(device, tokens, layer, default),
            default,
            lambda one: with_blocks(device, tokens, layer, one),
            read,
        )
        if not measured:
            raise arms.WrongResult(f"{layer}, {tokens} tokens: nothing runs: {self.refused[-1]}")
        return [{**layer.fields, "tokens": tokens, **item} for item in measured]

    def _reading(self, bank: Bank, given: list[tuple], replays: int, where: str) -> dict[str, Any]:
        def call(copy: int) -> torch.Tensor:
            return bank.run(copy, *given[copy][:3])

        reading = timing.time_rotating(call, len(given), ring=2, replays=replays)
        live = sum(item[3] for item in given) / len(given)
        gb_s = live * bank.layers[0].expert_bytes / (reading.us * 1e3)
        if gb_s > TOLERANCE * self.read_gb_s:
            self.failures.append(
                f"{where}: {gb_s:.0f} GB/s is more than the memory gives "
                f"({self.read_gb_s:.0f} GB/s): the weights came from a cache"
            )
        return {"us": round(reading.us, 3), "spread": round(reading.spread, 4)}


def overrides(measured: Iterable[dict[str, Any]]) -> list[tuning.ExpertOverride]:
    """Table rows of one layer from its measurements."""
    measured = list(measured)
    if not measured:
        return []
    found = choosing.choices(measured, "tokens", ExpertPlan)
    return tuning.expert_rows_from(found, **{name: measured[0][name] for name in KEY})
