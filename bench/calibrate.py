#!/usr/bin/env python3
"""Measures which plan is fastest on this GPU and writes the profile that the plugin reads.

    bench/calibrate.py --out profile.json --shapes 5120x12288,17408x5120
    EXL3_PROFILE=profile.json vllm serve ...

For every layer (shape, rate, codebook family) and a ladder of row counts: tiles of 8 to 128 rows,
the dense kernel, the fast forms of few rows, then the number of thread blocks of the winner. All
of it cold (`timing.py`), and every plan proven before it is timed. The built-in plan stays unless
another is more than 2 % faster, and a fast form has to gain 5 % over an exact one, since it leaves
out a rounding.

Interrupted runs continue: what is measured lies in `<out>.partial` until the profile is written.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import arms, generate, linear, ruler, timing
from exl3_plugin import devices, ops, tuning

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
FAMILIES = {"mcg": tuning.HALVES_FAMILY, "mul1": tuning.MUL1_FAMILY}
"""The codebook that is measured for each family."""
HYSTERESIS = 1.02
FAST_PENALTY = 1.05
DENSE_FROM_ROWS = 48
BLOCKS_PER_SM = (1, 2, 3)
SMALL_TILE_ROWS = 16
"""Up to this tile two thread blocks fit an SM, which is where the search for blocks begins."""
UNIT_INPUTS = 16
"""Inputs of one unit of work, whose other side is a strip of 128 columns."""
SCREEN_REPLAYS = 3
FINAL_REPLAYS = 11
FINALISTS_WITHIN = 1.06
"""Plans within this factor of the fastest of the screening are measured again, longer."""


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


def cost(plan: ops.Plan, us: float) -> float:
    """Time of a plan with the price of a fast form added."""
    return us * (FAST_PENALTY if plan.form == ops.FAST else 1)


def choose(times: dict[ops.Plan, float], default: ops.Plan) -> ops.Plan:
    """The plan to use, from microseconds; ties go to the earlier one, doubt to the built-in one."""
    best = min(times, key=lambda plan: cost(plan, times[plan]))
    if default in times and cost(default, times[default]) <= HYSTERESIS * cost(best, times[best]):
        return default
    return best


def finalists(times: dict[ops.Plan, float], default: ops.Plan) -> list[ops.Plan]:
    """Plans to measure again: the built-in one and those close to the fastest."""
    least = min(cost(plan, us) for plan, us in times.items())
    return [
        plan
        for plan, us in times.items()
        if plan == default or cost(plan, us) <= FINALISTS_WITHIN * least
    ]


class Partial:
    """Results on the way: a file of JSON lines whose first line says what they belong to."""

    def __init__(self, path: Path, identity: dict[str, Any]):
        """Opens the file; results of another identity are dropped."""
        self.path = path
        self.done: dict[tuple[int, ...], dict[str, Any]] = {}
        lines = path.read_text().splitlines() if path.is_file() else []
        try:
            entries = [json.loads(line) for line in lines]
        except json.JSONDecodeError:
            # The last line of an interrupted run may be half written.
            entries = [json.loads(line) for line in lines[:-1]]
        self.resumed = bool(entries) and entries[0] == identity
        if self.resumed:
            self.done = {tuple(entry["layer"]): entry for entry in entries[1:]}
        with path.open("w") as out:
            for entry in [identity, *self.done.values()]:
                print(json.dumps(entry), file=out)

    def add(self, entry: dict[str, Any]) -> None:
        """Keeps the result of one layer."""
        self.done[tuple(entry["layer"])] = entry
        with self.path.open("a") as out:
            print(json.dumps(entry), file=out)


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
        readings: dict[ops.Plan, dict[str, Any]] = {}

        def screen(plans: Iterable[ops.Plan]) -> None:
            for plan in plans:
                reading = self._time(layer, bank, truth, m, plan, SCREEN_REPLAYS)
                if reading is not None:
                    readings[plan] = reading

        def times() -> dict[ops.Plan, float]:
            return {plan: reading["us"] for plan, reading in readings.items()}

        sms = self.device.multiprocessors
        units = layer.k // UNIT_INPUTS * (layer.n // generate.BLOCK)
        screen(candidates(m, default, sms, units))
        if not readings:
            raise arms.WrongResult(f"{layer}, {m} rows: no plan runs here: {self.refused[-1]}")
        screen(with_blocks(choose(times(), default), sms, units))
        final = {}
        for plan in finalists(times(), default):
            reading = self._time(layer, bank, None, m, plan, FINAL_REPLAYS)
            if reading is not None:
                readings[plan] = reading
                final[plan] = reading["us"]
        chosen = choose(final or times(), default)
        layer_key = dict(zip(("k", "n", "half_bits", "family"), layer.key))
        return [
            {
                **layer_key,
                "m": m,
                "plan": list(plan),
                "us": reading["us"],
                "spread": reading["spread"],
                "default": plan == default,
                "chosen": plan == chosen,
            }
            for plan, reading in readings.items()
        ]

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
            self.refused.append(f"{where}: {str(error).splitlines()[0]}")
            return None


def overrides(measured: Iterable[dict[str, Any]]) -> list[tuning.Override]:
    """Table rows of one layer from its measurements."""
    chosen = sorted((item for item in measured if item["chosen"]), key=lambda item: item["m"])
    if not chosen:
        return []
    first = chosen[0]
    choices = [(item["m"], ops.Plan(*item["plan"]), item["default"]) for item in chosen]
    return tuning.rows_from(choices, first["k"], first["n"], first["half_bits"], first["family"])


def gain_lines(measured: list[dict[str, Any]], count: int = 10) -> list[str]:
    """The largest gains over the built-in plans, in words."""
    points: dict[tuple[int, ...], dict[str, dict[str, Any]]] = {}
    for item in measured:
        key = tuple(item[name] for name in ("k", "n", "half_bits", "family", "m"))
        for name in ("default", "chosen"):
            if item[name]:
                points.setdefault(key, {})[name] = item
    gains = sorted(
        (
            (pair["default"]["us"] / pair["chosen"]["us"], key, pair)
            for key, pair in points.items()
            if len(pair) == 2 and not pair["chosen"]["default"]
        ),
        key=lambda entry: (-entry[0], entry[1]),
    )
    names = {value: name for name, value in FAMILIES.items()}
    lines = [f"{len(gains)} of {len(points)} points changed"]
    for gain, (k, n, half_bits, family, m), pair in gains[:count]:
        lines.append(
            f"{gain:.2f}x  {k}x{n} {half_bits / 2:g} bit {names[family]}, {m} rows: "
            f"{pair['default']['plan']} {pair['default']['us']:.1f} us -> "
            f"{pair['chosen']['plan']} {pair['chosen']['us']:.1f} us"
        )
    return lines


def main(
    out: Annotated[Path, typer.Option(help="the profile to write")],
    shapes: Annotated[
        str, typer.Option(help="KxN of the layers that will be served, with commas between")
    ] = linear.DEFAULT_SHAPES,
    bits: Annotated[str, typer.Option(help="rates")] = "2,3,4,5,6,8",
    codebooks: Annotated[str, typer.Option(help="mcg (stands for 3inst too), mul1")] = "mcg,mul1",
    rows: Annotated[str, typer.Option(help="row counts")] = ",".join(map(str, ROWS)),
) -> None:
    """Calibrates the first GPU; about two seconds for each shape, rate and codebook family."""
    console = Console(stderr=True)
    try:
        layers = [
            Layer(k, n, rate, codebook)
            for k, n in linear.parse_shapes(shapes)
            for codebook in linear.parse_names(codebooks, tuple(FAMILIES), "codebook")
            for rate in linear.parse_bits(bits)
            if rate == int(rate) or codebook == "mul1"
        ]
        ladder = sorted(set(linear.parse_numbers(rows)))
        nvml = devices.monitor()
        key = tuning.current_key()
        identity = {"key": key.model_dump(), "rows": ladder, "version": tuning.VERSION}
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Partial(out.with_name(out.name + ".partial"), identity)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"calibrate.py: {error}", file=sys.stderr)
        raise typer.Exit(2) from error

    begin = time.perf_counter()
    facts = devices.device_facts(0, nvml)
    timing.use_own_stream()
    tuning.clear()
    ops.configure(exact=False, batch_invariant=False)
    scale = ruler.measure(nvml=nvml)
    for line in ruler.describe(facts, scale):
        console.print(line, highlight=False, soft_wrap=True)
    todo = [layer for layer in layers if tuple(layer.key) not in partial.done]
    if partial.resumed:
        console.print(f"continuing {partial.path}: {len(layers) - len(todo)} layers are measured")
    shapes_left = [(layer.k, layer.n) for layer in todo]
    elements = linear.activation_elements(shapes_left, ladder, facts.l2_bytes)
    bench = arms.Workbench(scale, facts.l2_bytes, arms.Activations(elements))
    calibration = Calibration(bench, ops.cuda_device())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task("", total=len(todo) * len(ladder))
            for layer in todo:
                progress.update(task, description=str(layer))
                measured = calibration.layer(layer, ladder, lambda: progress.advance(task))
                partial.add({"layer": layer.key, "measured": measured})
    except arms.WrongResult as error:
        console.print(f"no profile written, a kernel is wrong: {error}", markup=False)
        raise typer.Exit(1) from error
    if bench.failures:
        for failure in bench.failures:
            console.print(f"no profile written: {failure}", markup=False)
        partial.path.unlink()
        raise typer.Exit(1)

    results = [partial.done[tuple(layer.key)]["measured"] for layer in layers]
    profile = tuning.Profile(
        key=key,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        read_gb_s=round(scale.read_gb_s, 1),
        seconds=round(time.perf_counter() - begin, 1),
        overrides=[row for measured in results for row in overrides(measured)],
        measurements=[tuning.Measurement(**item) for measured in results for item in measured],
    )
    profile.write(out)
    tuning.apply(tuning.load_profile(out))
    partial.path.unlink()
    for line in calibration.refused[:3]:
        console.print(f"cannot run here: {line}", markup=False, highlight=False, soft_wrap=True)
    for line in gain_lines([item for measured in results for item in measured]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{out}: {len(profile.overrides)} overrides for {len(layers)} layers in "
        f"{profile.seconds:.0f} s. Use it with EXL3_PROFILE={out}",
        highlight=False,
    )


if __name__ == "__main__":
    typer.run(main)
