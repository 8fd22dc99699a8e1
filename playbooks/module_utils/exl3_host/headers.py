"""Weights per rank before anything is loaded: what safetensors headers say about each tensor.

A tensor belongs to one class, and the class says how tensor parallelism divides it. Where an
implementation may or may not divide it (vision towers, KDA's projections) the answer is an
interval. Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import HostError

MAX_HEADER_BYTES = 100 << 20
EXL3_PARTS = ("trellis", "suh", "svh", "mcg", "mul1", "su", "sv")

# The first row that matches a tensor's name decides; rest is divided by all ranks.
_CLASSES = (
    ("vision", r"(^|\.)(visual|vision_tower|vision_model|vision_embed|audio_tower|mm_projector)\."),
    ("draft", r"(^|\.)(mtp|mtp_layers|nextn|draft)\."),
    ("expert", r"\.experts\.|\.shared_expert(s)?\."),
    ("replicated", r"norm|\.(router|gate)\.(weight|e_score_correction_bias|bias)$|\.indexer\."),
    (
        "replicated",
        r"\.(q_a_proj|kv_a_proj_with_mqa|kv_a_proj|fused_qkv_a_proj)\.|shared_expert_gate",
    ),
    ("kv", r"\.(k_proj|v_proj)\."),
    ("linear", r"\.(linear_attn|mamba|kda|gdn)\."),
)
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in _CLASSES)
CLASSES = ("sharded", "expert", "kv", "linear", "replicated", "vision", "draft")


@dataclass(frozen=True)
class Weights:
    """Bytes of a checkpoint by class of tensor (`CLASSES`)."""

    classes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.classes.values())

    def per_rank(self, config: dict, tp: int, pp: int = 1, has_draft: bool = False) -> tuple:
        """(least, most) bytes on one rank.

        Most: what may be held whole is held whole, one of `pp` stages has a twentieth more than
        its share, and layers that are no multiple of 128 per rank are padded (one in a hundred).
        """
        part = {name: self.classes.get(name, 0) for name in CLASSES}
        kv_heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or tp
        divided = part["sharded"] + part["expert"]
        least = divided / tp + part["kv"] / min(tp, kv_heads) + part["replicated"]
        most = least * (1.01 if tp > 1 else 1.0)
        is_kda = bool(config.get("linear_num_heads"))
        least += part["linear"] / tp + part["vision"] / tp
        most += (part["linear"] if is_kda else part["linear"] / tp) + part["vision"]
        least += part["draft"] / tp if has_draft else 0
        most += part["draft"]
        return least / pp, most / pp * (1.05 if pp > 1 else 1.0)


def classify(name: str) -> str:
    """The class of a tensor by its name."""
    stem, _, last = name.rpartition(".")
    plain = f"{stem}.weight" if last in EXL3_PARTS else name
    if re.search(r"embed_tokens|lm_head|word_embeddings", plain):
        return "sharded"
    for kind, pattern in _COMPILED:
        if pattern.search(plain):
            return kind
    return "sharded"


def weigh(tensors: Iterable[tuple[str, int]], draft_layer: int | None = None) -> Weights:
    """Add up (name, bytes). `draft_layer`: layers from this number on belong to a draft model."""
    found = dict.fromkeys(CLASSES, 0)
    for name, size in tensors:
        kind = classify(name)
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if draft_layer is not None and layer and int(layer[1]) >= draft_layer and kind != "vision":
            kind = "draft"
        found[kind] += size
    return Weights(found)


def weigh_folder(folder: Path, config: dict) -> Weights | None:
    """Weights of the checkpoint in a folder, None where there is no safetensors file."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    tensors = [pair for file in files for pair in read_header(file)]
    return weigh(tensors, config.get("num_hidden_layers"))


def read_header(file: Path) -> list[tuple[str, int]]:
    """(name, bytes) of each tensor of one file. Raises HostError where it has no header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, file.stat().st_size - 8):
            raise HostError(
                f"{file} has no safetensors header.",
                "It is damaged or not downloaded to the end; fetch it again.",
            )
        return parse_header(stream.read(length), str(file))


def parse_header(text: bytes, where: str) -> list[tuple[str, int]]:
    """(name, bytes) of each tensor in the JSON part of a header."""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        return [(name, e["data_offsets"][1] - e["data_offsets"][0]) for name, e in header.items()]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise HostError(
            f"{where} has a broken safetensors header.", "Fetch the file again."
        ) from None
