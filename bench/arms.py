"""One measured arm: operands, proof that the result is right, and the reading."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from bench import generate, peers, timing
from bench.generate import WORST_LIMIT, Bank, Truth, Verdict
from bench.ruler import TOLERANCE, Ruler
from exl3_plugin import devices, ops

KERNELS = ("auto", "stream", "8", "16", "32", "64", "128", "dense")
FORMS = ("exact", "fast")
FAST_ROWS = 8
"""Most rows for which a fast form exists; above, both forms are one and the same kernel."""
DENSE_ROWS = 16
"""Fewest rows at which the dense kernel is worth a point."""
LIMITS = {torch.bfloat16: 2.5e-3, torch.float16: 6e-4}
"""Relative L2 error that passes, by the type of the result."""
ANY_PLAN = ops.Plan(ops.GEMM, 16, ops.EXACT, 0)
"""Where only the truth of an expectation matters."""
DENSE_LIMIT = 3.5e-3
"""The same where the weight itself is rounded to the type of the activations."""


class WrongResult(Exception):
    """An arm computed something else than the layer."""


@dataclass(frozen=True)
class Kernel:
    """What is forced: nothing ("auto"), the kernel for one row, a tile of rows, dense."""

    name: str
    form: str

    @property
    def plan(self) -> ops.Plan | None:
        """For `exl3::linear_with`; None for dispatch."""
        if self.name == "auto":
            return None
        if self.name == "dense":
            return ops.Plan(ops.DENSE, 0, ops.EXACT, 0)
        if self.name == "stream":
            return ops.Plan(ops.STREAM, 1, FORMS.index(self.form), 0)
        return ops.Plan(ops.GEMM, int(self.name), FORMS.index(self.form), 0)

    def applies(self, rows: int) -> bool:
        """False where a point would say nothing new, or would only burn time."""
        if self.form == "fast" and (self.name not in ("auto", "stream", "8") or rows > FAST_ROWS):
            return False
        if self.name == "auto":
            return True
        if self.name == "dense":
            return rows >= DENSE_ROWS
        if self.name == "stream":
            return rows == 1
        return rows <= 32 * int(self.name)


class Activations:
    """One buffer of random numbers a type, of which every `[m, k]` operand is a view."""

    def __init__(self, elements: int, device: str = "cuda"):
        self._elements = elements
        self._device = device
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    def views(self, m: int, k: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """`count` different `[m, k]` matrices."""
        if dtype not in self._flat:
            flat = torch.empty(self._elements, dtype=dtype, device=self._device)
            self._flat[dtype] = flat.normal_()
        size = m * k
        return [self._flat[dtype][i * size : (i + 1) * size].view(m, k) for i in range(count)]


@dataclass
class Workbench:
    """What all arms of one run share."""

    ruler: Ruler
    l2_bytes: int
    activations: Activations
    replays: int = timing.REPLAYS
    nvml: devices.Monitor | None = None
    failures: list[str] = field(default_factory=list)

    def operands(
        self, m: int, k: int, n: int, copies: int, dtype: torch.dtype
    ) -> tuple[list[torch.Tensor], int]:
        """Rotated activations, and how many outputs stay allocated at once."""
        count = timing.ring_size(m * k * dtype.itemsize, self.l2_bytes, copies)
        ring = timing.ring_size(m * n * dtype.itemsize, self.l2_bytes, copies)
        return self.activations.views(m, k, count, dtype), ring

    def reading(
        self,
        call: Callable[[int, torch.Tensor], torch.Tensor],
        size: tuple[int, int, int],
        copies: int,
        weight_bytes: int,
        dtype: torch.dtype,
        where: str,
        replays: int | None = None,
        sample: bool = False,
    ) -> dict[str, Any]:
        """Times one arm: us, spread, GB/s of weights, share of the ruler, TFLOP/s.

        Args:
            call: takes (copy, x).
            size: (m, k, n).
            copies: copies of the weights.
            weight_bytes: bytes of one copy.
            dtype: of x and of the result.
            where: names the arm if its reading is impossible.
            replays: fewer or more than usual.
            sample: read clocks and power while the device works, as `busy`.
        """
        m, k, n = size
        xs, ring = self.operands(m, k, n, copies, dtype)
        flops = 2.0 * m * k * n
        busy: dict[str, float] = {}
        nvml = self.nvml if sample else None
        reading = timing.time_rotating(
            lambda copy: call(copy, xs[copy % len(xs)]),
            copies,
            ring=ring,
            replays=self.replays if replays is None else replays,
            while_busy=None if nvml is None else lambda: busy.update(nvml.sample()),
        )
        gb_s = weight_bytes / (reading.us * 1e3)
        result = {
            "us": round(reading.us, 3),
            "spread": round(reading.spread, 4),
            "calls": reading.calls,
            "gb_s": round(gb_s, 1),
            "ruler_share": round(gb_s / self.ruler.read_gb_s, 4),
            "tflop_s": round(flops / (reading.us * 1e6), 2),
        }
        if busy:
            result["busy"] = busy
        if gb_s > TOLERANCE * self.ruler.read_gb_s:
            result["impossible"] = True
            self.failures.append(
                f"{where}: {gb_s:.0f} GB/s is more than the memory gives "
                f"({self.ruler.read_gb_s:.0f} GB/s): the weights came from a cache"
            )
        return result

    def proven(
        self,
        call: Callable[[int, torch.Tensor], torch.Tensor],
        size: tuple[int, int, int],
        copies: int,
        dtype: torch.dtype,
        truth: Truth,
        limit: float,
        plan: ops.Plan | None = None,
    ) -> Verdict:
        """Runs the arm once on the copy that `truth` is about and compares the result.

        The output's memory holds NaN before, as far as the allocator hands out the same block.

        Args:
            call: takes (copy, x).
            size: (m, k, n).
            copies: copies of the weights.
            dtype: of x and of the result.
            truth: about one of the copies.
            limit: relative L2 error that passes.
            plan: how our kernel computes, whose bound holds too; None for another's kernel.

        Raises:
            WrongResult: the result is off by more than `limit`, or not finite everywhere.
        """
        m, k, n = size
        xs, _ = self.operands(m, k, n, copies, dtype)
        x = xs[truth.copy % len(xs)]
        poison = torch.full((m, n), math.nan, dtype=dtype, device=x.device)
        del poison
        y = call(truth.copy, x)
        if tuple(y.shape) != (m, n) or y.dtype != dtype:
            raise WrongResult(f"the result is {list(y.shape)} {y.dtype}, expected {[m, n]} {dtype}")
        verdict = generate.verify(y, x, truth, plan or ANY_PLAN)
        if not verdict.passes(limit, bounded=plan is not None):
            raise WrongResult(
                f"relative error {verdict.relative:.2e} (limit {limit:.1e}), worst element "
                f"{verdict.worst:.2f} of its bound (limit {WORST_LIMIT}), "
                f"{'all' if verdict.finite else 'not all'} elements finite"
            )
        return verdict


def forced(bank: Bank, plan: ops.Plan) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """The call of `exl3::linear_with` on one bank."""
    return _call(bank, torch.ops.exl3.linear_with, (list(plan),))


def ours(
    bank: Bank, kernel: Kernel, options: dict[str, bool]
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """The call of our operator on one bank; sets its options, `exact` as the form says."""
    plan = kernel.plan
    ops.configure(**{**options, "exact": plan is None and kernel.form == "exact"})
    return _call(bank, torch.ops.exl3.linear, ()) if plan is None else forced(bank, plan)


def _call(
    bank: Bank, operator: Callable[..., torch.Tensor], last: tuple[Any, ...]
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    strips = bank.strips.unbind(0)
    suh = [bank.suh[i : i + 1] for i in range(bank.copies)]
    svh = bank.svh.unbind(0)
    shards = bank.shards

    def call(copy: int, x: torch.Tensor) -> torch.Tensor:
        return operator(x, strips[copy], suh[copy], svh[copy], None, shards, 0, *last)

    return call


def limit_for(plan: ops.Plan, dtype: torch.dtype) -> float:
    """Relative L2 error that passes for a plan."""
    return DENSE_LIMIT if plan.kernel == ops.DENSE and dtype == torch.bfloat16 else LIMITS[dtype]


def peer_reading(
    bench: Workbench, bank: Bank, rows: int, truths: list[Truth], extension: Any
) -> dict[str, Any]:
    """exllamav3's best path: us, path, its own choice, every path's time; or why there is none."""
    size = (rows, bank.k, bank.n)
    paths: dict[str, float] = {}
    problems: dict[str, str] = {}
    for number, path in enumerate(peers.exllamav3_paths(extension, bank, rows)):
        where = f"exllamav3 {path.name} {bank.k}x{bank.n} {bank.bits:g} {bank.codebook} {rows} rows"
        truth = truths[number % len(truths)]
        try:
            bench.proven(path.call, size, bank.copies, path.dtype, truth, path.limit or math.inf)
            reading = bench.reading(
                path.call, size, bank.copies, bank.copy_bytes, path.dtype, where
            )
            paths[path.name] = reading["us"]
        except (WrongResult, RuntimeError) as error:
            problems[path.name] = str(error).splitlines()[0]
            torch.cuda.synchronize()
    result: dict[str, Any] = {"paths": paths}
    if problems:
        result["problems"] = problems
    if paths:
        best = min(paths, key=paths.__getitem__)
        result.update(us=paths[best], path=best, own_choice=peers.exllamav3_own_choice(rows))
    return result
