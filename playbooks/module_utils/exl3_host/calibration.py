"""Calibration profiles of this host's devices: measured once per type, kept, found again.

The profile itself says what it was measured on, and the plugin refuses one that does not match. The
name of the file says the same in short, so that another driver or another release looks for another
file: device, memory, compute capability, driver major, software. Not in it: UUID, host, model.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

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
