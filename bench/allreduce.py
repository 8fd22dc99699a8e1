#!/usr/bin/env python3
"""All-reduce from 4 KiB to 64 MiB at each rank count, held against what the links can carry.

    bench/allreduce.py [--ranks 2,4] [--peer on,off] [--json FILE]

Two arms a size: eager, as vLLM runs a prefill, and replayed from a CUDA graph, as it runs decoding.
The ruler is a plain copy between two devices with both directions busy, which is what a ring does
to a link; bus bandwidth is 2 (n - 1) / n times the bytes over the time, so that it can be compared
with the ruler at any rank count. With peer access off the ruler stays that of the direct copy: the
share then says what the way through host memory costs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import collective, peer_access, ranks

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(4 * KIB * 4**step for step in range(8))
"""4 KiB, 16 KiB, ... 64 MiB."""
RULER_BYTES = 256 * MIB
RULER_COPIES = 8
READINGS = 7
READING_S = 0.004
MAX_CALLS = 100


def calls_in(reading_s: float, call_s: float) -> int:
    """How often a call is repeated in one reading."""
    return max(1, min(MAX_CALLS, round(reading_s / max(call_s, 1e-7))))


def bus_gb_s(size: int, world: int, us: float) -> float:
    """Bytes that each link carries in one direction, in GB/s, as a ring would send them."""
    return 2 * (world - 1) / world * size / us / 1e3


def work_all_reduce(
    report: ranks.Reporter, team: ranks.Team, rank: int, sizes: tuple[int, ...]
) -> None:
    """One rank's part: both arms of each size. Results `{bytes, mode, us, spread, calls}`."""
    report.step("set up the process group")
    device = collective.join(team, rank)
    # bf16, as between vLLM's layers. The sums grow to infinity, which takes no longer to add.
    data = torch.randn(max(sizes) // 2, dtype=torch.bfloat16, device=device)
    dist.all_reduce(data)
    for size in sizes:
        part = data[: size // 2]
        for mode in ("eager", "captured") if device.type == "cuda" else ("eager",):
            report.step(f"{mode} all-reduce of {size} bytes")
            make = _eager if mode == "eager" else _captured
            reading = _read(make, part, device)
            report.result(bytes=size, mode=mode, **reading)
    report.step("check values")
    elements = min(sizes) // 2
    last = collective.pattern(elements, rank, 1, device)
    dist.all_reduce(last)
    wrong = collective.first_difference(last, collective.expected(elements, team.world, 1, device))
    if wrong:
        raise RuntimeError(f"after all timings: {wrong}")
    dist.destroy_process_group()


def _eager(part: torch.Tensor, calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            dist.all_reduce(part)

    return run


def _captured(part: torch.Tensor, calls: int) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    # Other threads of NCCL may call the driver meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            dist.all_reduce(part)
    return graph.replay


def _read(make: Callable, part: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Median of several readings of a run of calls; all ranks make the same number of calls."""
    once = make(part, 1)
    for _ in range(3):
        once()
    estimate = torch.tensor([min(_time(once, device) for _ in range(3))], device=device)
    dist.all_reduce(estimate, op=dist.ReduceOp.MAX)
    calls = calls_in(READING_S, estimate.item())
    many = make(part, calls)
    many()
    totals = []
    for _ in range(READINGS):
        _meet(device)
        totals.append(_time(many, device) * 1e6)
    middle = statistics.median(totals)
    spread = (max(totals) - min(totals)) / middle
    return {"us": middle / calls, "spread": round(spread, 3), "calls": calls}


def _meet(device: torch.device) -> None:
    """Bring the ranks together, so that no reading holds another rank's delay."""
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()


def _time(call: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call, on the device's clock where it has one."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def work_ruler(report: ranks.Reporter, team: ranks.Team, rank: int, count: int) -> None:
    """Copies between neighbours of a ring of `count` GPUs: one way, both ways, all at once.

    Results `{ruler, gb_s}`: GB/s in one direction of the slowest link. On a CPU a copy in memory.
    """
    del rank
    cuda = team.backend == "nccl"
    size = RULER_BYTES if cuda else 16 * MIB
    names = [f"cuda:{index}" if cuda else "cpu" for index in range(count)]
    sources = [torch.randint(0, 127, (size,), dtype=torch.int8, device=name) for name in names]
    targets = [torch.empty_like(one) for one in sources]
    ring = [(index, (index + 1) % count) for index in range(count)]
    rows = {"one way": [[pair] for pair in ring], "all at once": [ring]}
    if count > 2:
        rows["both ways"] = [[(a, b), (b, a)] for a, b in ring]
    for name, groups in rows.items():
        report.step(f"ruler, {name}")
        rates = [_copy_rate(group, sources, targets, cuda) for group in groups]
        report.result(ruler=name, gb_s=round(min(rates), 2))


def _copy_rate(pairs: list[tuple[int, int]], sources: list, targets: list, cuda: bool) -> float:
    """GB/s of each copy while all `pairs` copy at once, the slowest of them; best of three."""
    size = sources[0].numel()
    streams = [torch.cuda.Stream(f"cuda:{a}") for a, _ in pairs] if cuda else []

    def copy(repeats: int) -> float:
        if not cuda:
            began = time.perf_counter()
            for _ in range(repeats):
                for a, b in pairs:
                    targets[b].copy_(sources[a])
            return (time.perf_counter() - began) / len(pairs)
        for index in range(len(sources)):
            torch.cuda.synchronize(index)
        began = time.perf_counter()
        for (a, b), stream in zip(pairs, streams):
            with torch.cuda.device(a), torch.cuda.stream(stream):
                for _ in range(repeats):
                    targets[b].copy_(sources[a], non_blocking=True)
        for stream in streams:
            stream.synchronize()
        return time.perf_counter() - began

    copy(1)
    return max(size * RULER_COPIES / copy(RULER_COPIES) / 1e9 for _ in range(3))


def ruler(count: int, backend: str, deadline_s: float) -> dict[str, float]:
    """What the slowest link of a ring of `count` devices carries; empty where it cannot be read."""
    with ranks.one_host(1, backend) as team:
        (end,) = ranks.run(work_ruler, team, {"count": count}, deadline_s)
    if end.state != "done":
        print(f"ruler: {end.state} at {end.step}: {end.detail}", file=sys.stderr)
    return {one["ruler"]: one["gb_s"] for one in end.results}


def measure(
    world: int, backend: str, peer: str, sizes: tuple[int, ...], deadline_s: float, limit: float
) -> list[dict]:
    """The lines of one rank count. `limit` is the ruler in GB/s, 0 where there is none.

    A stage that failed or stood still gives its lines so far and one that says so.
    """
    env = dict(peer_access.PEER_ON if peer == "on" else peer_access.PEER_OFF)
    with ranks.one_host(world, backend) as team:
        ends = ranks.run(work_all_reduce, team, {"sizes": sizes}, deadline_s, env)
    lines = []
    for same in zip(*(end.results for end in ends)):
        slowest = max(same, key=lambda one: one["us"])
        rate = bus_gb_s(slowest["bytes"], world, slowest["us"])
        line = {"ranks": world, "peer_access": peer, **slowest, "bus_gb_s": rate}
        lines.append({**line, "share": rate / limit if limit else None})
    worst = ranks.worst(ends)
    if worst.state != "done":
        detail = f"rank {worst.rank}, {worst.step}: {worst.detail or 'no answer'}"
        lines.append({"ranks": world, "peer_access": peer, "state": worst.state, "detail": detail})
    return lines


def show(lines: list[dict], rulers: dict[int, dict[str, float]], out: Console) -> None:
    """The same as a table."""
    for world, found in rulers.items():
        said = ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in found.items())
        out.print(f"link at {world} ranks, slowest of the ring: {said or 'not read'}")
    table = Table("ranks", "peer access", "KiB", "mode", "us", "spread", "bus GB/s", "of the link")
    for line in lines:
        world, peer = str(line["ranks"]), line["peer_access"]
        if "state" in line:
            table.add_row(world, peer, "", line["state"], line["detail"], "", "", "")
            continue
        share = "" if line["share"] is None else f"{line['share']:.0%}"
        table.add_row(
            world,
            peer,
            f"{line['bytes'] // KIB}",
            line["mode"],
            f"{line['us']:.1f}",
            f"{line['spread']:.0%}",
            f"{line['bus_gb_s']:.2f}",
            share,
        )
    out.print(table)


def main(
    counts: Annotated[
        str | None,
        typer.Option("--ranks", help="As 2,4; default: 2, 4, 8 as there are."),
    ] = None,
    peer: Annotated[
        str, typer.Option("--peer", help="NCCL's peer access: on, off or on,off.")
    ] = "on",
    backend: Annotated[
        str | None, typer.Option(help="nccl or gloo; default: nccl where there are GPUs.")
    ] = None,
    max_bytes: Annotated[int, typer.Option(help="Leave out larger sizes.")] = 64 * MIB,
    deadline_s: Annotated[float, typer.Option(min=1, help="For one step.")] = 30.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write one JSON line per point.")
    ] = None,
) -> None:
    """Time all-reduces and hold them against the links."""
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    there = torch.cuda.device_count() if backend == "nccl" else 2
    if counts is None:
        worlds = [one for one in (2, 4, 8) if one <= there]
    else:
        worlds = [int(one) for one in counts.split(",")]
    if not worlds or (backend == "nccl" and max(worlds) > there):
        print(f"{counts or 2} ranks need as many GPUs; there are {there}.", file=sys.stderr)
        raise typer.Exit(2)
    sizes = tuple(size for size in SIZES if size <= max_bytes)
    lines: list[dict] = []
    rulers: dict[int, dict[str, float]] = {}
    for world in worlds:
        rulers[world] = ruler(world, backend, deadline_s)
        limit = rulers[world].get("all at once", 0.0)
        for one in peer.split(","):
            lines += measure(world, backend, one, sizes, deadline_s, limit)
    show(lines, rulers, Console(width=100))
    if json_file is not None:
        head = {"ruler": rulers, **peer_access.identity(backend, max(worlds))}
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text("".join(json.dumps(one) + "\n" for one in [head, *lines]))
    if any("state" in line for line in lines):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
