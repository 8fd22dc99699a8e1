"""Layers, plans and checks shared by the GPU tests and the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from exl3_plugin import ops
from tests.gpu import oracle
from tests.ops.linear_cases import RATES, Shard, random_shard

DTYPES = (torch.bfloat16, torch.float16)
FUSED = [("mcg", 64, 384), ("mcg", 64, 256, 10, 201), ("mul1", 40, 256), ("3inst", 96, 128)]
"""Shards of one layer: rates, codebooks and columns that are not all wanted."""

ROWS = (
    *(0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 63, 64, 65),
    *(100, 127, 128, 129, 256, 300, 1000),
)
PLANS = {
    "rows8": ops.Plan(ops.GEMM, 8, ops.EXACT, 0),
    "rows8-fast": ops.Plan(ops.GEMM, 8, ops.FAST, 0),
    "rows16": ops.Plan(ops.GEMM, 16, ops.EXACT, 0),
    "rows32": ops.Plan(ops.GEMM, 32, ops.EXACT, 0),
    "rows64": ops.Plan(ops.GEMM, 64, ops.EXACT, 0),
    "rows128": ops.Plan(ops.GEMM, 128, ops.EXACT, 0),
    "dense": ops.Plan(ops.DENSE, 0, ops.EXACT, 0),
}
"""Every tier there is, with the number of blocks left to the kernel."""

WORST_LIMIT = 0.5
"""Share of the worst-case bound above which a result counts as wrong."""

__all__ = [
    "DTYPES",
    "PLANS",
    "RATES",
    "ROWS",
    "Layer",
    "Report",
    "activations",
    "closest",
    "make_layer",
    "same_bits",
]


@dataclass
class Layer:
    """One fused layer on a device, and the oracle's view of it.

    `flat`, `fields`, `suh`, `svh`, `bias`, `k_begin` are what the ops take.
    """

    shards: list[Shard]
    flat: torch.Tensor
    fields: list[int]
    suh: torch.Tensor
    svh: torch.Tensor
    bias: torch.Tensor | None
    k_begin: int
    _weights: list[oracle.Weights] = field(default_factory=list)

    @property
    def k(self) -> int:
        """Stored rows."""
        return self.suh.shape[1]

    @property
    def n_out(self) -> int:
        """Columns of the result."""
        return sum(shard.n_out for shard in self.shards)

    @property
    def n_stored(self) -> int:
        """Columns of all matrices."""
        return self.svh.shape[0]

    @property
    def weights(self) -> list[oracle.Weights]:
        """The decoded matrices, made on first use on the layer's device."""
        if not self._weights:
            at = 0
            for index, shard in enumerate(self.shards):
                svh = self.svh[at : at + shard.svh.shape[0]]
                at += shard.svh.shape[0]
                trellis = torch.from_numpy(shard.trellis).to(self.flat.device)
                self._weights.append(oracle.Weights(trellis, self.suh[index], svh, shard.codebook))
        return self._weights

    def run(self, x: torch.Tensor, plan: ops.Plan | None = None) -> torch.Tensor:
        """`exl3::linear`, or `exl3::linear_with` where a plan is given."""
        arguments = (x, self.flat, self.suh, self.svh, self.bias, self.fields, self.k_begin)
        if plan is None:
            return torch.ops.exl3.linear(*arguments)
        return torch.ops.exl3.linear_with(*arguments, list(plan))

    def expect(self, x: torch.Tensor, plan: ops.Plan) -> oracle.Expectation:
        """What `run` must return for `x` `[m, k_in]`, by the oracle."""
        parts, at = [], 0
        for shard, weights in zip(self.shards, self.weights):
            wanted = slice(shard.n_begin, shard.n_begin + shard.n_out)
            bias = None
            if self.bias is not None:
                bias = self.svh.new_zeros(shard.svh.shape[0], dtype=torch.float64)
                bias[wanted] = self.bias[at : at + shard.n_out].double()
            if plan.kernel == ops.DENSE:
                part = oracle.dense(x.double(), weights, x.dtype, self.k_begin, bias)
            else:
                wide = x.new_zeros(x.shape[0], self.k, dtype=torch.float64)
                wide[:, self.k_begin : self.k_begin + x.shape[1]] = x
                part = oracle.gemm(wide, weights, plan.form == ops.FAST, bias)
            parts.append(part.columns(wanted.start, wanted.stop))
            at += shard.n_out
        return oracle.join(parts)


