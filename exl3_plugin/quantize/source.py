"""What is converted: a folder in Hugging Face's layout, read tensor by tensor.

`gguf.py` offers the same interface over a GGUF file; the rest of the quantiser sees only this.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from exl3_plugin.quantize.ldlq import QuantizeError

_KEPT_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files a server needs beside the weights. Licences and read-me files come along by pattern."""

_KEPT_PATTERNS = ("LICENSE*", "NOTICE*", "README.md", "*.py")


class Source(ABC):
    """A model to convert: its configuration and its tensors under Hugging Face names."""

    path: Path
    config: dict
    shapes: dict[str, tuple[int, ...]]

    @abstractmethod
    def load(self, name: str) -> torch.Tensor:
        """The tensor as stored (a GGUF tensor: dequantised, in the dtype it will be kept in)."""

    def load_exact(self, name: str) -> torch.Tensor:
        """The tensor in the most precise form the source has; what is quantised starts from it."""
        return self.load(name)

    @abstractmethod
    def identity(self) -> dict:
        """What tells this source from another: kept with unfinished work, compared on resuming."""

    @abstractmethod
    def write_companions(self, folder: Path) -> None:
        """Write tokenizer, generation settings and chat template into `folder`."""

    @abstractmethod
    def transformers_model(self) -> torch.nn.Module:
        """The model as transformers runs it, for calibration, on the CPU."""

    @abstractmethod
    def tokenizer(self):
        """The transformers tokenizer, for calibration text."""

    @property
    def text_config(self) -> dict:
        """The part of the configuration that describes the language model."""
        return self.config.get("text_config") or self.config


def open_source(path: str | Path) -> Source:
    """Open a Hugging Face folder or a GGUF file.

    Raises:
        QuantizeError: nothing there, or nothing that can be converted.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return FolderSource(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        from exl3_plugin.quantize.gguf import GGUFSource

        return GGUFSource(path)
    if path.exists():
        raise QuantizeError(f"{path} is neither a folder in Hugging Face's layout nor a .gguf file")
    raise QuantizeError(f"{path} does not exist; SRC is a Hugging Face folder or a GGUF file")


def read_json(path: Path) -> dict:
    """A JSON object from a file, or a QuantizeError that says where it is broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise QuantizeError(f"{path} is missing") from None
    except ValueError as error:
        raise QuantizeError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise QuantizeError(f"{path} holds no JSON object")
    return content


class FolderSource(Source):
    """A folder with config.json and *.safetensors; the index file is not trusted, the files are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        existing = self.config.get("quantization_config")
        if existing:
            method = existing.get("quant_method", "unknown")
            raise QuantizeError(
                f"{path} is already quantised ({method}); start from the 16-bit or 32-bit weights"
            )
        self._files: dict[str, Path] = {}
        self.shapes = {}
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise QuantizeError(
                f"{path} holds no *.safetensors; save the model in safetensors form first"
            )
        for file in files:
            self._read_header(file)
        self._check_index()

    def _read_header(self, file: Path) -> None:
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    if name in self._files:
                        raise QuantizeError(
                            f"{name} is in both {self._files[name].name} and {file.name}; "
                            "remove the stale file"
                        )
                    self._files[name] = file
                    self.shapes[name] = tuple(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise QuantizeError(f"{file} cannot be read (truncated?): {error}") from error

    def _check_index(self) -> None:
        index = self.path / "model.safetensors.index.json"
        if not index.exists():
            return
        listed = set(read_json(index).get("weight_map", {}).values())
        missing = sorted(name for name in listed if not (self.path / name).exists())
        if missing:
            raise QuantizeError(
                f"{self.path}: {', '.join(missing)} is listed in {index.name} but absent; "
                "download the model again"
            )

    def load(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], "pt") as tensors:
            return tensors.get_tensor(name)

    def identity(self) -> dict:
        files = sorted(set(self._files.values()))
        config = json.dumps(self.config, sort_keys=True)
        return {
            "kind": "folder",
            "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
            "files": {file.name: file_identity(file) for file in files},
        }

    def write_companions(self, folder: Path) -> None:
        for name in _KEPT_FILES:
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, folder / name)
        for pattern in _KEPT_PATTERNS:
            for file in sorted(self.path.glob(pattern)):
                if file.is_file():
                    shutil.copyfile(file, folder / file.name)

    def transformers_model(self) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        quiet_transformers()
        return AutoModelForCausalLM.from_pretrained(
            self.path, dtype="auto", local_files_only=True
        ).eval()

    def tokenizer(self):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path, local_files_only=True)


def quiet_transformers() -> None:
    """Keep transformers' own bars and hints out of the progress display."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def file_identity(file: Path) -> dict:
    """Size and a digest of the first and last MiB: enough to notice another model, and quick."""
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        digest.update(stream.read(1 << 20))
        stream.seek(max(0, size - (1 << 20)))
        digest.update(stream.read(1 << 20))
    return {"bytes": size, "sha256_of_ends": digest.hexdigest()}
