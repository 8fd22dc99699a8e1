"""Unfinished work inside OUT: every finished module is a file, so a killed conversion continues.

    OUT/.partial/settings.json      what this work belongs to
    OUT/.partial/lock               held while a conversion runs
    OUT/.partial/modules/NAME.safetensors
    OUT/.partial/tokens.safetensors calibration tokens

Files are written under another name and renamed, so what has its final name is whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from exl3_plugin.format import MARKERS
from exl3_plugin.quantize.ldlq import QuantizeError
from exl3_plugin.quantize.tensor import QuantizedLinear

PARTIAL = ".partial"


def signed32(value: int) -> int:
    """The int32 with the bit pattern of an unsigned 32-bit number."""
    return value - (1 << 32) if value >= 1 << 31 else value


class WorkFolder:
    """The `.partial` folder of one output, locked for this process.

    Args:
        out: the output folder; created.
        settings: everything that decides the result. Work with other settings is refused.
        restart: throw away unfinished work instead.
    """

    def __init__(self, out: Path, settings: Mapping, restart: bool = False) -> None:
        self.out = out
        self.path = out / PARTIAL
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise QuantizeError(
                f"another conversion is writing to {out}; wait for it or choose another folder"
            ) from None
        self.modules = self.path / "modules"
        try:
            if restart:
                for entry in self.path.iterdir():
                    if entry.name != "lock":
                        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            self._settle(json.loads(json.dumps(dict(settings))))
            self.modules.mkdir(exist_ok=True)
        except BaseException:
            self.close()
            raise

    def _settle(self, settings: dict) -> None:
        file = self.path / "settings.json"
        if file.exists():
            earlier = json.loads(file.read_text(encoding="utf-8"))
            if earlier != settings:
                differing = sorted(
                    key
                    for key in earlier.keys() | settings.keys()
                    if earlier.get(key) != settings.get(key)
                )
                raise QuantizeError(
                    f"{self.out} holds an unfinished conversion with other settings "
                    f"({'; '.join(_difference(key, earlier, settings) for key in differing)}). "
                    "Repeat its settings to continue it, or pass --restart to throw it away"
                )
            return
        temporary = file.with_suffix(".new")
        temporary.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        temporary.rename(file)

    def close(self) -> None:
        """Release the lock; unfinished work stays."""
        self._lock.close()

    def remove(self) -> None:
        """Delete the folder: the conversion is complete."""
        shutil.rmtree(self.path)
        self._lock.close()

    # Modules

    def file_of(self, name: str) -> Path:
        """Where the finished module `name` lies."""
        return self.modules / f"{name}.safetensors"

    def finished(self, name: str) -> bool:
        return self.file_of(name).exists()

    def save(self, name: str, linear: QuantizedLinear, bias: torch.Tensor | None) -> None:
        """Write one finished module, whole or not at all."""
        tensors = {
            f"{name}.trellis": linear.trellis.contiguous(),
            f"{name}.suh": linear.suh.contiguous(),
            f"{name}.svh": linear.svh.contiguous(),
        }
        if linear.codebook in MARKERS:
            marker = torch.tensor(signed32(MARKERS[linear.codebook]), dtype=torch.int32)
            tensors[f"{name}.{linear.codebook}"] = marker
        if bias is not None:
            tensors[f"{name}.bias"] = bias.contiguous()
        write_whole(self.file_of(name), tensors, {"error": repr(linear.error)})

    def load(self, name: str) -> tuple[dict[str, torch.Tensor], float]:
        """Tensors of a finished module by suffix, and its relative error."""
        file = self.file_of(name)
        try:
            with safe_open(file, "pt") as content:
                error = float(content.metadata()["error"])
                tensors = {
                    key.removeprefix(f"{name}."): content.get_tensor(key)
                    for key in content.keys()  # noqa: SIM118 - not a mapping
                }
        except (SafetensorError, OSError) as problem:
            raise QuantizeError(
                f"{file} is damaged ({problem}); delete it and run the same command again"
            ) from problem
        return tensors, error

    # Calibration tokens

    def tokens(self) -> torch.Tensor | None:
        """Tokens that the unfinished conversion was calibrated with."""
        file = self.path / "tokens.safetensors"
        if not file.exists():
            return None
        with safe_open(file, "pt") as content:
            return content.get_tensor("tokens")

    def save_tokens(self, tokens: torch.Tensor) -> None:
        write_whole(self.path / "tokens.safetensors", {"tokens": tokens.contiguous()})


def _difference(key: str, earlier: dict, settings: dict) -> str:
    if isinstance(earlier.get(key), dict) or isinstance(settings.get(key), dict):
        return f"another {key}"
    return f"{key} was {earlier.get(key)}, now {settings.get(key)}"


def write_whole(
    file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file so that it appears complete under its name, also after a crash."""
    temporary = file.with_name(f"{file.name}.new")
    try:
        save_file(tensors, temporary, metadata={"format": "pt"} | (metadata or {}))
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.rename(file)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise QuantizeError(
            f"{file} cannot be written ({error}); free some space and run the same command again, "
            "it continues where it stopped"
        ) from error
