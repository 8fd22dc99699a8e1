#!/usr/bin/env python3
"""`exl3::linear` on a GPU against its peers and the read ruler, one JSON line a point.

    bench/linear.py --shapes 5120x12288,17408x5120,4096x2048 --bits 4,6 --codebooks mcg \\
        --rows 1,2,4,8,16,32,64,128,256,512,2048,8192 --peers all --json points.jsonl

Every point is compared with float64 truth before it is timed; a wrong one is not timed, and the
exit code is 1. How figures are taken stands in `timing.py`; the floors that the last table speaks
of in `floors.py`. `bench/report.py points.jsonl` prints whole tables from the file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import arms, generate, peers, report, ruler, timing
from bench.arms import FORMS, KERNELS, Kernel, Workbench, WrongResult
from exl3_plugin import devices, ops
from exl3_plugin.format import CODEBOOKS, LEGAL_BITS

SAMPLE_EVERY = 4
"""Clocks and power are read at every fourth row count of a layer."""
DEFAULT_SHAPES = "5120x12288,17408x5120,4096x2048"
OPTIONS = ("batch_invariant", "dependent_launch")
DEFAULT_ROWS = "1,2,4,8,16,32,64,128,256,512,2048,8192"


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """`KxN,KxN` to pairs; both multiples of 128.

    Raises:
        ValueError: anything else.
    """
    shapes = []
    for item in text.split(","):
        parts = item.strip().lower().split("x")
        if len(parts) != 2 or not all(part.isdigit() for part in parts):
            raise ValueError(f"shape {item!r}: expected KxN, such as 5120x12288")
        k, n = map(int, parts)
        if k % 128 or n % 128 or not k or not n:
            raise ValueError(f"shape {item!r}: K and N must be multiples of 128")
        shapes.append((k, n))
    return shapes


def parse_numbers(text: str) -> list[int]:
    """`1,2,4` to positive whole numbers.

    Raises:
        ValueError: anything else.
    """
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdigit() and int(item) > 0 for item in items):
        raise ValueError(f"{text!r}: expected positive whole numbers with commas between")
    return [int(item) for item in items]


def parse_bits(text: str) -> list[float]:
    """`4,2.5` to rates that exist.

    Raises:
        ValueError: a rate that does not.
    """
    try:
        rates = [float(item) for item in text.split(",")]
    except ValueError:
        raise ValueError(f"bits {text!r}: expected numbers with commas between") from None
    for rate in rates:
        if rate not in LEGAL_BITS:
            raise ValueError(f"{rate:g} bits do not exist; legal are {LEGAL_BITS}")
    return rates


def parse_names(text: str, known: tuple[str, ...], what: str) -> list[str]:
    """Names of `known` from a comma list; "none" is the empty list.

    Raises:
        ValueError: an unknown name.
    """
    names = [] if text.strip() == "none" else [item.strip() for item in text.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; there are {', '.join(known)}")
    return names


def parse_options(items: list[str]) -> dict[str, bool]:
    """`name=0` and `name=1` items for `ops.configure`; `exact` is what `--forms` is for.

    Raises:
        ValueError: another name or form.
    """
    options = {}
    for item in items:
        name, _, value = item.partition("=")
        if name not in OPTIONS or value not in ("0", "1"):
            names = " or ".join(OPTIONS)
            raise ValueError(f"option {item!r}: expected {names}, then =0 or =1")
        options[name] = value == "1"
    return options


def parse_dtype(text: str) -> torch.dtype:
    """Type of the activations.

    Raises:
        ValueError: one that the kernels do not take.
    """
    types = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    if text not in types:
        raise ValueError(f"dtype {text!r}: expected {' or '.join(types)}")
    return types[text]


def kernels_to_run(kernels: list[str], forms: list[str]) -> list[Kernel]:
    """Every kernel in every form that it has, "auto" first."""
    return [
        Kernel(name, form)
        for name in sorted(kernels, key=KERNELS.index)
        for form in forms
        if not (form == "fast" and name not in ("auto", "8"))
        and not (name == "dense" and form != forms[0])
    ]


class Run:
    """One run over a grid; `points()` yields the JSON lines."""

    def __init__(
        self,
        bench: Workbench,
        device: ops.Device,
        found: peers.Peers,
        options: dict[str, bool],
        dtype: torch.dtype,
        peer_layers: dict[float, list[str]],
        eager: bool = False,
    ):
        self.bench, self.device, self.found = bench, device, found
        self.options, self.dtype, self.eager = options, dtype, eager
        self.peer_layers = peer_layers

    def points(
        self,
        shapes: list[tuple[int, int]],
        rates: list[float],
        codebooks: list[str],
        rows: list[int],
        kernels: list[Kernel],
    ) -> Iterator[dict[str, Any]]:
        """All points of the grid, shape by shape, so that a bank is made once."""
        for k, n in shapes:
            dense = self._dense_peers(k, n, rows)
            for bits in rates:
                for codebook in codebooks:
                    if bits != int(bits) and codebook != "mul1":
                        continue
                    yield from self._layer(k, n, bits, codebook, rows, kernels, dense)

    def _dense_peers(self, k: int, n: int, rows: list[int]) -> dict[str, dict[int, Any]]:
        """Readings of the peers that do not know our rates: once a shape and row count."""
        paths: list[tuple[peers.Path, int, int]] = []
        if self.found.torch:
            copies = timing.copies_needed(2 * k * n, self.bench.l2_bytes)
            paths.append((peers.torch_path(peers.dense_weights(k, n, copies)), copies, 2 * k * n))
        if self.found.marlin:
            copies = timing.copies_needed(k * n // 2, self.bench.l2_bytes)
            try:
                path = peers.marlin_path(self.found.marlin, k, n, copies)
                paths.append((path, copies, k * n // 2))
            except Exception as error:  # best effort: another vLLM has other helpers
                self.found.absent["marlin"] = f"{k}x{n}: {str(error).splitlines()[0]}"
        readings: dict[str, dict[int, Any]] = {}
        for path, copies, size in paths:
            for m in rows:
                where = f"{path.peer} {k}x{n} {m} rows"
                reading = self.bench.reading(path.call, (m, k, n), copies, size, path.dtype, where)
                readings.setdefault(path.peer, {})[m] = reading
        return readings

    def _layer(
        self,
        k: int,
        n: int,
        bits: float,
        codebook: str,
        rows: list[int],
        kernels: list[Kernel],
        dense: dict[str, dict[int, Any]],
    ) -> Iterator[dict[str, Any]]:
        """All points of one shape, rate and codebook."""
        copies = timing.copies_needed(generate.weight_bytes(k, n, bits), self.bench.l2_bytes)
        bank = generate.random_bank(k, n, bits, codebook, copies)
        # Two copies whose truth is known take turns, so that a mixed-up copy is noticed.
        truths = [generate.Truth(bank, copy, seed=copy) for copy in (0, copies - 1)]
        for number, m in enumerate(rows):
            compared: dict[str, Any] = {}
            for name, readings in dense.items():
                if name == "torch" or bits == 4:
                    compared[name] = readings[m]
            if self.found.exllamav3 and codebook in self.peer_layers.get(bits, ()):
                compared["exllamav3"] = arms.peer_reading(
                    self.bench, bank, m, truths, self.found.exllamav3
                )
            base = {"shape": f"{k}x{n}", "k": k, "n": n, "bits": bits, "codebook": codebook}
            base.update(rows=m, copies=copies)
            if not kernels:
                yield {**base, "kernel": "none", "form": "none", "peers": compared}
            for kernel in kernels:
                if kernel.applies(m):
                    truth = truths[number % len(truths)]
                    point = {**base, **self._ours(bank, m, kernel, truth, number)}
                    yield with_ratios({**point, "peers": compared} if compared else point)

    def _ours(
        self, bank: generate.Bank, m: int, kernel: Kernel, truth: generate.Truth, number: int
    ) -> dict[str, Any]:
        """One point of ours, the number-th of its layer: proof, plan and reading."""
        size = (m, bank.k, bank.n)
        point: dict[str, Any] = {"kernel": kernel.name, "form": kernel.form}
        where = (
            f"{bank.k}x{bank.n} {bank.bits:g} bit {bank.codebook} {m} rows, "
            f"kernel {kernel.name} {kernel.form}"
        )
        plan = kernel.plan
        try:
            call = arms.ours(bank, kernel, self.options)
            if plan is None:
                plan = ops.plan(self.device, m, bank.k, bank.n, bank.bits, bank.codebook)
            point["plan"] = list(plan)
            limit = arms.limit_for(plan, self.dtype)
            verdict = self.bench.proven(call, size, bank.copies, self.dtype, truth, limit, plan)
            point.update(error=verdict.relative, bound=verdict.worst, noise=verdict.statistical)
            weights = (bank.copies, bank.copy_bytes)
            sample = number % SAMPLE_EVERY == 0
            point.update(self.bench.reading(call, size, *weights, self.dtype, where, sample=sample))
            if self.eager:
                xs, _ = self.bench.operands(m, bank.k, bank.n, bank.copies, self.dtype)
                step = timing.time_eager(lambda i: call(i, xs[i % len(xs)]), bank.copies)
                point["eager_us"] = round(step, 3)
        except (WrongResult, RuntimeError, AttributeError) as error:
            message = str(error).splitlines()[0]
            point["problem"] = message
            self.bench.failures.append(f"{where}: {message}")
            torch.cuda.synchronize()  # a fault of the device ends the run here, with its own error
        return point


def with_ratios(point: dict[str, Any]) -> dict[str, Any]:
    """Adds `ratios`: each peer's time over ours, above 1 where ours is faster."""
    ours = point.get("us")
    found = {
        name: round(reading["us"] / ours, 4)
        for name, reading in point.get("peers", {}).items()
        if ours and reading.get("us")
    }
    return {**point, "ratios": found} if found else point


