"""What a model's config.json says about the size of its linear layers.

EXL3 stores every dimension rounded up to 128, so the model's own sizes have to come from its
config. Only names and keys whose meaning is the same in all architectures are used: for everything
else the answer is "unknown", and what is unknown contradicts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Sizes = tuple[int, ...]
"""The sizes that a dimension may have; empty means unknown."""

# Towers and draft heads have sizes of their own, under other keys.
_FOREIGN = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|talker|mtp\w*|draft\w*|eagle\w*)\.")
_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.(.+)$")
_ATTENTION = re.compile(r"self_attn\.([qkvo]_proj)$")
_LATENT = re.compile(r"self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)$")
_MLP = re.compile(r"mlp\.(gate_proj|up_proj|down_proj)$")
_SHARED = re.compile(r"mlp\.shared_experts?\.(gate_proj|up_proj|down_proj)$")
_EXPERT = re.compile(r"\w+\.experts\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)$")

# Keys that mean that heads or widths differ between layers, or that attention is not the plain one.
_IRREGULAR_HEADS = re.compile(
    r"lora_rank|global_head|num_global|swa_|v_head_dim|qk_nope|attention_other|attention_hidden"
    r"|block_configs|heads_per_layer|double_wide|per_layer_config"
)
_IRREGULAR_WIDTHS = re.compile(r"block_configs|double_wide|per_layer_config|attention_hidden")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config: nested keys of a multimodal model win."""
    merged = dict(config)
    for key in ("llm_config", "language_config", "text_config"):
        if isinstance(config.get(key), Mapping):
            merged.update(config[key])
    return merged


def true_sizes(name: str, config: Mapping[str, Any]) -> tuple[Sizes, Sizes]:
    """Inputs k and outputs n that the config allows for the linear layer or embedding `name`.

    An embedding counts as the head it may be tied to: k is the hidden size, n the vocabulary.
    Unknown dimensions are empty tuples.
    """
    if _FOREIGN.search(name):
        return (), ()
    text = text_config(config)
    if any("draft" in key for key in text):  # a draft model reads more than one hidden state
        return (), ()
    hidden = _sizes(text.get("hidden_size"))
    leaf = name.rsplit(".", 1)[-1]
    if leaf in ("lm_head", "embed_tokens"):
        if any("embed_proj" in key for key in text):
            return (), ()
        return hidden, _sizes(text.get("vocab_size"))
    layer = _LAYER.search(name)
    if layer is None:
        return (), ()
    if match := _ATTENTION.fullmatch(layer[1]):
        return _attention_sizes(match[1], hidden, text)
    if match := _LATENT.fullmatch(layer[1]):
        return _latent_sizes(match[1], hidden, text)
    for pattern, width in (
        (_MLP, _dense_width),
        (_SHARED, _shared_width),
        (_EXPERT, _expert_width),
    ):
        if match := pattern.fullmatch(layer[1]):
            if any(_IRREGULAR_WIDTHS.search(key) for key in text):
                return (), ()
            wide = width(text)
            return (wide, hidden) if match[1] in ("down_proj", "w2") else (hidden, wide)
    return (), ()


def _attention_sizes(leaf: str, hidden: Sizes, text: Mapping[str, Any]) -> tuple[Sizes, Sizes]:
    if any(_IRREGULAR_HEADS.search(key) for key in text):
        return (), ()
    heads = text.get("num_attention_heads")
    key_value_heads = text.get("num_key_value_heads")
    key_value_heads = heads if key_value_heads is None else key_value_heads
    head_dim = text.get("head_dim")
    if head_dim is None and hidden and _sizes(heads):
        head_dim = hidden[0] // heads
    if not (_sizes(heads) and _sizes(key_value_heads) and _sizes(head_dim)):
        return (), ()
    if leaf == "o_proj":
        return (heads * head_dim,), hidden
    if leaf != "q_proj":
        return hidden, (key_value_heads * head_dim,)
    # Gated attention puts a gate beside every query; not every such config says so.
    gated = text.get("attn_output_gate")
    factors = (1, 2) if gated is None else (2,) if gated else (1,)
    return hidden, tuple(factor * heads * head_dim for factor in factors)


def _latent_sizes(leaf: str, hidden: Sizes, text: Mapping[str, Any]) -> tuple[Sizes, Sizes]:
    """Multi-head latent attention: down to a rank, and up from it to the heads."""
    keys = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    numbers = [text.get(key) for key in keys]
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        return (), ()
    heads, nope, rope, value = numbers
    query, latent = _sizes(text.get("q_lora_rank")), _sizes(text.get("kv_lora_rank"))
    if leaf == "q_a_proj":
        return hidden, query
    if leaf == "q_b_proj":
        return query, (heads * (nope + rope),)
    if leaf == "kv_a_proj_with_mqa":
        return hidden, tuple(rank + rope for rank in latent)
    return latent, (heads * (nope + value),)


def _dense_width(text: Mapping[str, Any]) -> Sizes:
    return _sizes(text.get("intermediate_size"), text.get("intermediate_size_mlp"))


def _expert_width(text: Mapping[str, Any]) -> Sizes:
    return _sizes(text.get("moe_intermediate_size", text.get("intermediate_size")))


def _shared_width(text: Mapping[str, Any]) -> Sizes:
    own = _sizes(text.get("shared_expert_intermediate_size"))
    count, width = text.get("n_shared_experts"), text.get("moe_intermediate_size")
    if not own and _sizes(count) and _sizes(width):
        own = (count * width,)
    return own


def _sizes(*values: Any) -> Sizes:
    """The values that are positive whole numbers; a list of one per layer is unknown."""
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0)


def match_size(stored: int, allowed: Sizes, block: int) -> int | None:
    """The allowed size that is `stored` once rounded up to whole blocks, None when none is."""
    return next((size for size in allowed if stored == -(-size // block) * block), None)
