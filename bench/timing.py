"""How every figure of this project is taken on a GPU: cold, replayed from a graph, with a spread.

Three things make a kernel look faster than it will be in a model: weights that are still in the L2
from the call before, the launch gaps that a graph removes for one arm and not for the other, and
the best of many readings. So: every arm rotates through copies of its operands until twice the L2
has passed between two uses of one copy, every arm is one CUDA graph of many calls, and a figure is
the median of several replays, given with their spread.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

MIN_COPIES = 8
CACHE_FACTOR = 2.0
"""Times the L2 that must pass between two uses of one copy."""
MIN_CALLS = 20
GRAPH_US = 1000.0
"""A graph of short calls is made this long, so that its own launch does not count."""
MAX_CALLS = 240
LONG_CALL_US = 600.0
"""Calls beyond this need no repetition inside a graph: one turn through the copies is enough."""
REPLAYS = 9
WARM_REPLAYS = 2


@dataclass(frozen=True)
class Reading:
    """Time of one call in microseconds; spread is (slowest - fastest) / median of the replays."""

    us: float
    spread: float
    calls: int
    replays: int


def summarise(totals_us: list[float], calls: int) -> Reading:
    """Reading of replays that took `totals_us` for `calls` calls each."""
    middle = statistics.median(totals_us)
    spread = (max(totals_us) - min(totals_us)) / middle if middle > 0 else math.inf
    return Reading(middle / calls, spread, calls, len(totals_us))


def copies_needed(copy_bytes: int, l2_bytes: int) -> int:
    """Copies of an operand so that more than twice the L2 passes between two uses of one."""
    others = math.ceil(CACHE_FACTOR * l2_bytes / copy_bytes)
    return max(MIN_COPIES, others + 1)


def ring_size(tensor_bytes: int, l2_bytes: int, copies: int) -> int:
    """Copies of an activation or output: as many as cold use takes, never more than the weights.

    Small activations stay in the cache in a model too, where the layer before has just written
    them; rotating them with the weights is enough.
    """
    others = math.ceil(CACHE_FACTOR * l2_bytes / tensor_bytes) if tensor_bytes else copies
    return max(2, min(copies, others + 1))


def graph_calls(copies: int, call_us: float) -> int:
    """Calls of one graph: a multiple of `copies`, at least `MIN_CALLS` unless they are long."""
    wanted = MIN_CALLS
    if call_us > LONG_CALL_US:
        wanted = 1
    elif call_us > 0:
        wanted = max(wanted, min(MAX_CALLS, math.ceil(GRAPH_US / call_us)))
    return copies * math.ceil(wanted / copies)


def use_own_stream() -> torch.cuda.Stream:
    """Makes a new stream current for the rest of the process: capture refuses the default one.

    Everything a call allocates once per stream (cuBLAS workspaces) is then allocated by the warm-up
    and not in the first capture.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_stream(stream)
    return stream


@functools.cache
def _pool() -> tuple[Any, torch.cuda.CUDAGraph]:
    """Memory shared by all graphs, kept alive by one tiny graph: each is dead before the next."""
    handle = torch.cuda.graph_pool_handle()
    value = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    keeper = torch.cuda.CUDAGraph()
    keeper.capture_begin(pool=handle)
    value.add_(1)
    keeper.capture_end()
    return handle, keeper


def capture(call: Callable[[int], Any], copies: int, calls: int, ring: int) -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls, the i-th on copy `i % copies`.

    The last `ring` results stay allocated while later calls run, so outputs rotate as well.
    """
    handle, _ = _pool()
    held: deque[Any] = deque(maxlen=ring)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=handle)
    try:
        for i in range(calls):
            held.append(call(i % copies))
    except BaseException:
        with suppress(Exception):
            graph.capture_end()
        raise
    graph.capture_end()
    return graph


def time_graph(
    graph: torch.cuda.CUDAGraph,
    calls: int,
    replays: int = REPLAYS,
    while_busy: Callable[[], None] | None = None,
) -> Reading:
    """Replays back to back and reads the time between events; needs a warm device.

    Args:
        graph: holds `calls` calls.
        calls: calls of one replay.
        replays: readings to take the median of.
        while_busy: called once while the device works, for clocks and power.
    """
    for _ in range(WARM_REPLAYS):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    if while_busy is not None:
        while_busy()
    torch.cuda.synchronize()
    totals = [1000 * a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return summarise(totals, calls)


def _between(work: Callable[[], None]) -> float:
    """Microseconds on the device between the begin and the end of `work`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end)


def time_rotating(
    call: Callable[[int], Any],
    copies: int,
    *,
    ring: int = 2,
    replays: int = REPLAYS,
    while_busy: Callable[[], None] | None = None,
) -> Reading:
    """Time of `call(copy)` with rotated operands.

    Args:
        call: launches the work on one copy and returns its output (or anything).
        copies: copies the caller holds; see `copies_needed`.
        ring: outputs that stay allocated at once; see `ring_size`.
        replays: readings.
        while_busy: see `time_graph`.
    """
    for i in range(min(copies, 3)):
        call(i)
    # Launches outside a graph may take longer than the work, so this only tells long calls apart;
    # what the first graph takes says whether it is too short.
    eager_us = _between(lambda: call(0))
    calls = graph_calls(copies, max(eager_us, GRAPH_US / MIN_CALLS))
    graph = capture(call, copies, calls, ring)
    graph.replay()
    needed = graph_calls(copies, _between(graph.replay) / calls)
    if needed > 1.5 * calls:
        calls = needed
        graph = capture(call, copies, calls, ring)
    return time_graph(graph, calls, replays, while_busy)


def time_eager(call: Callable[[int], Any], copies: int, calls: int = 200) -> float:
    """Microseconds a call with launches included: one pass without a graph, after a warm-up."""
    for i in range(copies):
        call(i)
    torch.cuda.synchronize()

    def work() -> None:
        for i in range(calls):
            call(i % copies)

    return _between(work) / calls
