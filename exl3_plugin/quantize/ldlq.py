"""Rounding with error feedback: a rotated weight becomes trellis tiles, tile row after tile row.

The error that matters is `tr(E^T H E)` with `H` the second moment of the layer's input. With
`H = L D L^T` (identity blocks of 16 on the diagonal of `L`), rounding the tile rows from the last
to the first and handing each one the errors of those behind it,

    T_i = A_i + sum over later rows q of L[q, i]^T (A - Q)_q,       Q_i = nearest tiles to T_i,

makes the total error `sum_i tr(D_i (T_i - Q_i)(T_i - Q_i)^T)`: only the part of a row's error that
no other row can absorb is left (the LDLQ method of the QuIP# and QTIP papers, in blocks of 16).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from exl3_plugin import ops
from exl3_plugin.format import BLOCK, CODEBOOKS, PERM, TILE, words_from_bits

TILE_ELEMENTS = TILE * TILE

_CHUNK_TILES = 4096
"""Tiles of one call to the search: large enough for all cores, small enough to report progress."""

_MAX_DAMPINGS = 10
"""Attempts to make a Hessian positive definite before it is called unusable."""


class QuantizeError(ValueError):
    """The conversion cannot be done as asked; the message says why and what to do."""


# Transforms


def hadamard_matrix(dtype: torch.dtype) -> torch.Tensor:
    """The orthonormal 128-point Hadamard matrix in natural order, `[128, 128]`, symmetric."""
    matrix = torch.ones(1, 1, dtype=dtype)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=dtype)
    while len(matrix) < BLOCK:
        matrix = torch.kron(pair, matrix)
    return matrix / math.sqrt(BLOCK)


def rotate_columns(x: torch.Tensor) -> torch.Tensor:
    """Hadamard transform of every 128-block of the last axis; its own inverse."""
    return (x.reshape(-1, BLOCK) @ hadamard_matrix(x.dtype)).reshape(x.shape)


def rotate_rows(x: torch.Tensor) -> torch.Tensor:
    """Hadamard transform of every 128-block of the first axis of a matrix; its own inverse."""
    blocks = x.reshape(-1, BLOCK, x.shape[-1])
    return (hadamard_matrix(x.dtype) @ blocks).reshape(x.shape)


# Tiles


_RING = torch.from_numpy(np.ascontiguousarray(PERM))
_ROW_MAJOR = torch.argsort(_RING)


def to_tiles(rows: torch.Tensor) -> torch.Tensor:
    """Tile rows `[rows, 16, n]` as tiles in ring order, `[rows * n/16, 256]`."""
    tiles = rows.unflatten(-1, (-1, TILE)).transpose(1, 2).reshape(-1, TILE_ELEMENTS)
    return tiles[:, _RING]


def from_tiles(tiles: torch.Tensor, n: int) -> torch.Tensor:
    """The inverse of `to_tiles`: tiles `[rows * n/16, 256]` as tile rows `[rows, 16, n]`."""
    tiles = tiles[:, _ROW_MAJOR].reshape(-1, n // TILE, TILE, TILE)
    return tiles.transpose(1, 2).reshape(-1, TILE, n)


@dataclass
class Meter:
    """What the trellis search has cost so far; `on_tiles(count)` is called after each batch."""

    on_tiles: Callable[[int], None] = lambda count: None
    tiles: int = 0
    seconds: float = 0.0
    core_seconds: float = 0.0

    def add(self, tiles: int, seconds: float, core_seconds: float) -> None:
        self.tiles += tiles
        self.seconds += seconds
        self.core_seconds += core_seconds
        self.on_tiles(tiles)

    def tiles_per_second_per_core(self) -> float:
        """Tiles per second of CPU time in the search: other load on the machine is left out."""
        return self.tiles / max(self.core_seconds, 1e-9)


@dataclass(frozen=True)
class Encoder:
    """The trellis search at one rate and codebook."""

    bits: float
    codebook: str
    meter: Meter = field(default_factory=Meter)

    @property
    def words(self) -> int:
        return words_from_bits(self.bits)

    def __call__(self, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tiles float32 `[T, 256]` in ring order; returns (int16 `[T, words]`, float32 `[T, 256]`).

        Which tiles share a call does not change the result.
        """
        ops.load()
        index = CODEBOOKS.index(self.codebook)
        packed, values = [], []
        for chunk in tiles.contiguous().split(_CHUNK_TILES):
            begin, core_begin = time.perf_counter(), time.process_time()
            words, decoded = torch.ops.exl3.encode_tiles(chunk, self.words, index)
            self.meter.add(
                len(chunk), time.perf_counter() - begin, time.process_time() - core_begin
            )
            packed.append(words)
            values.append(decoded)
        return torch.cat(packed), torch.cat(values)


