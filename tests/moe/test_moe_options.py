"""What the method for routed experts refuses of vLLM's settings, before memory is spent."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from exl3_plugin.experts import Activation
from exl3_plugin.loading import LoadError
from exl3_plugin.moe_options import activation_of, refuse_options

PREFIX = "model.layers.3.mlp.experts"


def layer(**change):
    parallel = SimpleNamespace(enable_eplb=change.pop("eplb", False))
    moe = SimpleNamespace(
        moe_parallel_config=parallel,
        experts_per_token=change.pop("slots", 8),
        has_bias=change.pop("bias", False),
    )
    values = {
        "moe_config": moe,
        "local_num_experts": 64,
        "ckpt_up_proj_name": "up_proj",
        "activation": SimpleNamespace(value=change.pop("activation", "silu")),
        "swiglu_limit": None,
        "swiglu_alpha": None,
        "swiglu_beta": None,
    }
    return SimpleNamespace(**values | change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"eplb": True}, "serve without --enable-eplb"),
        ({"local_num_experts": 513}, "513 experts on one rank, at most 512 are possible"),
        ({"slots": 17}, "17 experts a token, at most 16 are possible"),
        ({"ckpt_up_proj_name": None}, "experts without gates are not supported"),
        ({"bias": True}, "experts with biases are not supported"),
        ({"activation": "swigluoai"}, "activation swigluoai between gate and down"),
        ({"activation": "gelu", "swiglu_limit": 7.0}, "activation gelu cut at 7"),
    ],
)
def test_refused(change, reason):
    with pytest.raises(LoadError) as error:
        refuse_options(layer(**change), PREFIX)
    assert str(error.value).startswith(PREFIX) and reason in str(error.value)


def test_accepted():
    refuse_options(layer(), PREFIX)
    assert activation_of(layer(swiglu_limit=10.0), PREFIX) == Activation(limit=10.0)
    uninterleaved = layer(
        activation="swigluoai_uninterleave", swiglu_alpha=1.7, swiglu_beta=1.0, swiglu_limit=7.0
    )
    assert activation_of(uninterleaved, PREFIX) == Activation("swiglu", 1.7, 1.0, 7.0)
    assert activation_of(layer(activation="gelu_tanh"), PREFIX) == Activation(
        "gelu_tanh", 1.0, 0.0, math.inf
    )
