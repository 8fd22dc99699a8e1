"""The part of a plan that GPU hosts decide: GPUs, CPUs and nodes, peer access, memory share."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import arguments, calibration, container_plan, fit_recipe, gpupin, measure, nccl, peers
from .instance import Instance
from .matching import Decisions
from .plan_cpu import Parts, context_length
from .recipe import LoadedRecipe
from .schema import GpuProfile

VLLM = "vllm==0.33.0"
KV_DTYPES = {"bf16": "bfloat16"}


@dataclass(frozen=True)
class Known:
    """What earlier runs on this host have found out.

    peer_reports: what `bench/peer_access.py` measured here. measured: `measure.load`. model_dir,
    store: where `fit_recipe` finds headers and the figures of earlier starts.
    """

    peer_reports: tuple[dict, ...] = ()
    measured: dict | None = None
    model_dir: Path | None = None
    store: Path | None = None


def known_here(store: Path, facts: dict, model_dir: Path) -> Known:
    """`Known` of this host's disk."""
    if not facts["gpus"]:
        return Known()
    reports = []
    for path in sorted((store / "peers").glob("*.json")):
        try:
            reports.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    return Known(tuple(reports), measure.load(store / measure.KEPT, facts), model_dir, store)


def with_calibration(
    loaded: LoadedRecipe,
    facts: dict,
    instance: Instance,
    runtime: str,
    known: Known,
    log: Decisions,
) -> Instance:
    """The instance with the profile that was measured on this type of GPU with this software.

    Raises HostError where the recipe requires one and there is none.
    """
    if instance.calibration_file or known.store is None:
        return instance
    software = instance.release or "none"
    if runtime == "docker":
        software = container_plan.image_of(loaded, facts, instance)["digest"]
    rule = instance.calibration or loaded.recipe.calibration
    path = calibration.find(known.store, facts, software, rule)
    found = "none is kept for this driver and release" if path is None else "measured here"
    log.add("calibration", "built-in plans" if path is None else path.name, f"{rule}; {found}")
    return replace(instance, calibration_file=None if path is None else str(path))


def decide(
    loaded: LoadedRecipe,
    profile_id: str,
    profile: GpuProfile,
    facts: dict,
    instance: Instance,
    runtime: str,
    known: Known,
    log: Decisions,
) -> Parts:
    """The GPU part of a plan. Raises HostError for GPUs that are taken or not there."""
    here = profile.match.gpus_per_node
    max_model_len = context_length(instance, profile_id, profile, log)
    pin, verdict = _pin_and_peers(profile, facts, instance, runtime, here, known)
    shown = pin.as_dict()
    log.add("gpus", ", ".join(pin.gpus), pin.reason)
    log.add("peer_access", verdict.verdict, verdict.reason)
    container = None
    if runtime == "docker":
        container = container_plan.section(loaded, facts, instance, profile, shown, log.add)
    else:
        log.add("pinning", " ".join(pin.numactl) or "no numactl", pin.cpus_reason)
    args = arguments.merge_args(loaded.recipe.serve.args, profile.args, instance.args)
    env = arguments.merge_env(loaded.recipe.serve.env, profile.env, instance.env)
    env, args, said = nccl.apply(env, args, nccl.for_peers(verdict))
    log.entries.extend(said)
    settings = _settings(profile, max_model_len)
    settings |= pin.args
    env = {**pin.env, **env}
    if runtime == "native":
        # A container sees the GPUs it was given; a process has to be told, by number in PCI order.
        index = {gpu["uuid"]: gpu["index"] for gpu in facts["gpus"]}
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(index[uuid]) for uuid in pin.gpus)
    return Parts(
        pin=shown,
        numactl=list(pin.numactl),
        container=container,
        settings=settings,
        args=args,
        env=env,
        fit=_fit(loaded, profile_id, profile, facts, known, max_model_len, instance.freed_gib),
        vllm=VLLM,
        warnings=[*pin.warnings, *verdict.warnings],
    )


