"""Float64 truth and error bounds for the CUDA kernels, with torch on any device.

The decoder here reads the format document literally (16 ring bits make a state) and shares nothing
with `exl3_plugin.format` or the kernels; `test_oracle.py` holds it against the former.

Two bounds, with u = 2^-24 and v = 2^-11 (half a unit of fp16, relative), t = x * suh, xh = H t:

* `worst`: every rounding of full size and one sign (docs/kernels-cuda.md). Transform: seven
  butterfly levels and a scale in fp32, one rounding to fp16. Product: K/16 steps and a few joins of
  an accumulator that may truncate, c = 4. Output: seven levels, svh, bias. Fast forms add v times
  sum |xh| |A|. It is what a user is promised, and hundreds of times larger than real errors, so a
  result beyond HALF of it fails.
* `statistical`: what catches faults. Each rounding is modelled as it happens: xh is rounded to fp16
  as the kernel does it, so what is left of that step are the few elements so near the middle of two
  fp16 numbers that fp32 noise decides, each of which may go either way; fast forms are compared
  with the unrounded weights they declare. A result may be off by that and SIGMAS standard
  deviations of the other roundings.

Both stand before the conversion to the result's dtype, half a unit in the last place of the very
number, which an error may exceed them by.

The dense route rounds the weight in the original basis once to the activation dtype, and on the way
there ten times to fp16: after the part of either transform inside a tile, after its three stages
over tiles, the product of the scales, and with it. Its statistical bound models all as noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

U = 2.0**-24
HALF = 2.0**-11
SIGMAS = 10.0
UNDECIDED = 8.0
"""Standard deviations of fp32 noise within which the rounding of the image may go either way."""

BLOCK = 128
ROOT = math.sqrt(BLOCK)
JOINS = 64
"""Partial sums of one output that are joined after the loop over k: warps times blocks, at most."""

IMAGE_SCALE = 1 / ROOT
"""What the kernel multiplies the butterflies' result by before it rounds to fp16."""

DIGITS = {torch.float16: 11, torch.bfloat16: 8}
LOWEST = {torch.float16: -24, torch.bfloat16: -133}
"""Significant bits, and the exponent of the smallest step."""


# The format, from its description


