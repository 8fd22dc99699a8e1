"""The lock of a recipe: every file of its model with size and SHA-256, beside the recipe.

`<name>.files.json`, `exl3-lock/1`:

    schema, source {kind: "hub", repo, revision} | {kind: "path"}
    files  {name: {bytes, sha256}}
    model  {weights_bytes, classes {class: bytes}, config {...}}   read from headers and config.json

The last part is what `fit` needs, so that it can be asked before anything is fetched. Reading a
lock needs the standard library alone; making one of a Hub repository needs huggingface_hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from . import headers, kv
from .errors import HostError

SCHEMA = "exl3-lock/1"
SUFFIX = ".files.json"
# Stands in a recipe until it is locked.
UNPINNED = "0" * 40
UNPINNED_DIGEST = f"sha256:{'0' * 64}"
_SKIPPED = re.compile(r"(^|/)(\.git|\.cache|\.huggingface|\.exl3-)|(^|/)\.gitattributes$")


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


def lock_folder(folder: Path, tell: Callable[[str], None] = lambda text: None) -> dict:
    """The lock of a model folder on this machine; reads every byte. Raises HostError."""
    if not (folder / "config.json").is_file():
        found = "has no config.json" if folder.is_dir() else "is not there"
        raise HostError(f"The model folder {folder} {found}.", "Correct model.path in the recipe.")
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not _SKIPPED.search(name):
            tell(f"reading {name}")
            files[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = [pair for file in sorted(folder.glob("*.safetensors")) for pair in _header(file)]
    return _lock({"kind": "path"}, files, config, tensors)


def _header(file: Path) -> list[tuple[str, int]]:
    return headers.read_header(file)


def _lock(source: dict, files: dict, config: dict, tensors: list[tuple[str, int]]) -> dict:
    if not tensors:
        raise HostError("The model has no safetensors file.", "Only safetensors models are served.")
    kept = kv.kept(config)
    weights = headers.weigh(tensors, kept.get("num_hidden_layers"))
    model = {"weights_bytes": weights.total, "classes": weights.classes, "config": kept}
    return {"schema": SCHEMA, "source": source, "files": files, "model": model}


def lock_hub(
    repo: str,
    revision: str,
    token: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict:
    """The lock of a Hub repository: sizes and digests from its listing, headers by range reads.

    `revision` may be a branch; the lock names the commit it points to now. Raises HostError.
    """
    # The Hub client is loaded where it is needed: it takes a second.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token or False)
    try:
        info = api.model_info(repo, revision=revision, files_metadata=True)
        commit, files, tensors, config = info.sha, {}, [], {}
        for entry in sorted(info.siblings, key=lambda one: one.rfilename):
            name = entry.rfilename
            if _SKIPPED.search(name):
                continue
            tell(f"asking for {name}")
            content = None if entry.lfs else _small_file(api, repo, name, commit)
            if entry.lfs:
                files[name] = {"bytes": entry.lfs.size, "sha256": entry.lfs.sha256}
            else:
                _check_blob(name, content, entry.blob_id)
                digest = hashlib.sha256(content).hexdigest()
                files[name] = {"bytes": len(content), "sha256": digest}
            if name == "config.json":
                config = json.loads(content or _small_file(api, repo, name, commit))
            if name.endswith(".safetensors") and "/" not in name:
                meta = api.parse_safetensors_file_metadata(repo, name, revision=commit)
                tensors += [
                    (key, one.data_offsets[1] - one.data_offsets[0])
                    for key, one in meta.tensors.items()
                ]
    except GatedRepoError:
        raise HostError(
            f"{repo} is gated.",
            "Accept its licence on its page, then lock with --token-file FILE.",
        ) from None
    except RevisionNotFoundError:
        raise HostError(
            f"{repo} has no revision '{revision}'.", "Give a commit, tag or branch that it has."
        ) from None
    except RepositoryNotFoundError:
        raise HostError(
            f"{repo} does not exist, or is private.", "Correct model.repo, or give --token-file."
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise HostError(
            f"The Hub could not be asked about {repo}: {_first_line(error)}.",
            "Connect this machine, or lock a folder with --folder DIR.",
        ) from None
    source = {"kind": "hub", "repo": repo, "revision": commit}
    return _lock(source, files, config, tensors)


def _small_file(api, repo: str, name: str, commit: str) -> bytes:
    return Path(api.hf_hub_download(repo, name, revision=commit)).read_bytes()


def _check_blob(name: str, content: bytes, blob_id: str | None) -> None:
    """A file that is not in LFS carries git's own digest."""
    if not blob_id or not re.fullmatch(r"[0-9a-f]{40}", blob_id) or blob_id == UNPINNED:
        return
    found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if found != blob_id:
        raise HostError(
            f"{name} has git digest {found[:12]}..., the listing says {blob_id[:12]}....",
            "The Hub sent something else than it lists; try again, or ask another mirror.",
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200].rstrip(".")


def compare(folder: Path, lock: dict) -> list[str]:
    """How a folder differs from a lock; reads every byte. Files that the lock lacks are ignored."""
    wrong = []
    for name, facts in sorted(lock["files"].items()):
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif (size := path.stat().st_size) != facts["bytes"]:
            wrong.append(f"{name} has {size} bytes, the lock says {facts['bytes']}")
        elif (found := sha256_of(path)) != facts["sha256"]:
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
