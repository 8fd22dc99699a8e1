"""Float64 truth and error bounds of `exl3::moe`, for the CPU and for CUDA.

Every expert is computed densely, one matrix after the other, from weights that the decoder of
`tests/gpu/oracle.py` makes; it reads the format document literally and shares nothing with the
kernels. Alongside each value go the variance of its error and the worst it can be, with u = 2^-24:

* transform: a product and seven butterfly levels in fp32; on CUDA one rounding to fp16;
* product: k / 16 steps of an accumulator that may truncate (CUDA) or k / 4 terms a lane (CPU),
  and the joins that follow; fast forms leave out a rounding of each weight, 2^-11 relative;
* output: seven levels and the scale;
* activation: what gate and up are off by, times the slopes there, and the last places of `expf`;
* the down projection is linear: what its input is off by goes through the dense weight;
* short rows: what down gives for a slot, rounded to bfloat16;
* combine: one product and one addition a slot, one rounding to the result's type.

A result may be off by SIGMAS standard deviations, and by half of the worst case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from exl3_plugin.experts import SILU, Activation, Stored
from tests.gpu.oracle import (
    HALF,
    SIGMAS,
    U,
    codebook_values,
    hadamard,
    place,
    spread,
    states,
    step,
)

SLOPE = 1.13
"""No activation is steeper than this (GELU near 1.4); SiLU reaches 1.1."""


@dataclass
class Value:
    """Numbers, the variance of their error and its worst size; all of one shape, float64."""

    value: torch.Tensor
    variance: torch.Tensor
    worst: torch.Tensor


class Matrix:
    """One stored matrix, decoded on first use."""

    def __init__(self, stored: Stored, device: torch.device | str = "cpu"):
        self.stored = Stored(*(t.to(device) for t in stored[:3]), stored.codebook)

    @cached_property
    def inner(self) -> torch.Tensor:
        """The rotated weight, float64 `[k, n]`."""
        values = codebook_values(self.stored.codebook)[0].to(self.stored.trellis.device)
        return place(values[states(self.stored.trellis).long()])

    @cached_property
    def dense(self) -> torch.Tensor:
        """The weight in the original basis, float64 `[k, n]`."""
        left = hadamard(self.inner.T).T * self.stored.suh.double()[:, None]
        return hadamard(left) * self.stored.svh.double()

    def multiply(self, x: Value, cuda: bool, fast: bool) -> Value:
        """`x W` for x `[m, k]`, with what the kernels may be off by."""
        suh, svh, a = self.stored.suh.double(), self.stored.svh.double(), self.inner
        t = x.value * suh
        xh = hadamard(t)
        energy = spread(t**2) / 128
        image_var = (8 / 3) * U**2 * energy
        image_worst = 8 * U * spread(t.abs()) / math.sqrt(128)
        if cuda:
            half = step(xh.abs() + image_worst, torch.float16)
            image_var = image_var + half**2 / 12
            image_worst = image_worst + half / 2
        steps = x.value.shape[1] / 16 + 80 if cuda else x.value.shape[1] / 4 + 8
        per_term = 4 * U * steps + (HALF if fast else 0)
        square = a**2
        sums_var = image_var @ square + (16 * U**2 * steps + fast * HALF**2) * (xh**2 @ square)
        # Codebook values are sums of halves whose magnitudes may be four times the weight's.
        sums_worst = image_worst @ a.abs() + per_term * (xh.abs() @ (a.abs() + 4 * fast))
        z = xh @ a
        variance = (spread(sums_var) / 128 + 3 * U**2 * spread(z**2) / 128) * svh**2
        worst = (spread(sums_worst + 8 * U * z.abs()) / math.sqrt(128)) * svh.abs()
        y = hadamard(z) * svh
        variance = variance + 2 * U**2 * y**2 + x.variance @ self.dense**2
        worst = worst + 4 * U * y.abs() + x.worst @ self.dense.abs()
        return Value(y, variance, worst)


def to_bfloat16(v: Value) -> Value:
    """The same after one more rounding."""
    statistical = step(v.value.abs() + v.variance.sqrt(), torch.bfloat16) / 2
    worst = step(v.value.abs() + v.worst, torch.bfloat16) / 2
    return Value(v.value, v.variance + statistical**2 / 3, v.worst + worst)


def activate(gate: Value, up: Value, a: Activation) -> Value:
    """`a(gate) * (up + beta)` with the errors of both."""

    def function(g: torch.Tensor) -> torch.Tensor:
        if a.name == "swiglu":
            return g * torch.sigmoid(a.alpha * g)
        if a.name == "gelu":
            return 0.5 * g * (1 + torch.erf(g / math.sqrt(2)))
        cubic = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
        return 0.5 * g * (1 + torch.tanh(cubic))

    g, u = gate.value.clamp(max=a.limit), up.value.clamp(-a.limit, a.limit) + a.beta
    value = function(g) * u
    slope = (function(g + 1e-4) - function(g - 1e-4)) / 2e-4
    # 16 u: a few units in the last place of expf, erff or tanhf, the quotient, the product; the
    # tails of gelu lose what 1 - 1 loses.
    rounding = 16 * U * (value.abs() + g.abs() * u.abs())
    variance = (slope * u) ** 2 * gate.variance + function(g) ** 2 * up.variance + rounding**2
    variance = variance + gate.variance * up.variance + (u * gate.variance) ** 2
    worst = (SLOPE * u).abs() * gate.worst + function(g).abs() * up.worst
    return Value(value, variance, worst + SLOPE * gate.worst * up.worst + rounding)


@dataclass
class Expectation:
    """The sum over the slots, `[m, n]`, before it is rounded to the result's type."""

    total: Value

    def fractions(self, got: torch.Tensor) -> tuple[float, float]:
        """Largest error as a fraction of the statistical and of the worst-case bound."""
        error = (got.double() - self.total.value).abs()
        error = torch.where(got.isnan(), math.inf, error)
        if not error.numel():
            return 0.0, 0.0
        if got.dtype == torch.float32:
            last = 2 * U * self.total.value.abs() + 1e-300
        else:
            last = step(self.total.value.abs() * (1 + 2.0**-7), got.dtype) / 2 + 1e-300
        statistical = error / (SIGMAS * self.total.variance.sqrt() + last)
        return float(statistical.max()), float((error / (self.total.worst + last)).max())