# Error feedback


def block_ldl(hessian: torch.Tensor) -> torch.Tensor:
    """Lower factor `L` of `H = L D L^T` with identity diagonal blocks of 16.

    Args:
        hessian: float64 `[B, k, k]`, symmetric; a matrix that is not positive definite is damped
            in steps of 5 % of its mean diagonal.

    Returns:
        float32 `[B, k, k]`.

    Raises:
        QuantizeError: still not positive definite after 10 steps.
    """
    k = hessian.shape[-1]
    damping = 0.05 * hessian.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None]
    for _ in range(_MAX_DAMPINGS):
        cholesky, info = torch.linalg.cholesky_ex(hessian)
        if not info.any():
            break
        failed = (info != 0).to(hessian.dtype)[:, None]
        hessian = hessian + torch.diag_embed((failed * damping).expand(-1, k))
    else:
        raise QuantizeError(
            "the Hessian is not positive definite even with 50 % damping: the calibration "
            "activations are unusable; convert without calibration or with other text"
        )
    lower = torch.empty_like(cholesky, dtype=torch.float32)
    for begin in range(0, k, TILE):
        block = slice(begin, begin + TILE)
        lower[..., block] = torch.linalg.solve_triangular(
            cholesky[:, block, block], cholesky[..., block], upper=False, left=False
        )
    return lower


def feedback_gain(lower: torch.Tensor) -> float:
    """Mean of `sum over later rows of L^2`: how much error variance a row receives, per unit."""
    size = lower.shape[-1]
    own = TILE * (size // TILE) * lower.shape[0]
    total = float(lower.square().sum(dtype=torch.float64))
    # The diagonal blocks are identities: 16 ones in each, which are no feedback.
    return (total - own) / (size * lower.shape[0])


def ldlq(
    target: torch.Tensor, lower: torch.Tensor, encoder: Encoder
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a rotated weight to tiles with error feedback.

    Args:
        target: float32 `[k, n]`, scaled to what the codebook expects.
        lower: float32 `[1, k, k]` from `block_ldl`, or `[k/128, 128, 128]` when the Hessian is
            block diagonal: then the 128-row spans do not see each other and go in one batch.
        encoder: the trellis search.

    Returns:
        (trellis int16 `[k/16, n/16, words]`, its decoded values float32 `[k, n]`).
    """
    k, n = target.shape
    if lower.shape[-1] == BLOCK:
        packed, values = _round_spans(target.reshape(-1, BLOCK, n), None, lower, encoder)
        return packed.reshape(k // TILE, n // TILE, -1), values.reshape(k, n)
    lower = lower[0]
    shifted = target.clone()
    trellis = torch.empty(k // TILE, n // TILE, encoder.words, dtype=torch.int16)
    values = torch.empty_like(target)
    for begin in range(k - BLOCK, -1, -BLOCK):
        span = slice(begin, begin + BLOCK)
        packed, decoded = _round_spans(
            target[None, span], shifted[None, span], lower[None, span, span], encoder
        )
        trellis[begin // TILE : (begin + BLOCK) // TILE] = packed[0]
        values[span] = decoded[0]
        # One wide update per span instead of one per tile row: the same sums, far faster.
        error = target[span] - values[span]
        shifted[:begin].addmm_(lower[span, :begin].T, error)
    return trellis, values


def _round_spans(
    target: torch.Tensor, shifted: torch.Tensor | None, lower: torch.Tensor, encoder: Encoder
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round `[B, 128, n]` spans that are independent of each other.

    `shifted` is `target` plus the feedback of earlier spans (None: no such feedback), `lower` the
    diagonal blocks of `L` `[B, 128, 128]`.
    """
    spans, rows, n = target.shape
    shifted = target if shifted is None else shifted
    error = torch.zeros_like(target)
    values = torch.empty_like(target)
    trellis = torch.empty(spans, rows // TILE, n // TILE, encoder.words, dtype=torch.int16)
    for begin in range(rows - TILE, -1, -TILE):
        own, later = slice(begin, begin + TILE), slice(begin + TILE, rows)
        wanted = shifted[:, own]
        if begin + TILE < rows:
            wanted = wanted + lower[:, later, own].transpose(1, 2) @ error[:, later]
        packed, decoded = encoder(to_tiles(wanted))
        trellis[:, begin // TILE] = packed.reshape(spans, n // TILE, -1)
        values[:, own] = from_tiles(decoded, n)
        error[:, own] = target[:, own] - values[:, own]
    return trellis, values
