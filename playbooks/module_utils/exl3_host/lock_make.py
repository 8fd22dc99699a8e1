"""Makes the lock of a recipe: from a model folder, or of a Hub repository without its weights."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from . import headers, kv
from .errors import HostError
from .lock import SCHEMA, UNPINNED, sha256_of

_SKIPPED = re.compile(r"(^|/)(\.git|\.cache|\.huggingface|\.exl3-)|(^|/)\.gitattributes$")


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
    tensors = [
        pair for file in sorted(folder.glob("*.safetensors")) for pair in headers.read_header(file)
    ]
    return _lock({"kind": "path"}, files, config, tensors)


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
    except Exception as error:
        # The client's transport (httpx, httpx2, requests) has errors of its own.
        transport = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "requests")
        if isinstance(error, HostError) or not (
            transport or isinstance(error, HfHubHTTPError | OSError)
        ):
            raise
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
