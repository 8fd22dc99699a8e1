"""Which tensors of a model become EXL3 linears, under which names, and which stay as they are.

The rules are exllamav3's own, as far as names tell: fused tensors are split, stacked experts get a
module each, the output head is always stored as its own quantised tensor, and embeddings, norms,
routers, convolutions and very small projections stay plain.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from exl3_plugin.quantize.ldlq import QuantizeError
from exl3_plugin.quantize.source import Source

_LAYER = re.compile(r"(?:^|.*\.)layers\.(\d+)\.")
_PLAIN_LEAVES = re.compile(
    r"(norm|embed|router|conv1d)|^(gate|shared_expert_gate|in_proj_a|in_proj_b|in_proj_ba|wg"
    r"|kv_b_proj|weights_proj|[fg]_[ab]_proj|b_proj|lm_head)$"
)
"""Routers, gates, convolutions, low-rank pieces of linear attention, and MLA's absorbed kv_b."""

_PLAIN_PREFIXES = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|audio_tower|audio_model|multi_modal_projector|mtp)\."
)
_SHARED_INPUT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj"),
}
_EXPERTS = re.compile(r"^(.*\.experts)\.(?:\d+\.)?(\w+)$")
_SMALLEST = 64
"""A side below this would be more than half padding: such a projection stays plain."""

_TRANSPOSED_EXPERTS = ("llama4", "llama4_text")


@dataclass(frozen=True)
class Linear:
    """One EXL3 module to be made.

    Attributes:
        name: module name in the checkpoint, without suffix.
        tensor: source tensor, stored `[n, k]` unless `transposed`.
        k, n: true sizes (inputs, outputs).
        rows: output rows of the source tensor that belong to this module, None for all.
        expert: index into the first axis of a stack of experts.
        bias: source tensor of the bias (cut by `rows` like the weight).
        group: linears of one group get the same rate.
        input: linears of one input share a Hessian and the input signs.
        layer: number of the decoder layer, -1 for the head.
    """

    name: str
    tensor: str
    k: int
    n: int
    group: str
    input: str
    layer: int
    rows: tuple[int, int] | None = None
    expert: int | None = None
    transposed: bool = False
    bias: str | None = None

    @property
    def is_head(self) -> bool:
        return self.layer < 0

    @property
    def is_attention(self) -> bool:
        return "attn" in self.name or "attention" in self.name

    @property
    def tiles(self) -> int:
        """Tiles as stored, with the padding to multiples of 128."""
        return math.ceil(self.k / 128) * math.ceil(self.n / 128) * 64


@dataclass
class Inventory:
    """All modules of a model: `linears` in the order of the network, `plain` tensors by name."""

    linears: list[Linear] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)

    @property
    def decoder(self) -> list[Linear]:
        return [linear for linear in self.linears if not linear.is_head]

    @property
    def heads(self) -> list[Linear]:
        return [linear for linear in self.linears if linear.is_head]


def take_inventory(source: Source) -> Inventory:
    """Sort the tensors of `source` into linears to quantise and tensors to keep.

    Raises:
        QuantizeError: nothing to quantise, or a form of storage that is not supported.
    """
    inventory = Inventory()
    used_bias: set[str] = set()
    for name in sorted(source.shapes, key=_natural):
        linears = _linears_of(source, name)
        if linears:
            inventory.linears += linears
            used_bias.update(linear.bias for linear in linears if linear.bias)
        else:
            inventory.plain.append(name)
    if not inventory.linears:
        raise QuantizeError(
            f"{source.path} holds no decoder linears (2-D tensors named *.layers.N.*.weight)"
        )
    head = _head(source)
    inventory.linears.append(head)
    inventory.plain = [
        name
        for name in inventory.plain
        if name not in used_bias and (name != head.tensor or name.endswith("embed_tokens.weight"))
    ]
    if head.bias:
        inventory.plain.remove(head.bias)
    return inventory


