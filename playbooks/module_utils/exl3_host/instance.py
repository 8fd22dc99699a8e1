"""What an inventory says about one server."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from .containers import DEFAULT_USER
from .errors import HostError


@dataclass(frozen=True)
class Instance:
    """What the inventory says about one server, beside its recipe.

    freed_gib: memory that comes back because a running server of this name is replaced.
    release: any text that names the installed software; a change of it changes the hash.
    runtime: what this instance asks for; default_runtime where neither it nor the recipe does.
    image: NAME@sha256:... instead of the recipe's image.
    calibration_file: the measured profile of this host's device, where one is named;
    calibration: auto, require or skip, instead of the recipe's word.
    nodes: hosts that serve this instance together. gpus: UUIDs to use; taken_gpus: those of other
    instances; gpu_nodes: memory node by UUID or PCI address, for hosts that do not tell.
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
    calibration: str | None = None
    nodes: int = 1
    gpus: tuple[str, ...] = ()
    taken_gpus: tuple[str, ...] = ()
    gpu_nodes: dict[str, int] = field(default_factory=dict)
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
        if self.calibration not in (None, "auto", "require", "skip"):
            raise HostError(
                f"Calibration '{self.calibration}' is not known.", "Use auto, require or skip."
            )
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
