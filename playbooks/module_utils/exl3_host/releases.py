"""What served before, kept so that one command brings it back.

A release is written down when its server has given the right answer: the plan and the spec, whose
container stays on the host, stopped. Containers of older releases are removed.
"""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

from . import containers
from .errors import HostError
from .spec import Paths, engine_of, read_json, write_json
from .spec import releases as everything

SCHEMA = "exl3-release/1"
KEEP = 2


def record(paths: Paths, plan: dict, spec: dict, keep: int = KEEP) -> dict:
    """Note that this plan serves now, as the newest release; forget all but `keep` before it."""
    known = everything(paths)
    number = known[-1]["number"] + 1 if known else 1
    release = {
        "schema": SCHEMA,
        "number": number,
        "id": spec["config_hash"][:8],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "image": (spec.get("container") or {}).get("image"),
        "venv": _venv_id(plan),
        "plan": plan,
        "spec": spec,
    }
    for one in known:
        if one["id"] == release["id"]:
            _file(paths, one).unlink(missing_ok=True)
    write_json(_file(paths, release), release)
    prune(paths, spec, keep)
    return release


def prune(paths: Paths, spec: dict, keep: int) -> list[str]:
    """Remove releases beyond the newest `keep + 1`, and containers that belong to none."""
    known = everything(paths)
    for one in known[: max(0, len(known) - keep - 1)]:
        _file(paths, one).unlink(missing_ok=True)
    kept = {one["spec"]["container"]["name"] for one in everything(paths) if _is_container(one)}
    removed = []
    # An instance that was moved to a venv may still have containers to lose.
    boxed = next((one for one in [spec, *(k["spec"] for k in known)] if one.get("container")), None)
    if boxed is not None:
        engine = engine_of(boxed)
        for one in containers.of_instance(engine, paths.instance):
            name = one["Names"][0].lstrip("/")
            if name not in kept and one["State"] != "running":
                containers.drop(engine, name, 10)
                removed.append(name)
        needed = {
            one["image"]["digest"]
            for run in (paths.store / "run").glob("*")
            for one in everything(Paths(paths.store, run.name))
            if one["image"]
        }
        for folder in containers.stale_caches(paths.store, needed):
            shutil.rmtree(folder, ignore_errors=True)
    return removed


def choose(paths: Paths, wanted: str, current: dict | None) -> dict:
    """The release to go back to: `previous`, a number, or the beginning of an id.

    Raises HostError where there is none, with what there is.
    """
    known = everything(paths)
    now = (current or {}).get("config_hash", "")[:8]
    others = [one for one in known if one["id"] != now]
    if wanted == "previous":
        found = others[-1:]
    else:
        found = [
            one
            for one in known
            if str(one["number"]) == wanted
            or (re.fullmatch(r"[0-9a-f]{4,64}", wanted) and one["id"].startswith(wanted[:8]))
        ]
    if not found:
        there = ", ".join(f"{one['number']} ({one['id']}, {one['time']})" for one in known)
        raise HostError(
            f"instance {paths.instance!r} has no release '{wanted}' to go back to.",
            f"Releases here: {there or 'none'}. exl3_keep_releases says how many are kept.",
        )
    release = found[-1]
    if not _is_container(release) and release["venv"] != _venv_id(release["plan"]):
        raise HostError(
            f"release {release['number']} of {paths.instance!r} was served from another venv than "
            f"the one that is in {release['plan']['venv']['dir']} now.",
            "Check out the commit it was deployed from and deploy again; containers keep their "
            "software, a venv does not.",
        )
    return release


def _is_container(release: dict) -> bool:
    return bool(release["spec"].get("container"))


def _venv_id(plan: dict) -> str | None:
    if plan.get("container"):
        return None
    return (read_json(Path(plan["venv"]["dir"]) / ".exl3-stamp.json") or {}).get("id")


def _file(paths: Paths, release: dict) -> Path:
    return paths.releases / f"{release['number']:06d}.json"
