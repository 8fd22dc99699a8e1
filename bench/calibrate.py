#!/usr/bin/env python3
"""Measures which plan is fastest on this GPU and writes the profile that the plugin reads.

    bench/calibrate.py --out profile.json --shapes 5120x12288,17408x5120 --experts 128x8:2048x768
    EXL3_PROFILE=profile.json vllm serve ...

For every layer (shape, rate, codebook family) and a ladder of row counts: tiles of 8 to 128 rows,
the dense kernel, the fast forms of few rows, then the number of thread blocks of the winner. All
of it cold (`timing.py`), and every plan proven before it is timed. The built-in plan stays unless
another is more than 2 % faster, and a fast form has to gain 5 % over an exact one, since it leaves
out a rounding. Layers of routed experts likewise, see `calibrate_experts.py`.

Interrupted runs continue: what is measured lies in `<out>.partial` until the profile is written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import arms, calibrate_experts, choosing, generate, linear, ruler, timing
from exl3_plugin import devices, ops, tuning

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
FAMILIES = {"mcg": tuning.HALVES_FAMILY, "mul1": tuning.MUL1_FAMILY}
"""The codebook that is measured for each family."""
KEY = ("k", "n", "half_bits", "family")
Measured = dict[tuple[int, ...], list[dict[str, Any]]]
"""Measurements by the key of their layer; linear layers and experts have keys of two lengths."""
DENSE_FROM_ROWS = 48
BLOCKS_PER_SM = (1, 2, 3)
SMALL_TILE_ROWS = 16
"""Up to this tile two thread blocks fit an SM, which is where the search for blocks begins."""
UNIT_INPUTS = 16
"""Inputs of one unit of work, whose other side is a strip of 128 columns."""


@dataclass(frozen=True)
class Layer:
    """What a row of the plan table is about."""

    k: int
    n: int
    bits: float
    codebook: str

    @property
    def key(self) -> list[int]:
        """k, n, half bits, family: as in the table."""
        return [self.k, self.n, round(2 * self.bits), FAMILIES[self.codebook]]

    def __str__(self) -> str:
        return f"{self.k}x{self.n} {self.bits:g} bit {self.codebook}"


def candidates(m: int, default: ops.Plan, sms: int, most_blocks: int) -> list[ops.Plan]:
    """Plans worth measuring at `m` rows, the built-in one first.

    Tiles of far fewer rows than m decode every weight many times over, tiles of far more multiply
    mostly padding. The largest tile is measured up to the end, for the crossover to dense.

    Args:
        m: rows of x.
        default: the built-in plan.
        sms: multiprocessors of the device.
        most_blocks: units of work; more thread blocks than that have nothing to do.
    """
    plans = [default]
    for rows in tuning.TILE_ROWS:
        too_small = 8 * rows < m and rows != tuning.TILE_ROWS[-1]
        if too_small or rows > max(16, 2 * m):
            continue
        blocks = min(most_blocks, sms * (2 if rows <= SMALL_TILE_ROWS else 1))
        forms = [ops.EXACT]
        if rows in tuning.FAST_TILE_ROWS and m <= arms.FAST_ROWS:
            forms.append(ops.FAST)
        plans += [ops.Plan(ops.GEMM, rows, form, blocks) for form in forms]
    if m == 1:
        blocks = min(most_blocks, sms)
        plans += [ops.Plan(ops.STREAM, 1, form, blocks) for form in (ops.EXACT, ops.FAST)]
    if m >= DENSE_FROM_ROWS:
        plans.append(ops.Plan(ops.DENSE, 0, ops.EXACT, 0))
    return list(dict.fromkeys(plans))


def with_blocks(plan: ops.Plan, sms: int, most_blocks: int) -> list[ops.Plan]:
    """The plan with other numbers of thread blocks: whole waves over the SMs."""
    if plan.kernel != ops.GEMM:
        return []
    counts = dict.fromkeys(min(most_blocks, factor * sms) for factor in BLOCKS_PER_SM)
    return [plan._replace(blocks=blocks) for blocks in counts if blocks != plan.blocks]


class Calibration:
    """Measures layers on one device."""

    def __init__(self, bench: arms.Workbench, device: ops.Device):
        self.bench, self.device = bench, device
        self.refused: list[str] = []

    def layer(self, layer: Layer, rows: Iterable[int], advance: Callable[[], None]) -> list[dict]:
        """All measurements of one layer, as dictionaries of `tuning.Measurement`."""
        size = generate.weight_bytes(layer.k, layer.n, layer.bits)
        copies = timing.copies_needed(size, self.bench.l2_bytes)
        bank = generate.random_bank(layer.k, layer.n, layer.bits, layer.codebook, copies)
        truth = generate.Truth(bank, 0)
        measured = []
        for m in rows:
            measured += self._point(layer, bank, truth, m)
            advance()
        return measured

    def _point(
        self, layer: Layer, bank: generate.Bank, truth: generate.Truth, m: int
    ) -> list[dict[str, Any]]:
        """Screens the candidates at one row count, then the finalists, then their blocks."""
        default = ops.plan(
            self.device, m, layer.k, layer.n, layer.bits, layer.codebook, False, False
        )
        sms = self.device.multiprocessors
        units = layer.k // UNIT_INPUTS * (layer.n // generate.BLOCK)
        measured = choosing.measure(
            candidates(m, default, sms, units),
            default,
            lambda plan: with_blocks(plan, sms, units),
            lambda plan, replays, prove: self._time(
                layer, bank, truth if prove else None, m, plan, replays
            ),
        )
        if not measured:
            raise arms.WrongResult(f"{layer}, {m} rows: no plan runs here: {self.refused[-1]}")
        return [{**dict(zip(KEY, layer.key)), "m": m, **item} for item in measured]

    def _time(
        self,
        layer: Layer,
        bank: generate.Bank,
        truth: generate.Truth | None,
        m: int,
        plan: ops.Plan,
        replays: int,
    ) -> dict[str, Any] | None:
        """Reading of one plan, proven first where the truth is given; None if it cannot run here.

        Raises:
            WrongResult: the kernel computes something else; nothing may be chosen then.
        """
        size, dtype = (m, layer.k, layer.n), torch.bfloat16
        where = f"{layer}, {m} rows, plan {list(plan)}"
        call = arms.forced(bank, plan)
        try:
            if truth is not None:
                limit = arms.limit_for(plan, dtype)
                self.bench.proven(call, size, bank.copies, dtype, truth, limit, plan)
            return self.bench.reading(
                call, size, bank.copies, bank.copy_bytes, dtype, where, replays
            )
        except arms.WrongResult as error:
            raise arms.WrongResult(f"{where}: {error}") from error
        except RuntimeError as error:
            torch.cuda.synchronize()  # a fault of the device ends the run; a refusal does not
            self.refused.append(f"cannot run here: {where}: {str(error).splitlines()[0]}")
            return None


def overrides(measured: Iterable[dict[str, Any]]) -> list[tuning.Override]:
    """Table rows of one layer from its measurements."""
    measured = list(measured)
    if not measured:
        return []
    found = choosing.choices(measured, "m", ops.Plan)
    return tuning.rows_from(found, *(measured[0][name] for name in KEY))


def describe(k: int, n: int, half_bits: int, family: int, m: int) -> str:
    """A point in words."""
    names = {value: name for name, value in FAMILIES.items()}
    return f"{k}x{n} {half_bits / 2:g} bit {names[family]}, {m} rows"


def layers_to_measure(
    shapes: str,
    bits: str,
    codebooks: str,
    experts: str,
    model: Path | None,
    ranks: int,
    whole_experts: bool,
    extend: bool = False,
) -> tuple[list[Layer], list[calibrate_experts.ExpertLayer]]:
    """Linear layers and layers of experts that the options name, each once.

    Raises:
        ValueError: an option means nothing; a checkpoint cannot be served.
    """
    grid = [
        (rate, codebook)
        for codebook in linear.parse_names(codebooks, tuple(FAMILIES), "codebook")
        for rate in linear.parse_bits(bits)
        if rate == int(rate) or codebook == "mul1"
    ]
    sizes = [] if shapes == "none" else linear.parse_shapes(shapes)
    linears = [Layer(k, n, *kind) for k, n in sizes for kind in grid]
    mixtures = [
        calibrate_experts.ExpertLayer(one, *kind)
        for one in calibrate_experts.parse_experts(experts)
        for kind in grid
    ]
    if model is not None:
        mixtures += calibrate_experts.layers_of(model, ranks, whole_experts)
    if not linears and not mixtures and not extend:
        raise ValueError("nothing to measure: no shapes, and no experts")
    return list(dict.fromkeys(linears)), list(dict.fromkeys(mixtures))


def measured_before(path: Path, key: tuning.Key) -> Measured:
    """Measurements of a profile that is there, by the key of their layer.

    Raises:
        ProfileError: it is no profile, or of something else.
    """
    profile = tuning.load_profile(path)
    tuning.require_match(profile, key, path)
    found: Measured = {}
    for items, fields in (
        (profile.measurements, KEY),
        (profile.expert_measurements, calibrate_experts.KEY),
    ):
        for item in items:
            data = item.model_dump()
            found.setdefault(tuple(data[name] for name in fields), []).append(data)
    return found


def main(
    out: Annotated[Path, typer.Option(help="the profile to write")],
    shapes: Annotated[
        str, typer.Option(help="KxN of the layers that will be served, with commas between; none")
    ] = linear.DEFAULT_SHAPES,
    bits: Annotated[str, typer.Option(help="rates")] = "2,3,4,5,6,8",
    codebooks: Annotated[str, typer.Option(help="mcg (stands for 3inst too), mul1")] = "mcg,mul1",
    rows: Annotated[str, typer.Option(help="row counts")] = ",".join(map(str, ROWS)),
    experts: Annotated[
        str,
        typer.Option(
            help="routed experts: experts x experts a token : hidden x width, 128x8:2048x768"
        ),
    ] = "",
    model: Annotated[
        Path | None, typer.Option(help="a checkpoint, whose experts are measured at its rates")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs that share it")] = 1,
    enable_expert_parallel: Annotated[
        bool, typer.Option("--enable-expert-parallel", help="they share whole experts")
    ] = False,
    extend: Annotated[
        bool, typer.Option("--extend", help="keep what the profile has, measure what it lacks")
    ] = False,
    tokens: Annotated[str, typer.Option(help="token counts for experts")] = ",".join(
        map(str, calibrate_experts.TOKENS)
    ),
) -> None:
    """Calibrates the first GPU; some seconds for each shape, rate and codebook family."""
    console = Console(stderr=True)
    try:
        layers, mixtures = layers_to_measure(
            shapes, bits, codebooks, experts, model, tensor_parallel_size, enable_expert_parallel,
            extend,
        )  # fmt: skip
        ladder, expert_ladder = (sorted(set(linear.parse_numbers(text))) for text in (rows, tokens))
        nvml = devices.monitor()
        key = tuning.current_key()
        held = measured_before(out, key) if extend and out.is_file() else {}
        identity = {
            "key": key.model_dump(), "rows": ladder, "tokens": expert_ladder,
            "version": tuning.VERSION,
        }  # fmt: skip
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = choosing.Partial(out.with_name(out.name + ".partial"), identity)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"calibrate.py: {error}", file=sys.stderr)
        raise typer.Exit(2) from error

    layers = [layer for layer in layers if tuple(layer.key) not in held]
    mixtures = [layer for layer in mixtures if tuple(layer.key) not in held]
    if not layers and not mixtures:
        partial.path.unlink()
        console.print(f"{out} has all that is asked for", highlight=False)
        return
    begin = time.perf_counter()
    facts = devices.device_facts(0, nvml)
    timing.use_own_stream()
    tuning.clear()
    ops.configure(exact=False, batch_invariant=False)
    scale = ruler.measure(nvml=nvml)
    for line in ruler.describe(facts, scale):
        console.print(line, highlight=False, soft_wrap=True)
    elements = linear.activation_elements(
        [(layer.k, layer.n) for layer in layers if tuple(layer.key) not in partial.done],
        ladder,
        facts.l2_bytes,
    )
    bench = arms.Workbench(scale, facts.l2_bytes, arms.Activations(elements))
    linears = Calibration(bench, ops.cuda_device())
    routed = calibrate_experts.Calibration(scale.read_gb_s, ops.cuda_device())
    jobs = [(linears, layer, ladder) for layer in layers]
    jobs += [(routed, layer, expert_ladder) for layer in mixtures]
    todo = [job for job in jobs if tuple(job[1].key) not in partial.done]
    if partial.resumed:
        console.print(f"continuing {partial.path}: {len(jobs) - len(todo)} layers are measured")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task("", total=sum(len(numbers) for _, _, numbers in todo))
            for calibration, layer, numbers in todo:
                progress.update(task, description=str(layer))
                measured = calibration.layer(layer, numbers, lambda: progress.advance(task))
                partial.add({"layer": layer.key, "measured": measured})
                torch.cuda.empty_cache()
    except (arms.WrongResult, torch.OutOfMemoryError) as error:
        console.print(f"no profile written, {_reason(error)}", markup=False)
        raise typer.Exit(1) from error
    if failures := bench.failures + routed.failures:
        for failure in failures:
            console.print(f"no profile written: {failure}", markup=False)
        partial.path.unlink()
        raise typer.Exit(1)

    new = {tuple(job[1].key): partial.done[tuple(job[1].key)]["measured"] for job in jobs}
    profile = profile_of(key, scale.read_gb_s, time.perf_counter() - begin, held | new)
    profile.write(out)
    tuning.apply(tuning.load_profile(out))
    partial.path.unlink()
    for line in [*linears.refused[:3], *routed.refused[:3], *gains(new)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{out}: {len(profile.overrides)} overrides for linear layers, {len(profile.experts)} for "
        f"experts; {len(new)} layers measured in {profile.seconds:.0f} s. Use it with "
        f"EXL3_PROFILE={out}",
        highlight=False,
    )


def of_kind(measured: Measured, key: tuple[str, ...]) -> list[list[dict[str, Any]]]:
    """Those of linear layers, or of experts."""
    return [items for layer, items in measured.items() if len(layer) == len(key)]


def profile_of(
    key: tuning.Key, read_gb_s: float, seconds: float, measured: Measured
) -> tuning.Profile:
    """The profile of all measurements."""
    linears, routed = of_kind(measured, KEY), of_kind(measured, calibrate_experts.KEY)
    return tuning.Profile(
        key=key,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        read_gb_s=round(read_gb_s, 1),
        seconds=round(seconds, 1),
        overrides=[row for items in linears for row in overrides(items)],
        experts=[row for items in routed for row in calibrate_experts.overrides(items)],
        measurements=list(chain.from_iterable(linears)),
        expert_measurements=list(chain.from_iterable(routed)),
    )


def gains(measured: Measured) -> list[str]:
    """What was gained, linear layers first."""
    lines = []
    for name, key, number, words in (
        ("linear layers", KEY, "m", describe),
        ("experts", calibrate_experts.KEY, "tokens", calibrate_experts.describe),
    ):
        items = list(chain.from_iterable(of_kind(measured, key)))
        if items:
            found = choosing.gain_lines(items, (*key, number), words)
            lines += [f"{name}: {line}" for line in found]
    return lines


def _reason(error: Exception) -> str:
    """Why there is no profile, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"a layer does not fit this GPU's memory: {str(error).splitlines()[0]}"
    return f"a kernel is wrong: {error}"


if __name__ == "__main__":
    typer.run(main)
