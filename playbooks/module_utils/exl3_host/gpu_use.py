"""Who holds the GPUs of this host, and how much of their memory, as nvidia-smi tells it.

Without nvidia-smi, or without GPUs in question, everything here says "nobody, nothing".
"""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass

from . import procs
from .errors import HostError

QUERY_TIMEOUT_S = 20
# The driver needs some seconds to give memory back after the last process has ended.
FREE_WAIT_S = 60


@dataclass(frozen=True)
class Holder:
    """A process that computes on a GPU."""

    gpu: str
    pid: int
    mib: int | None

    def __str__(self) -> str:
        memory = "" if self.mib is None else f", {self.mib} MiB"
        return f"pid {self.pid} ({procs.command_line(self.pid)}{memory}) on {self.gpu}"


def _query(*arguments: str) -> list[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line]


def holders(gpus: list[str]) -> list[Holder]:
    """The compute processes on these GPUs (UUIDs)."""
    if not gpus:
        return []
    rows = _query("--query-compute-apps=gpu_uuid,pid,used_memory")
    return [
        Holder(row[0], int(row[1]), int(row[2]) if row[2].isdigit() else None)
        for row in rows
        if len(row) == 3 and row[0] in gpus and row[1].isdigit()
    ]


def memory_mib(gpus: list[str]) -> tuple[int, ...]:
    """Memory in use on each of these GPUs; empty where it cannot be known."""
    if not gpus:
        return ()
    rows = _query("--query-gpu=uuid,memory.used")
    return tuple(int(row[1]) for row in rows if row[0] in gpus and row[1].isdigit())


def refuse_foreign(gpus: list[str], own: list[int]) -> None:
    """Raise HostError when somebody else computes on a GPU that an instance is to get."""
    foreign = [one for one in holders(gpus) if one.pid not in own]
    if foreign:
        raise HostError(
            f"GPU in use: {'; '.join(str(one) for one in foreign)}.",
            "Stop that program (a worker that a killed server left behind: kill it), or give the "
            "instance other GPUs.",
        )


def require_cdi(gpus: list[str]) -> None:
    """Raise HostError where the toolkit's list of CDI devices lacks one of these GPUs.

    The engine's own words for it ("unresolvable CDI devices") come late and name no way out.
    """
    program = shutil.which("nvidia-ctk")
    if not gpus:
        return
    if program is None:
        raise HostError(
            "nvidia-ctk is not there, so no GPU can be handed to a container.",
            "Install NVIDIA's container toolkit (exl3_engine_gpus: true).",
        )
    done = subprocess.run(
        [program, "cdi", "list"], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S
    )
    missing = [uuid for uuid in gpus if f"nvidia.com/gpu={uuid}" not in done.stdout.split()]
    if missing:
        raise HostError(
            f"the list of CDI devices has no {', '.join(missing)}: it is missing, or older than "
            "the driver.",
            "Run: systemctl restart nvidia-cdi-refresh (or nvidia-ctk cdi generate "
            "--output=/var/run/cdi/nvidia.yaml), then nvidia-ctk cdi list.",
        )


def wait_free(gpus: list[str], left: list[int], timeout_s: float = FREE_WAIT_S) -> list[Holder]:
    """Wait until none of the processes `left`, nor one that is gone, holds these GPUs."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = [
            one for one in holders(gpus) if one.pid in left or procs.start_ticks(one.pid) is None
        ]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(1)
