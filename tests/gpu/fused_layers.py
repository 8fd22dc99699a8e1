"""The operators with a norm or a gated activation inside, and what they must return.

The truth is the layer's oracle on what `tests.ops.fused_cases` says goes into it; where fp32 noise
decides a rounding before the layer, both bounds are wider by what that can do.
"""

from __future__ import annotations

import torch

from tests.gpu import cases, oracle
from tests.ops import fused_cases

EPSILON = 1e-5
KINDS = [cases.PLANS[name] for name in ("rows8", "rows8-fast", "dense")]
"""One plan of each arithmetic. The last, whose bounds are wide, is for many rows only."""
FEW_ROWS = 64


def rest(layer: cases.Layer) -> list:
    """What both operators take after their own arguments."""
    return [layer.flat, layer.suh, layer.svh, layer.bias, layer.fields, layer.k_begin]


def norm_linear(layer, x, residual, weight) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.exl3.norm_linear(x, residual, weight, EPSILON, *rest(layer))


def gated_linear(layer, x) -> torch.Tensor:
    return torch.ops.exl3.gated_linear(x, *rest(layer))


def expectations(layer: cases.Layer, hidden: fused_cases.Hidden, dtype) -> list[oracle.Expectation]:
    """What the layer must return, computed in each of its ways (KINDS)."""
    x = hidden.value.to(dtype)
    assert torch.equal(x.double(), hidden.value), "the numbers before the layer are not rounded"
    offs, noises = [], []
    for shard, weights in zip(layer.shards, layer.weights):
        wanted = slice(shard.n_begin, shard.n_begin + shard.n_out)
        off = in_stored_rows(layer, hidden.off) @ weights.dense[0].abs()
        offs.append(off[:, wanted])
        noises.append(image_noise(layer, hidden, weights)[:, wanted])
    off, noise = torch.cat(offs, dim=1), torch.cat(noises, dim=1)
    found = [layer.expect(x, plan) for plan in KINDS]
    return [
        oracle.Expectation(e.truth, e.modelled, e.statistical + off + noise, e.worst + off)
        for e in found
    ]


def in_stored_rows(layer: cases.Layer, values: torch.Tensor) -> torch.Tensor:
    """`[m, k_in]` at its place among the stored rows, zeros around it."""
    wide = values.new_zeros(len(values), layer.k)
    wide[:, layer.k_begin : layer.k_begin + values.shape[1]] = values
    return wide


def image_noise(layer, hidden: fused_cases.Hidden, weights: oracle.Weights) -> torch.Tensor:
    """What else a number that may go either way does, `[m, n]`, for the statistical bound.

    It moves the whole transformed block it is part of, so all of the block may be rounded to fp16
    otherwise than modelled: two independent errors of half a step each, step^2 / 6 together.
    """
    image = oracle.hadamard(in_stored_rows(layer, hidden.value) * weights.suh)
    ratio = oracle.IMAGE_SCALE * oracle.ROOT
    step = oracle.step(image * ratio, torch.float16) / ratio
    open_blocks = oracle.spread(in_stored_rows(layer, hidden.off)) > 0
    variance = (step**2 / 6 * open_blocks) @ weights.half_way**2
    return oracle.SIGMAS * variance.sqrt() * weights.svh.abs()


def fractions(layer, y: torch.Tensor, expected: list[oracle.Expectation]) -> tuple[float, float]:
    """Largest error as a fraction of the bounds of the ways that this many rows may take."""
    return cases.closest(layer, y, expected[:2] if len(y) <= FEW_ROWS else expected)
