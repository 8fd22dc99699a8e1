"""The model store: a model of the plan becomes a finished folder, once, and is checked against its
manifest afterwards.

A folder under `models/` is complete or absent: it gets its name when the manifest has been
written. A store may be shared read-only: a host that finds its model there writes nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from .errors import HostError
from .fetch import Maker, Request, refuse_early
from .lock import compare, lock_beside, sha256_of
from .manifest import MANIFEST, check_folder, read_manifest, write_manifest
from .spec import read_json

__all__ = [
    "MANIFEST",
    "Maker",
    "Request",
    "check_folder",
    "ensure",
    "sha256_of",
    "write_manifest",
]

OWN_FOLDERS = ("bench", "calibration", "choices", "images", "jit", "learned", "logs", "models")
OWN_FOLDERS += ("nodes", "peers", "plans", "reports", "run", "secrets", "sources")


def request_from_plan(plan: dict, store: Path, **options) -> Request:
    """The request that a plan's `model` describes, with the lock beside its recipe."""
    model = plan["model"]
    recipe = (plan.get("recipe") or {}).get("path")
    is_hub = model["source"]["kind"] == "hub"
    is_folder = model["source"]["kind"] == "path" and model["quantize"] is None
    lock = lock_beside(Path(recipe)) if recipe and (is_hub or is_folder) else None
    if lock is not None and is_hub:
        pinned = (lock["source"].get("repo"), lock["source"].get("revision"))
        if pinned != (model["source"]["repo"], model["source"]["revision"]):
            raise HostError(
                f"The lock beside {recipe} is of {pinned[0]} at {str(pinned[1])[:12]}, the recipe "
                f"wants {model['source']['repo']} at {model['source']['revision'][:12]}.",
                "Lock it again: exl3ctl recipe lock NAME",
            )
    return Request(
        source=model["source"],
        quantize=model["quantize"],
        folder=Path(model["dir"]),
        store=Path(store),
        python=Path(plan["venv"]["dir"]) / "bin" / "python",
        lock=lock,
        needs_token=bool((plan.get("secrets") or {}).get("hf_token")),
        **options,
    )


def present(request: Request, verify: bool = False) -> bool:
    """Whether the model is there and whole. Raises HostError for a damaged or missing local one."""
    if not request.is_ours:
        folder = Path(request.source["path"])
        if not (folder / "config.json").is_file():
            found = "has no config.json" if folder.is_dir() else "is not there"
            raise HostError(f"model folder {folder} {found}.", "Correct model.path in the recipe.")
        wrong = compare(folder, request.lock, verify) if request.lock is not None else []
        if wrong:
            raise HostError(
                f"model folder {folder} is not what the recipe is locked to: {'; '.join(wrong)}.",
                "Restore it, or lock the recipe again: exl3ctl recipe lock NAME",
            )
        return True
    if not request.folder.exists():
        return False
    wrong = check_folder(request.folder, verify)
    if wrong:
        raise HostError(
            f"damaged model: {wrong}.",
            f"Delete {request.folder} and deploy again; it is then made anew.",
        )
    return True


def ensure(
    request: Request,
    is_check: bool = False,
    verify: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[bool, list[str]]:
    """Have the model in its folder; returns (changed, what was or would be done). Raises
    HostError.
    """
    if present(request, verify):
        return False, ["every file verified"] if verify and request.is_ours else []
    refuse_early(request)
    if is_check:
        what = "quantise" if request.quantize else "download"
        return True, [f"would {what} into {request.folder}"]
    try:
        request.store.mkdir(parents=True, exist_ok=True)
        request.folder.parent.mkdir(parents=True, exist_ok=True)
        lock_file = open(request.folder.parent / f".{request.folder.name}.lock", "w")  # noqa: SIM115
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        raise HostError(
            f"the store {request.store} may not be written here ({os.strerror(error.errno)}) and "
            f"holds no {request.folder.name}.",
            "Fetch the model on the host that owns the store, then deploy here.",
        ) from None
    with lock_file:
        # Two instances of one recipe, or two plays: the second waits and finds the work done.
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        if present(request):
            return False, []
        maker = Maker(request, tell)
        maker.make()
        return True, maker.steps


def contents(store: Path) -> list[dict]:
    """Every model folder of a store: name, bytes, which plans use it, whether it is finished."""
    used: dict[str, list[str]] = {}
    for plan_file in sorted((store / "plans").glob("*.json")):
        plan = read_json(plan_file) or {}
        folder = (plan.get("model") or {}).get("dir")
        if folder:
            used.setdefault(Path(folder).name, []).append(plan.get("instance") or plan_file.stem)
    out = []
    models = store / "models"
    for folder in sorted(models.iterdir()) if models.is_dir() else []:
        if not folder.is_dir():
            continue
        manifest = read_manifest(folder)
        out.append(
            {
                "name": folder.name,
                "bytes": sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()),
                "finished": manifest is not None and not folder.name.startswith("."),
                "used_by": used.get(folder.name.removeprefix(".partial-"), []),
                "source": (manifest or {}).get("settings", {}).get("source"),
            }
        )
    return out


def collect_garbage(store: Path, is_check: bool = True) -> list[dict]:
    """Delete the model folders that no plan names; returns what was or would be deleted."""
    garbage = [one for one in contents(store) if not one["used_by"]]
    for one in [] if is_check else garbage:
        shutil.rmtree(store / "models" / one["name"])
        lock_file = store / "models" / f".{one['name'].removeprefix('.partial-')}.lock"
        lock_file.unlink(missing_ok=True)
    return garbage


def remove_all(store: Path, is_check: bool = False) -> list[str]:
    """Delete what the playbooks keep in a store, and the store itself when nothing else lies in it.

    Raises HostError while a server still runs from it.
    """
    if (store / "run").is_dir() and any((store / "run").iterdir()):
        raise HostError(f"servers still belong to {store}.", "Remove them first (--tags instance).")
    removed = [name for name in OWN_FOLDERS if (store / name).is_dir()]
    if is_check:
        return removed
    for name in removed:
        shutil.rmtree(store / name)
    if store.is_dir() and not any(store.iterdir()):
        store.rmdir()
    return removed
