"""The manifest of a finished model folder: every file with its size and SHA-256.

It is written last, so a folder that has one is complete. Standard library only.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from .lock import sha256_of

MANIFEST = ".exl3-manifest.json"
SCHEMA = "exl3-model/1"


def write_manifest(folder: Path, settings: dict) -> dict:
    """Write down every file of a model, make the files read-only, and return the manifest.

    Containers read the store under another user: everybody may read, nobody may write.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            name = str(path.relative_to(folder))
            files[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            path.chmod(0o444)
        elif path.is_dir():
            path.chmod(0o755)
    value = {"schema": SCHEMA, "settings": settings, "files": files}
    draft = folder / f"{MANIFEST}.tmp"
    draft.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    draft.chmod(0o444)
    os.replace(draft, folder / MANIFEST)
    folder.chmod(0o755)
    return value


def read_manifest(folder: Path) -> dict | None:
    """The manifest of a folder, None where there is none that can be read."""
    try:
        found = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("files"), dict) else None


def check_folder(folder: Path, verify: bool) -> str | None:
    """What is wrong with a finished model, None when nothing is. `verify` reads every byte."""
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{folder} has no readable {MANIFEST}, so the playbooks did not make it"
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        size = path.stat().st_size
        if size != facts["bytes"]:
            return f"{path} has {size} bytes, expected {facts['bytes']}"
        if verify and (found := sha256_of(path)) != facts["sha256"]:
            return f"{path} has SHA-256 {found[:12]}..., expected {facts['sha256'][:12]}..."
    return None
