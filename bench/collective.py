"""An all-reduce whose every value is checked, and copies between devices whose every byte is.

The check uses whole numbers small enough that bf16 holds each partial sum exactly, and other ones
in each round, so that a buffer left over from the round before is not taken for a result.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from bench.ranks import Reporter, Team

MIB = 1 << 20
SIZES = (4096, MIB, 64 * MIB)
"""Bytes: one token of a small model, a batch, a prefill. Other NCCL protocols carry each."""
COPY_BYTES = 64 * MIB
ROUNDS = 3
_PERIOD = 17
_MAX_EXACT = 256
"""bf16 has 8 significant bits: whole numbers up to here are exact."""


def join(team: Team, rank: int, timeout_s: float = 600.0) -> torch.device:
    """Enter the process group; the device of this rank. Raises what torch.distributed raises."""
    from datetime import timedelta

    device = torch.device(team.device_of(rank))
    bound = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        bound = device
    else:
        # Ranks of one host share its cores; more threads only wait for each other.
        torch.set_num_threads(1)
    dist.init_process_group(
        team.backend,
        init_method=team.rendezvous,
        world_size=team.world,
        rank=rank,
        timeout=timedelta(seconds=timeout_s),
        device_id=bound,
    )
    return device


def pattern(elements: int, rank: int, turn: int, device: torch.device) -> torch.Tensor:
    """What `rank` contributes in round `turn`: bf16 `[elements]`, whole numbers from 0 to 16."""
    index = torch.arange(elements, device=device, dtype=torch.int32)
    return ((index * 7 + rank * 5 + turn * 3) % _PERIOD).to(torch.bfloat16)


def expected(elements: int, world: int, turn: int, device: torch.device) -> torch.Tensor:
    """The exact sum of all ranks' patterns, bf16 `[elements]`."""
    total = torch.zeros(elements, device=device, dtype=torch.int32)
    for rank in range(world):
        total += pattern(elements, rank, turn, device).to(torch.int32)
    if world * (_PERIOD - 1) > _MAX_EXACT:
        raise ValueError(f"{world} ranks: sums beyond {_MAX_EXACT} are not exact in bf16")
    return total.to(torch.bfloat16)


def first_difference(found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """None where equal, else how many values differ and what the first one is."""
    wrong = (found != wanted).nonzero().flatten()
    if not len(wrong):
        return None
    at = int(wrong[0])
    return (
        f"{len(wrong)} of {len(wanted)} values are wrong, the first at {at}: "
        f"{found[at].item():g} instead of {wanted[at].item():g}"
    )


def check_all_reduce(
    report: Reporter, team: Team, rank: int, sizes: tuple[int, ...] = SIZES
) -> None:
    """One rank's part: all-reduces of each size in bytes, several rounds, all values compared.

    Reports one result a size: `{bytes, seconds, wrong}`, wrong None or a sentence. The seconds are
    those of the rounds after the first, which sets the connections up.
    """
    report.step("set up the process group")
    device = join(team, rank)
    for size in sizes:
        elements = size // 2
        wrong, spent = None, []
        for turn in range(ROUNDS):
            report.step(f"all-reduce of {size} bytes, round {turn + 1} of {ROUNDS}")
            data = pattern(elements, rank, turn, device)
            _settle(device)
            began = time.perf_counter()
            dist.all_reduce(data)
            _settle(device)
            spent.append(time.perf_counter() - began)
            wrong = wrong or first_difference(data, expected(elements, team.world, turn, device))
        report.result(bytes=size, seconds=round(min(spent[1:]), 6), wrong=wrong)
    report.step("leave the process group")
    dist.destroy_process_group()


def check_copies(
    report: Reporter, team: Team, rank: int, device: str, count: int, size: int = COPY_BYTES
) -> None:
    """Copy `size` bytes for every ordered pair of `count` devices, and compare all of them.

    One process does it for all pairs (`team` and `rank` are not used), as a copy that stands still
    is seen from outside. Results: `{source, target, granted, bytes, gb_s, wrong}`.
    """
    del team, rank
    names = [f"{device}:{index}" if device == "cuda" else device for index in range(count)]
    for source, a in enumerate(names):
        for target, b in enumerate(names):
            if source == target:
                continue
            report.step(f"copy from device {source} to device {target}")
            granted = device != "cuda" or torch.cuda.can_device_access_peer(target, source)
            seed = source * count + target
            index = torch.arange(size // 4, dtype=torch.int32)
            words = index * 2654435 + seed
            here = words.to(a)
            # What was there before must not pass for the copy.
            there = torch.full_like(here, -1, device=b)
            # The first copy sets peer access up; the second one is timed and compared.
            there.copy_(here, non_blocking=True)
            there.fill_(-1)
            _settle(here.device, there.device)
            began = time.perf_counter()
            there.copy_(here, non_blocking=True)
            _settle(here.device, there.device)
            seconds = time.perf_counter() - began
            wrong = first_difference(there.cpu(), words)
            report.result(
                source=source,
                target=target,
                granted=granted,
                bytes=size,
                gb_s=round(size / seconds / 1e9, 2),
                wrong=wrong,
            )


def _settle(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
