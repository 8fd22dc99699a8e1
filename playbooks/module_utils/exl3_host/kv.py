"""What the KV cache costs: bytes of one rank per token and per request, from a model's config.

An answer is an interval, because vLLM's allocator rounds what the formulas give: layers are put in
groups of equal size, a group's page is as large as the largest of its kinds, and a draft model
brings a group of its own. Plain attention is exact; where kinds mix, the upper end is what rounding
can cost at most. Standard library only.

Sources: vLLM 0.32's kv_cache_interface.py and kv_cache_utils.py for what each kind of layer holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# One row of DeepSeek's packed fp8 latent: 512 values, 4 scales, 64 rope values in bf16.
FP8_DS_MLA_BYTES = 656
# The sparse indexer's key: 8 bits a value and one float32 scale for 128 of them.
INDEX_SCALE_BYTES = 4
ELEMENT_BYTES = {"auto": 2, "bf16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_ds_mla": 1}
# Reported pools of GLM-5.3-Flash (11 latent layers of 45) cost up to 1.9 times the formula; a draft
# model's group, which repeats the page of every layer, is the largest part of it.
GIB = 2**30
DRAFT_FACTOR = 1.9
# A linear layer's state is kept once, twice with prefix caching in aligned blocks.
STATE_COPIES = 2

# What a lock file keeps of a config.
# fmt: off
_KEPT = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "v_head_dim", "hidden_size", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim",
    "index_kpool", "layer_types", "sliding_window", "use_sliding_window",
    "sliding_window_pattern", "full_attention_interval", "linear_num_value_heads",
    "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "linear_num_heads", "linear_head_dim", "num_experts",
    "n_routed_experts", "num_local_experts", "max_position_embeddings", "vocab_size",
    "mamba_d_state", "state_size", "ssm_cfg",
)
# fmt: on


@dataclass(frozen=True)
class KvCost:
    """Bytes per rank: `token` grows with each token of a request, `request` is there once.

    Pairs are (least, most). `kinds` names how many layers of which kind were counted.
    """

    token: tuple[float, float]
    request: tuple[float, float]
    kinds: dict[str, int]
    notes: tuple[str, ...] = ()

    def tokens(self, pool_bytes: float, max_model_len: int) -> tuple[int, int]:
        """(fewest, most) tokens that a pool of bytes per rank holds, as vLLM counts them.

        vLLM prints how many requests of max_model_len fit, times max_model_len.
        """
        if pool_bytes <= 0:
            return (0, 0)
        least, most = (t + r / max_model_len for t, r in zip(self.token, self.request, strict=True))
        return int(pool_bytes / most), int(pool_bytes / least)


def text_config(config: dict) -> dict:
    """The part of a Hugging Face config that describes the language model."""
    return config.get("text_config") or config.get("llm_config") or config


def layer_kinds(config: dict) -> list[str] | None:
    """`full`, `sliding`, `linear` or `latent` for each layer; None where that cannot be told."""
    text = text_config(config)
    count = text.get("num_hidden_layers")
    if not count or any(text.get(k) for k in ("mamba_d_state", "state_size", "ssm_cfg")):
        return None
    attention = "latent" if text.get("kv_lora_rank") else "full"
    given = text.get("layer_types")
    if given:
        names = {
            "full_attention": attention,
            "attention": attention,
            "indexed_attention": "latent",
            "sliding_attention": "sliding",
            "linear_attention": "linear",
        }
        kinds = [names.get(one) for one in given[:count]]
        return kinds if None not in kinds and len(kinds) == count else None
    if text.get("linear_num_value_heads") or text.get("linear_num_heads"):
        every = text.get("full_attention_interval") or 4
        return [attention if (i + 1) % every == 0 else "linear" for i in range(count)]
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        every = text.get("sliding_window_pattern")
        if every:
            return [attention if (i + 1) % every == 0 else "sliding" for i in range(count)]
        return ["sliding"] * count
    return [attention] * count


def cost(
    config: dict,
    tp: int = 1,
    kv_dtype: str = "auto",
    element_bytes: int | None = None,
    max_model_len: int = 4096,
    batched_tokens: int = 8192,
    has_draft: bool = False,
) -> KvCost | None:
    """The cost for one rank of `tp`; None where the architecture is not understood.

    `element_bytes` replaces the size that `kv_dtype` names (4 when served in float32).
    """
    text, kinds = text_config(config), layer_kinds(config)
    if kinds is None:
        return None
    size = element_bytes or ELEMENT_BYTES[kv_dtype]
    rows = {
        "full": _attention_bytes(text, tp, size),
        "sliding": _attention_bytes(text, tp, size),
        "latent": _latent_bytes(text, kv_dtype, size),
    }
    state = _state_bytes(text, tp)
    numbers = {kind: kinds.count(kind) for kind in ("full", "sliding", "latent", "linear")}
    numbers = {kind: number for kind, number in numbers.items() if number}
    if any(rows.get(kind) is None for kind in numbers if kind != "linear"):
        return None
    if "linear" in numbers and state is None:
        return None
    notes: list[str] = []
    growing = sum(rows[k] * n for k, n in numbers.items() if k in ("full", "latent"))
    token_low = token_high = float(growing)
    if "latent" in numbers and text.get("index_head_dim"):
        key = (text["index_head_dim"] + INDEX_SCALE_BYTES) * numbers["latent"]
        token_low += key / (text.get("index_kpool") or 1)
        token_high += key
    request_low, request_high = 0.0, 0.0
    if "sliding" in numbers:
        window = text["sliding_window"]
        row = rows["sliding"] * numbers["sliding"]
        # A chunk of prefill is written before the window moves on, in whole blocks.
        request_low += row * min(window, max_model_len)
        request_high += row * min(window + batched_tokens + 256, max_model_len)
        if not growing:
            notes.append(f"every layer sees {window:,} tokens only")
    if "linear" in numbers:
        request_low += state[0] * numbers["linear"]
        attending = sum(n for k, n in numbers.items() if k != "linear")
        padded = -(-numbers["linear"] // attending) * attending if attending else numbers["linear"]
        request_high += state[1] * padded * STATE_COPIES
    if has_draft:
        token_high *= DRAFT_FACTOR
        request_high *= DRAFT_FACTOR
        notes.append("a draft model takes a part of the cache; how much is known after a start")
    return KvCost((token_low, token_high), (request_low, request_high), numbers, tuple(notes))


def _attention_bytes(text: dict, tp: int, size: int) -> float | None:
    """Keys and values of one token in one layer on one rank."""
    heads = text.get("num_attention_heads")
    if not heads:
        return None
    width = text.get("head_dim") or (text.get("hidden_size") or 0) // heads
    kv_heads = text.get("num_key_value_heads") or heads
    # Fewer heads than ranks: vLLM gives every rank one, so they are held more than once.
    here = max(1, kv_heads // tp)
    return here * (width + (text.get("v_head_dim") or width)) * size if width else None


def _latent_bytes(text: dict, kv_dtype: str, size: int) -> float | None:
    """The latent row of one token in one layer; every rank holds all of it."""
    rank = text.get("kv_lora_rank")
    if not rank:
        return None
    rope = text.get("qk_rope_head_dim") or 0
    if kv_dtype == "fp8_ds_mla":
        return FP8_DS_MLA_BYTES
    return (rank + rope) * size


def _state_bytes(text: dict, tp: int) -> tuple[float, float] | None:
    """State of one request in one linear layer on one rank: recurrent matrix and convolution.

    The matrix is float32 in most families and may be the model's 16 bits.
    """
    taps = (text.get("linear_conv_kernel_dim") or 4) - 1
    if text.get("linear_num_value_heads"):
        heads, keys = text["linear_num_value_heads"], text.get("linear_num_key_heads") or 1
        dk, dv = text.get("linear_key_head_dim") or 128, text.get("linear_value_head_dim") or 128
        channels = 2 * keys * dk + heads * dv
    elif text.get("linear_num_heads"):
        heads, dk = text["linear_num_heads"], text.get("linear_head_dim") or 128
        dv, channels = dk, 3 * heads * dk
    else:
        return None
    matrix, conv = heads * dk * dv / tp, channels / tp * taps * 2
    return matrix * 2 + conv, matrix * 4 + conv


def kept(config: dict) -> dict[str, Any]:
    """The part of a config that `cost` and the weights per rank read, for a lock file."""
    text = text_config(config)
    linear = text.get("linear_attn_config") or {}
    found = {name: text[name] for name in _KEPT if text.get(name) is not None}
    renamed = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
    found |= {new: linear[old] for old, new in renamed.items() if old in linear}
    if config.get("architectures"):
        found["architectures"] = config["architectures"]
    return found