class Layer:
    """The experts of a layer as matrices of the oracle.

    `inner_range` and `n_out` as in `exl3_plugin.experts.pack`.
    """

    def __init__(self, experts, device="cpu", inner_range=None, n_out=None):
        self.experts = [[Matrix(m, device) for m in three] for three in experts]
        down = experts[0][2]
        self.begin, self.size = inner_range or (0, down.suh.shape[0])
        self.n_out = down.svh.shape[0] if n_out is None else n_out
        self.k = experts[0][0].suh.shape[0]

    def expect(
        self, x, weights, ids, expert_map=None, activation=SILU, weight_on_input=False,
        cuda=False, fast=False, short=False,
    ) -> Expectation:  # fmt: skip
        """What `Experts.run` must return for the same arguments; rows of slots may be `short`."""
        m = x.shape[0]
        wide = x.new_zeros(m, self.k, dtype=torch.float64)
        wide[:, : x.shape[1]] = x.double()
        zero = wide.new_zeros(m, self.n_out)
        total = Value(zero, zero.clone(), zero.clone())
        local = ids.long()
        if expert_map is not None:
            local = torch.where(local < 0, -1, expert_map.long()[local.clamp(min=0)])
        for slot in range(ids.shape[1]):
            for expert in local[:, slot].unique().tolist():
                if expert < 0:
                    continue
                rows = (local[:, slot] == expert).nonzero()[:, 0]
                weight = weights[rows, slot].double()[:, None]
                given = wide[rows] * weight if weight_on_input else wide[rows]
                out = self._expert(expert, given, activation, cuda, fast, short)
                factor = 1.0 if weight_on_input else weight
                total.value[rows] += factor * out.value
                total.variance[rows] += factor**2 * (out.variance + U**2 * out.value**2)
                total.worst[rows] += abs(factor) * (out.worst + U * out.value.abs())
                size = total.value[rows].abs() + (factor * out.value).abs()
                total.variance[rows] += (U * size) ** 2
                total.worst[rows] += U * size
        return Expectation(total)

    def _expert(self, expert, x, activation, cuda, fast, short) -> Value:
        gate, up, down = self.experts[expert]
        # A weight times a row rounds once more.
        given = Value(x, (U * x) ** 2, U * x.abs())
        products = (matrix.multiply(given, cuda, fast) for matrix in (gate, up))
        h = activate(*products, activation)
        used = torch.zeros(h.value.shape[1], dtype=torch.float64, device=x.device)
        used[self.begin : self.begin + self.size] = 1
        h = Value(h.value * used, h.variance * used, h.worst * used)
        out = down.multiply(h, cuda, fast)
        out = to_bfloat16(out) if short else out
        return Value(*(t[:, : self.n_out] for t in (out.value, out.variance, out.worst)))
