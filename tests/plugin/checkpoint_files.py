"""Checkpoints taken apart and put together again, so that a test can spoil exactly one thing."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass
class Stored:
    """One tensor as a safetensors file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def stored(dtype: str, array: np.ndarray) -> Stored:
    return Stored(dtype, array.shape, array.tobytes())


def marker(value: int, shape: tuple[int, ...] = ()) -> Stored:
    return Stored("I32", shape, struct.pack("<I", value))


def read_tensors(file: Path) -> dict[str, Stored]:
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    data = content[8 + length :]
    return {
        name: Stored(entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for name, entry in json.loads(content[8 : 8 + length]).items()
        if name != "__metadata__"
    }


def write_tensors(file: Path, tensors: Mapping[str, Stored]) -> None:
    header, position = {}, 0
    for name, tensor in tensors.items():
        end = position + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    parts = [struct.pack("<Q", len(text)), text, *(tensor.data for tensor in tensors.values())]
    file.write_bytes(b"".join(parts))


@dataclass
class Editable:
    """A checkpoint folder with its tensors and config in memory; `save` writes them back."""

    path: Path
    tensors: dict[str, Stored]
    config: dict

    def save(self, shards: int = 1, index: bool = False) -> Path:
        """Write everything; with several shards as `model-0000i-of-0000n.safetensors`."""
        (self.path / "config.json").write_text(json.dumps(self.config))
        (self.path / "model.safetensors").unlink(missing_ok=True)
        names, weight_map = list(self.tensors), {}
        size = -(-len(names) // shards)
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            file = "model.safetensors" if shards == 1 else file
            part = names[i * size : (i + 1) * size]
            write_tensors(self.path / file, {name: self.tensors[name] for name in part})
            weight_map.update(dict.fromkeys(part, file))
        if index:
            self.write_index(weight_map)
        return self.path

    def write_index(self, weight_map: Mapping[str, str]) -> None:
        text = json.dumps({"metadata": {}, "weight_map": dict(weight_map)})
        (self.path / "model.safetensors.index.json").write_text(text)