def make_layer(
    seed,
    k: int,
    specs: list[tuple],
    device: torch.device | str = "cuda",
    bias: torch.dtype | None = None,
    k_begin: int = 0,
) -> Layer:
    """A layer of random matrices; the same seed gives the same numbers on every device.

    Args:
        seed: what `numpy.random.default_rng` takes.
        k: stored rows.
        specs: for each shard (codebook, words, n) or (codebook, words, n, n_begin, n_out).
        device: where the tensors go.
        bias: dtype of the bias, None for none.
        k_begin: first stored row that x will cover.
    """
    rng = np.random.default_rng(seed)
    shards = [random_shard(rng, k, n, codebook, words, *cut) for codebook, words, n, *cut in specs]
    device = torch.device(device)
    pieces = [
        (torch.from_numpy(s.trellis).to(device), s.codebook, s.n_begin, s.n_out) for s in shards
    ]
    flat, fields = ops.pack_shards(pieces, strips=device.type == "cuda")
    suh = torch.from_numpy(np.stack([s.suh for s in shards])).to(device)
    svh = torch.from_numpy(np.concatenate([s.svh for s in shards])).to(device)
    extra = None
    if bias is not None:
        extra = torch.from_numpy(rng.standard_normal(sum(s.n_out for s in shards)))
        extra = extra.to(device=device, dtype=bias)
    return Layer(shards, flat, fields, suh, svh, extra, k_begin)


def activations(seed, m: int, k: int, dtype: torch.dtype, device="cuda") -> torch.Tensor:
    """Standard normal `[m, k]`, one row in eight a hundred times smaller."""
    x = np.random.default_rng(seed).standard_normal((m, k), dtype=np.float32)
    x[::8] *= 0.01
    return torch.from_numpy(x).to(device=device, dtype=dtype)


class Report:
    """Collects fractions of the bounds, and names every case that breaks one."""

    def __init__(self):
        self.statistical: dict[str, float] = {}
        self.worst: dict[str, float] = {}
        self.broken: list[str] = []

    def add(
        self,
        group: str,
        case: str,
        fractions: tuple[float, float],
        worst_limit: float = WORST_LIMIT,
    ) -> None:
        """One checked result; `group` is what the summary goes by."""
        statistical, worst = fractions
        self.statistical[group] = max(self.statistical.get(group, 0.0), statistical)
        self.worst[group] = max(self.worst.get(group, 0.0), worst)
        if not (statistical <= 1 and worst <= worst_limit):
            self.broken.append(f"{group} {case}: {statistical:.3g} statistical, {worst:.3g} worst")

    def check(self, title: str) -> None:
        """Prints the worst fraction of each group; raises AssertionError if a case broke one."""
        print(f"\n{title}: largest error as a fraction of the bounds (statistical, worst case)")
        for group, statistical in self.statistical.items():
            print(f"  {group:14} {statistical:.3f}  {self.worst[group]:.4f}")
        shown = "\n".join(self.broken[:20])
        assert not self.broken, f"{len(self.broken)} cases break a bound:\n{shown}"
        assert self.statistical, "nothing was checked"


def closest(
    layer: Layer, y: torch.Tensor, expectations: list[oracle.Expectation]
) -> tuple[float, float]:
    """Fractions of the bounds where each shard may have been computed in any of several ways."""
    worst, at = (0.0, 0.0), 0
    for shard in layer.shards:
        columns = (at, at + shard.n_out)
        at += shard.n_out
        part = y[:, columns[0] : columns[1]]
        best = min(e.columns(*columns).fractions(part) for e in expectations)
        worst = tuple(map(max, worst, best))
    return worst


def beside_a_busy_stream(reruns: int = 100) -> Iterator[int]:
    """Counts reruns, while matmuls of another stream take multiprocessors away at random."""
    busy = torch.cuda.Stream()
    a = torch.randn(3072, 3072, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for rerun in range(reruns):
        if rerun % 5 == 0:
            with torch.cuda.stream(busy):
                for _ in range(3):
                    a @ a
        yield rerun
    torch.cuda.synchronize()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of a 16-bit dtype are equal bit by bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))
