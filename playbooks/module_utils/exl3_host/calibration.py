"""Calibration profiles of this host's devices: measured once per type, kept, found again.

The profile itself says what it was measured on, and the plugin refuses one that does not match. The
name of the file says the same in short, so that another driver or another release looks for another
file: device, memory, compute capability, driver major, software. Not in it: UUID, host, model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from . import containers
from .errors import HostError
from .spec import read_json, write_json

INDEX = "index.json"


def key_of(gpu: dict, software: str) -> dict:
    """What a profile depends on; `software` is an image digest or the id of a venv."""
    driver = gpu.get("driver") or ""
    memory = gpu.get("memory_bytes")
    return {
        "name": gpu["name"],
        "compute_capability": gpu["compute_capability"],
        "memory_gib": None if memory is None else round(memory / 2**30),
        "driver_major": driver.partition(".")[0],
        "software": software,
    }


def file_of(store: Path, key: dict) -> Path:
    """Where the profile of this key is kept."""
    text = json.dumps(key, sort_keys=True, separators=(",", ":"))
    slug = re.sub(r"[^a-z0-9]+", "-", key["name"].lower()).strip("-")
    return store / "calibration" / f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


def wanted(facts: dict, software: str) -> list[tuple[dict, dict]]:
    """(key, first GPU) of each type of device on this host."""
    found: dict[str, tuple[dict, dict]] = {}
    for gpu in facts["gpus"]:
        key = key_of(gpu, software)
        found.setdefault(json.dumps(key, sort_keys=True), (key, gpu))
    return list(found.values())


def keep(store: Path, key: dict) -> None:
    """Note that the profile of this key is complete; the list is for people and for status."""
    path = store / "calibration" / INDEX
    known = read_json(path) or {}
    write_json(path, {**known, file_of(store, key).name: key})


def find(store: Path, facts: dict, software: str, rule: str) -> Path | None:
    """The profile for this host's GPUs, by the recipe's `calibration`: auto, require or skip.

    Raises HostError where it is required and not there, with those that are stale.
    """
    if rule == "skip" or not facts["gpus"]:
        return None
    keys = wanted(facts, software)
    if len(keys) > 1:
        if rule == "require":
            names = ", ".join(key["name"] for key, _ in keys)
            raise HostError(
                f"calibration is required, and this host has several types of GPU: {names}.",
                "Give the instance GPUs of one type, or set calibration: auto in the recipe.",
            )
        return None
    path = file_of(store, keys[0][0])
    if path.is_file():
        return path
    if rule == "require":
        stale = [one.name for one in (store / "calibration").glob("*.json") if one.name != INDEX]
        raise HostError(
            f"the recipe requires a calibration of {keys[0][0]['name']}, and there is none for "
            f"this driver and release (kept: {', '.join(sorted(stale)) or 'none'}).",
            "Run: ansible-playbook playbooks/calibrate.yml",
        )
    return None


# (file to write inside `out`'s folder, GPU) to the command that measures it.
CommandOf = Callable[[Path, dict], list[str]]


def native_command(python: Path, checkout: Path) -> CommandOf:
    """bench/calibrate.py of a checkout, run by a Python that has torch and the plugin."""
    program = str(checkout / "bench" / "calibrate.py")
    return lambda out, gpu: [str(python), program, "--out", str(out)]


def container_command(box: dict, docker_host: str) -> CommandOf:
    """The same program in an image; `box` is the `container` of a plan."""

    def command(out: Path, gpu: dict) -> list[str]:
        image = f"{box['image']['name']}@{box['image']['digest']}"
        words = ["docker", *(["-H", docker_host] if docker_host else []), "run", "--rm", "--init"]
        words += ["--network", "none", "--user", box["user"], "--cap-drop", "ALL"]
        words += ["--device", f"nvidia.com/gpu={gpu['uuid']}"]
        words += ["--mount", f"type=bind,source={out.parent},target=/out"]
        return [*words, image, "calibrate", "--out", f"/out/{out.name}"]

    return command


def measure(
    store: Path,
    facts: dict,
    software: str,
    command_of: CommandOf,
    force: bool = False,
    arguments: tuple[str, ...] = (),
    is_check: bool = False,
    user: str | None = None,
) -> tuple[bool, list[str]]:
    """Measure each type of GPU that has no profile yet; (changed, what was done).

    `user` is who writes the profile in a container. Raises HostError with the end of the output; a
    second run goes on where a failed one stopped, since the draft keeps its name.
    """
    changed, told = False, []
    for key, gpu in wanted(facts, software):
        path = file_of(store, key)
        if path.is_file() and not force:
            told.append(f"{key['name']}: kept ({path.name})")
            continue
        changed = True
        if is_check:
            told.append(f"{key['name']}: would be measured")
            continue
        draft = path.parent / "drafts" / path.name
        draft.parent.mkdir(parents=True, exist_ok=True)
        if user is not None:
            uid, gid = containers.ids(user)
            containers.give(draft.parent, uid, gid, 0o770)
        command = [*command_of(draft, gpu), *arguments]
        _run(command, store / "logs" / "calibrate.log", gpu)
        try:
            json.loads(draft.read_text())
        except (OSError, ValueError) as error:
            raise HostError(
                f"calibrating {gpu['name']} left no profile: {error}.",
                f"See {store}/logs/calibrate.log.",
            ) from None
        os.replace(draft, path)
        keep(store, key)
        told.append(f"{key['name']}: measured ({path.name})")
    return changed, told or ["no GPU here: CPU kernels are not calibrated"]


def _run(command: list[str], log: Path, gpu: dict) -> None:
    env = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if command[0] != "docker":
        env["CUDA_VISIBLE_DEVICES"] = str(gpu["index"])
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as out:
        out.write(f"$ {' '.join(command)}\n")
        out.flush()
        try:
            status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        except OSError as error:
            raise HostError(
                f"{command[0]} cannot be run: {error.strerror}.", "Deploy first."
            ) from None
    if status.returncode != 0:
        said = log.read_text(errors="replace")
        missing = re.findall(r"^ModuleNotFoundError: No module named '([\w.]+)'", said, re.M)
        if missing:
            raise HostError(
                f"calibrating {gpu['name']} needs the Python package {missing[-1]}, and "
                f"{command[0]} has none.",
                f"{command[0]} -m pip install {missing[-1].partition('.')[0]}, or give the Python "
                f"of the venv (--python). Log: {log}.",
            )
        tail = "\n".join(said.splitlines()[-12:])
        raise HostError(
            f"calibrating {gpu['name']} ended with exit status {status.returncode}:\n{tail}",
            f"The GPU must be idle. Log: {log}; a second run goes on where this one stopped.",
        )
