#!/usr/bin/env python3
"""What the device can do at most, for other figures to be held against: `bench/ruler.py [--json]`.

Read bandwidth (the fastest of several reductions over 2 GiB), copy bandwidth (bytes read plus bytes
written) and the dense bf16 peak (8192 cubed). Random data: zeros run faster than real numbers do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import timing
from exl3_plugin import devices

READ_BYTES = 2 << 30
DENSE_SIZE = 8192
TOLERANCE = 1.02
"""A reading above this many times the ruler was not read from memory."""


@dataclass(frozen=True)
class Ruler:
    """Rates of one device. GB/s are 1e9 bytes a second, TFLOP/s count a multiply-add as two."""

    read_gb_s: float
    read_by: str
    copy_gb_s: float
    dense_tflop_s: float
    reads: dict[str, float] = field(default_factory=dict)
    busy: dict[str, dict[str, float]] = field(default_factory=dict)
    """Clocks and power while each figure was taken."""


def _triton_sum(data: torch.Tensor):
    """A call that sums int32 blocks of `data` with a Triton kernel of our own, or None."""
    try:
        import triton

        from bench.ruler_kernel import BLOCK, WARPS, sum_blocks
    except ImportError:
        return None
    words = data.view(torch.int32)
    blocks = triton.cdiv(words.numel(), BLOCK)
    out = torch.empty(blocks, dtype=torch.int32, device=data.device)

    def call(_: int) -> torch.Tensor:
        sum_blocks[(blocks,)](words, out, words.numel(), BLOCK, num_warps=WARPS)
        return out

    try:
        call(0)
        # Sums wrap modulo 2^32, as the sum of int64 does when cut to 32 bits.
        wanted = words.sum().to(torch.int32).item()
        found = out.sum().to(torch.int32).item()
    except Exception as error:  # Triton compiles with the host's C compiler, which may be absent
        print(f"ruler: no Triton reduction here ({str(error).splitlines()[0]})", file=sys.stderr)
        return None
    if found != wanted:
        print(f"ruler: Triton sums to {found}, torch to {wanted}; left out", file=sys.stderr)
        return None
    return call


def _dense(busy: Callable[[str], Callable[[], None]]) -> float:
    """TFLOP/s of one large bf16 product."""
    size = DENSE_SIZE
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for _ in range(10):
        a @ b
    reading = timing.time_rotating(lambda _: a @ b, 1, ring=1, while_busy=busy("dense"))
    return 2 * size**3 / (reading.us * 1e6)


def _reads(data: torch.Tensor, busy: Callable[[str], Callable[[], None]]) -> dict[str, float]:
    """GB/s of every reduction over `data`, float32 `[count]`."""
    candidates: dict[str, Callable[[int], torch.Tensor]] = {
        "torch sum of float32": lambda _: data.sum(),
        "torch max of float32": lambda _: data.amax(),
        "torch sum of rows": lambda _: data.view(-1, 1 << 16).sum(1),
    }
    triton_sum = _triton_sum(data)
    if triton_sum is not None:
        candidates["triton sum of int32"] = triton_sum
    rates = {}
    for name, call in candidates.items():
        reading = timing.time_rotating(call, 4, ring=1, while_busy=busy("read"))
        rates[name] = data.nbytes / (reading.us * 1e3)
    return rates


def _copy(source: torch.Tensor, busy: Callable[[str], Callable[[], None]]) -> float:
    """GB/s of a device-to-device copy, read and written bytes counted."""
    target = torch.empty_like(source)
    reading = timing.time_rotating(
        lambda _: target.copy_(source), 4, ring=1, while_busy=busy("copy")
    )
    return 2 * source.nbytes / (reading.us * 1e3)


def measure(read_bytes: int = READ_BYTES, nvml: devices.Monitor | None = None) -> Ruler:
    """Measures the current device; takes about a second.

    Args:
        read_bytes: size of the buffers, several times the L2; a multiple of 2^18.
        nvml: where clocks and power are sampled, if anywhere.
    """
    samples: dict[str, dict[str, float]] = {}

    def busy(name: str) -> Callable[[], None]:
        def sample() -> None:
            values = nvml.sample() if nvml is not None else {}
            if values:
                samples[name] = values

        return sample

    # The matrix product comes first: it also takes the clocks to where they stay.
    dense = _dense(busy)
    data = torch.randn(read_bytes // 4, dtype=torch.float32, device="cuda")
    reads = _reads(data, busy)
    copy = _copy(data, busy)
    del data
    torch.cuda.empty_cache()
    best = max(reads, key=reads.__getitem__)
    return Ruler(reads[best], best, copy, dense, reads, samples)


def describe(facts: devices.DeviceFacts, ruler: Ruler) -> list[str]:
    """The device and its rates in a few lines of text."""
    limit = "unknown" if facts.power_limit_w is None else f"{facts.power_limit_w} W"
    lines = [
        f"{facts.name}, compute capability {facts.compute_capability}, {facts.sms} SMs, "
        f"L2 {facts.l2_bytes / 2**20:.0f} MiB, {facts.memory_bytes / 2**30:.0f} GiB, "
        f"power limit {limit}",
        f"driver {facts.driver}, CUDA {facts.cuda_runtime}, torch {facts.torch}",
        f"read {ruler.read_gb_s:.0f} GB/s ({ruler.read_by}), copy {ruler.copy_gb_s:.0f} GB/s, "
        f"dense bf16 {ruler.dense_tflop_s:.0f} TFLOP/s",
    ]
    for name, values in ruler.busy.items():
        lines.append(f"during {name}: " + ", ".join(f"{k} {v:.0f}" for k, v in values.items()))
    return lines


def main(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
    gib: Annotated[float, typer.Option(help="size of the buffers in GiB")] = 2.0,
) -> None:
    """Measures read and copy bandwidth and the dense bf16 peak of the first GPU."""
    try:
        nvml = devices.monitor()
    except RuntimeError as error:
        print(f"ruler.py: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    facts = devices.device_facts(0, nvml)
    timing.use_own_stream()
    ruler = measure(int(gib * 2**30) // (1 << 18) * (1 << 18), nvml)
    if as_json:
        print(json.dumps({"device": facts.as_dict(), "ruler": asdict(ruler)}))
        return
    console = Console(width=110)
    for line in describe(facts, ruler):
        console.print(line, highlight=False)
    table = Table("reduction", "GB/s")
    for name, rate in sorted(ruler.reads.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{rate:.0f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
