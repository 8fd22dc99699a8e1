#!/usr/bin/env python3
"""Does peer access between these devices work, at exactly this rank count? One JSON object.

    bench/peer_access.py --ranks 2 [--json FILE]                   on one host
    bench/peer_access.py --ranks 2 --nodes 2 --node-rank 0 --master 192.0.2.21:29600    on each host

A driver that grants peer access has proved nothing: there are hosts on which the first all-reduce
never ends, at two ranks and not at four, and hosts on which copies arrive with wrong bytes. So
every ordered pair of devices copies 64 MiB, which are compared, and the all-reduce of the real rank
count runs with NCCL's peer access on and again with it off, with every value compared. Each step
has a deadline. This program only measures; what follows from it is decided by `exl3ctl peers`.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import collective, ranks

SCHEMA = "exl3-peers/1"
# What NCCL may use between the cards of one host. NVLS is left as the caller has it.
PEER_ON: dict[str, str | None] = {"NCCL_P2P_DISABLE": None, "NCCL_SHM_DISABLE": None}
PEER_OFF: dict[str, str | None] = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": None}


def identity(backend: str, count: int) -> dict:
    """What a verdict belongs to: driver, NCCL, torch and the set of devices."""
    found: dict[str, Any] = {
        "backend": backend,
        "torch": torch.__version__,
        "nccl": None,
        "driver": None,
        "devices": [],
    }
    if backend == "nccl":
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        found["driver"] = driver_version()
        for index in range(count):
            props = torch.cuda.get_device_properties(index)
            domain, bus, slot = (
                getattr(props, f"pci_{part}_id", 0) for part in ("domain", "bus", "device")
            )
            address = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
            found["devices"].append({"index": index, "name": props.name, "pci": address})
    else:
        found["devices"] = [
            {"index": index, "name": platform.processor() or platform.machine(), "pci": None}
            for index in range(count)
        ]
    return found


def driver_version() -> str | None:
    """The NVIDIA driver's version, from procfs or nvidia-smi."""
    import re
    import subprocess

    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            text = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout
        except (OSError, subprocess.TimeoutExpired):
            return None
    match = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", text)
    return match[1] if match else None


def copies(count: int, backend: str, deadline_s: float) -> list[dict]:
    """Every ordered pair, as far as the process got; the pair it stood still at is `hung`."""
    device = "cpu" if backend == "gloo" else "cuda"
    with ranks.one_host(1, backend) as team:
        (end,) = ranks.run(
            collective.check_copies, team, {"device": device, "count": count}, deadline_s
        )
    rows = [
        {**one, "state": "wrong" if one["wrong"] else "moves", "detail": one["wrong"]}
        for one in end.results
    ]
    for row in rows:
        del row["wrong"]
    if end.state != "done":
        rows.append({"state": end.state, "detail": f"{end.step}: {end.detail or 'no answer'}"})
    return rows


def collected(ends: list[ranks.Ended], peer: str, world: int, seconds: float) -> dict:
    """One collective stage as a row: right, wrong, hung, failed or died."""
    worst = ranks.worst(ends)
    row: dict[str, Any] = {"peer_access": peer, "ranks": world, "wall_s": round(seconds, 1)}
    if worst.state != "done":
        where = f"rank {worst.rank}, {worst.step}"
        detail = f"{where}: {worst.detail}" if worst.detail else f"{where}: no answer"
        return {**row, "state": worst.state, "detail": detail, "sizes": []}
    wrong = [
        f"rank {end.rank}, all-reduce of {one['bytes']} bytes: {one['wrong']}"
        for end in ends
        for one in end.results
        if one["wrong"]
    ]
    sizes = []
    for at, one in enumerate(ends[0].results):
        slowest = max(end.results[at]["seconds"] for end in ends)
        moved = 2 * (world - 1) / world * one["bytes"] / slowest / 1e9 if world > 1 else 0.0
        sizes.append({"bytes": one["bytes"], "us": round(slowest * 1e6, 1), "bus_gb_s": moved})
    for one in sizes:
        one["bus_gb_s"] = round(one["bus_gb_s"], 3)
    state = "wrong" if wrong else "right"
    return {**row, "state": state, "detail": wrong[0] if wrong else None, "sizes": sizes}


