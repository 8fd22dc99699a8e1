"""Rules for single values of a recipe: what may stand there, and what to write instead.

Each rule takes a value and returns it, or raises a pydantic error whose context holds a `message`
and a `fix` for the person who wrote the recipe.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import PydanticCustomError

from .redact import looks_secret

# Settings that a recipe may not hand to vLLM, and where they come from instead.
DENIED_ARGS = {
    "api-key": "Set secrets.api_key; the key itself stays on the host",
    "config": "Write the settings as keys of serve.args",
    "data-parallel-size": "It is set by profiles.<id>.parallel.dp",
    "disable-custom-all-reduce": "It is decided from profiles.<id>.comm.custom_all_reduce",
    "enable-expert-parallel": "It is set by profiles.<id>.parallel.expert",
    "gpu-memory-utilization": "It is set by profiles.<id>.memory.utilization",
    "hf-token": "Set secrets.hf_token; the token itself stays on the host",
    "host": "The instance decides where it listens",
    "kv-cache-dtype": "It is set by profiles.<id>.memory.kv_cache_dtype",
    "kv-cache-memory-bytes": "It is set by profiles.<id>.memory.kv_cache_gib",
    "master-addr": "It is decided by the plan",
    "master-port": "It is decided by the plan",
    "max-model-len": "It is set by profiles.<id>.memory.max_model_len",
    "model": "It is set by model",
    "model-tag": "It is set by model",
    "nnodes": "It is set by profiles.<id>.match.nodes",
    "node-rank": "It is decided by the plan",
    "numa-bind": "It is decided from profiles.<id>.pinning",
    "numa-bind-cpus": "It is decided from profiles.<id>.pinning",
    "numa-bind-nodes": "It is decided from profiles.<id>.pinning",
    "pipeline-parallel-size": "It is set by profiles.<id>.parallel.pp",
    "port": "The instance decides where it listens",
    "quantization": "The checkpoint says it",
    "revision": "It is set by model.revision",
    "served-model-name": "It is set by model.served_name",
    "tensor-parallel-size": "It is set by profiles.<id>.parallel.tp",
    "trust-remote-code": "It is set by model.trust_remote_code",
    "uds": "The instance decides where it listens",
}

# Families of settings that belong to the plan as a whole.
DENIED_BEGINNINGS = ("data-parallel-", "decode-context-parallel", "prefill-context-parallel")

DENIED_ENV = {
    "CPU_VISIBLE_MEMORY_NODES": "It is decided from profiles.<id>.pinning",
    "CUDA_VISIBLE_DEVICES": "GPUs are chosen by the plan",
    "LD_LIBRARY_PATH": "A recipe may not choose libraries",
    "LD_PRELOAD": "A recipe may not choose libraries",
    "NCCL_P2P_DISABLE": "It is decided from profiles.<id>.comm.peer_access",
    "NVIDIA_VISIBLE_DEVICES": "GPUs are chosen by the plan",
    "PATH": "A recipe may not choose programs",
    "PYTHONHOME": "A recipe may not choose programs",
    "PYTHONPATH": "A recipe may not choose programs",
    "VLLM_CPU_KVCACHE_SPACE": "It is set by profiles.<id>.memory.kv_cache_gib",
    "VLLM_CPU_OMP_THREADS_BIND": "It is decided from profiles.<id>.pinning",
}
_SECRET_ENV = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_KEY)(_|$)|_KEY$")
ENV_NAME = r"^[A-Z][A-Z0-9_]*$"
ARG_NAME = r"^[a-z][a-z0-9-]*$"


def refuse(message: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError("recipe", "{message}", {"message": message, "fix": fix})


def arg_name(name: str) -> str:
    plain = name.lstrip("-").replace("_", "-").lower()
    bare = plain.removeprefix("no-")
    # From 0.33 on --disable-x is the inverse of every --enable-x, and the other way round.
    spellings = [bare, re.sub("^disable-", "enable-", bare), re.sub("^enable-", "disable-", bare)]
    for spelling in spellings if bare else []:
        # vLLM's parser accepts an unambiguous beginning of a flag for the whole flag.
        for denied, instead in DENIED_ARGS.items():
            if denied == spelling or (len(spelling) > 2 and denied.startswith(spelling)):
                raise refuse(f"'{name}' may not be set here.", f"{instead}.")
    if bare.startswith(DENIED_BEGINNINGS):
        raise refuse(f"'{name}' may not be set here.", "It is decided by the plan.")
    if not re.fullmatch(ARG_NAME, name):
        raise refuse(f"'{name}' is no vLLM argument name.", f"Write '{plain}'.")
    return name


def arg_value(value: Any) -> Any:
    if isinstance(value, str):
        if looks_secret(value):
            raise refuse("This looks like a token or key.", "Secrets do not belong in a recipe.")
        return value
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, list):
        if not all(isinstance(v, (str, bool, int, float)) for v in value):
            raise refuse("A list of plain values is expected.", "Write nested data as a map.")
        return [arg_value(v) for v in value]
    if isinstance(value, dict):
        _json_value(value)
        return value
    raise refuse("No value is given.", "Write a value, or true for a flag without one.")


def _json_value(value: Any) -> None:
    """Walk a map that will become JSON for vLLM, looking for secrets."""
    if isinstance(value, dict):
        for inner in value.values():
            _json_value(inner)
    elif isinstance(value, list):
        for inner in value:
            _json_value(inner)
    elif isinstance(value, str):
        arg_value(value)


def env_name(name: str) -> str:
    if name in DENIED_ENV:
        raise refuse(f"'{name}' may not be set here.", f"{DENIED_ENV[name]}.")
    if _SECRET_ENV.search(name):
        raise refuse(
            f"'{name}' may not be in a recipe.",
            "Secrets stay on the host: use secrets.hf_token or secrets.api_key.",
        )
    if not re.fullmatch(ENV_NAME, name):
        raise refuse(f"'{name}' is no environment name.", "Write capitals, digits and underscores.")
    return name


def env_value(value: str) -> str:
    if looks_secret(value):
        raise refuse("This looks like a token or key.", "Secrets do not belong in a recipe.")
    if "\0" in value or "\n" in value:
        raise refuse("An environment value is one line.", "Remove the line break.")
    return value


def commit(value: str) -> str:
    if re.fullmatch(r"[0-9a-f]{40}", value):
        return value
    if re.fullmatch(r"[0-9a-fA-F]{7,64}", value):
        raise refuse(
            f"'{value}' is {len(value)} characters.", "Pin the whole commit: 40 lower-case hex."
        )
    raise refuse(f"'{value}' is a branch or tag, which moves.", "Pin the commit: 40 hex digits.")


def sha256(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        raise refuse(
            f"'{value}' is no SHA-256.", "Expected 64 lower-case hex digits, as sha256sum prints."
        )
    return value


def image_digest(value: str) -> str:
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", value):
        raise refuse(f"'{value}' is no digest.", "Expected sha256:<64 hex>.")
    return value


def regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        where = f" at position {error.pos}" if error.pos is not None else ""
        raise refuse(
            f"'{value}' does not compile: {error.msg}{where}.",
            "It is a Python regular expression; escape special characters with \\.",
        ) from None
    return value


def inner_path(value: str) -> str:
    parts = value.split("/")
    if value.startswith("/") or ".." in parts or "" in parts:
        raise refuse(
            f"'{value}' does not stay inside the package.",
            "Write a path as in the wheel's listing.",
        )
    return value
