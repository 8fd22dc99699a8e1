"""What has to run for a plan, where an instance keeps its files, and the fingerprint of both.

A native server is a program of the venv. A container is one too: `docker start --attach` stays as
long as the container runs, passes signals on and ends with its exit status, so both have the same
supervisor, log, unit and bound on restarts.

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

from . import containers, procs, wait
from .engine import Engine
from .errors import HostError

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
    def pending(self) -> Path:
        """The spec that served before a replacement that is not finished yet."""
        return self.run / "pending.json"

    @property
    def releases(self) -> Path:
        """What served before, a file each."""
        return self.run / "releases"

    @property
    def secrets(self) -> Path:
        return self.run / "secrets"

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


def make_spec(plan: dict, store: Path, manager: str, docker_host: str | None = None) -> dict:
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
        "pin": plan.get("pin") or {},
        "manager": manager,
        "grace_s": _grace_s(serve["argv"]),
        "log": str(paths.log),
        "state": str(paths.state),
        "log_max_bytes": LOG_MAX_BYTES,
        "log_keep": LOG_KEEP,
        **RESTART,
    }
    # The environment of whoever runs the playbook is no reason to restart a server.
    moment = ("env", "health", "start", "pin")
    facts = {key: value for key, value in spec.items() if key not in moment}
    facts["env"] = serve.get("env", {})
    facts["endpoint"] = {key: value for key, value in spec["endpoint"].items() if key != "smoke"}
    facts["venv"] = (read_json(Path(plan["venv"]["dir"]) / ".exl3-stamp.json") or {}).get("id")
    facts["model"] = _digest_of(Path(plan["model"]["dir"]) / ".exl3-manifest.json")
    facts["config"] = _digest_of(Path(plan["model"]["dir"]) / "config.json")
    facts["api_key"] = _digest_of(Path(key_file)) if key_file else None
    if plan.get("container"):
        spec |= _container(plan, paths, spec, docker_host)
        facts |= {"argv": None, "env": None, "venv": None, "cwd": None, "secret_env": None}
        facts["container"] = spec["container"]["body"]
        facts["profile"] = _digest_of(Path(plan["container"].get("profile") or "/nowhere"))
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    spec["config_hash"] = hashlib.sha256(canonical.encode()).hexdigest()
    if plan.get("container"):
        name = containers.name_of(plan["instance"], spec["config_hash"])
        spec["container"]["name"] = name
        spec["argv"] = ["docker", "start", "--attach", name]
        spec["stop_argv"] = ["docker", "stop", "-t", str(spec["grace_s"]), name]
        spec["kill_argv"] = ["docker", "kill", name]
    return spec


def _container(plan: dict, paths: Paths, spec: dict, docker_host: str | None) -> dict:
    """The parts of a spec that only a container has; its name comes from the fingerprint."""
    engine = str(Engine(docker_host))
    folders = containers.Folders(
        cache=containers.cache_folder(
            str(paths.store), plan["container"]["image"]["digest"], plan["container"]["user"]
        ),
        secrets=str(paths.secrets),
    )
    return {
        "env": {name: spec["env"][name] for name in ("HOME", "PATH") if name in spec["env"]}
        | {"DOCKER_HOST": engine},
        "secret_env": {},
        "container": {
            "engine": engine,
            "image": plan["container"]["image"],
            "labels": {
                containers.LABEL_INSTANCE: plan["instance"],
                "exl3.recipe": plan["recipe"]["name"],
            },
            "body": containers.body(plan, folders, spec["grace_s"]),
            "api_key_file": plan["serve"].get("api_key_file"),
        },
    }


def engine_of(spec: dict) -> Engine:
    """The engine that a container's spec belongs to."""
    return Engine(spec["container"]["engine"])


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
    """The processes of this instance that run now, those inside its container too."""
    found = set(container_pids(read_json(paths.spec)))
    state = read_json(paths.state)
    if state is not None and state["boot_id"] == procs.boot_id():
        records = (state["supervisor"], state["server"])
        for root in (one for one in records if procs.same_process(one)):
            found.update(procs.tree(root["pid"]))
    return sorted(found)


def releases(paths: Paths) -> list[dict]:
    """Every release that is kept, the oldest first; see `releases.py`."""
    found = [read_json(path) for path in sorted(paths.releases.glob("*.json"))]
    return [one for one in found if one is not None]


def server_pid(paths: Paths) -> int | None:
    """The process that is the server: a container's first, else what the supervisor started."""
    spec, state = read_json(paths.spec), read_json(paths.state)
    if spec and spec.get("container"):
        return next(iter(container_pids(spec)), None)
    running = state and state["boot_id"] == procs.boot_id() and procs.same_process(state["server"])
    return state["server"]["pid"] if running else None


def container_pids(spec: dict | None) -> list[int]:
    """The processes in the container of a spec, its init first; empty where there is none."""
    if not spec or not spec.get("container"):
        return []
    with contextlib.suppress(HostError, OSError):
        return engine_of(spec).pids(spec["container"]["name"])
    return []
