"""One linear layer from weight to EXL3 tensors: regularise, search the scale, round, refit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exl3_plugin.format import BLOCK
from exl3_plugin.quantize import scales
from exl3_plugin.quantize.ldlq import (
    Encoder,
    block_ldl,
    feedback_gain,
    ldlq,
    rotate_columns,
    rotate_rows,
)

DAMPING = 0.025
"""Share of the mean diagonal added to a Hessian, as in exllamav3."""


@dataclass
class QuantizedLinear:
    """What is stored of one linear, and how far off it is.

    `error` is `tr(E^T H E) / tr(W^T H W)` with the damped Hessian (the identity without one).
    """

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    codebook: str
    bits: float
    error: float


def damped(hessian: torch.Tensor) -> torch.Tensor:
    """`hessian` plus 2.5 % of its mean diagonal, float64."""
    hessian = hessian.double()
    return hessian + DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian)).double()


def usable(hessian: torch.Tensor | None) -> bool:
    """Whether a captured Hessian says anything (finite, and not all zero)."""
    if hessian is None or not bool(torch.isfinite(hessian).all()):
        return False
    return float(hessian.diagonal().mean()) > 1e-20


def quantize_linear(
    weight: torch.Tensor,
    hessian: torch.Tensor | None,
    encoder: Encoder,
    input_seed: str,
    output_seed: str,
) -> tuple[QuantizedLinear, torch.Tensor]:
    """Quantise one linear.

    Args:
        weight: float32 `[k, n]` (inputs, outputs), any sizes: it is padded to multiples of 128.
        hessian: second moment `[k, k]` of the input, or None: then every input channel counts the
            same, which still leaves the different sizes of the rows for feedback to use.
        encoder: rate and codebook.
        input_seed, output_seed: names that fix the random signs.

    Returns:
        (the tensors to store, the weight they decode to: float32 `[k, n]` without padding).
    """
    k_true, n_true = weight.shape
    metric = damped(hessian) if usable(hessian) else None
    regular = scales.regularise(weight, input_seed, output_seed)
    lower = block_ldl(_rotated_metric(metric, k_true, regular.suh))
    scale, _ = scales.search_scale(regular.inner, encoder, feedback_gain(lower))
    trellis, values = ldlq(regular.inner * scale, lower, encoder)
    suh, svh = regular.suh / scale, regular.svh

    core = unrotate(values)[:k_true, :n_true]
    suh[:k_true], svh[:n_true] = scales.refit(core, weight, metric, suh[:k_true], svh[:n_true])
    suh, svh = scales.balance(suh, svh)
    decoded = core * suh[:k_true, None].float() * svh[:n_true].float()
    error = relative_error(weight, decoded, metric)
    stored = QuantizedLinear(trellis, suh, svh, encoder.codebook, encoder.bits, error)
    return stored, decoded


def unrotate(values: torch.Tensor) -> torch.Tensor:
    """The decoded inner weight `[k, n]` with both rotations undone, before `suh` and `svh`."""
    return rotate_rows(rotate_columns(values.float()))


def relative_error(
    weight: torch.Tensor, decoded: torch.Tensor, metric: torch.Tensor | None
) -> float:
    """`tr(E^T H E) / tr(W^T H W)`; `metric` None is the identity."""

    def energy(matrix: torch.Tensor) -> float:
        weighted = matrix if metric is None else metric.float() @ matrix
        return float((matrix * weighted).sum(dtype=torch.float64))

    whole = energy(weight)
    return energy(weight - decoded) / whole if whole > 0 else 0.0


def _rotated_metric(metric: torch.Tensor | None, k_true: int, suh: torch.Tensor) -> torch.Tensor:
    """The Hessian as the rotated, scaled weight sees it: `P diag(suh) H diag(suh) P`, float64.

    The error of `W` is `diag(suh) P E P diag(svh)`, so this with the whole of `suh`, not only its
    signs, is the exact metric on the input side. Padding carries no activations: only the damping
    remains there, and the rounding uses that freedom. Returns `[1, k, k]`, or the diagonal blocks
    `[k/128, 128, 128]` when `metric` is None (identity).
    """
    k = len(suh)
    scale = suh.double()
    scale = scale / scale.square().mean().sqrt()
    if metric is None:
        weight = torch.full((k,), DAMPING, dtype=torch.float64)
        weight[:k_true] += 1.0
        blocks = torch.diag_embed((weight * scale.square()).reshape(-1, BLOCK))
        return rotate_columns(rotate_columns(blocks).transpose(1, 2))
    padding = metric.diagonal().mean() * DAMPING / (1.0 + DAMPING)
    full = torch.eye(k, dtype=torch.float64) * padding
    full[:k_true, :k_true] = metric
    full = full * scale[:, None] * scale
    full = rotate_columns(rotate_rows(full))
    return (0.5 * (full + full.T))[None]
