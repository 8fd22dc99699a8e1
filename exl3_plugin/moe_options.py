"""What vLLM may ask of routed experts, in the terms of the op, and what it does not compute."""

from __future__ import annotations

import math

import torch

from exl3_plugin.experts import MAX_EXPERTS, MAX_SLOTS, Activation
from exl3_plugin.loading import LoadError


def refuse_options(layer: torch.nn.Module, prefix: str) -> None:
    """Refuse what the op does not compute, before memory is spent.

    Raises:
        LoadError: names the layer, what was asked and what to do.
    """
    moe = layer.moe_config
    if moe.moe_parallel_config.enable_eplb:
        raise LoadError(
            f"{prefix}: expert load balancing moves experts between ranks while serving, which "
            "EXL3 experts cannot; serve without --enable-eplb"
        )
    if layer.local_num_experts > MAX_EXPERTS:
        raise LoadError(
            f"{prefix}: {layer.local_num_experts} experts on one rank, at most {MAX_EXPERTS} are "
            "possible; spread them with --enable-expert-parallel"
        )
    if moe.experts_per_token > MAX_SLOTS:
        raise LoadError(
            f"{prefix}: {moe.experts_per_token} experts a token, at most {MAX_SLOTS} are possible"
        )
    if layer.ckpt_up_proj_name is None or getattr(moe, "has_bias", False):
        raise LoadError(
            f"{prefix}: experts {'with biases' if layer.ckpt_up_proj_name else 'without gates'} "
            "are not supported"
        )
    activation_of(layer, prefix)


def activation_of(layer: torch.nn.Module, prefix: str) -> Activation:
    """vLLM's activation in the op's terms.

    Raises:
        LoadError: the op has no such activation.
    """
    limit = math.inf if layer.swiglu_limit is None else float(layer.swiglu_limit)
    name = layer.activation.value
    if name == "silu":
        return Activation("swiglu", 1.0, 0.0, limit)
    if name == "swigluoai_uninterleave":
        alpha = 1.0 if layer.swiglu_alpha is None else layer.swiglu_alpha
        beta = 0.0 if layer.swiglu_beta is None else layer.swiglu_beta
        return Activation("swiglu", alpha, beta, limit)
    if name in ("gelu", "gelu_tanh") and limit == math.inf:
        return Activation(name)
    raise LoadError(
        f"{prefix}: activation {name}{'' if limit == math.inf else f' cut at {limit:g}'} between "
        "gate and down is not supported; there are silu, gelu and gelu_tanh"
    )
