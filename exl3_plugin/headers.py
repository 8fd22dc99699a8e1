"""Where a checkpoint's files come from, and what their safetensors headers say.

A safetensors file begins with a 64-bit length and a JSON header that gives dtype, shape and place
of every tensor. Reading only that makes the largest checkpoint known in milliseconds, and comparing
it with the size of the file finds a broken download before anything is loaded.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

HEADER_LIMIT_BYTES = 100_000_000
"""The safetensors library refuses longer headers; so much is no header."""

_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class CheckpointError(ValueError):
    """A checkpoint cannot be served as it is; the message says what, where and what to do."""


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: `offset` counts bytes from the start of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Source:
    """The files of one checkpoint, in a folder or on the Hub.

    `sizes` maps file names to bytes; `open_file` opens one of them for reading and seeking;
    `revision` is the full commit for a Hub repository and None for a folder.
    """

    name: str
    path: Path
    revision: str | None
    sizes: Mapping[str, int]
    open_file: Callable[[str], BinaryIO]

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON object of this checkpoint, None where the file is absent.

        Raises:
            CheckpointError: the file is no JSON object.
        """
        if name not in self.sizes:
            return None
        with self.open_file(name) as stream:
            text = stream.read()
        try:
            value = json.loads(text)
        except ValueError as error:
            raise CheckpointError(
                f"{self.name}/{name} is not JSON ({error}); download or write it again"
            ) from error
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{self.name}/{name} holds a JSON {type(value).__name__}, expected an object"
            )
        return value


def open_source(source: str | Path, revision: str | None = None) -> Source:
    """Find a checkpoint: a local folder, or `owner/name` on the Hugging Face Hub.

    Raises:
        CheckpointError: there is no such folder, or the Hub cannot be asked.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.exists():
        raise CheckpointError(f"{path} is a file, expected the folder of a checkpoint")
    if isinstance(source, str) and _HUB_ID.fullmatch(source):
        return _hub(source, revision)
    raise CheckpointError(
        f"folder {path} is not there; give the folder of a checkpoint or a Hub repository as "
        "owner/name"
    )


def _folder(path: Path, name: str | None = None, revision: str | None = None) -> Source:
    sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
    return Source(name or str(path), path, revision, sizes, lambda file: (path / file).open("rb"))


def _hub(repository: str, revision: str | None) -> Source:
    """Header access to a Hub repository at one commit; offline, what the local cache holds."""
    from huggingface_hub import HfApi, HfFileSystem, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = f"{repository} at revision {revision or 'main'}"
    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    except HfHubHTTPError as error:
        raise CheckpointError(
            f"no folder {repository} is here and the Hub refuses {wanted}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    except OSError as error:  # requests' and httpx' connection errors differ by hub version
        reason = error
    except Exception as error:
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests")):
            raise
        reason = error
    else:
        files = HfFileSystem()
        sizes = {item.rfilename: item.size or 0 for item in info.siblings or []}
        return Source(
            f"{repository}@{info.sha}",
            Path(repository),
            info.sha,
            sizes,
            lambda file: files.open(f"{repository}/{file}", "rb", revision=info.sha),
        )
    try:
        cached = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"no folder {repository} is here, the Hub cannot be reached ({reason}) and {wanted} "
            "is not in the local cache; connect, or download it elsewhere and give the folder"
        ) from error
    return _folder(cached, f"{repository}@{cached.name}", cached.name)


def read_headers(source: Source, files: list[str]) -> dict[str, TensorInfo]:
    """All tensors of the given safetensors files.

    Raises:
        CheckpointError: a file is truncated or no safetensors file, or two files hold one name.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for info in _read_header(source, file):
            if info.name in tensors:
                raise CheckpointError(
                    f"{source.name}: tensor {info.name} is both in {tensors[info.name].file} and "
                    f"in {file}; remove the file that does not belong to this checkpoint"
                )
            tensors[info.name] = info
    return tensors


def read_scalar(source: Source, tensor: TensorInfo) -> int:
    """Value of a one-element I32 tensor."""
    with source.open_file(tensor.file) as stream:
        stream.seek(tensor.offset)
        return struct.unpack("<i", stream.read(4))[0]


def _read_header(source: Source, file: str) -> list[TensorInfo]:
    """Tensors of one file, in the order of their data, checked against the size of the file."""
    where, size = f"{source.name}/{file}", source.sizes[file]
    with source.open_file(file) as stream:
        prefix = stream.read(8)
        if prefix == b"version ":
            raise CheckpointError(
                f"{where} is a Git LFS pointer, not the file itself; run `git lfs pull`"
            )
        if len(prefix) < 8:
            raise CheckpointError(
                f"{where} is truncated: {size} bytes, too few for a header; download it again"
            )
        length = struct.unpack("<Q", prefix)[0]
        if length > HEADER_LIMIT_BYTES:
            raise CheckpointError(
                f"{where} is no safetensors file: it announces a header of {length} bytes, "
                f"at most {HEADER_LIMIT_BYTES} are allowed"
            )
        if 8 + length > size:
            raise CheckpointError(
                f"{where} is truncated: {size} bytes, but its header alone ends at byte "
                f"{8 + length}; download it again"
            )
        text = stream.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = [_tensor(name, entry, file, 8 + length) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where} is no safetensors file: its header is damaged ({error!r}); download it again"
        ) from error
    return _check_data(where, sorted(tensors, key=lambda t: t.offset), 8 + length, size)


def _tensor(name: str, entry: dict[str, Any], file: str, data: int) -> TensorInfo:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"{name} has shape {shape} and offsets {begin}, {end}")
    if end < begin:
        raise ValueError(f"{name} ends at {end}, before it begins at {begin}")
    item_bytes = _ITEM_BYTES.get(entry["dtype"])
    if item_bytes is not None and math.prod(shape) * item_bytes != end - begin:
        raise ValueError(
            f"{name}, {entry['dtype']} {list(shape)}, has {end - begin} bytes, "
            f"expected {math.prod(shape) * item_bytes}"
        )
    return TensorInfo(name, entry["dtype"], shape, file, data + begin, end - begin)


def _check_data(where: str, tensors: list[TensorInfo], data: int, size: int) -> list[TensorInfo]:
    """The tensors must follow each other without gap or overlap and end where the file ends."""
    position = data
    for tensor in tensors:
        if tensor.offset != position:
            raise CheckpointError(
                f"{where} is damaged: tensor {tensor.name} begins at byte {tensor.offset}, "
                f"expected {position}, where the tensor before it ends; download it again"
            )
        position += tensor.nbytes
    if position > size:
        cut = [tensor.name for tensor in tensors if tensor.offset + tensor.nbytes > size]
        raise CheckpointError(
            f"{where} is truncated: {size} bytes, its header describes {position}; incomplete are "
            f"{some(cut)}; download it again"
        )
    if position < size:
        raise CheckpointError(
            f"{where} is damaged: {size} bytes, its header describes only {position}; "
            "download it again"
        )
    return tensors


def some(names: list[str], most: int = 3) -> str:
    """The first few of many names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
