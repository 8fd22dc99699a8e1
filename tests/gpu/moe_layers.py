"""Layers of routed experts on the device, their plans, and the oracle beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exl3_plugin import experts
from exl3_plugin.experts import SILU, Kind
from tests.moe import moe_cases, moe_oracle

MCG4 = Kind("mcg", 64)
PLANS = {
    "stream1": [1, 0, 0, 0],
    "stream1-fast": [1, 1, 0, 0],
    "stream2-fast": [2, 1, 0, 0],
    "stream4": [4, 0, 0, 0],
    "stream4-fast": [4, 1, 0, 0],
    "rows8": [8, 0, 0, 0],
    "rows8-fast": [8, 1, 0, 0],
    "rows16": [16, 0, 0, 0],
    "rows32": [32, 0, 0, 0],
    "rows64": [64, 0, 0, 0],
    "rows128": [128, 0, 0, 0],
    "rows256": [256, 0, 0, 0],
    "rows256-short": [256, 1, 0, 0],
}
"""What `exl3::moe_with` takes: rows of a tile, form, blocks and tokens at once (0: the rule). Up to
4 rows are the route for few tokens, 256 is that by warpgroups."""
DTYPES = (torch.bfloat16, torch.float16)


@dataclass
class Layer:
    """Packed experts on the device and their matrices as stored."""

    packed: experts.Experts
    oracle: moe_oracle.Layer

    def takes(self, plan, dtype=torch.bfloat16, activation=SILU) -> bool:
        """Whether a plan serves this layer: warpgroups need gate and up of each expert of one kind
        and a short activation, short rows bfloat16; the route for few tokens knows one kind of
        weights for gate and up and one for down."""
        if plan is not None and plan[0] == 256:
            fits = bool(self.packed.sizes[3]) and activation.name != "gelu"
            return fits and (plan[1] == 0 or dtype == torch.bfloat16)
        if plan is None or plan[0] >= 8:
            return True
        uses = self.packed.kinds[2::3]
        gates, downs = (sum(use >> bit & 1 for use in uses) for bit in (0, 2))
        return bool(self.packed.sizes[3]) and gates == downs == 1

    def run(self, x, weights, ids, plan=None, expert_map=None, activation=SILU, on_input=False):
        """`exl3::moe`, or `exl3::moe_with` where a plan is given."""
        p = self.packed
        arguments = (
            x, weights, ids, expert_map, p.w13_trellis, p.w13_suh, p.w13_svh, p.w2_trellis,
            p.w2_suh, p.w2_svh, p.table, p.kinds, p.sizes, *activation.arguments, on_input,
        )  # fmt: skip
        if plan is None:
            return torch.ops.exl3.moe(*arguments)
        return torch.ops.exl3.moe_with(*arguments, list(plan))

    def expect(
        self, x, weights, ids, fast=False, short=False, expert_map=None, activation=SILU,
        on_input=False,
    ):  # fmt: skip
        """What `run` must return; see `moe_bank.form_of`."""
        return self.oracle.expect(
            x, weights, ids, expert_map, activation, on_input, True, fast, short
        )


def make(seed, count, k, inner, n, kinds=MCG4, inner_range=None, n_out=None) -> Layer:
    """Random experts, as `moe_cases.layer`, on the device."""
    stored = moe_cases.layer(seed, count, k, inner, n, kinds)
    return Layer(
        experts.pack(stored, "cuda", inner_range, n_out),
        moe_oracle.Layer(stored, "cuda", inner_range, n_out),
    )


def rows(seed, m, k, dtype=torch.bfloat16) -> torch.Tensor:
    """Activations on the device."""
    return moe_cases.activations(seed, m, k, dtype).cuda()


def routed(seed, m, slots, count) -> tuple[torch.Tensor, torch.Tensor]:
    """A routing on the device."""
    weights, ids = moe_cases.routing(seed, m, slots, count)
    return weights.cuda(), ids.cuda()


class Check:
    """Collects fractions of the bounds and names what breaks one."""

    def __init__(self):
        self.largest: dict[str, tuple[float, float]] = {}
        self.broken: list[str] = []

    def add(self, group: str, case: str, fractions: tuple[float, float]) -> None:
        """One checked result."""
        before = self.largest.get(group, (0.0, 0.0))
        self.largest[group] = tuple(map(max, before, fractions))
        if not (fractions[0] <= 1 and fractions[1] <= 0.5):
            self.broken.append(f"{group} {case}: {fractions[0]:.3g}, {fractions[1]:.3g}")

    def done(self, title: str) -> None:
        """Prints the largest fractions; raises AssertionError where a bound was broken."""
        print(f"\n{title}: largest error as a fraction of the bounds (statistical, worst case)")
        for group, (statistical, worst) in self.largest.items():
            print(f"  {group:14} {statistical:.3f}  {worst:.4f}")
        assert not self.broken, f"{len(self.broken)} break a bound:\n" + "\n".join(self.broken[:20])
        assert self.largest, "nothing was checked"
