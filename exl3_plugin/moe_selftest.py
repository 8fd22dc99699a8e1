"""The boot self-test for routed experts: some experts of a layer, held against float64.

The first and the last expert of this rank are decoded as they were loaded. Once their words are in
kernel order, random rows are sent to them alone and mixed, at row counts that take every tile, and
the results compared over all columns. Units and limits are those of `selftest`; the truth shares
nothing with the kernels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from exl3_plugin.experts import Activation, Stored
from exl3_plugin.selftest import TYPICAL, WORST, Result, SelfTestError, decode, transform

ROWS = (1, 20, 150)
"""Rows sent: few, some and many for one expert."""

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes x, weights and ids, which are places on this rank, and returns the routed sum."""


@dataclass(frozen=True)
class Prepared:
    """Experts decoded before their words were reordered; `experts` by place."""

    prefix: str
    experts: dict[int, tuple[Stored, ...]]
    weights: dict[int, list[torch.Tensor]]
    inner: slice
    hidden: int
    started: float


def prepare(
    prefix: str, experts: dict[int, tuple[Stored, ...]], inner: slice, hidden: int
) -> Prepared:
    """Decode gate, up and down of some experts.

    Args:
        prefix: vLLM's name of the layer, for errors.
        experts: place on this rank to the three matrices, words as stored.
        inner: columns between the products that this rank uses, of those it holds.
        hidden: inputs and outputs of the layer.
    """
    started = time.perf_counter()
    weights = {
        place: [decode(matrix.trellis, matrix.codebook) for matrix in three]
        for place, three in experts.items()
    }
    return Prepared(prefix, experts, weights, inner, hidden, started)


def run(test: Prepared, multiply: Multiply, activation: Activation, dtype: torch.dtype) -> Result:
    """Send rows to the experts, now in kernel order, and compare.

    Raises:
        SelfTestError: names the layer, the rows and the error.
    """
    places = list(test.experts)
    device = test.weights[places[0]][0].device
    random = torch.Generator(device=device).manual_seed(0)
    gate = test.experts[places[0]][0]
    # Activations of a size at which neither fp16 images nor fp16 results leave their range.
    used = gate.suh[: test.hidden].float()
    size = 1 / max(float(used.square().mean().sqrt()), 2.0**-10)
    worst = typical = 0.0
    for rows in ROWS:
        x = torch.randn(rows, test.hidden, generator=random, dtype=torch.float32, device=device)
        x = (size * x).to(dtype)
        ids = torch.tensor(places, dtype=torch.int32, device=device)
        ids = ids[torch.arange(rows, device=device) % len(places)][:, None]
        with torch.inference_mode():
            # Models are loaded with another default dtype.
            ones = torch.ones(rows, 1, dtype=torch.float32, device=device)
            got = multiply(x, ones, ids).double()
        error = torch.zeros_like(got)
        for place in places:
            mine = ids[:, 0] == place
            truth, unit = _expected(test, place, x[mine].double(), activation)
            off = (got[mine] - truth).abs() / unit.clamp(min=1e-30)
            step = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
            off = torch.where((got[mine] - truth).abs() <= step, 0, off)
            error[mine] = torch.nan_to_num(off, nan=math.inf, posinf=math.inf)
        found = float(error.max()), float(error.square().mean().sqrt())
        if not (found[0] <= WORST and found[1] <= TYPICAL):
            raise SelfTestError(
                f"EXL3 self-test: {test.prefix} is wrong with {rows} rows for experts at places "
                f"{', '.join(map(str, places))} of this rank: results are off by up to "
                f"{found[0]:.3g} times their usual size, {found[1]:.3g} in the mean; rounding "
                f"accounts for {WORST:g} and {TYPICAL:g}. What would be served is not what the "
                "checkpoint holds: please report this with the line above and the version of "
                "exl3-fleet. EXL3_SELF_TEST=0 starts without the test"
            )
        worst, typical = max(worst, found[0]), max(typical, found[1])
    seconds = time.perf_counter() - test.started
    return Result(test.prefix, len(places), worst, typical, seconds)


def _expected(
    test: Prepared, place: int, x: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact outputs of one expert for rows x float64, and the unit of their errors."""
    gate, up, down = test.experts[place]
    first, second, third = test.weights[place]
    wide = x.new_zeros(x.shape[0], gate.suh.shape[0])
    wide[:, : test.hidden] = x

    def product(rows: torch.Tensor, matrix: Stored, weight: torch.Tensor) -> torch.Tensor:
        return transform(transform(rows * matrix.suh.double()) @ weight)

    g = product(wide, gate, first) * gate.svh.double()
    u = product(wide, up, second) * up.svh.double()
    h = torch.zeros_like(g)
    h[:, test.inner] = _activate(activation, g[:, test.inner], u[:, test.inner])
    raw = product(h, down, third)
    svh = down.svh.double()
    unit = raw.square().mean(1, keepdim=True).sqrt() * svh.abs()
    return (raw * svh)[:, : test.hidden], unit[:, : test.hidden]


def _activate(a: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit) + a.beta
    if a.name == "swiglu":
        return gate * torch.sigmoid(a.alpha * gate) * up
    tanh = "tanh" if a.name == "gelu_tanh" else "none"
    return torch.nn.functional.gelu(gate, approximate=tanh) * up
