"""Fit of a recipe's GPU profile: what is known is put together, best source first.

weights   an earlier start, the profile's rank_weights_gib, headers of a model that lies here, the
          lock, model.weights_bytes
tokens    an earlier start of the same configuration, one of another length, config.json, the
          profile's kv_bytes_per_token
memory    the GPUs of this host where they match, else recipes/profiles/hardware.yaml
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from . import fit_gpu, headers, kv, learned
from .arguments import argument_list
from .hardware import Hardware
from .lock import lock_beside
from .recipe import LoadedRecipe
from .schema import GpuProfile

GIB = fit_gpu.GIB


@dataclass(frozen=True)
class Memory:
    """Memory of one rank's device, and where the figure comes from."""

    total_gib: float
    available_gib: float | None
    source: str


def memory_here(profile: GpuProfile, facts: dict) -> Memory | None:
    """Memory of this host's GPUs, None where it has not enough that match."""
    match = profile.match
    fitting = [g for g in facts["gpus"] if g.get("compute_capability") == match.compute_capability]
    if len(fitting) < match.gpus_per_node:
        return None
    if match.unified_memory:
        memory = facts["memory"]
        if memory["total_bytes"] is None or memory["available_bytes"] is None:
            return None
        available = memory["available_bytes"] / GIB
        return Memory(memory["total_bytes"] / GIB, available, "this host")
    sizes = sorted((g["memory_bytes"] for g in fitting if g.get("memory_bytes")), reverse=True)
    if len(sizes) < match.gpus_per_node:
        return None
    smallest = sizes[match.gpus_per_node - 1] / GIB
    if match.vram_gib_min is not None and smallest < match.vram_gib_min:
        return None
    return Memory(smallest, None, "this host")


def memory_of_class(hardware: Hardware) -> Memory:
    """Memory that recipes/profiles/hardware.yaml states for a class."""
    available = hardware.available_gib if hardware.match.unified_memory else None
    source = f"recipes/profiles/hardware.yaml, {hardware.evidence.status}"
    return Memory(hardware.memory_gib, available, source)


def request(
    loaded: LoadedRecipe,
    profile: GpuProfile,
    memory: Memory,
    model_dir: Path | None = None,
    store: Path | None = None,
    max_model_len: int | None = None,
    key: dict | None = None,
    freed_gib: float = 0.0,
) -> fit_gpu.GpuRequest:
    """What `fit_gpu.check` is asked.

    key: see `learned.key_of`, for figures of earlier starts. freed_gib: above 0 where a running
    server of this instance is about to be replaced.
    """
    tp, pp, limits = profile.parallel.tp, profile.parallel.pp, profile.memory
    length = max_model_len or limits.max_model_len
    args = {**loaded.recipe.serve.args, **profile.args}
    has_draft = bool(args.get("speculative-config"))
    config, weights = _model_facts(loaded, model_dir)
    span, source = _weights(loaded, profile, config, weights, has_draft)
    kv_dtype = limits.kv_cache_dtype or "auto"
    batched = _whole(args.get("max-num-batched-tokens"), fit_gpu.DEFAULT_BATCHED_TOKENS)
    cost = None
    if config:
        cost = kv.cost(
            config,
            tp,
            kv_dtype,
            max_model_len=length,
            batched_tokens=batched,
            has_draft=has_draft,
        )
    if cost is None and limits.kv_bytes_per_token is not None:
        cost = fit_gpu.stated_cost(limits.kv_bytes_per_token)
    tokens, learned_from = None, ""
    if key is not None and store is not None:
        same, near = learned.exact(store, key), learned.similar(store, key)
        if same is not None:
            tokens, learned_from = same["tokens"], f"learned from the start of {same['when']}"
        if near is not None:
            cost = learned.cost_of(near) or cost
            if near.get("weights_gib"):
                span, source = (near["weights_gib"],) * 2, f"as loaded on {near['when']}"
    return fit_gpu.GpuRequest(
        tp=tp,
        pp=pp,
        utilization=limits.utilization,
        max_model_len=length,
        total_gib=memory.total_gib,
        weights=span,
        weights_source=source,
        kv_dtype=kv_dtype,
        cost=cost,
        min_kv_tokens=limits.min_kv_tokens or 0,
        overhead_gib=limits.overhead_gib,
        batched_tokens=batched,
        available_gib=_available(memory, limits.utilization, freed_gib),
        reserve_gib=limits.host_reserve_gib or 0.0,
        unified=profile.match.unified_memory,
        learned_tokens=tokens,
        learned_from=learned_from,
    )


