"""Rank processes that can be given up: each step has a deadline, and a hang is a result.

A peer copy or a collective that never ends is exactly what is looked for here, and neither torch
nor NCCL can be interrupted from inside. So every stage runs in processes of its own, which report
step by step; when no report comes in time they are killed, and the caller learns the step at which
each of them stood still.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START_S = 120.0
"""Time for a process to import torch and reach its device; a cold disk takes most of a minute."""


@dataclass
class Ended:
    """What became of one rank: `state` is done, failed, hung or died."""

    rank: int
    state: str = "hung"
    detail: str = ""
    step: str = "start"
    results: list[dict] = field(default_factory=list)


@dataclass(frozen=True)
class Team:
    """Who takes part in a collective: all ranks of all hosts, and those that this host starts.

    rendezvous is an init_method of torch.distributed: `file://` on one host, `tcp://` over two.
    """

    world: int
    local: tuple[int, ...]
    rendezvous: str
    backend: str

    def device_of(self, rank: int) -> str:
        """The device of a rank: its index on this host, or the CPU under gloo."""
        return "cpu" if self.backend == "gloo" else f"cuda:{rank - self.local[0]}"


class Reporter:
    """The rank's side of the pipe: `step` says what comes next, `result` what came out."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def step(self, name: str) -> None:
        """Say what begins now; the deadline starts anew."""
        self._pipe.send(("step", name))

    def result(self, **values: Any) -> None:
        """Hand one JSON-like result to the parent."""
        self._pipe.send(("result", values))


@contextlib.contextmanager
def one_host(world: int, backend: str) -> Iterator[Team]:
    """A team on this host alone, which meets in a file, so that no port is needed."""
    with tempfile.TemporaryDirectory(prefix="exl3-ranks-") as folder:
        meet = f"file://{Path(folder) / 'meet'}"
        yield Team(world, tuple(range(world)), meet, backend)


def run(
    work: Callable[..., None],
    team: Team,
    arguments: dict[str, Any],
    deadline_s: float,
    env: dict[str, str | None] | None = None,
) -> list[Ended]:
    """Run `work(report, team, rank, **arguments)` once per local rank and wait for all of them.

    `deadline_s` is the longest time a rank may go without a report, after its first one. When one
    rank ends badly the others get no longer than that either. `env` is set (None: removed) in the
    processes alone. `work` has to be importable: the processes are spawned, since CUDA does not
    survive a fork.
    """
    context = multiprocessing.get_context("spawn")
    ends, pipes, processes = [], {}, []
    with _environment(env or {}):
        for rank in team.local:
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_enter, args=(theirs, work, team, rank, arguments), daemon=True
            )
            process.start()
            theirs.close()
            ends.append(Ended(rank))
            pipes[mine] = ends[-1]
            processes.append(process)
    try:
        _listen(pipes, deadline_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process, end in zip(processes, ends):
            process.join(10)
            if end.state == "died":
                end.detail = _how(process.exitcode)
    return ends


def worst(ends: list[Ended]) -> Ended:
    """The rank that explains a failure: a failed one before one that only waited for it."""
    order = ["failed", "died", "hung", "done"]
    return min(ends, key=lambda end: order.index(end.state))


def _listen(pipes: dict[Connection, Ended], deadline_s: float) -> None:
    limits = dict.fromkeys(pipes, time.monotonic() + START_S)
    while limits:
        soonest = min(limits.values())
        ready = wait(list(limits), max(0.0, soonest - time.monotonic()))
        if not ready:
            return
        for pipe in ready:
            end = pipes[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError):
                if end.state == "hung":
                    end.state = "died"
                del limits[pipe]
                continue
            if kind == "step":
                end.step = value
            elif kind == "result":
                end.results.append(value)
            else:
                end.state, end.detail = kind, value
                del limits[pipe]
                if kind == "failed":
                    # Whoever waits for this rank in a collective waits in vain.
                    last = time.monotonic() + min(deadline_s, 3.0)
                    limits = {one: min(limit, last) for one, limit in limits.items()}
                continue
            limits[pipe] = time.monotonic() + deadline_s


def _enter(pipe: Connection, work: Callable, team: Team, rank: int, arguments: dict) -> None:
    # A terminal's Ctrl-C reaches the parent too, which ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        work(Reporter(pipe), team, rank, **arguments)
        pipe.send(("done", ""))
    except Exception as error:
        said = traceback.format_exception_only(error)[-1].strip()
        pipe.send(("failed", said[:2000]))
    finally:
        pipe.close()
        # Nothing that is left can be trusted to end by itself after a failed collective.
        os._exit(0)


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit status {code} and said nothing"


@contextlib.contextmanager
def _environment(values: dict[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    _put(values)
    try:
        yield
    finally:
        _put(before)


def _put(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