def step_ends(words: int) -> list[int]:
    """Ring position just after the bits of each of the 256 steps."""
    bits, half = divmod(words, 16)
    return [bits * (i + 1) + ((i + 1) // 2 if half else 0) for i in range(256)]


def states(trellis: torch.Tensor) -> torch.Tensor:
    """States in ring order: int16 `[..., words]` to int32 `[..., 256]`."""
    words = trellis.shape[-1]
    device = trellis.device
    swapped = trellis.reshape(-1, words)[:, torch.arange(words, device=device) ^ 1].int() & 0xFFFF
    shifts = torch.arange(15, -1, -1, dtype=torch.int32, device=device)
    ring = ((swapped[:, :, None] >> shifts) & 1).to(torch.uint8).view(len(swapped), 16 * words)
    first = torch.tensor(step_ends(words), device=device) - 16
    state = torch.zeros(len(ring), 256, dtype=torch.int32, device=device)
    for b in range(16):
        state = 2 * state + ring[:, (first + b) % (16 * words)]
    return state.view(*trellis.shape[:-1], 256)


def codebook_values(codebook: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For all 65,536 states, float64: value, value before its rounding to fp16, sum of magnitudes.

    The last is what the fast forms add up for one weight: both halves of the pair, or byte sum and
    offset of mul1.
    """
    state = torch.arange(1 << 16)
    if codebook == "mul1":
        product = (state * 0x83DCD12D) & 0xFFFFFFFF
        total = sum((product >> shift) & 0xFF for shift in (0, 8, 16, 24))
        unrounded = (1774 * total - 905216).double() / 2**18
        summed = (1774 * total + 905216).double() / 2**18
    else:
        multiplier, addend = {"mcg": (0xCBAC1FED, 0), "3inst": (89226354, 64248484)}[codebook]
        product = (state * multiplier + addend) & 0xFFFFFFFF
        pair = (product & 0x8FFF8FFF) ^ 0x3B603B60
        halves = []
        for half in (pair & 0xFFFF, pair >> 16):
            exponent, mantissa = (half >> 10) & 31, half & 1023
            size = (1 + mantissa.double() / 1024) * power(exponent - 15)
            halves.append(torch.where(half >= 0x8000, -size, size))
        unrounded = halves[0] + halves[1]
        summed = halves[0].abs() + halves[1].abs()
    # The sums have few enough digits for fp32, so this rounds once.
    return unrounded.to(torch.float16).double(), unrounded, summed


def place(values: torch.Tensor) -> torch.Tensor:
    """Ring order to a matrix: `[k/16, n/16, 256]` to `[k, n]`."""
    position = torch.arange(256, device=values.device)
    lane, j = position >> 3, position & 7
    row = 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1)
    column = (lane >> 2) + 8 * (j >> 2)
    k_tiles, n_tiles, _ = values.shape
    tile = torch.empty_like(values)
    tile[..., 16 * row + column] = values
    matrix = tile.view(k_tiles, n_tiles, 16, 16).transpose(1, 2)
    return matrix.reshape(16 * k_tiles, 16 * n_tiles)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal transform of every 128-block of the last axis, float64."""
    index = torch.arange(BLOCK, device=x.device)
    both, parity = index[:, None] & index, 0
    for bit in range(7):
        parity = parity + ((both >> bit) & 1)
    signs = (1 - 2 * (parity % 2)).double()
    return (x.double().reshape(-1, BLOCK) @ signs / ROOT).view(x.shape)


def spread(x: torch.Tensor) -> torch.Tensor:
    """Sum of each 128-block of the last axis, at every place of the block."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK).sum(-1, keepdim=True)
    return blocks.expand(*blocks.shape[:-1], BLOCK).reshape(x.shape)


# Rounding


def power(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as float64, from its bits: `torch.ldexp` goes through an inexact float32 `pow`."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def step(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbours of `dtype` around |x|, float64."""
    exponent = torch.where(x == 0, LOWEST[dtype], torch.frexp(x)[1].long() - DIGITS[dtype])
    return power(exponent.clamp(min=LOWEST[dtype]))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x to the nearest number of `dtype`, ties to even, as float64; no overflow."""
    unit = step(x, dtype)
    return torch.round(x / unit) * unit


# One matrix


class Weights:
    """One decoded matrix, with what both bounds need of it.

    Args:
        trellis: int16 `[k/16, n/16, words]` as stored, on the device to compute on.
        suh: float16 `[k]`.
        svh: float16 `[n]`.
        codebook: its name.
    """

    def __init__(self, trellis, suh, svh, codebook: str):
        self.codebook = codebook
        self.suh, self.svh = suh.double(), svh.double()
        self._states = states(trellis)

    def _matrix(self, which: int) -> torch.Tensor:
        table = codebook_values(self.codebook)[which].to(self._states.device)
        return place(table[self._states.long()])

    @cached_property
    def exact(self) -> torch.Tensor:
        """The rotated weight as the format defines it, `[k, n]` float64."""
        return self._matrix(0)

    @cached_property
    def unrounded(self) -> torch.Tensor:
        """The same without the last rounding of the codebook: what the fast forms declare."""
        return self._matrix(1)

    @cached_property
    def summed(self) -> torch.Tensor:
        """Magnitude that the fast forms add up for each weight."""
        return self._matrix(2)

    @cached_property
    def half_way(self) -> torch.Tensor:
        """The exact weight after the output transform alone, `[k, n]`."""
        return hadamard(self.exact)

    @cached_property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The weight in the original basis `[k, n]`; variance and worst error before rounding."""
        half_way = hadamard(self.exact.T).T  # over the inputs first
        scale = (self.suh[:, None] * self.svh).abs()
        weight = hadamard(half_way) * self.suh[:, None] * self.svh
        # Either direction rounds four times; the noise of a stage spreads over a block, in the
        # mean with the energy of the block. The last two are of the scales and of the value itself.
        energy = spread(half_way**2) / BLOCK
        variance = (8 * HALF**2 / 3 * energy) * scale**2 + 2 * (HALF * weight) ** 2 / 3
        # A value between stages is at most the sum of the magnitudes that go into it.
        single = 4 * HALF * spread(self.exact.abs().T).T / ROOT + 4 * HALF * half_way.abs()
        worst = spread(single + 2.0**-22) / ROOT * scale + 2 * HALF * weight.abs()
        return weight, variance + (2 * U * weight) ** 2, worst + 4 * U * weight.abs()


@dataclass
class Expectation:
    """What a result must be: `[m, n]` each, float64; `statistical` and `worst` without conversion.

    `truth` is exact, `modelled` has the roundings that the statistical bound takes as given.
    """

    truth: torch.Tensor
    modelled: torch.Tensor
    statistical: torch.Tensor
    worst: torch.Tensor

    def columns(self, begin: int, end: int) -> Expectation:
        """The part for some columns."""
        return Expectation(*(t[:, begin:end] for t in vars(self).values()))

    def fractions(self, got: torch.Tensor) -> tuple[float, float]:
        """Largest error of the first rows as a fraction of both bounds; NaN counts as infinite.

        Half a unit in the last place of `got` is what the conversion to its dtype may do to any
        result, so it is taken off first: fractions tell about the arithmetic before it.

        Args:
            got: `[rows, n]`, float16 or bfloat16, rows up to m.
        """
        if got.numel() == 0:
            return 0.0, 0.0
        result = []
        for centre, bound in ((self.modelled, self.statistical), (self.truth, self.worst)):
            centre, bound = centre[: len(got)], bound[: len(got)]
            conversion = step(centre.abs() + bound, got.dtype) / 2
            excess = ((got.double() - centre).abs() - conversion).clamp(min=0)
            fraction = excess / (bound + 1e-300)
            result.append(float(torch.nan_to_num(fraction, nan=math.inf).max()))
        return result[0], result[1]


def join(parts: list[Expectation]) -> Expectation:
    """The columns of several shards side by side."""
    return Expectation(
        *(torch.cat(list(t), dim=1) for t in zip(*(vars(p).values() for p in parts)))
    )


def gemm(x: torch.Tensor, weights: Weights, fast: bool, bias=None) -> Expectation:
    """Expectation of the kernels that multiply straight from the trellis.

    Args:
        x: `[m, k]` float64, zero where the layer has no input.
        weights: the matrix.
        fast: the form without the weights' last rounding.
        bias: `[n]` or None.
    """
    k = x.shape[1]
    exact = weights.exact
    used, summed = (weights.unrounded, weights.summed) if fast else (exact, exact.abs())
    scale = weights.svh.abs() / ROOT
    t = x * weights.suh
    xh = hadamard(t)
    ratio = IMAGE_SCALE * ROOT
    image = rounded(xh * ratio, torch.float16) / ratio
    unit = step(xh * ratio, torch.float16) / ratio

    # Where xh lies this near the middle of two fp16 numbers, fp32 noise decides between them.
    noise = U * torch.sqrt((7 / 3) * spread(t**2) / BLOCK + xh**2)
    near = (((xh / unit) % 1 - 0.5).abs() * unit < UNDECIDED * noise) * unit
    undecided = near @ weights.half_way.abs() * weights.svh.abs()
    energy = image**2 @ summed**2
    z = image @ used
    # A truncating accumulator drifts with its own size, which grows like the root of the energy.
    size = energy.sqrt()
    steps = k / (8 if fast else 16) + 16
    common = torch.zeros_like(size)
    if fast and weights.codebook == "mul1":
        # What byte sums have too much is the same in all channels: it drifts alike in all of them,
        # and the transform gathers it in the first channel of a block, where it is taken off.
        excess = 905216 / 2**18 * image.cumsum(1).abs().amax(1, keepdim=True)
        size = size + excess
        common[:, ::BLOCK] = 2 * U * (steps + 16) * excess * ROOT
    drifted = 4 * torch.sqrt(spread((2 * U * steps * size) ** 2)) * scale
    drifted = drifted + common * weights.svh.abs()
    variance = spread(4 * U**2 * energy + (7 / 3) * U**2 * z**2) * scale**2
    y = hadamard(z) * weights.svh
    magnitude = y.abs() if bias is None else y.abs() + bias.double().abs()
    statistical = SIGMAS * variance.sqrt() + drifted + undecided + 4 * U * magnitude

    truth_z = xh @ exact
    size = HALF * xh.abs() + 2.0**-25 / ratio + U * (7 * spread(t.abs()) / ROOT + 2 * xh.abs())
    error = size @ exact.abs() + 4 * U * (k / 16 + JOINS + 2) * (xh.abs() @ summed)
    if fast:
        error = error + HALF * (xh.abs() @ exact.abs())
    truth = hadamard(truth_z) * weights.svh
    worst = spread(error + 7 * U * truth_z.abs()) * scale + 4 * U * magnitude
    if bias is not None:
        truth, y = truth + bias.double(), y + bias.double()
    return Expectation(truth, y, statistical, worst)


def dense(
    x: torch.Tensor, weights: Weights, dtype: torch.dtype, k_begin: int, bias=None
) -> Expectation:
    """Expectation of the route through a rebuilt weight.

    Args:
        x: `[m, k_in]` float64.
        weights: the matrix.
        dtype: of the activations and of the rebuilt weight.
        k_begin: first row of the weight that x covers.
        bias: `[n]` or None.
    """
    covered = slice(k_begin, k_begin + x.shape[1])
    weight, variance, error = (t[covered] for t in weights.dense)
    variance = variance + step(weight, dtype) ** 2 / 12
    error = error + step(weight.abs() + error, dtype) / 2
    truth = x @ weight
    steps = x.shape[1] / 16 + 16
    size = torch.sqrt(x**2 @ weight**2)
    # The library may join parts of a long sum in the activation dtype; a bias may be added to the
    # rounded product.
    extra = step(size, dtype) / 2
    if bias is not None:
        extra = extra + step(truth, dtype)
    statistical = SIGMAS * torch.sqrt(x**2 @ variance) + 8 * U * steps * size + extra
    worst = x.abs() @ error + 4 * U * (steps + JOINS) * (x.abs() @ weight.abs()) + extra
    if bias is not None:
        truth = truth + bias.double()
    return Expectation(truth, truth, statistical, worst)


def dense_weight(weights: Weights, dtype: torch.dtype) -> Expectation:
    """Expectation of the rebuilt weight itself, `[k, n]`."""
    weight, variance, worst = weights.dense
    return Expectation(weight, weight, SIGMAS * variance.sqrt(), worst)
