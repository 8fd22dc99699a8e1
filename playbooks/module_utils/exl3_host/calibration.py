"""Calibration profiles of this host's devices: measured once per type, kept, found again.

The profile itself says what it was measured on, and the plugin refuses one that does not match. The
name of the file says the same in short, so that another driver or another release looks for another
file: device, memory, compute capability, driver major, software. Not in it: UUID, host, model.

Routed experts are measured for the models that are served: their sizes and rates come from the
checkpoint, and a profile is extended by those it lacks. The index says which models it covers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Model:
    """A model whose experts a profile shall cover, and how the GPUs share it."""

    folder: str
    """On this host."""
    ranks: int = 1
    whole_experts: bool = False
    """Expert parallel: each GPU holds whole experts."""

    @property
    def name(self) -> str:
        """As the index calls it."""
        how = ", whole experts" if self.whole_experts else ""
        return f"{Path(self.folder).name} on {self.ranks}{how}"

    def arguments(self, folder: str) -> list[str]:
        """Of bench/calibrate.py, for which the model lies in `folder`."""
        words = ["--model", folder, "--tensor-parallel-size", str(self.ranks)]
        return words + ["--enable-expert-parallel"] * self.whole_experts


def model_of(plan: dict) -> Model | None:
    """The model of a plan; None where it is not on this host yet."""
    folder, argv = plan["model"]["dir"], plan["serve"]["argv"]
    if not (Path(folder) / "config.json").is_file():
        return None

    def number(option: str) -> int:
        return int(argv[argv.index(option) + 1]) if option in argv else 1

    whole = "--enable-expert-parallel" in argv
    # Experts go to the ranks of all replicas; what is cut is cut within one.
    ranks = number("--tensor-parallel-size") * (number("--data-parallel-size") if whole else 1)
    return Model(folder, ranks, whole)


def covered(store: Path, key: dict) -> list[str]:
    """Models whose experts are in the profile of this key."""
    known = read_json(store / "calibration" / INDEX) or {}
    return known.get(file_of(store, key).name, {}).get("models", [])


def keep(store: Path, key: dict, models: list[str]) -> None:
    """Note that the profile of this key is complete; the list is for people and for status."""
    path = store / "calibration" / INDEX
    known = read_json(path) or {}
    entry = {**key, "models": sorted(set(models))}
    write_json(path, {**known, file_of(store, key).name: entry})


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


def native_command(python: Path, checkout: Path, model: Model | None = None) -> CommandOf:
    """bench/calibrate.py of a checkout, run by a Python that has torch and the plugin."""
    program = str(checkout / "bench" / "calibrate.py")
    experts = [] if model is None else model.arguments(model.folder)
    return lambda out, gpu: [str(python), program, "--out", str(out), *experts]


def container_command(box: dict, docker_host: str, model: Model | None = None) -> CommandOf:
    """The same program in an image; `box` is the `container` of a plan."""

    def command(out: Path, gpu: dict) -> list[str]:
        image = f"{box['image']['name']}@{box['image']['digest']}"
        words = ["docker", *(["-H", docker_host] if docker_host else []), "run", "--rm", "--init"]
        words += ["--network", "none", "--user", box["user"], "--cap-drop", "ALL"]
        words += ["--device", f"nvidia.com/gpu={gpu['uuid']}"]
        words += ["--mount", f"type=bind,source={out.parent},target=/out"]
        experts = []
        if model is not None:
            inside = containers.model_inside(model.folder)
            words += ["--mount", f"type=bind,source={model.folder},target={inside},readonly"]
            experts = model.arguments(inside)
        return [*words, image, "calibrate", "--out", f"/out/{out.name}", *experts]

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
    model: Model | None = None,
) -> tuple[bool, list[str]]:
    """Measure each type of GPU that has no profile yet; (changed, what was done).

    `user` is who writes the profile in a container, `model` the one that `command_of` speaks of: a
    profile that does not cover it is extended. Raises HostError with the end of the output; a
    second run goes on where a failed one stopped, since the draft keeps its name.
    """
    changed, told = False, []
    for key, gpu in wanted(facts, software):
        path = file_of(store, key)
        models = covered(store, key)
        extends = path.is_file() and not force
        if extends and (model is None or model.name in models):
            told.append(f"{key['name']}: kept ({path.name})")
            continue
        changed = True
        what = f"the experts of {Path(model.folder).name}, if any, " if extends else ""
        if is_check:
            told.append(f"{key['name']}: {what}would be measured")
            continue
        draft = path.parent / "drafts" / path.name
        draft.parent.mkdir(parents=True, exist_ok=True)
        command = [*command_of(draft, gpu), *arguments]
        if extends:
            shutil.copyfile(path, draft)
            command += ["--shapes", "none", "--extend"]
        if user is not None:
            uid, gid = containers.ids(user)
            containers.give(draft.parent, uid, gid, 0o770)
        _run(command, store / "logs" / "calibrate.log", gpu)
        try:
            json.loads(draft.read_text())
        except (OSError, ValueError) as error:
            raise HostError(
                f"calibrating {gpu['name']} left no profile: {error}.",
                f"See {store}/logs/calibrate.log.",
            ) from None
        os.replace(draft, path)
        keep(store, key, (models if extends else []) + ([] if model is None else [model.name]))
        told.append(f"{key['name']}: {what}measured ({path.name})")
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