def _natural(name: str) -> list:
    """Sort key with numbers as numbers, so that layer 10 follows layer 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def _linears_of(source: Source, name: str) -> list[Linear]:
    """The EXL3 modules that come out of one source tensor (none: it stays plain)."""
    layer = _LAYER.match(name)
    if layer is None or _PLAIN_PREFIXES.search(name):
        return []
    shape = source.shapes[name]
    if len(shape) == 3 and re.search(r"\.experts\.(gate_up_proj|down_proj)(\.weight)?$", name):
        return _expert_stack(source, name, int(layer[1]))
    module, _, suffix = name.rpartition(".")
    parent, _, leaf = module.rpartition(".")
    if suffix != "weight" or len(shape) != 2 or min(shape) < _SMALLEST:
        return []
    if _PLAIN_LEAVES.search(leaf):
        return []
    bias = f"{module}.bias" if f"{module}.bias" in source.shapes else None
    parts = _fused_parts(source, leaf, shape[0])
    if not parts:
        return [_linear(module, name, shape[1], shape[0], int(layer[1]), bias=bias)]
    linears, begin = [], 0
    for part, rows in parts:
        linears.append(
            _linear(
                f"{parent}.{part}",
                name,
                shape[1],
                rows,
                int(layer[1]),
                rows=(begin, begin + rows),
                bias=bias,
            )
        )
        begin += rows
    return linears


def _linear(name: str, tensor: str, k: int, n: int, layer: int, **extra) -> Linear:
    parent, _, leaf = name.rpartition(".")
    shared = f"{parent}.{_SHARED_INPUT[leaf]}" if leaf in _SHARED_INPUT else name
    group = shared
    experts = _EXPERTS.match(name)
    if experts:
        # All experts of a layer get one rate; those that see the same tokens share their signs.
        group = experts[1]
        if leaf in _SHARED_INPUT:
            shared = f"{experts[1]}.{_SHARED_INPUT[leaf]}"
    return Linear(name, tensor, k, n, group, shared, layer, **extra)


def _fused_parts(source: Source, leaf: str, rows: int) -> list[tuple[str, int]]:
    """Names and row counts of the linears inside a fused tensor, empty when it is not one."""
    config = source.text_config
    if leaf == "gate_up_proj":
        return [("gate_proj", rows // 2), ("up_proj", rows // 2)]
    if leaf != "qkv_proj":
        return []
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    parts = [("q_proj", heads * head_dim), ("k_proj", kv_heads * head_dim)]
    parts.append(("v_proj", kv_heads * head_dim))
    if sum(size for _, size in parts) != rows:
        raise QuantizeError(
            f"qkv_proj has {rows} rows, but the config's {heads} + 2 * {kv_heads} heads of "
            f"{head_dim} make {(heads + 2 * kv_heads) * head_dim}"
        )
    return parts


def _expert_stack(source: Source, name: str, layer: int) -> list[Linear]:
    """Stacked experts `[E, ...]` as one module per expert and projection."""
    base = name.removesuffix(".weight")
    experts, leaf = base.rpartition(".")[::2]
    if f"{base}_bias" in source.shapes or f"{base}_blocks" in source.shapes:
        raise QuantizeError(
            f"{name} is a stack of experts with biases or of its own packing (GPT-OSS), which is "
            "not supported"
        )
    count, first, second = source.shapes[name]
    transposed = source.text_config.get("model_type") in _TRANSPOSED_EXPERTS
    n, k = (second, first) if transposed else (first, second)
    linears = []
    for expert in range(count):
        parts = [("gate_proj", 0), ("up_proj", n // 2)] if leaf == "gate_up_proj" else [(leaf, 0)]
        size = n // len(parts)
        for part, begin in parts:
            linears.append(
                _linear(
                    f"{experts}.{expert}.{part}",
                    name,
                    k,
                    size,
                    layer,
                    rows=(begin, begin + size),
                    expert=expert,
                    transposed=transposed,
                )
            )
    return linears


def _head(source: Source) -> Linear:
    """The output head: its own tensor, else the embedding it is tied to."""
    heads = [
        name
        for name in source.shapes
        if name.endswith("lm_head.weight") and not _PLAIN_PREFIXES.search(name)
    ]
    embeddings = [
        name
        for name in source.shapes
        if name.endswith("embed_tokens.weight") and not _PLAIN_PREFIXES.search(name)
    ]
    if len(heads) > 1 or (not heads and len(embeddings) != 1):
        raise QuantizeError(
            f"{source.path}: expected one lm_head.weight or one embed_tokens.weight, found "
            f"{', '.join(heads + embeddings) or 'neither'}"
        )
    if heads:
        tensor = heads[0]
        name = tensor.removesuffix(".weight")
    else:
        tensor = embeddings[0]
        wrapped = tensor.startswith("language_model.model.")
        name = "language_model.lm_head" if wrapped else "lm_head"
    n, k = source.shapes[tensor]
    bias = f"{name}.bias" if f"{name}.bias" in source.shapes else None
    return Linear(name, tensor, k, n, group=name, input=name, layer=-1, bias=bias)