def _available(memory: Memory, utilization: float, freed_gib: float) -> float | None:
    """MemAvailable once a running server has stopped.

    What a GPU took of unified memory is no part of a process's resident size, so the server that
    is replaced is taken to hold its share.
    """
    if memory.available_gib is None or freed_gib <= 0:
        return memory.available_gib
    returned = max(freed_gib, utilization * memory.total_gib)
    return min(memory.total_gib, memory.available_gib + returned)


def key_of_profile(
    loaded: LoadedRecipe,
    profile_id: str,
    profile: GpuProfile,
    folder: Path,
    max_model_len: int | None = None,
) -> dict:
    """What `learned.key_of` will say, from a recipe and one of its GPU profiles."""
    args = {**loaded.recipe.serve.args, **profile.args}
    draft = args.get("speculative-config")
    words = argument_list({"speculative-config": draft}) if draft else [None, None]
    kv_dtype = profile.memory.kv_cache_dtype or "auto"
    return {
        "model": folder.name,
        "profile": profile_id,
        "tp": profile.parallel.tp,
        "pp": profile.parallel.pp,
        "kv_dtype": "bfloat16" if kv_dtype == "bf16" else kv_dtype,
        "dtype": str(args.get("dtype", "auto")),
        "max_model_len": max_model_len or profile.memory.max_model_len,
        "budget": str(profile.memory.utilization),
        "draft": words[1],
    }


def verdict(
    loaded: LoadedRecipe,
    profile: GpuProfile,
    facts: dict | None,
    hardware: Hardware | None,
    **options,
) -> dict | None:
    """The verdict of `fit_gpu.check`; None where no memory figure is to be had."""
    memory = memory_here(profile, facts) if facts is not None else None
    if memory is None and hardware is not None:
        memory = memory_of_class(hardware)
    if memory is None:
        return None
    found = fit_gpu.check(request(loaded, profile, memory, **options))
    found["lines"].insert(0, f"memory of {memory.source}")
    return found


def _model_facts(loaded: LoadedRecipe, model_dir: Path | None) -> tuple[dict, object]:
    """(config, Weights or None) of a model that lies here, else of the lock."""
    if model_dir is not None and (model_dir / "config.json").is_file():
        config = kv.kept(json.loads((model_dir / "config.json").read_text(encoding="utf-8")))
        weights = headers.weigh_folder(model_dir, config)
        if weights is not None:
            return config, (weights, "safetensors headers")
    lock = lock_beside(loaded.path)
    if lock is None:
        return {}, None
    if loaded.recipe.model.quantize is not None:
        # The lock is of the source; what is made of it is smaller.
        return lock["model"]["config"], None
    return lock["model"]["config"], (headers.Weights(lock["model"]["classes"]), "the lock")


def _weights(loaded, profile: GpuProfile, config: dict, weights, has_draft: bool) -> tuple:
    """((least, most) GiB per rank or None, source)."""
    tp, pp, model = profile.parallel.tp, profile.parallel.pp, loaded.recipe.model
    if profile.memory.rank_weights_gib is not None:
        return (profile.memory.rank_weights_gib,) * 2, "stated by the profile"
    if weights is not None:
        found, source = weights
        least, most = found.per_rank(config, tp, pp, has_draft)
        return (least / GIB, most / GIB), source
    if model.weights_bytes is not None:
        return fit_gpu.spread_weights(model.weights_bytes, tp, pp), "from model.weights_bytes"
    return None, "unknown"


def _whole(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