def activation_elements(shapes: list[tuple[int, int]], rows: list[int], l2_bytes: int) -> int:
    """Numbers that the largest rotation of activations holds, for 16-bit types."""
    most = 0
    for k, n in shapes:
        copies = timing.copies_needed(generate.weight_bytes(k, n, 1), l2_bytes)
        for m in rows:
            most = max(most, m * k * timing.ring_size(2 * m * k, l2_bytes, copies))
    return most


def main(
    shapes: Annotated[str, typer.Option(help="KxN with commas between")] = DEFAULT_SHAPES,
    bits: Annotated[str, typer.Option(help="rates")] = "2,3,4,5,6,8",
    codebooks: Annotated[str, typer.Option(help=", ".join(CODEBOOKS))] = "mcg,mul1,3inst",
    rows: Annotated[str, typer.Option(help="rows of x")] = DEFAULT_ROWS,
    peer_names: Annotated[str, typer.Option("--peers", help="all, none, or names")] = "all",
    peer_bits: Annotated[str, typer.Option(help="rates exllamav3 is run at; all if empty")] = "",
    peer_codebooks: Annotated[str, typer.Option(help="codebooks likewise")] = ",".join(CODEBOOKS),
    forms: Annotated[str, typer.Option(help=", ".join(FORMS))] = "exact,fast",
    kernels: Annotated[str, typer.Option(help=", ".join(KERNELS) + "; none: peers only")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="one line a point")] = None,
    option: Annotated[list[str], typer.Option(help="dependent_launch=0, ...")] = [],  # noqa: B006
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16")] = "bfloat16",
    replays: Annotated[int, typer.Option(help="readings a point")] = timing.REPLAYS,
    eager: Annotated[bool, typer.Option(help="also without a graph, launches included")] = False,
) -> None:
    """Measures a grid of layers and prints where it stands against the floors."""
    try:
        grid_shapes, grid_rates = parse_shapes(shapes), parse_bits(bits)
        grid_books = parse_names(codebooks, CODEBOOKS, "codebook")
        grid_rows, options = parse_numbers(rows), parse_options(option)
        grid_kernels = kernels_to_run(
            parse_names(kernels, KERNELS, "kernel"), parse_names(forms, FORMS, "form")
        )
        wanted_peers = peers.parse(peer_names)
        peer_rates = parse_bits(peer_bits) if peer_bits else grid_rates
        peer_books = parse_names(peer_codebooks, CODEBOOKS, "codebook")
        number = parse_dtype(dtype)
        nvml = devices.monitor()
    except (ValueError, RuntimeError) as error:
        print(f"linear.py: {error}", file=sys.stderr)
        raise typer.Exit(2) from error

    facts = devices.device_facts(0, nvml)
    timing.use_own_stream()
    found = peers.find(wanted_peers)
    if grid_kernels:
        ops.require_cuda()
    scale = ruler.measure(nvml=nvml)
    elements = activation_elements(grid_shapes, grid_rows, facts.l2_bytes)
    bench = Workbench(scale, facts.l2_bytes, arms.Activations(elements), replays, nvml)
    run = Run(
        bench,
        ops.cuda_device(),
        found,
        options,
        number,
        dict.fromkeys(peer_rates, peer_books),
        eager,
    )

    console = Console(width=118)
    for line in ruler.describe(facts, scale):
        console.print(line, highlight=False, soft_wrap=True)
    for name, reason in found.absent.items():
        console.print(f"peer {name} is absent: {reason}", highlight=False, markup=False)
    header = {"run": {"device": facts.as_dict(), "ruler": asdict(scale), "options": options}}
    header["run"].update(peers=found.names(), dtype=dtype, replays=replays, time=time.time())
    points = []
    begin = time.perf_counter()
    total = len(grid_shapes) * len(grid_rates) * len(grid_books) * len(grid_rows)
    out = json_file.open("w") if json_file else None
    try:
        if out:
            print(json.dumps(header), file=out, flush=True)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("points", total=total)
            seen = set()
            for point in run.points(grid_shapes, grid_rates, grid_books, grid_rows, grid_kernels):
                points.append(point)
                if out:
                    print(json.dumps(point), file=out, flush=True)
                seen.add((point["shape"], point["bits"], point["codebook"], point["rows"]))
                progress.update(task, completed=len(seen))
    finally:
        if out:
            out.close()
    console.print(
        f"{len(points)} points in {time.perf_counter() - begin:.0f} s, "
        f"clocks and power at the end: {nvml.sample()}",
        highlight=False,
    )
    report.print_summary(console, points, bench.failures)
    if bench.failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
