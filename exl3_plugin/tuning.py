"""Calibration profiles: what `bench/calibrate.py` measured on a device, read, matched and applied.

The kernels choose by built-in tables (`ops.plan`). A profile overrides them for the layers it was
measured on. It is keyed by everything its figures depend on, and a profile whose key is not this
process's key is refused: a plan from another device, driver or build is a guess with a date.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import exl3_plugin
from exl3_plugin import devices, env, ops
from exl3_plugin.experts import MAX_SLOTS, ExpertPlan

VERSION = 2
TILE_ROWS = (8, 16, 32, 64, 128)
FAST_TILE_ROWS = (8,)
ANY_FAMILY, HALVES_FAMILY, MUL1_FAMILY = -1, 0, 1
"""Codebook families of a plan: any, the two that add halves (3inst, mcg), mul1."""
TABLE_FIELDS = ("k", "n", "half_bits", "family", "m_upto", "kernel", "rows", "form", "blocks")
"""Order of a row of `exl3::set_plan_table`."""
WARPGROUP_ROWS = 256
"""What stands for the route of experts by warpgroups among the rows of tiles."""
EXPERT_TILE_ROWS = (1, 2, 4, *TILE_ROWS, WARPGROUP_ROWS)
FAST_EXPERT_TILE_ROWS = (1, 2, 4, 8, WARPGROUP_ROWS)
EXPERT_TABLE_FIELDS = (
    "k", "inner", "experts", "global_experts", "slots", "half_bits", "family", "tokens_upto",
    "rows", "form", "blocks",
)  # fmt: skip
"""Order of a row of `exl3::set_moe_table`."""


class ProfileError(ValueError):
    """A profile that is missing, malformed, or not of this device; the message says what to do."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Key(_Strict):
    """What the figures of a profile depend on. None: this device or driver does not tell."""

    device_name: str
    compute_capability: str
    sms: int
    power_limit_w: int | None
    driver_major: int | None
    cuda_runtime: str | None
    plugin_version: str
    source_hash: str
    """Of the sources that the CUDA library was built from."""


class Override(_Strict):
    """One row of the plan table. In k, n and half_bits 0 means any; family -1 means any."""

    k: int = Field(0, ge=0)
    n: int = Field(0, ge=0)
    half_bits: int = Field(0, ge=0, le=16)
    """Twice the bits per weight."""
    family: int = Field(ANY_FAMILY, ge=ANY_FAMILY, le=MUL1_FAMILY)
    m_upto: int = Field(ge=1)
    """Most rows of x that the row is for; the first row that fits wins."""
    kernel: int = Field(ge=ops.GEMM, le=ops.STREAM)
    rows: int = 0
    form: int = Field(ops.EXACT, ge=ops.EXACT, le=ops.FAST)
    blocks: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _is_a_plan(self) -> Override:
        if self.kernel == ops.GEMM and self.rows not in TILE_ROWS:
            raise ValueError(f"rows {self.rows} is no tile; there are {TILE_ROWS}")
        if self.kernel == ops.STREAM and (self.rows, self.m_upto) != (1, 1):
            raise ValueError(
                f"the kernel for one row has rows 1, m_upto 1, not {self.rows}, {self.m_upto}"
            )
        gemm_is_fast = self.kernel == ops.GEMM and self.rows in FAST_TILE_ROWS
        if self.form == ops.FAST and not (gemm_is_fast or self.kernel == ops.STREAM):
            raise ValueError(
                f"a fast form exists only with tiles of {FAST_TILE_ROWS} rows or for one row"
            )
        return self

    @property
    def plan(self) -> ops.Plan:
        """The plan it asks for."""
        return ops.Plan(self.kernel, self.rows, self.form, self.blocks)

    def fits(self, m: int, k: int, n: int, half_bits: int, family: int) -> bool:
        """Whether it is for this problem, by the rules of the kernels' own table."""
        return (
            m <= self.m_upto
            and self.k in (0, k)
            and self.n in (0, n)
            and self.half_bits in (0, half_bits)
            and self.family in (ANY_FAMILY, family)
        )

    def numbers(self) -> list[int]:
        """In the order of `TABLE_FIELDS`."""
        return [getattr(self, name) for name in TABLE_FIELDS]


class Measurement(_Strict):
    """One reading behind a choice."""

    k: int
    n: int
    half_bits: int
    family: int
    m: int
    plan: tuple[int, int, int, int]
    us: float
    spread: float
    default: bool
    """The built-in choice."""
    chosen: bool


