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
    pin         {mode, cpus, mems, threads, nodes, numactl, reason}; on GPUs also gpus, ranks, and
                what `gpupin.GpuPin` tells
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
from pathlib import Path

from . import arguments, container_plan, fit, keys, plan_cpu, plan_gpu, sources
from .errors import HostError
from .instance import DEFAULT_USER, Instance
from .matching import Decisions, choose_profile
from .recipe import LoadedRecipe
from .schema import GpuProfile

__all__ = [
    "DEFAULT_USER",
    "SCHEMA",
    "Instance",
    "choose_profile",
    "config_hash",
    "make_plan",
    "plan_here",
]

SCHEMA = "exl3-plan/1"
# Without a time limit of its own, a server whose log stands still this long counts as hung.
STALL_TIMEOUT_S = 240


def make_plan(
    loaded: LoadedRecipe,
    facts: dict,
    instance: Instance,
    size: fit.ModelSize | None = None,
    calibration_sha256: str | None = None,
    known: plan_gpu.Known | None = None,
) -> dict:
    """The plan. `size` is `fit.measure` of the model's folder, where the model is there already;
    `known` is what earlier runs have found out about this host's GPUs.

    Raises HostError when nothing can be planned: no profile fits, overrides are wrong, an API key
    is asked for and no file holds one. A host with too little memory still gets a plan, whose
    `fit.ok` is false, so that the figures can be read.
    """
    recipe = loaded.recipe
    log = Decisions()
    profile_id, profile = choose_profile(loaded, facts, instance.profile, log, instance.nodes)
    runtime = log.choose(
        "runtime",
        (instance.runtime, "the instance asks for it"),
        (recipe.runtime, "the recipe asks for it"),
        (instance.default_runtime, "exl3_runtime of the inventory"),
    )
    source = sources.model_source(loaded)
    quantize = sources.quantization(loaded, calibration_sha256)
    folder = sources.model_dir(loaded, instance.store, calibration_sha256)
    size = size or fit.ModelSize()
    if size.weights_bytes is None and recipe.model.weights_bytes is not None:
        size = fit.ModelSize(recipe.model.weights_bytes, None, "the recipe's estimate")
    known = known or plan_gpu.Known()
    if isinstance(profile, GpuProfile):
        instance = plan_gpu.with_calibration(loaded, facts, instance, runtime, known, log)
        parts = plan_gpu.decide(loaded, profile_id, profile, facts, instance, runtime, known, log)
    else:
        parts = plan_cpu.decide(loaded, profile_id, profile, facts, instance, runtime, size, log)
    container = parts.container
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
            "served_name": recipe.model.served_name or recipe.name,
            "prepare": sources.preparation(source, quantize),
        },
        "venv": {"dir": instance.venv, "vllm": parts.vllm},
        "container": container,
        "serve": {
            "argv": _argv(loaded, instance, folder, parts, log),
            "env": _env(loaded, profile, instance, parts),
            "host": instance.host,
            "port": instance.port,
            "url": _url(instance),
            "api_key_file": _api_key_file(recipe.secrets.api_key, instance),
        },
        "pin": parts.pin,
        "fit": parts.fit,
        "health": {
            "ready_timeout_s": recipe.health.ready_timeout_s,
            "stall_timeout_s": recipe.health.stall_timeout_s or STALL_TIMEOUT_S,
            "smoke": {**recipe.health.smoke.model_dump(), "temperature": 0},
        },
        "start": recipe.start.model_dump(),
        "calibration": instance.calibration or recipe.calibration,
        "secrets": recipe.secrets.model_dump(),
        "decisions": log.entries,
        "warnings": [*_key_warnings(instance), *parts.warnings],
    }
    plan["config_hash"] = config_hash(plan)
    return plan


def _argv(
    loaded: LoadedRecipe, instance: Instance, folder: str, parts: plan_cpu.Parts, log: Decisions
) -> list[str]:
    """The command of the server; in a container what the image's entry point gets."""
    recipe = loaded.recipe
    settings = {
        "host": container_plan.listen_address(parts.container, instance.host),
        "port": instance.port,
        "served-model-name": recipe.model.served_name or recipe.name,
        **parts.settings,
    }
    if recipe.model.trust_remote_code:
        settings["trust-remote-code"] = True
        log.add("trust_remote_code", True, "the recipe asks for it; code of the model is run")
    program, model = f"{instance.venv}/bin/vllm", folder
    if parts.container is not None:
        program, model = "vllm", container_plan.model_inside(folder)
    # Sorted, so that moving a line in a recipe restarts nothing.
    return [
        program,
        "serve",
        model,
        *arguments.argument_list(settings),
        *arguments.argument_list(dict(sorted(parts.args.items()))),
    ]


def _env(loaded: LoadedRecipe, profile, instance: Instance, parts: plan_cpu.Parts) -> dict:
    env = {
        # The model is in the store; a server that reaches for the Hub would hang without network.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **parts.env,
    }
    if parts.container is not None:
        env |= container_plan.CACHE_ENV
    else:
        env["VLLM_CACHE_ROOT"] = f"{instance.store}/jit/vllm"
        if instance.calibration_file:
            env["EXL3_PROFILE"] = instance.calibration_file
    env |= arguments.merge_env(loaded.recipe.serve.env, profile.env, instance.env)
    return dict(sorted(env.items()))


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
    known = plan_gpu.known_here(Path(instance.store), facts, Path(folder))
    return make_plan(loaded, facts, instance, fit.measure(folder), digest, known)


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
    """The file named for the instance; where the recipe wants a key and none is named, our own."""
    if wanted and instance.api_key_file is None:
        return str(keys.default_file(instance.store, instance.name))
    return instance.api_key_file


def _key_warnings(instance: Instance) -> list[str]:
    if _loopback(instance.host) or instance.api_key_file is not None:
        return []
    return [
        f"The server listens on {instance.host} without an API key: whoever reaches port "
        f"{instance.port} can use it."
    ]
