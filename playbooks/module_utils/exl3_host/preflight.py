"""What can be refused before anything is changed: names and ports that clash, ports of others, a
disk that is too small.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from . import keys, procs
from .errors import HostError
from .spec import Paths, own_pids, read_json

GIB = 1 << 30
VENV_GIB = 5.0
ROOM_MIB = 64
DEFAULT_PORT = 8000
OPTIONS = ("profile", "port", "host", "api_key_file", "max_model_len", "kv_cache_gib", "pinning")
OPTIONS += ("runtime", "image", "default_runtime", "container_user", "container_network")
OPTIONS += ("calibration_file",)
OPTIONS += ("nodes", "calibration")
MAPS = {"args": "--serve-args", "env": "--serve-env", "gpu_nodes": "--gpu-nodes"}
PLANNER_PACKAGES = ("pydantic", "ruamel.yaml", "rich", "typer")
# What every module takes that has to know the plan of one instance.
INSTANCE_OPTIONS = {
    "instance": {"type": "dict", "required": True},
    "bind_address": {"type": "str", "required": True},
    "checkout": {"type": "path", "required": True},
    "store": {"type": "path", "required": True},
    "venv": {"type": "path", "required": True},
    "others": {"type": "list", "elements": "str", "default": []},
    "defaults": {"type": "dict", "default": {}},
}


def completed(instance: dict) -> dict:
    """An entry of exl3_instances with its default port; `-e` hands numbers over as text."""
    try:
        port = int(instance.get("port") or DEFAULT_PORT)
    except ValueError:
        raise HostError(
            f"'{instance['port']}' is no port.", "Give a number from 1 to 65535."
        ) from None
    return {**instance, "port": port}


def check_instances(instances: list[dict]) -> None:
    """Refuse an inventory whose instances cannot run side by side. Raises HostError."""
    for key in ("name", "port"):
        seen: set = set()
        for one in instances:
            if one[key] in seen:
                raise HostError(
                    f"two instances have the {key} {one[key]}.",
                    f"Give each instance of exl3_instances its own {key}.",
                )
            seen.add(one[key])


def check_port(instance: dict, bind_address: str, store: Path) -> None:
    """Refuse a port that a process which is not this instance listens on. Raises HostError."""
    paths = Paths(store, instance["name"])
    mine = own_pids(paths)
    for listener in procs.conflicting(instance.get("host") or bind_address, instance["port"]):
        if listener.pid is None and mine:
            continue
        if listener.pid not in mine:
            raise HostError(
                f"port {instance['port']} is in use: {listener}.",
                f"Stop that program or give instance {instance['name']!r} another port.",
                owner=listener.pid,
            )


def check_disk(venv: Path) -> None:
    """Refuse to begin a venv where there is no room for it. Raises HostError."""
    if (venv / ".exl3-stamp.json").exists():
        return
    there = venv
    while not there.exists():
        there = there.parent
    free_gib = shutil.disk_usage(there).free / GIB
    if free_gib < VENV_GIB:
        raise HostError(
            f"{there} has {free_gib:.1f} GiB free, and the venv needs {VENV_GIB:.0f} GiB.",
            "Free space or set exl3_venv_dir to another disk.",
        )


def check_room(store: Path) -> None:
    """Refuse a store on a disk that is full: a server that was stopped there could not come back.

    Raises HostError. What a model needs is checked where it is fetched.
    """
    there = store
    while not there.exists():
        there = there.parent
    disk = os.statvfs(there)
    free_mib = disk.f_bavail * disk.f_frsize >> 20
    if free_mib < ROOM_MIB or (disk.f_files and not disk.f_favail):
        what = f"{free_mib} MiB" if free_mib < ROOM_MIB else "no inode"
        raise HostError(
            f"the disk of the store {store} is full: {what} free, {ROOM_MIB} MiB are needed for "
            "states and logs.",
            "Free space (exl3ctl store gc), or set exl3_store_dir to another disk.",
        )


def planner(venv: Path) -> list[str] | None:
    """The command that plans on this host: the venv's Python, else our own; None where neither can.

    The planner needs pydantic and a few more packages, which a bare host has only after the venv
    is made.
    """
    # Looked for and not imported, which takes five times as long.
    look = "import sys; from importlib.util import find_spec as f; "
    look += f"sys.exit(any(f(name) is None for name in {PLANNER_PACKAGES}))"
    for python in (str(venv / "bin" / "python"), sys.executable):
        probe = [python, "-c", look]
        try:
            if subprocess.run(probe, capture_output=True).returncode == 0:
                return [python, "-m", "exl3_host.cli"]
        except OSError:
            continue
    return None


def run_planner(command: list[str], checkout: Path, arguments: list[str]) -> dict:
    """Output of `exl3ctl ... --json`, run from the checkout so that plans follow its recipes.

    A plan that does not fit is returned too (`fit.ok` is false); any other refusal raises
    HostError.
    """
    env = {**os.environ, "PYTHONPATH": str(checkout / "playbooks" / "module_utils")}
    done = subprocess.run(
        [*command, *arguments, "--json"],
        cwd=checkout,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr or done.stdout).strip().splitlines()[-8:]
        raise HostError(f"exl3ctl {arguments[0]} failed:\n" + "\n".join(said)) from None
    if "error" in answer:
        lines = [
            "{file}:{line}:{column}  {path}  {message} {fix}".format_map(one)
            for one in answer.get("problems", [])
        ]
        raise HostError("\n".join([answer["error"], *lines]), answer.get("fix", ""))
    return answer


def planned(command: list[str], given: dict, **changes: object) -> dict:
    """The plan of one instance, by `command` of `planner`.

    `given` are the parameters of a module with INSTANCE_OPTIONS; `changes` replace settings of its
    instance. Raises HostError as `run_planner` does.
    """
    instance = completed({**given["instance"], **changes})
    store, venv = Path(given["store"]), Path(given["venv"])
    arguments = plan_arguments(
        instance, given["bind_address"], store, venv, given["defaults"], given.get("others")
    )
    return run_planner(command, Path(given["checkout"]), arguments)


def plan_arguments(
    instance: dict,
    bind_address: str,
    store: Path,
    venv: Path,
    defaults: dict | None = None,
    others: list[str] | None = None,
) -> list[str]:
    """The `exl3ctl plan` arguments of one instance of the inventory.

    `defaults` are settings of the inventory that an instance may override; `others` names all its
    instances, whose GPUs are taken.
    """
    freed_gib = procs.resident_bytes(own_pids(Paths(store, instance["name"]))) / GIB
    stamp = read_json(venv / ".exl3-stamp.json") or {}
    arguments = ["plan", instance["recipe"], "--name", instance["name"]]
    arguments += ["--store", str(store), "--venv", str(venv), "--freed-gib", f"{freed_gib:.3f}"]
    if stamp.get("id"):
        arguments += ["--release", stamp["id"][:12]]
    values = {"host": bind_address, **(defaults or {}), **instance}
    values = {name: value for name, value in values.items() if value not in (None, "")}
    if values.get("api_key_file") == keys.GENERATE:
        values["api_key_file"] = str(keys.default_file(store, instance["name"]))
    for option in OPTIONS:
        if option in values:
            arguments += [f"--{option.replace('_', '-')}", str(values[option])]
    if instance.get("gpus"):
        arguments += ["--gpus", ",".join(instance["gpus"])]
    taken = taken_gpus(store, instance["name"], others or [])
    if taken:
        arguments += ["--taken-gpus", ",".join(taken)]
    for name, option in MAPS.items():
        if values.get(name):
            arguments += [option, json.dumps(values[name], sort_keys=True)]
    return arguments


def taken_gpus(store: Path, name: str, others: list[str]) -> list[str]:
    """GPUs in the plans of the other instances of this host that are there or will be."""
    found: list[str] = []
    for path in sorted((store / "plans").glob("*.json")):
        other = path.stem
        if other != name and (other in others or (store / "run" / other).is_dir()):
            found += ((read_json(path) or {}).get("pin") or {}).get("gpus", [])
    return found


def lasting(plan: dict | None) -> dict:
    """A plan without the figures of the moment, for comparing two of them."""
    if plan is None:
        return {}
    model = {key: value for key, value in plan["model"].items() if key != "prepare"}
    moment = ("fit", "warnings", "model")
    return {**{key: value for key, value in plan.items() if key not in moment}, "model": model}
