"""Routed experts as `exl3::moe` takes them: where each matrix lies, what rate it has, one call.

All experts of a layer share six tensors. Gate and up lie in `w13_*`, down in `w2_*`; the words of
the matrices follow one another in one flat trellis, expert by expert, gate before up, so experts
and projections may differ in bits and codebook without any padding. `table` says where each begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from exl3_plugin import ops
from exl3_plugin.format import CODEBOOKS, TILE

MAX_EXPERTS = 512
"""Experts that one device may hold of a layer; `csrc/moe/limits.h` has the same number."""
MAX_SLOTS = 16
"""Experts that one token may be sent to."""

GATE, UP, DOWN = 0, 1, 2


class Kind(NamedTuple):
    """Rate and codebook of one matrix."""

    codebook: str
    """"3inst", "mcg" or "mul1"."""
    words: int
    """int16 words of one 16 x 16 tile: 16 times the bits."""


class Stored(NamedTuple):
    """One matrix as stored: trellis int16 `[k/16, n/16, words]`, suh `[k]`, svh `[n]` float16."""

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    codebook: str


class Activation(NamedTuple):
    """`a(gate) * (up + beta)`, gate cut at `limit` from above and up at both sides."""

    name: str = "swiglu"
    """"swiglu" (`gate * sigmoid(alpha * gate)`), "gelu" or "gelu_tanh"."""
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf

    @property
    def arguments(self) -> list:
        """The four arguments of the op."""
        index = ("swiglu", "gelu", "gelu_tanh").index(self.name)
        return [index, self.alpha, self.beta, self.limit]


SILU = Activation()


@dataclass(frozen=True)
class Arrangement:
    """Where the matrices of all experts lie.

    `table` is int64 `[3, experts, 2]`, for gate, up and down the first word and the number of the
    kind; `kinds` and `paired` are what the op takes; the words are those of either trellis.
    """

    table: torch.Tensor
    kinds: list[int]
    paired: bool
    w13_words: int
    w2_words: int


def arrange(kinds: Sequence[Sequence[Kind]], k: int, inner: int, n: int) -> Arrangement:
    """Lay matrices out one after the other.

    Args:
        kinds: for each expert those of gate, up and down.
        k: stored inputs of gate and up, a multiple of 128.
        inner: their stored outputs, the inputs of down.
        n: stored outputs of down.
    """
    table = torch.zeros(3, len(kinds), 2, dtype=torch.int64)
    found: dict[Kind, int] = {}
    uses: dict[Kind, int] = {}
    at = [0, 0]
    for expert, three in enumerate(kinds):
        for projection, kind in enumerate(three):
            side = int(projection == DOWN)
            tiles = (inner * n if side else k * inner) // TILE**2
            table[projection, expert, 0] = at[side]
            table[projection, expert, 1] = found.setdefault(kind, len(found))
            uses[kind] = uses.get(kind, 0) | 1 << projection
            at[side] += tiles * kind.words
    flat = [x for kind in found for x in (CODEBOOKS.index(kind.codebook), kind.words, uses[kind])]
    paired = all(three[GATE] == three[UP] for three in kinds)
    return Arrangement(table, flat, paired, *at)


class ExpertPlan(NamedTuple):
    """How one call is computed; `exl3::moe_with` takes these numbers and tokens at once."""

    rows: int
    """Rows of a tile: 1, 2, 4 (the route for few tokens), 8, 16, 32, 64 or 128; 256: the route by
    warpgroups."""
    form: int
    """`ops.EXACT`, or `ops.FAST` with 1 to 8 rows, and with 256, where it rounds the row of each
    slot to bfloat16."""
    blocks: int
    """Thread blocks of a product; 0 leaves the choice to the kernel."""


class ExpertSizes(NamedTuple):
    """What a plan needs to know of a layer of experts on one device."""

    experts: int
    """On the device."""
    global_experts: int
    """Those that the router knows, on all ranks together."""
    slots: int
    """Experts of a token."""
    k: int
    inner: int
    """Columns between the products that the device stores."""


def plan(
    device: ops.Device,
    tokens: int,
    sizes: ExpertSizes,
    bits: float,
    codebook: str,
    exact: bool = False,
    batch_invariant: bool = False,
    table: Sequence[int] = (),
) -> ExpertPlan:
    """The plan of a layer whose experts are of one kind, with bfloat16 tokens.

    Pure, so it works on every machine.

    Args:
        device: the GPU, from `ops.cuda_device` or written down.
        tokens: rows of x.
        sizes: of the layer; as many outputs as inputs.
        bits: bits per weight.
        codebook: "3inst", "mcg" or "mul1".
        exact: as in `ops.configure`.
        batch_invariant: likewise.
        table: measured choices that come before the rule, as `exl3::set_moe_table` takes them.
    """
    ops.load()
    shape = [tokens, sizes.slots, sizes.experts, sizes.global_experts, sizes.k, sizes.inner]
    shape += [sizes.k, int(2 * bits), int(codebook == "mul1"), 1, 1, 1]
    options = int(exact) + 2 * int(batch_invariant)
    return ExpertPlan(*torch.ops.exl3.moe_plan(list(device), shape, options, list(table))[:3])


@dataclass(frozen=True)
class Experts:
    """The experts of one layer on one device, ready to run.

    `w13_suh` float16 `[experts, 2, k]`, `w13_svh` `[experts, 2, inner]`, `w2_suh`
    `[experts, inner]`, `w2_svh` `[experts, n]`; `sizes` is inner_begin, inner_size, n_out, paired.
    """

    w13_trellis: torch.Tensor
    w13_suh: torch.Tensor
    w13_svh: torch.Tensor
    w2_trellis: torch.Tensor
    w2_suh: torch.Tensor
    w2_svh: torch.Tensor
    table: torch.Tensor
    kinds: list[int]
    sizes: list[int]

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        expert_map: torch.Tensor | None = None,
        activation: Activation = SILU,
        weight_on_input: bool = False,
    ) -> torch.Tensor:
        """Send each row to its experts and add what comes back.

        Args:
            x: `[m, k_in]` bfloat16 or float16, on the CPU float32 too; k_in up to k.
            weights: float32 `[m, slots]`.
            ids: int32 or int64 `[m, slots]`; -1 is no expert.
            expert_map: int32, for each id the place in these tensors or -1; None where they agree.
            activation: what stands between the products.
            weight_on_input: multiply rows before the experts, not after.

        Returns:
            `[m, n_out]` in x's dtype: the weighted sum in the order of the slots, rounded once.
        """
        return torch.ops.exl3.moe(
            x, weights, ids, expert_map, self.w13_trellis, self.w13_suh, self.w13_svh,
            self.w2_trellis, self.w2_suh, self.w2_svh, self.table, self.kinds, self.sizes,
            *activation.arguments, weight_on_input,
        )  # fmt: skip


def pack(
    experts: Sequence[tuple[Stored, Stored, Stored]],
    device: torch.device | str = "cpu",
    inner_range: tuple[int, int] | None = None,
    n_out: int | None = None,
) -> Experts:
    """Experts from matrices as stored: for tests, trials and measurements.

    Args:
        experts: gate, up and down of each.
        device: where the tensors go; on CUDA the words are brought into the order of its kernels.
        inner_range: columns of gate and up in use as (first, count); default all.
        n_out: outputs wanted; default all.
    """
    ops.load()
    device = torch.device(device)
    gate, _, down = experts[0]
    k, inner, n = gate.suh.shape[0], gate.svh.shape[0], down.svh.shape[0]
    kinds = [[Kind(m.codebook, m.trellis.shape[2]) for m in three] for three in experts]
    plan = arrange(kinds, k, inner, n)
    order = ops.to_strips if device.type == "cuda" else (lambda t: t.reshape(-1))

    def words(*projections: int) -> torch.Tensor:
        return torch.cat([order(three[p].trellis.to(device)) for three in experts
                          for p in projections])  # fmt: skip

    def scales(name: str, *projections: int) -> torch.Tensor:
        rows = [torch.stack([getattr(three[p], name) for p in projections]) for three in experts]
        return torch.stack(rows).to(device)

    begin, size = inner_range or (0, inner)
    return Experts(
        words(GATE, UP),
        scales("suh", GATE, UP),
        scales("svh", GATE, UP),
        words(DOWN),
        scales("suh", DOWN)[:, 0].contiguous(),
        scales("svh", DOWN)[:, 0].contiguous(),
        plan.table.to(device),
        plan.kinds,
        [begin, size, n if n_out is None else n_out, int(plan.paired)],
    )