class ExpertOverride(_Strict):
    """One row of the table for routed experts. 0 means any; family -1 means any."""

    k: int = Field(0, ge=0)
    """Stored inputs of gate and up."""
    inner: int = Field(0, ge=0)
    """Stored columns between the products, as the device holds them."""
    experts: int = Field(0, ge=0)
    """On the device."""
    global_experts: int = Field(0, ge=0)
    """Of the model."""
    slots: int = Field(0, ge=0, le=MAX_SLOTS)
    """Experts of a token."""
    half_bits: int = Field(0, ge=0, le=16)
    family: int = Field(ANY_FAMILY, ge=ANY_FAMILY, le=MUL1_FAMILY)
    tokens_upto: int = Field(ge=1)
    """Most tokens that the row is for; the first row that matches and can serve wins."""
    rows: int
    form: int = Field(ops.EXACT, ge=ops.EXACT, le=ops.FAST)
    blocks: int = Field(0, ge=0, lt=1 << 16)

    @model_validator(mode="after")
    def _is_a_plan(self) -> ExpertOverride:
        if self.rows not in EXPERT_TILE_ROWS:
            raise ValueError(f"rows {self.rows} is no tile; there are {EXPERT_TILE_ROWS}")
        if self.form == ops.FAST and self.rows not in FAST_EXPERT_TILE_ROWS:
            raise ValueError(f"a fast form exists only with tiles of {FAST_EXPERT_TILE_ROWS} rows")
        return self

    @property
    def plan(self) -> ExpertPlan:
        """The plan it asks for."""
        return ExpertPlan(self.rows, self.form, self.blocks)

    def numbers(self) -> list[int]:
        """In the order of `EXPERT_TABLE_FIELDS`."""
        return [getattr(self, name) for name in EXPERT_TABLE_FIELDS]


class ExpertMeasurement(_Strict):
    """One reading behind a choice for routed experts."""

    k: int
    inner: int
    experts: int
    global_experts: int
    slots: int
    half_bits: int
    family: int
    tokens: int
    plan: tuple[int, int, int]
    us: float
    spread: float
    default: bool
    """The built-in choice."""
    chosen: bool


class Profile(_Strict):
    """A profile file."""

    version: Literal[2] = VERSION
    key: Key
    created: str
    """UTC, ISO 8601."""
    read_gb_s: float
    """The read ruler while it was measured."""
    seconds: float
    overrides: list[Override]
    experts: list[ExpertOverride] = []
    measurements: list[Measurement]
    expert_measurements: list[ExpertMeasurement] = []

    def table(self) -> list[int]:
        """The argument of `exl3::set_plan_table`."""
        return [number for override in self.overrides for number in override.numbers()]

    def expert_table(self) -> list[int]:
        """The argument of `exl3::set_moe_table`."""
        return [number for override in self.experts for number in override.numbers()]

    def find(self, m: int, k: int, n: int, half_bits: int, family: int) -> ops.Plan | None:
        """The plan the profile gives a problem; None leaves it to the built-in tables."""
        problem = (m, k, n, half_bits, family)
        return next((row.plan for row in self.overrides if row.fits(*problem)), None)

    def write(self, path: Path) -> None:
        """Writes the file at once or not at all, one line for each override and measurement."""
        data = self.model_dump()
        rows = {name: data.pop(name) for name, value in [*data.items()] if isinstance(value, list)}
        head = json.dumps(data, indent=1)[:-2]
        for name, items in rows.items():
            body = ",\n".join(f"  {json.dumps(item)}" for item in items)
            head += f',\n "{name}": [\n{body}\n ]' if items else f',\n "{name}": []'
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(head + "\n}\n")
        temporary.replace(path)


class Difference(NamedTuple):
    """One fact of a key that differs."""

    field: str
    found: Any
    """In this process."""
    expected: Any
    """In the profile."""


