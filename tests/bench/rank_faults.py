"""Ranks with faults of real hosts: one that never answers, one with wrong bytes, one that dies."""

import os
import time

import torch.distributed as dist

from bench import collective


def hangs(report, team, rank, sizes):
    """Both ranks agree on everything, then the second one never comes to the all-reduce."""
    del sizes
    report.step("set up the process group")
    collective.join(team, rank)
    report.step("all-reduce of 4096 bytes, round 1 of 3")
    if rank == 1:
        time.sleep(600)
    dist.all_reduce(collective.pattern(2048, rank, 0, "cpu"))


def flips_one_value(report, team, rank, sizes):
    """The real check, with one value of the second size changed on its way to rank 1."""
    honest = dist.all_reduce

    def lossy(data, *arguments, **named):
        honest(data, *arguments, **named)
        if rank == 1 and data.numel() == sizes[1] // 2:
            data[1234] += 1

    dist.all_reduce = lossy
    collective.check_all_reduce(report, team, rank, sizes)


def dies(report, team, rank, sizes):
    """Rank 0 is ended as by the OOM killer while rank 1 waits for it."""
    del sizes
    report.step("set up the process group")
    collective.join(team, rank)
    report.step("all-reduce of 4096 bytes, round 1 of 3")
    if rank == 0:
        os.kill(os.getpid(), 9)
    time.sleep(600)


def stale_copy(report, team, rank, device, count):
    """The real check of copies, where the second copy of each pair does nothing."""
    import torch

    honest, calls = torch.Tensor.copy_, []

    def lossy(target, source, non_blocking=False):
        calls.append(1)
        return target if len(calls) % 2 == 0 else honest(target, source, non_blocking)

    torch.Tensor.copy_ = lossy
    collective.check_copies(report, team, rank, device, count, size=1 << 16)
