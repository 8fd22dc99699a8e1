"""What has to run for a plan, where an instance keeps its files, and the fingerprint of both.

The fingerprint covers all that a running server depends on: command, settings, wheel, model files.
It decides whether anything has to be done at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from . import procs, wait

SPEC = "exl3-service/1"
LOG_MAX_BYTES = 50 * 1024 * 1024
LOG_KEEP = 5
RESTART = {"burst": 3, "interval_s": 3600, "backoff_s": 10}
DEFAULT_GRACE_S = 60
DEFAULT_READY_S = 1800
KEPT_ENV = ("HOME", "LANG", "LC_ALL", "LOGNAME", "OPENBLAS_CORETYPE", "PATH", "TMPDIR", "USER")


@dataclass(frozen=True)
class Paths:
    """Where one instance keeps its files inside the store."""

    store: Path
    instance: str

    @property
    def run(self) -> Path:
        return self.store / "run" / self.instance

    @property
    def spec(self) -> Path:
        return self.run / "spec.json"

    @property
    def state(self) -> Path:
        return self.run / "state.json"

    @property
    def ready(self) -> Path:
        return self.run / "ready.json"

    @property
    def log(self) -> Path:
        return self.store / "logs" / self.instance / "server.log"


def read_json(path: Path) -> dict | None:
    """A JSON object from a file, or None when it is absent or half written."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def write_json(path: Path, value: dict) -> None:
    """Write a JSON object so that a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    os.replace(draft, path)


def _digest_of(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileNotFoundError, PermissionError):
        return None


def make_spec(plan: dict, store: Path, manager: str) -> dict:
    """What has to run for this plan, with the fingerprint that decides whether it already does."""
    paths, serve = Paths(store, plan["instance"]), plan["serve"]
    env = {name: os.environ[name] for name in KEPT_ENV if name in os.environ}
    key_file = serve.get("api_key_file")
    health = plan.get("health") or {}
    spec = {
        "schema": SPEC,
        "instance": plan["instance"],
        "argv": [*(plan.get("pin") or {}).get("numactl", []), *serve["argv"]],
        "cwd": str(paths.run),
        "env": {**env, **serve.get("env", {})},
        "secret_env": {"VLLM_API_KEY": key_file} if key_file else {},
        "endpoint": {
            "host": serve["host"],
            "port": serve["port"],
            "served_name": plan["model"]["served_name"],
            "api_key_file": key_file,
            "smoke": health.get("smoke"),
        },
        "health": {
            "ready_timeout_s": health.get("ready_timeout_s") or DEFAULT_READY_S,
            "stall_timeout_s": health.get("stall_timeout_s"),
        },
        "start": plan.get("start") or {},
        "manager": manager,
        "grace_s": _grace_s(serve["argv"]),
        "log": str(paths.log),
        "state": str(paths.state),
        "log_max_bytes": LOG_MAX_BYTES,
        "log_keep": LOG_KEEP,
        **RESTART,
    }
    # The environment of whoever runs the playbook is no reason to restart a server.
    facts = {key: value for key, value in spec.items() if key not in ("env", "health", "start")}
    facts["env"] = serve.get("env", {})
    facts["endpoint"] = {key: value for key, value in spec["endpoint"].items() if key != "smoke"}
    facts["venv"] = (read_json(Path(plan["venv"]["dir"]) / ".exl3-stamp.json") or {}).get("id")
    facts["model"] = _digest_of(Path(plan["model"]["dir"]) / ".exl3-manifest.json")
    facts["config"] = _digest_of(Path(plan["model"]["dir"]) / "config.json")
    facts["api_key"] = _digest_of(Path(key_file)) if key_file else None
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    spec["config_hash"] = hashlib.sha256(canonical.encode()).hexdigest()
    return spec


def _grace_s(argv: list[str]) -> int:
    """Longer than the drain that the server itself was told to allow."""
    for index, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name == "--shutdown-timeout":
            value = value or (argv[index + 1] if index + 1 < len(argv) else "")
            with contextlib.suppress(ValueError):
                return max(DEFAULT_GRACE_S, int(float(value)) + 15)
    return DEFAULT_GRACE_S


def endpoint_of(spec: dict) -> wait.Endpoint:
    """The address part of a spec."""
    return wait.Endpoint(**spec["endpoint"])


def own_pids(paths: Paths) -> list[int]:
    """The processes of this instance that run now."""
    state = read_json(paths.state)
    if state is None or state["boot_id"] != procs.boot_id():
        return []
    roots = [state[name] for name in ("supervisor", "server") if procs.same_process(state[name])]
    return sorted({pid for root in roots for pid in procs.tree(root["pid"])})
