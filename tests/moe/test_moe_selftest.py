"""The boot self-test of routed experts, on the CPU: right weights pass, a changed one does not."""

from __future__ import annotations

import pytest
import torch

from exl3_plugin import experts, moe_selftest
from exl3_plugin.experts import Activation, Kind
from exl3_plugin.selftest import SelfTestError
from tests.moe import moe_cases as cases

KINDS = (Kind("mcg", 64), Kind("mul1", 40), Kind("3inst", 48))
CUT, HIDDEN = (30, 150), 250


def prepared(activation=Activation("swiglu", 1.0, 0.0, 4.0)):  # noqa: B008
    stored = cases.layer(1, 4, 256, 256, 256, lambda e, p: KINDS[(e + p) % 3])
    packed = experts.pack(stored, "cpu", CUT, HIDDEN)
    tested = {place: stored[place] for place in (0, 3)}
    test = moe_selftest.prepare("layer", tested, slice(CUT[0], sum(CUT)), HIDDEN)

    def multiply(x, weights, ids):
        return packed.run(x, weights, ids, activation=activation)

    return packed, test, multiply, activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "activation", [Activation(limit=4.0), Activation("gelu"), Activation("gelu_tanh")], ids=str
)
def test_right_experts_pass(dtype, activation):
    _, test, multiply, _ = prepared(activation)
    torch.set_default_dtype(dtype)  # as vLLM does while a model is loaded
    try:
        result = moe_selftest.run(test, multiply, activation, dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    assert result.blocks == 2 and 0 < result.typical < 0.002
    if dtype == torch.float32:
        assert result.worst < 1e-4


@pytest.mark.parametrize("what", ["w13_trellis", "w2_trellis", "w13_suh", "w2_svh"])
def test_a_changed_word_is_found(what):
    packed, test, multiply, activation = prepared()
    values = getattr(packed, what)
    if values.dtype == torch.int16:
        values[5] ^= 1 << 9
    else:
        values.view(-1)[5] *= 2
    with pytest.raises(SelfTestError, match=r"layer is wrong with .* rows for experts at places 0"):
        moe_selftest.run(test, multiply, activation, torch.bfloat16)


def test_an_expert_in_anothers_place_is_found():
    packed, test, multiply, activation = prepared()
    packed.table[:, [0, 3]] = packed.table[:, [3, 0]]
    with pytest.raises(SelfTestError):
        moe_selftest.run(test, multiply, activation, torch.bfloat16)
