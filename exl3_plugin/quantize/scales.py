"""The two vectors around the tiles: signs, regularisation, the global scale, and the refit.

    W = diag(suh) H A H diag(svh)

`suh` and `svh` are chosen so that `A` looks like one unit Gaussian source everywhere, which is
what the codebook was made for; after rounding they are fitted once more to what came out.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch

from exl3_plugin.format import BLOCK, TILE
from exl3_plugin.quantize.ldlq import Encoder, rotate_columns, rotate_rows, to_tiles

_WHOLE_BITS = (1, 2, 3, 4, 5, 6, 7, 8)
_BEST_RMS = {
    "3inst": dict(zip(_WHOLE_BITS, (1.435, 1.244, 1.169, 1.127, 1.050, 1.020, 0.974, 0.897))),
    "mcg": dict(zip(_WHOLE_BITS, (1.435, 1.244, 1.169, 1.127, 1.050, 1.020, 0.945, 0.897))),
    "mul1": dict(zip(_WHOLE_BITS, (1.12, 1.00, 0.94, 0.912, 0.88, 0.845, 0.783, 0.76)))
    | {1.5: 1.03, 2.5: 0.968, 3.5: 0.912},
}
"""Input rms at which each codebook rounds a Gaussian source best: where the search starts."""

_RELATIVE_MSE = dict(
    zip(_WHOLE_BITS, (0.27, 0.0685, 0.0175, 0.0045, 0.00118, 3.1e-4, 8.3e-5, 2.2e-5))
) | {1.5: 0.137, 2.5: 0.0345, 3.5: 0.0088}
"""Relative mean square error at that rms, near enough for every codebook."""

_SEARCH_STEP = 1.07
SEARCH_TILES = 64
_EMPTY = 1e-30
_REFIT_ROUNDS = 2


def signs(seed: str, size: int) -> torch.Tensor:
    """Random signs float32 `[size]`, the same for the same seed on every machine."""
    digest = hashlib.sha256(seed.encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    bits = np.unpackbits(np.frombuffer(generator.bytes(-(-size // 8)), np.uint8))[:size]
    return torch.from_numpy(1.0 - 2.0 * bits.astype(np.float32))


@dataclass
class Regularised:
    """A weight between its transforms: `inner` float32 `[k, n]`, `suh` `[k]`, `svh` `[n]`."""

    inner: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor


def padded(size: int) -> int:
    """`size` rounded up to whole Hadamard blocks."""
    return -(-size // BLOCK) * BLOCK


def regularise(weight: torch.Tensor, input_seed: str, output_seed: str) -> Regularised:
    """Pad, take out row and column scales, flip signs and rotate; `inner` gets an rms of 1.

    Args:
        weight: float32 `[k, n]` (inputs, outputs), any sizes.
        input_seed: names the input; linears that share an input share their input signs.
        output_seed: names the linear.

    In a block that is partly padding the rotation spreads the real channels over all 128, so their
    scale is reduced by the square root of the real share: every tile then has the same rms.
    Columns of zeros (padding among them) end with `svh` = 0, rows of zeros with a benign `suh`.
    """
    k_true, n_true = weight.shape
    k, n = padded(k_true), padded(n_true)
    weight = torch.nn.functional.pad(weight, (0, n - n_true, 0, k - k_true))

    column = weight.square().mean(0, dtype=torch.float64).sqrt()
    empty_column = column < _EMPTY
    column = column / column.mean().clamp_min(_EMPTY)
    column = column * _real_share(n_true, n)
    column[empty_column] = 0.1
    svh = signs(output_seed, n) * column.float()
    rotated = rotate_columns(weight / svh)

    row = rotated.square().mean(1, dtype=torch.float64).sqrt()
    empty_row = row < _EMPTY
    row = row * _real_share(k_true, k)
    row[empty_row] = row[~empty_row].mean() if bool((~empty_row).any()) else 0.1
    suh = signs(input_seed, k) * row.float()
    inner = rotate_rows(rotated / suh[:, None])
    rms = float(inner.square().mean(dtype=torch.float64).sqrt())
    if rms > _EMPTY:
        inner, suh = inner / rms, suh * rms
    svh[empty_column] = 0.0
    return Regularised(inner, suh, svh)


def _real_share(true: int, stored: int) -> torch.Tensor:
    """Square root of the real share of the block of each channel, float64 `[stored]`."""
    factor = torch.ones(stored, dtype=torch.float64)
    if true % BLOCK:
        factor[stored - BLOCK :] = math.sqrt((true % BLOCK) / BLOCK)
    return factor


def search_scale(inner: torch.Tensor, encoder: Encoder, gain: float = 0.0) -> tuple[float, float]:
    """The factor on `inner` (rms 1) at which the trellis rounds it best.

    Args:
        inner: float32 `[k, n]`.
        encoder: the trellis search.
        gain: error variance that feedback adds to a row, from `ldlq.feedback_gain`; the sample is
            inflated by what will be added, so that the scale fits what the search will see.

    Returns:
        (scale, mean square error of the sample relative to its energy).
    """
    sample = _sample_tiles(inner)
    sample = sample * math.sqrt(1.0 + gain * _RELATIVE_MSE[encoder.bits])
    energy = float(sample.square().mean(dtype=torch.float64))
    if energy < _EMPTY:
        return 1.0, 0.0
    errors: dict[int, float] = {}
    start = _BEST_RMS[encoder.codebook][encoder.bits]

    def error_at(step: int) -> float:
        if step not in errors:
            scale = start * _SEARCH_STEP**step
            _, values = encoder(sample * scale)
            off = (values / scale - sample).square().mean(dtype=torch.float64)
            errors[step] = float(off) / energy
        return errors[step]

    best = 0
    while abs(best) < 12:
        neighbour = min((best - 1, best + 1), key=error_at)
        if error_at(neighbour) >= error_at(best):
            break
        best = neighbour
    # A parabola through the best three points, in steps of the logarithm.
    low, middle, high = (error_at(best + offset) for offset in (-1, 0, 1))
    bend = low - 2 * middle + high
    offset = 0.5 * (low - high) / bend if bend > 0 else 0.0
    return start * _SEARCH_STEP ** (best + max(-0.5, min(0.5, offset))), middle


def _sample_tiles(inner: torch.Tensor) -> torch.Tensor:
    """Tiles for the scale search: a wrapped diagonal, and the loudest and quietest of the rest."""
    tile_rows, tile_columns = inner.shape[0] // TILE, inner.shape[1] // TILE
    total = tile_rows * tile_columns
    wanted = max(16, min(SEARCH_TILES, total // 16))
    longest = max(tile_rows, tile_columns)
    step = torch.arange(0, longest, max(1, longest * 4 // (3 * wanted)))
    diagonal = (step % tile_rows) * tile_columns + step % tile_columns
    blocks = inner.reshape(tile_rows, TILE, tile_columns, TILE)
    energy = blocks.square().sum((1, 3)).reshape(-1)
    order = torch.argsort(energy, stable=True)
    extremes = max(1, wanted // 8)
    chosen = torch.cat((diagonal, order[:extremes], order[-extremes:])).unique()
    rows, columns = chosen // tile_columns, chosen % tile_columns
    picked = blocks[rows, :, columns]
    return to_tiles(picked.reshape(-1, TILE, TILE))


def refit(
    core: torch.Tensor,
    weight: torch.Tensor,
    hessian: torch.Tensor | None,
    suh: torch.Tensor,
    svh: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Least-squares fit of the scales to the rounded weight; two rounds of columns, then rows.

    Args:
        core: float32 `[k, n]`, the rounded weight with both rotations undone but no scales.
        weight: float32 `[k, n]`, what it should be. Both without padding.
        hessian: float64 `[k, k]` damped second moment of the input, or None for the identity.
        suh, svh: scales so far, float32 `[k]` and `[n]`.

    Returns:
        New (suh, svh), float32. Neither step can raise `tr(E^T H E)`: each solves for its scales
        exactly with the other side held (a row scale that would turn negative stays as it was).
    """
    metric = None if hessian is None else hessian.float()
    wanted = weight if metric is None else metric @ weight
    suh, svh = suh.clone(), svh.clone()
    for _ in range(_REFIT_ROUNDS):
        now = core * suh[:, None] * svh
        measured = now if metric is None else metric @ now
        over = (now * wanted).sum(0, dtype=torch.float64)
        under = (now * measured).sum(0, dtype=torch.float64)
        factor = torch.where(under > _EMPTY, over / under.clamp_min(_EMPTY), 1.0).float()
        svh, now = svh * factor, now * factor

        over = (now * wanted).sum(1, dtype=torch.float64)
        if metric is None:
            under = now.square().sum(1, dtype=torch.float64)
            solution = over / under.clamp_min(_EMPTY)
        else:
            system = (now @ now.T).double() * hessian
            system.diagonal().add_(1e-6 * system.diagonal().mean())
            solution = torch.linalg.solve(system, over)
        usable = torch.isfinite(solution) & (solution > 0)
        suh = suh * torch.where(usable, solution, 1.0).float()
    return suh, svh


def balance(suh: torch.Tensor, svh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move a power of two between the scales so that neither leaves fp16's normal range.

    Returns (suh, svh) as float16. Only extreme weights are touched: `suh` of an ordinary layer is
    0.001 to 1 and `svh` about 1.
    """
    inner, outer = float(suh.abs().mean()), float(svh.abs().mean())
    if inner > _EMPTY and outer > _EMPTY and not 2.0**-8 <= inner <= 2.0:
        shift = 2.0 ** round(0.5 * math.log2(outer / inner))
        suh, svh = suh * shift, svh / shift
    limit = torch.finfo(torch.float16).max
    return suh.clamp(-limit, limit).half(), svh.clamp(-limit, limit).half()