def _pin_and_peers(
    profile: GpuProfile, facts: dict, instance: Instance, runtime: str, here: int, known: Known
) -> tuple[gpupin.GpuPin, peers.Verdict]:
    """Peer access is judged for the GPUs that were chosen, and what was chosen depends on it."""

    def choose(peer_access: bool | None) -> gpupin.GpuPin:
        return gpupin.decide_gpus(
            facts,
            here,
            mode=instance.pinning_mode or profile.pinning.mode,
            smt=profile.pinning.smt,
            reserve=profile.pinning.reserve_cores_per_node,
            shm_gib=container_plan.shm_gib(profile) if runtime == "docker" else 0.0,
            manual=dict(instance.gpu_nodes) or None,
            measured=known.measured,
            wanted=list(instance.gpus) or None,
            taken=instance.taken_gpus,
            peer_access=peer_access,
            runtime=runtime,
        )

    pin = choose(None)
    verdict = _judge(profile, facts, pin, here, known)
    if verdict.verdict == "alone":
        return pin, verdict
    decided = choose(verdict.verdict == "use")
    if decided.gpus != pin.gpus:
        verdict = _judge(profile, facts, decided, here, known)
    return decided, verdict


def _judge(
    profile: GpuProfile, facts: dict, pin: gpupin.GpuPin, here: int, known: Known
) -> peers.Verdict:
    chosen = [gpu for gpu in facts["gpus"] if gpu["uuid"] in pin.gpus]
    devices = sorted(gpu["bus_id"] for gpu in chosen)
    fitting = [
        report
        for report in known.peer_reports
        if report.get("ranks") == here and peers.addresses(report) == devices
    ]
    matrix = (facts.get("topology") or {}).get("matrix")
    mesh = peers.full_mesh(matrix, [gpu["index"] for gpu in chosen]) if matrix else None
    report = fitting[-1] if fitting else None
    return peers.decide(report, here, profile.comm.peer_access, mesh, devices)


def _settings(profile: GpuProfile, max_model_len: int) -> dict[str, Any]:
    """Arguments of `vllm serve` in the order in which a person reads them."""
    parallel, memory = profile.parallel, profile.memory
    settings: dict[str, Any] = {
        "max-model-len": max_model_len,
        "tensor-parallel-size": parallel.tp,
    }
    if parallel.pp > 1:
        settings["pipeline-parallel-size"] = parallel.pp
    if parallel.dp > 1:
        settings["data-parallel-size"] = parallel.dp
    if parallel.expert:
        settings["enable-expert-parallel"] = True
    if parallel.backend != "mp":
        settings["distributed-executor-backend"] = parallel.backend
    settings["gpu-memory-utilization"] = str(memory.utilization)
    if memory.kv_cache_dtype is not None:
        settings["kv-cache-dtype"] = KV_DTYPES.get(memory.kv_cache_dtype, memory.kv_cache_dtype)
    if profile.comm.custom_all_reduce == "disable" and parallel.tp > 1:
        settings["disable-custom-all-reduce"] = True
    return settings


def _fit(
    loaded: LoadedRecipe,
    profile_id: str,
    profile: GpuProfile,
    facts: dict,
    known: Known,
    max_model_len: int,
    freed_gib: float,
) -> dict:
    key = None
    if known.model_dir is not None:
        key = fit_recipe.key_of_profile(loaded, profile_id, profile, known.model_dir, max_model_len)
    verdict = fit_recipe.verdict(
        loaded,
        profile,
        facts,
        None,
        model_dir=known.model_dir,
        store=known.store,
        max_model_len=max_model_len,
        key=key,
        freed_gib=freed_gib,
    )
    if verdict is not None:
        return verdict
    return {
        "ok": True,
        "needed_gib": 0.0,
        "available_gib": None,
        "lines": ["how much memory the GPUs have is not known: vLLM will tell"],
        "reasons": [],
        "would_fit": [],
    }
