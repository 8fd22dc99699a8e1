"""The lock of a recipe: every file of its model with size and SHA-256, beside the recipe.

`<name>.files.json`, `exl3-lock/1`:

    schema, source {kind: "hub", repo, revision} | {kind: "path"}
    files  {name: {bytes, sha256}}
    model  {weights_bytes, classes {class: bytes}, config {...}}   read from headers and config.json

The last part is what `fit` needs, so that it can be asked before anything is fetched. Locks are
read here with the standard library alone, and made in `lock_make`.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from .errors import HostError

SCHEMA = "exl3-lock/1"
SUFFIX = ".files.json"
# Stands in a recipe until it is locked.
UNPINNED = "0" * 40
UNPINNED_DIGEST = f"sha256:{'0' * 64}"


def read_lock(path: Path) -> dict:
    """A lock file. Raises HostError where it is absent, broken or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HostError(
            f"The lock file {path} cannot be read: {error.strerror}.",
            "Make it with: exl3ctl recipe lock NAME",
        ) from None
    except ValueError as error:
        raise HostError(f"The lock file {path} is no JSON: {error}.", _AGAIN) from None
    files = found.get("files") if isinstance(found, dict) else None
    if not isinstance(files, dict) or found.get("schema") != SCHEMA:
        raise HostError(f"{path} is no lock file (schema {SCHEMA} is expected).", _AGAIN)
    for name, facts in files.items():
        if not _inside(name) or not re.fullmatch(r"[0-9a-f]{64}", str(facts.get("sha256"))):
            raise HostError(f"{path}: the entry '{name}' is no file with a SHA-256.", _AGAIN)
    return found


_AGAIN = "Make it again with: exl3ctl recipe lock NAME"


def _inside(name: str) -> bool:
    return not name.startswith("/") and ".." not in name.split("/") and name != ""


def lock_beside(recipe_path: Path) -> dict | None:
    """The lock that lies beside a recipe, or None where there is none. Raises HostError."""
    path = recipe_path.with_name(recipe_path.name.removesuffix(".yaml") + SUFFIX)
    return read_lock(path) if path.is_file() else None


def total_bytes(lock: dict) -> int:
    """Bytes of all files of a lock."""
    return sum(facts["bytes"] for facts in lock["files"].values())


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with open(path, "rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def compare(folder: Path, lock: dict, every_byte: bool = True) -> list[str]:
    """How a folder differs from a lock, by sizes alone or by every byte.

    Files that the lock lacks are ignored.
    """
    wrong = []
    for name, facts in sorted(lock["files"].items()):
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif (size := path.stat().st_size) != facts["bytes"]:
            wrong.append(f"{name} has {size} bytes, the lock says {facts['bytes']}")
        elif every_byte and (found := sha256_of(path)) != facts["sha256"]:
            wrong.append(
                f"{name} has SHA-256 {found[:12]}..., the lock says {facts['sha256'][:12]}..."
            )
    return wrong


def as_text(lock: dict) -> str:
    """A lock as it is written: one file a line."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps(facts, sort_keys=True)}"
        for name, facts in sorted(lock["files"].items())
    ]
    return (
        f'{{\n "schema": {json.dumps(lock["schema"])},\n'
        f' "source": {json.dumps(lock["source"], sort_keys=True)},\n'
        f' "model": {json.dumps(lock["model"], sort_keys=True)},\n'
        ' "files": {\n' + ",\n".join(lines) + "\n }\n}\n"
    )
