"""Banks of random EXL3 layers on a device, and the truth about them in float64.

Any 16-bit words are a valid trellis. The truth and its bounds are those of the GPU tests
(`tests/gpu/oracle.py`), taken in sampled columns and rows, so that proving a point costs less than
timing it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from exl3_plugin import format as exl3
from exl3_plugin import ops
from tests.gpu import oracle
from tests.gpu.cases import WORST_LIMIT

BLOCK = exl3.BLOCK
TILE = exl3.TILE
SUH_SIZE = 0.06
"""Typical size of input scales in published checkpoints; output scales are near 1."""


@dataclass
class Bank:
    """Copies of one random linear layer that differ in every word.

    trellis: int16 `[copies, k/16, n/16, 16*bits]` as stored.
    suh, svh: float16 `[copies, k]` and `[copies, n]`.
    """

    k: int
    n: int
    bits: float
    codebook: str
    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor

    @property
    def copies(self) -> int:
        """Number of copies."""
        return self.trellis.shape[0]

    @property
    def copy_bytes(self) -> int:
        """Bytes of weights that one call has to read."""
        return self.trellis[0].nbytes

    @functools.cached_property
    def strips(self) -> torch.Tensor:
        """int16 `[copies, words]`: every copy in the order the CUDA kernels read."""
        return torch.stack([ops.to_strips(copy) for copy in self.trellis])

    @property
    def shards(self) -> list[int]:
        """The `shards` argument of `exl3::linear` for one unfused matrix."""
        return [exl3.CODEBOOKS.index(self.codebook), self.trellis.shape[3], self.n, 0, self.n]


def weight_bytes(k: int, n: int, bits: float) -> int:
    """Bytes of the trellis of a `[k, n]` matrix."""
    return int(k * n * bits) // 8


def random_bank(
    k: int, n: int, bits: float, codebook: str, copies: int, device: str = "cuda", seed: int = 0
) -> Bank:
    """Random words, and scales of the size and scatter of a real layer.

    Raises:
        FormatError: k or n is no multiple of 128, or the rate does not exist.
    """
    if k % BLOCK or n % BLOCK or k <= 0 or n <= 0:
        raise exl3.FormatError(f"a layer of {k}x{n} is not made of blocks of {BLOCK}")
    words = exl3.words_from_bits(bits)
    if words % TILE and codebook != "mul1":
        raise exl3.FormatError(f"{bits:g} bits exist only with mul1, not with {codebook}")
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (copies, k // TILE, n // TILE, words // 2)
    pairs = torch.randint(
        -(2**31), 2**31, shape, dtype=torch.int32, device=device, generator=generator
    )

    def scales(size: int, typical: float) -> torch.Tensor:
        uniform = torch.rand(copies, size, device=device, generator=generator)
        signs = torch.randint(0, 2, (copies, size), device=device, generator=generator) * 2 - 1
        return (signs * typical * (0.5 + uniform)).half()

    return Bank(k, n, bits, codebook, pairs.view(torch.int16), scales(k, SUH_SIZE), scales(n, 1.0))


class Truth:
    """The product with one copy in float64, in some of its columns, with the oracle's bounds.

    A column needs the whole block of 128 around it, so a few random blocks are decoded, over all k.
    """

    def __init__(self, bank: Bank, copy: int, blocks: int = 2, seed: int = 0):
        strips = bank.n // BLOCK
        generator = np.random.default_rng([seed, copy, bank.k, bank.n])
        chosen = np.sort(generator.choice(strips, min(blocks, strips), replace=False))[:, None]
        device = bank.trellis.device

        def spans(width: int) -> torch.Tensor:
            return torch.from_numpy((chosen * width + np.arange(width)).reshape(-1)).to(device)

        self.copy = copy
        self.columns = spans(BLOCK)
        trellis = bank.trellis[copy].index_select(1, spans(BLOCK // TILE))
        svh = bank.svh[copy].index_select(0, self.columns)
        self._weights = oracle.Weights(trellis, bank.suh[copy], svh, bank.codebook)

    def expect(self, x: torch.Tensor, plan: ops.Plan) -> oracle.Expectation:
        """What rows `x` `[m, k]` must give in `columns`, computed as `plan` says."""
        if plan.kernel == ops.DENSE:
            return oracle.dense(x.double(), self._weights, x.dtype, 0)
        return oracle.gemm(x.double(), self._weights, plan.form == ops.FAST)


@dataclass(frozen=True)
class Verdict:
    """How far a result is from the truth.

    relative: L2 error over L2 size.
    worst: largest error as a fraction of the bound that every element keeps.
    statistical: the same of the bound that faults break; for the record.
    finite: every element of the whole result is.
    """

    relative: float
    worst: float
    statistical: float
    finite: bool

    def passes(self, limit: float, bounded: bool = True) -> bool:
        """Within `limit` in L2, all finite, and within the bound unless another kernel made it."""
        close = self.finite and self.relative <= limit
        return close and (not bounded or self.worst <= WORST_LIMIT)


def sample_rows(m: int, count: int = 64, seed: int = 0) -> np.ndarray:
    """Row numbers to check: all of few, else the first, the last and random ones between."""
    if m <= count:
        return np.arange(m)
    inner = np.random.default_rng([seed, m]).choice(m - 2, count - 2, replace=False) + 1
    return np.sort(np.concatenate([[0, m - 1], inner]))


def verify(y: torch.Tensor, x: torch.Tensor, truth: Truth, plan: ops.Plan) -> Verdict:
    """Compares sampled rows and columns of `y` `[m, n]`, the product of `x` `[m, k]`."""
    rows = torch.from_numpy(sample_rows(x.shape[0])).to(x.device)
    expected = truth.expect(x.index_select(0, rows), plan)
    got = y.index_select(0, rows).index_select(1, truth.columns)
    error = got.double() - expected.truth
    relative = (error.norm() / expected.truth.norm()).item()
    statistical, worst = expected.fractions(got)
    return Verdict(relative, worst, statistical, bool(torch.isfinite(y).all()))
