"""Random EXL3 layers on a device, and the truth about them in float64.

Any 16-bit words are a valid trellis. The truth is the format written in torch: it shares nothing
with the compiled kernels but the tables of `exl3_plugin.format`, which are held against
exllamav3's own results.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from exl3_plugin import format as exl3
from exl3_plugin import ops

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


@functools.lru_cache(maxsize=16)
def _tables(bits: float, codebook: str, device: str) -> tuple[torch.Tensor, ...]:
    """Per element of a row-major tile: 16-bit piece and shift of its window; the values."""
    ends = exl3.step_ends(bits)[np.argsort(exl3.PERM)]
    begin = (ends - 16) % (TILE * TILE * bits)
    piece = torch.from_numpy((begin // 16).astype(np.int64)).to(device)
    shift = torch.from_numpy((16 - begin % 16).astype(np.int64)).to(device)
    values = torch.from_numpy(exl3.codebook(codebook).astype(np.float64)).to(device)
    return piece, shift, values


def decode(trellis: torch.Tensor, codebook: str) -> torch.Tensor:
    """The rotated weight: int16 `[k/16, n/16, 16*bits]` to float64 `[k, n]`, exact."""
    rows, columns, words = trellis.shape
    piece, shift, values = _tables(words / TILE, codebook, str(trellis.device))
    # The ring is read from the top bit of each 32-bit word on, so its 16-bit halves change places.
    halves = trellis.to(torch.int64).view(rows, columns, words // 2, 2).flip(-1) & 0xFFFF
    ring = halves.reshape(rows, columns, words)
    pairs = (ring << 16) | ring.roll(-1, dims=-1)
    states = (pairs[..., piece] >> shift) & 0xFFFF
    tiles = values[states].view(rows, columns, TILE, TILE)
    return tiles.permute(0, 2, 1, 3).reshape(rows * TILE, columns * TILE)


@functools.lru_cache(maxsize=4)
def _hadamard_matrix(device: str) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / math.sqrt(BLOCK)).to(device)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal transform of every block of 128 of the last axis, float64."""
    blocks = x.double().reshape(*x.shape[:-1], -1, BLOCK) @ _hadamard_matrix(str(x.device))
    return blocks.reshape(x.shape)


class Truth:
    """`y = x W` of one copy in float64, in some of its columns.

    A column needs the whole block of 128 around it, so a few random blocks are decoded, over all k.
    """

    def __init__(self, bank: Bank, copy: int, blocks: int = 2, seed: int = 0):
        strips = bank.n // BLOCK
        generator = np.random.default_rng([seed, copy, bank.k, bank.n])
        chosen = np.sort(generator.choice(strips, min(blocks, strips), replace=False))
        self.copy = copy
        self.columns = torch.from_numpy(
            (chosen[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
        ).to(bank.trellis.device)
        tiles = (chosen[:, None] * (BLOCK // TILE) + np.arange(BLOCK // TILE)).reshape(-1)
        index = torch.from_numpy(tiles).to(bank.trellis.device)
        self.inner = decode(bank.trellis[copy].index_select(1, index), bank.codebook)
        self.suh = bank.suh[copy].double()
        self.svh = bank.svh[copy].double()[self.columns]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of the product: `[m, k]` to float64 `[m, columns]`."""
        return hadamard(hadamard(x.double() * self.suh) @ self.inner) * self.svh


@dataclass(frozen=True)
class Verdict:
    """How far a result is from the truth: relative L2, and the worst element over the RMS."""

    relative: float
    worst: float
    finite: bool

    def passes(self, limit: float) -> bool:
        """Within `limit` in L2, no single element more than twenty times that off, all finite."""
        return self.finite and self.relative <= limit and self.worst <= 20 * limit


def sample_rows(m: int, count: int = 64, seed: int = 0) -> np.ndarray:
    """Row numbers to check: all of few, else the first, the last and random ones between."""
    if m <= count:
        return np.arange(m)
    inner = np.random.default_rng([seed, m]).choice(m - 2, count - 2, replace=False) + 1
    return np.sort(np.concatenate([[0, m - 1], inner]))


def check(y: torch.Tensor, wanted: torch.Tensor, got: torch.Tensor) -> Verdict:
    """Verdict on `got` against float64 `wanted`; all of `y` has to be finite."""
    error = got.double() - wanted
    size = wanted.square().mean().sqrt()
    relative = (error.square().mean().sqrt() / size).item()
    return Verdict(relative, (error.abs().max() / size).item(), bool(torch.isfinite(y).all()))


def verify(y: torch.Tensor, x: torch.Tensor, truth: Truth) -> Verdict:
    """Compares sampled rows and columns of `y` `[m, n]`, the product of `x` `[m, k]`."""
    rows = torch.from_numpy(sample_rows(x.shape[0])).to(x.device)
    wanted = truth.product(x.index_select(0, rows))
    got = y.index_select(0, rows).index_select(1, truth.columns)
    return check(y, wanted, got)
