"""What a layer multiplies where a norm or a gated activation runs inside it, in float64.

`exl3::norm_linear` and `exl3::gated_linear` say where they round, so a float64 computation that
rounds in the same places has the same numbers wherever fp32 noise decides nothing. NOISE bounds
that noise, relative to the number before its first rounding, u = 2^-24:

* norm: the sum of two 16-bit numbers rounds once (u). Squares add up in many lanes, each of a few
  hundred at most; a sum of L terms is off by sqrt(L) u in the mean and L u at worst, and the root
  halves it. Then epsilon, the root (4 u at most) and a product: less than 64 u together.
* silu: g / (1 + exp(-g)), exp through 2^(g log2 e), off by |g| u, for |g| up to 40: less than 64 u.

An element so near the middle of two numbers of its dtype that this much decides between them may go
either way, by one step; products of two 16-bit numbers are exact in fp32, so what follows is known.
What these elements may do to a result is `off @ |W|`; it is added to both bounds of the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.gpu import oracle

U = 2.0**-24
NOISE = 64 * U


@dataclass
class Hidden:
    """What goes into a layer: `[m, k]` float64, and how far a result in fp32 may be off it."""

    value: torch.Tensor
    off: torch.Tensor

    def rounded(self, dtype: torch.dtype) -> Hidden:
        """The same after a rounding to `dtype`: off by a step where it may go either way."""
        if dtype == torch.float32:
            return Hidden(self.value, self.off + U * self.value.abs())
        step = oracle.step(self.value, dtype)
        to_middle = ((self.value / step) % 1 - 0.5).abs() * step
        off = torch.where(to_middle < self.off, self.off + step, 0)
        return Hidden(oracle.rounded(self.value, dtype), off)

    def times(self, factor: torch.Tensor) -> Hidden:
        """The exact product with exact numbers."""
        return Hidden(self.value * factor, self.off * factor.abs())


def normed(
    x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, epsilon: float
) -> Hidden:
    """What `exl3::norm_linear` hands to its layer; arguments as it takes them, `[m, k]`."""
    total = x.double() + residual.double()
    norm = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    hidden = Hidden(norm, NOISE * norm.abs()).rounded(norm_weight.dtype)
    hidden = hidden.times(norm_weight.double())
    if norm_weight.dtype == torch.float32:
        hidden.off += U * hidden.value.abs()
    return hidden.rounded(x.dtype)


def gated(x: torch.Tensor) -> Hidden:
    """What `exl3::gated_linear` hands to its layer, from gate and up side by side, `[m, 2 k]`."""
    gate, up = x.double().chunk(2, -1)
    silu = gate * torch.sigmoid(gate)
    hidden = Hidden(silu, NOISE * silu.abs()).rounded(x.dtype).times(up)
    if x.dtype == torch.float32:
        hidden.off += U * hidden.value.abs()
    return hidden.rounded(x.dtype)


def norm_inputs(
    seed: int, m: int, k: int, dtype: torch.dtype, weight_dtype: torch.dtype, device="cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual and norm_weight; every third row is small enough for epsilon to count."""
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, m, k, generator=generator, dtype=torch.float64)
    residual *= 4  # of another size, so that sums of them have more digits than either
    x[::3] *= 2.0**-8
    residual[::3] *= 2.0**-8
    weight = 1 + 0.3 * torch.randn(k, generator=generator, dtype=torch.float64)
    return x.to(device, dtype), residual.to(device, dtype), weight.to(device, weight_dtype)


def gated_inputs(seed: int, m: int, k: int, dtype: torch.dtype, device="cpu") -> torch.Tensor:
    """Gate and up `[m, 2 k]`; gates reach from where silu is nearly zero to where it is linear."""
    x = torch.randn(m, 2 * k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[:, :k] *= 3
    return x.to(device, dtype)
