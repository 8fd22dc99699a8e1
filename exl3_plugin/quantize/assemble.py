"""Finished modules become a checkpoint folder, which appears complete or not at all."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from exl3_plugin import __version__
from exl3_plugin.format import MARKERS
from exl3_plugin.quantize.inventory import Inventory
from exl3_plugin.quantize.source import Source
from exl3_plugin.quantize.store import WorkFolder, write_whole

_OURS = re.compile(
    r"^(model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|config\.json"
    r"|quantization_config\.json)$"
)
"""Files that a conversion writes and a later one replaces."""


def is_complete(out: Path) -> bool:
    """Whether `out` holds a checkpoint: config.json is written last."""
    return (out / "config.json").exists()


def quantization_config(settings: Mapping) -> dict:
    """The `quantization_config` object, in the fields of exllamav3's own converter."""
    calibration = settings["calibration"]
    return {
        "quant_method": "exl3",
        "version": f"exl3-fleet {__version__}",
        "bits": float(settings["bits"]),
        "head_bits": settings["head_bits"],
        "calibration": {
            "rows": calibration["rows"] if calibration else 0,
            "cols": calibration["columns"] if calibration else 0,
        },
        "out_scales": "always",
        "codebook": settings["codebook"],
    }


def assemble(
    work: WorkFolder,
    source: Source,
    inventory: Inventory,
    rates: Mapping[str, float],
    settings: Mapping,
    shard_bytes: int,
) -> None:
    """Write the checkpoint into `work.out` from finished modules and the source's plain tensors.

    Everything is prepared inside the work folder and renamed into place, config.json last.
    """
    staging = work.path / "checkpoint"
    staging.mkdir(exist_ok=True)
    for leftover in staging.iterdir():
        leftover.unlink()
    source.write_companions(staging)
    shards, sizes = _plan_shards(work, source, inventory, shard_bytes)
    names = _shard_names(len(shards))
    weight_map: dict[str, str] = {}
    storage: dict[str, dict] = {}
    for file, units in zip(names, shards, strict=True):
        tensors: dict[str, torch.Tensor] = {}
        for unit in units:
            content = _unit_tensors(work, source, inventory, unit)
            tensors |= content
            _describe(storage, content, rates)
        write_whole(staging / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    if len(names) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        _write_json(staging / "model.safetensors.index.json", index)
    quantization = quantization_config(settings)
    _write_json(staging / "quantization_config.json", quantization | {"tensor_storage": storage})
    _write_json(staging / "config.json", _model_config(source.config, quantization))
    _publish(staging, work.out)


def _plan_shards(
    work: WorkFolder, source: Source, inventory: Inventory, shard_bytes: int
) -> tuple[list[list[str]], dict[str, int]]:
    """Units (plain tensors and modules) of each shard, and the bytes of every unit."""
    plain = sorted(inventory.plain)
    # The embedding goes first, as the network does.
    plain.sort(key=lambda name: "embed" not in name)
    units = [*plain, *(linear.name for linear in inventory.linears)]
    modules = {linear.name for linear in inventory.linears}
    sizes = {}
    shards: list[list[str]] = [[]]
    filled = 0
    for unit in units:
        if unit in modules:
            size = work.file_of(unit).stat().st_size
        else:
            tensor = source.load(unit)
            size = tensor.numel() * tensor.element_size()
        sizes[unit] = size
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += size
    return shards, sizes


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]


def _unit_tensors(
    work: WorkFolder, source: Source, inventory: Inventory, unit: str
) -> dict[str, torch.Tensor]:
    if unit in inventory.plain:
        return {unit: source.load(unit).contiguous()}
    tensors, _ = work.load(unit)
    return {f"{unit}.{suffix}": tensor for suffix, tensor in tensors.items()}


def _describe(
    storage: dict[str, dict], content: Mapping[str, torch.Tensor], rates: Mapping[str, float]
) -> None:
    """Add the tensors of one unit to the `tensor_storage` map."""
    for name, tensor in content.items():
        module, _, suffix = name.rpartition(".")
        entry = storage.setdefault(module, {"stored_tensors": {}})
        entry["stored_tensors"][name] = {
            "shape": list(tensor.shape),
            "n_bytes": tensor.numel() * tensor.element_size(),
            "dtype": str(tensor.dtype),
        }
        if suffix == "trellis":
            bits = rates[module]
            entry["quant_format"] = "exl3"
            entry["bits_per_weight"] = int(bits) if bits == int(bits) else bits
        if suffix in MARKERS:
            entry[f"{suffix}_multiplier"] = MARKERS[suffix]


def _model_config(config: Mapping, quantization: Mapping) -> dict:
    """The source's config with the quantisation in it and the head untied, at every level."""
    result = copy.deepcopy(dict(config))
    result["tie_word_embeddings"] = False
    for nested in result.values():
        if isinstance(nested, dict) and "tie_word_embeddings" in nested:
            nested["tie_word_embeddings"] = False
    if isinstance(result.get("text_config"), dict):
        result["text_config"]["tie_word_embeddings"] = False
    result["quantization_config"] = dict(quantization)
    return result


def _write_json(file: Path, content: dict) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")


def _publish(staging: Path, out: Path) -> None:
    """Move the new files over the old ones. Without config.json nothing takes `out` for a model."""
    (out / "config.json").unlink(missing_ok=True)
    for old in out.iterdir():
        if old.is_file() and _OURS.match(old.name):
            old.unlink()
    new = sorted(staging.iterdir(), key=lambda file: file.name == "config.json")
    for file in new:
        file.rename(out / file.name)