def all_reduce(team: ranks.Team, peer: str, deadline_s: float, sizes: tuple[int, ...]) -> dict:
    """The checked all-reduce of a team with NCCL's peer access `on` or `off`."""
    env = dict(PEER_ON if peer == "on" else PEER_OFF)
    began = time.monotonic()
    ends = ranks.run(collective.check_all_reduce, team, {"sizes": sizes}, deadline_s, env)
    return collected(ends, peer, team.world, time.monotonic() - began)


def over_nodes(world: int, backend: str, nodes: int, node_rank: int, master: str) -> ranks.Team:
    """This host's part of a team over several hosts; ranks are numbered host by host."""
    if world % nodes:
        raise typer.BadParameter(f"{world} ranks do not divide among {nodes} hosts")
    if not 0 <= node_rank < nodes:
        raise typer.BadParameter(f"host {node_rank} of {nodes}: they count from 0")
    here = world // nodes
    local = tuple(range(node_rank * here, (node_rank + 1) * here))
    return ranks.Team(world, local, f"tcp://{master}", backend)


def measure(
    world: int,
    backend: str,
    deadline_s: float = 30.0,
    team: ranks.Team | None = None,
    sizes: tuple[int, ...] = collective.SIZES,
) -> dict:
    """The whole report, schema `exl3-peers/1`. `team` where hosts share the collective.

    The second all-reduce, with peer access off, shows that what would be used instead works; it
    runs in any case, since its speed is the price of a veto.
    """
    here = world if team is None else len(team.local)
    report: dict[str, Any] = {"schema": SCHEMA, "ranks": world, **identity(backend, here)}
    report["copies"] = copies(here, backend, min(deadline_s, 10.0)) if here > 1 else []
    report["collectives"] = []
    for peer in ("on", "off") if backend == "nccl" and here > 1 else ("on",):
        if team is not None:
            report["collectives"].append(all_reduce(team, peer, deadline_s, sizes))
            break
        with ranks.one_host(world, backend) as own:
            report["collectives"].append(all_reduce(own, peer, deadline_s, sizes))
    return report


def main(
    world: Annotated[int, typer.Option("--ranks", min=1, max=16, help="Ranks in all.")] = 2,
    backend: Annotated[
        str | None, typer.Option(help="nccl or gloo; default: nccl where there are GPUs.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts that take part.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Which of them this is.")] = 0,
    master: Annotated[str, typer.Option(help="ADDRESS:PORT of host 0.")] = "127.0.0.1:29600",
    deadline_s: Annotated[float, typer.Option(min=1, help="For one step.")] = 30.0,
    max_bytes: Annotated[int, typer.Option(help="Leave out larger all-reduces.")] = 64 << 20,
    only_identity: Annotated[
        bool, typer.Option("--identity", help="Only say what a verdict would belong to.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write it here too.")] = None,
) -> None:
    """Measure peer access and print one JSON object."""
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    here = world // nodes
    if backend == "nccl" and torch.cuda.device_count() < here:
        found = torch.cuda.device_count()
        print(f"{here} ranks need {here} GPUs on this host; there are {found}.", file=sys.stderr)
        raise typer.Exit(2)
    if only_identity:
        report = {"schema": SCHEMA, "ranks": world, **identity(backend, here)}
    else:
        team = over_nodes(world, backend, nodes, node_rank, master) if nodes > 1 else None
        sizes = tuple(size for size in collective.SIZES if size <= max_bytes)
        report = measure(world, backend, deadline_s, team, sizes)
    text = json.dumps(report, indent=1)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        draft = json_file.with_name(json_file.name + ".tmp")
        draft.write_text(text + "\n")
        os.replace(draft, json_file)
    print(text)


if __name__ == "__main__":
    typer.run(main)