def load_profile(path: str | Path) -> Profile:
    """Reads a profile.

    Raises:
        ProfileError: no such file, no JSON, or not what a profile holds; names the place.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ProfileError(
            f"profile {path}: {error.strerror or error}. EXL3_PROFILE must name a file that "
            "bench/calibrate.py wrote; unset it to use the built-in tables"
        ) from error
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        wrong = {found["loc"]: found for found in error.errors()}
        if (old := wrong.get(("version",))) is not None:
            raise ProfileError(
                f"profile {path} is of version {old['input']!r}, this plugin reads version "
                f"{VERSION}: measure again with bench/calibrate.py --out {path}, or unset "
                "EXL3_PROFILE to use the built-in tables"
            ) from error
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ProfileError(
            f"profile {path}: {where}: {first['msg']} (and {error.error_count() - 1} more). It is "
            f"no profile of version {VERSION}: run bench/calibrate.py --out {path}"
        ) from error


def key_of(facts: devices.DeviceFacts, source_hash: str) -> Key:
    """The key of a device with kernels built from sources of this hash."""
    return Key(
        device_name=facts.name,
        compute_capability=facts.compute_capability,
        sms=facts.sms,
        power_limit_w=facts.power_limit_w,
        driver_major=facts.driver_major,
        cuda_runtime=facts.cuda_runtime,
        plugin_version=exl3_plugin.__version__,
        source_hash=source_hash,
    )


def current_key(index: int = 0) -> Key:
    """The key of this process's device `index` and CUDA library.

    Raises:
        LibraryError: there is no such device or library.
    """
    ops.require_cuda(index)
    built = json.loads(torch.ops.exl3.cuda_build_info())
    return key_of(devices.device_facts(index), built["source_hash"])


def match(profile: Profile, key: Key) -> list[Difference]:
    """Facts in which a profile and this process differ; empty where it may be used."""
    return [
        Difference(name, getattr(key, name), getattr(profile.key, name))
        for name in Key.model_fields
        if getattr(key, name) != getattr(profile.key, name)
    ]


def require_match(profile: Profile, key: Key, path: str | Path) -> None:
    """Refuses a profile that was measured on something else.

    Raises:
        ProfileError: what differs, found and expected, and what to do.
    """
    differences = match(profile, key)
    if not differences:
        return
    facts = "; ".join(
        f"{d.field} is {_shown(d.found)}, the profile has {_shown(d.expected)}" for d in differences
    )
    raise ProfileError(
        f"profile {path} of {profile.created} is stale: {facts}. Its plans were measured on "
        f"something else. Run bench/calibrate.py --out {path} on this device, or unset "
        "EXL3_PROFILE to use the built-in tables"
    )


def _shown(value: Any) -> str:
    text = "unknown" if value is None else str(value)
    return text if len(text) <= 40 else text[:16] + "..."


def apply(profile: Profile) -> None:
    """Hands the overrides to the kernels of this process; they replace earlier ones."""
    ops.load()
    torch.ops.exl3.set_plan_table(profile.table())
    torch.ops.exl3.set_moe_table(profile.expert_table())


def clear() -> None:
    """Goes back to the built-in tables."""
    ops.load()
    torch.ops.exl3.set_plan_table([])
    torch.ops.exl3.set_moe_table([])


def use_profile(index: int = 0, path: str | Path | None = None) -> Profile | None:
    """Applies the profile that `EXL3_PROFILE` names, once the device of the process is known.

    Args:
        index: torch's number of the device.
        path: instead of the environment's.

    Returns:
        The profile in force, None where none is named.

    Raises:
        ProfileError: it cannot be read, or belongs to something else.
        LibraryError: no device or no CUDA library.
    """
    path = env.get("EXL3_PROFILE") if path is None else path
    if path is None:
        return None
    profile = load_profile(path)
    require_match(profile, current_key(index), path)
    apply(profile)
    return profile


def merged(choices: Sequence[tuple[int, Any, bool]]) -> list[tuple[int, Any]]:
    """(number, plan) of table rows, from the choice at each measured number of rows or tokens.

    A choice at one number is taken for all numbers down to the one measured before it. Numbers
    above the last override are left to the built-in choice; those below it are written down even
    where the built-in choice won, since the first row that fits wins.

    Args:
        choices: (number, plan, whether it is the built-in plan), numbers ascending.
    """
    kept = list(choices)
    while kept and kept[-1][2]:
        kept.pop()
    rows: list[tuple[int, Any]] = []
    for number, plan, _ in kept:
        if rows and rows[-1][1] == plan:
            rows[-1] = (number, plan)
        else:
            rows.append((number, plan))
    return rows


def rows_from(
    choices: Sequence[tuple[int, ops.Plan, bool]], k: int, n: int, half_bits: int, family: int
) -> list[Override]:
    """Table rows of one layer, see `merged`.

    Args:
        choices: (m, plan, whether it is the built-in plan), m ascending.
        k: rows of the weight.
        n: columns.
        half_bits: twice the bits per weight.
        family: of the codebook.
    """
    return [
        Override(k=k, n=n, half_bits=half_bits, family=family, m_upto=m, **plan._asdict())
        for m, plan in merged(choices)
    ]


def expert_rows_from(
    choices: Sequence[tuple[int, ExpertPlan, bool]], **layer: int
) -> list[ExpertOverride]:
    """Table rows of one layer of experts, see `merged`.

    Args:
        choices: (tokens, plan, whether it is the built-in plan), tokens ascending.
        layer: k, inner, experts, global_experts, slots, half_bits, family.
    """
    return [
        ExpertOverride(**layer, tokens_upto=tokens, **plan._asdict())
        for tokens, plan in merged(choices)
    ]
