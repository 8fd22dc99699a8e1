"""What a checkpoint holds, from its safetensors headers alone.

The tensors are the truth. `config.json` gives the model's own sizes; the shard index and
`quantization_config.json` are hints that are often stale, so where they disagree with the tensors
that is a warning, never the answer. Whatever could only decode to garbage is refused here, before
anything is loaded, with the tensor's name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exl3_plugin.format import BLOCK, EMBEDDING_GROUP, MARKERS, FormatError
from exl3_plugin.headers import (
    CheckpointError,
    Source,
    TensorInfo,
    open_source,
    read_headers,
    read_scalar,
    some,
)
from exl3_plugin.layout import describe_embedding, describe_linear
from exl3_plugin.sizes import match_size, true_sizes

__all__ = ["Checkpoint", "CheckpointError", "Module", "TensorInfo", "read_checkpoint"]

# Suffixes that only the quantised form of a layer has.
_QUANTISED = {"trellis", "suh", "svh", "su", "sv", *MARKERS}

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")

# Other formats write the same tensor names and change what they mean; these words in a key of
# quantization_config give them away.
_FOREIGN_KEY = re.compile(r"rotation|tier|bitmap|permut", re.IGNORECASE)

_PLAIN_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class Module:
    """One module of the model and its stored tensors.

    `kind` is "exl3" (a quantised linear), "embedding" (quantised rows) or "plain". `k` inputs and
    `n` outputs are as stored, so padded to 128 for "exl3"; an embedding counts as the head it may
    be tied to, with its rows as `n` and its width, padded to 256 where quantised, as `k`. Both are
    None where a plain module has no matrix. `k_true` and `n_true` are the model's own sizes where
    config.json tells them. `bits` and `codebook` are None for plain modules. `tensors` maps the
    last part of a tensor's name to the tensor.
    """

    name: str
    kind: str
    bits: float | None
    codebook: str | None
    k: int | None
    n: int | None
    k_true: int | None
    n_true: int | None
    tensors: dict[str, TensorInfo]
    nbytes: int
    legacy_signs: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that can be served.

    `path` is the folder (for a Hub repository its id), `revision` the commit where there is one,
    `files` the safetensors files read, `warnings` what a person should know.
    """

    path: Path
    config: dict[str, Any]
    modules: dict[str, Module]
    tensors: dict[str, TensorInfo]
    files: list[str]
    revision: str | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Read and check the headers of a checkpoint.

    Args:
        source: a folder, or `owner/name` on the Hugging Face Hub (needs a network).
        revision: commit, tag or branch on the Hub; it is resolved to a commit.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, damaged, contradicts its config or
            is of a kind that is not supported.
    """
    where = open_source(source, revision)
    files = sorted(name for name in where.sizes if name.endswith(".safetensors"))
    if not files:
        raise CheckpointError(
            f"{where.name} holds no *.safetensors file (it holds {some(sorted(where.sizes))}); "
            "expected an EXL3 checkpoint"
            if where.sizes
            else f"{where.name} is empty, expected an EXL3 checkpoint"
        )
    config = where.read_json("config.json")
    if config is None:
        raise CheckpointError(
            f"{where.name} has no config.json; copy it from the model this was quantised from"
        )
    warnings: list[str] = []
    quantization = _quantization_map(where, warnings)
    for origin, keys in (
        ("config.json", config.get("quantization_config")),
        ("quantization_config.json", quantization),
    ):
        _refuse_foreign_keys(f"{where.name}/{origin}", keys)

    _check_shard_numbers(where, files)
    tensors = read_headers(where, files)
    _check_index(where, files, tensors, warnings)
    modules = _read_modules(where, config, tensors, warnings)
    _compare_with_map(modules, quantization, warnings)
    _compare_with_config(modules, config, warnings)
    return Checkpoint(where.path, config, modules, tensors, files, where.revision, warnings)


# Files


def _shard_lists(files: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(an existing shard, the missing ones of its numbered set), once per set."""
    sets: dict[tuple[str, str], set[int]] = defaultdict(set)
    for match in filter(None, map(_SHARD.fullmatch, files)):
        sets[match["stem"], match["total"]].add(int(match["number"]))
    for (stem, total), found in sorted(sets.items()):
        name = f"{stem}-{{:05d}}-of-{total}.safetensors"
        missing = [name.format(i) for i in range(1, int(total) + 1) if i not in found]
        yield name.format(min(found)), missing


def _index_maps(source: Source, warnings: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    for name in sorted(source.sizes):
        if not name.endswith(".safetensors.index.json"):
            continue
        try:
            index = source.read_json(name) or {}
        except CheckpointError as error:
            warnings.append(f"the shard index is ignored: {error}")
            continue
        weight_map = index.get("weight_map")
        if isinstance(weight_map, dict):
            yield name, weight_map


def _check_shard_numbers(source: Source, files: list[str]) -> None:
    """Numbered shards must be complete even where no index lists them."""
    for present, missing in _shard_lists(files):
        if not missing:
            continue
        should_hold = [
            tensor
            for _, weight_map in _index_maps(source, [])
            for tensor, file in weight_map.items()
            if file == missing[0]
        ]
        raise CheckpointError(
            f"{source.name}: shard {some(missing)} is missing, {present} says it must be there"
            + (f"; it should hold {some(should_hold)}" if should_hold else "")
            + "; download it again"
        )


def _check_index(
    source: Source, files: list[str], tensors: Mapping[str, TensorInfo], warnings: list[str]
) -> None:
    """Hold the shard index against the files: a lost shard is an error, a stale index is not."""
    held = {_split(name)[0] for name in tensors}
    for index, weight_map in _index_maps(source, warnings):
        lost = sorted(set(map(str, weight_map.values())) - set(files))
        for file in lost:
            absent = [t for t, f in weight_map.items() if f == file and _split(t)[0] not in held]
            if absent:
                raise CheckpointError(
                    f"{source.name}: shard {file} is missing, {index} says it holds "
                    f"{some(absent)}; download it again, or delete {index} if it belongs to "
                    "another checkpoint"
                )
        gone = sorted(set(weight_map) - set(tensors))
        new = sorted(set(tensors) - set(weight_map))
        if lost or gone or new:
            parts = [
                f"{len(names)} {what} ({some(names)})"
                for names, what in (
                    (lost, "files that do not exist"),
                    (gone, "tensors that no file holds"),
                    (new, "tensors it does not name"),
                )
                if names
            ]
            warnings.append(f"{index} is stale and was not believed: " + "; ".join(parts))


# Modules


def _split(tensor: str) -> tuple[str, str]:
    module, _, suffix = tensor.rpartition(".")
    return module, suffix


def _read_modules(
    source: Source,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    warnings: list[str],
) -> dict[str, Module]:
    groups: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module, suffix = _split(name)
        groups[module][suffix] = tensor
    remote = source.revision is not None and not source.path.is_dir()
    if remote and any(set(group) & set(MARKERS) for group in groups.values()):
        warnings.append(
            "the constants of the codebook markers were not compared, since each would be a "
            "request to the Hub; they are compared once the files are local"
        )
    modules, problems = {}, []
    for name, group in groups.items():
        try:
            module = _read_module(source, name, group, remote)
            modules[name] = _with_true_sizes(module, config)
        except FormatError as error:
            files = sorted({tensor.file for tensor in group.values()})
            problems.append(f"{name} (in {', '.join(files)}): {error}")
    if problems:
        rest = len(problems) - 5
        lines = problems[:5] + ([f"and {rest} more modules"] if rest > 0 else [])
        raise CheckpointError(f"{source.name} cannot be served:\n  " + "\n  ".join(lines))
    return modules


def _read_module(
    source: Source, name: str, group: dict[str, TensorInfo], trust_markers: bool
) -> Module:
    """Say what one module is; raises FormatError where it is nothing legal."""
    nbytes = sum(tensor.nbytes for tensor in group.values())
    shapes = {suffix: (tensor.dtype, tensor.shape) for suffix, tensor in group.items()}
    _refuse_unsupported_names(name, group)
    if "trellis" not in group:
        if leftover := sorted(_QUANTISED.intersection(group)):
            raise FormatError(
                f"{', '.join(leftover)} without a trellis; a shard is missing or was cut"
            )
        n, k = group["weight"].shape if _is_matrix(group.get("weight")) else (None, None)
        return Module(name, "plain", None, None, k, n, None, None, group, nbytes)
    if "weight" in group:
        raise FormatError("both a trellis and a plain weight; remove the one that is not meant")
    if len(group["trellis"].shape) == 2:
        bits, rows, width = describe_embedding(shapes)
        return Module(name, "embedding", bits, "mul1", width, rows, None, None, group, nbytes)
    markers = {}
    for marker in MARKERS.keys() & group.keys():
        tensor = group[marker]
        if trust_markers:
            markers[marker] = MARKERS[marker]
        elif tensor.nbytes == 4:
            markers[marker] = read_scalar(source, tensor)
    layout = describe_linear(shapes, markers)
    return Module(
        name, "exl3", layout.bits, layout.codebook, layout.k, layout.n, None, None, group, nbytes,
        layout.legacy_signs,
    )  # fmt: skip


def _is_matrix(tensor: TensorInfo | None) -> bool:
    return tensor is not None and len(tensor.shape) == 2


def _refuse_unsupported_names(name: str, group: Mapping[str, TensorInfo]) -> None:
    if not _QUANTISED.intersection(group):
        return
    if re.search(r"\.rank\d+$", name):
        raise FormatError(
            "tensors cut for one rank of tensor parallelism are not supported; use the uncut "
            "checkpoint"
        )
    if re.search(r"\.slice\.\d+$", name):
        raise FormatError(
            "layers cut into slices are not supported; quantise the model again with a recent "
            "exllamav3 or with `exl3ctl quantize`"
        )


def _with_true_sizes(module: Module, config: Mapping[str, Any]) -> Module:
    """Add the model's own sizes; raises FormatError where the stored ones contradict them."""
    if module.k is None or module.n is None:
        return module
    weight = module.tensors.get("weight")
    if weight is not None and weight.dtype not in _PLAIN_FLOATS:
        return module  # packed by another format, so the shape says nothing
    blocks = {"exl3": (BLOCK, BLOCK), "embedding": (EMBEDDING_GROUP, 1), "plain": (1, 1)}
    found: list[int | None] = []
    for axis, stored, allowed, block in zip(
        "kn", (module.k, module.n), true_sizes(module.name, config), blocks[module.kind]
    ):
        size = match_size(stored, allowed, block)
        if allowed and size is None:
            sizes = " or ".join(map(str, allowed))
            rounded = "" if block == 1 else f", rounded up to a multiple of {block}"
            raise FormatError(
                f"stored {axis} is {stored}, but config.json means {sizes}{rounded}; config.json "
                "and the tensors are of different models"
            )
        found.append(size)
    return replace(module, k_true=found[0], n_true=found[1])


# Hints


def _quantization_map(source: Source, warnings: list[str]) -> dict[str, Any]:
    try:
        return source.read_json("quantization_config.json") or {}
    except CheckpointError as error:
        warnings.append(f"ignored: {error}")
        return {}


def _refuse_foreign_keys(where: str, keys: Any) -> None:
    if not isinstance(keys, Mapping):
        return
    foreign = sorted(key for key, value in keys.items() if _FOREIGN_KEY.search(key) and value)
    if foreign:
        raise CheckpointError(
            f"{where} has {', '.join(foreign)}: a variant of EXL3 that decodes differently and is "
            "not supported; quantise the model with exllamav3 or `exl3ctl quantize`"
        )


def _compare_with_map(
    modules: Mapping[str, Module], quantization: Mapping[str, Any], warnings: list[str]
) -> None:
    """quantization_config.json lists modules too, often not all of them or ones long gone."""
    listed = quantization.get("tensor_storage")
    if not isinstance(listed, Mapping):
        return
    omitted = sorted(m.name for m in modules.values() if m.bits and m.name not in listed)
    if omitted:
        warnings.append(
            f"quantization_config.json omits quantised modules that the files hold: "
            f"{some(omitted)}; they are read from the files"
        )
    stored = {
        tensor
        for name, entry in listed.items()
        if isinstance(entry, Mapping) and name not in modules
        for tensor in entry.get("stored_tensors") or {}
    }
    if stored:
        warnings.append(
            f"quantization_config.json lists tensors that no file holds: {some(sorted(stored))}"
        )


def _compare_with_config(
    modules: Mapping[str, Module], config: Mapping[str, Any], warnings: list[str]
) -> None:
    quantised = any(module.bits for module in modules.values())
    section = config.get("quantization_config")
    if not quantised:
        warnings.append("no module is quantised as EXL3")
    elif not isinstance(section, Mapping):
        warnings.append("config.json has no quantization_config although modules are EXL3")
    elif section.get("quant_method") != "exl3":
        warnings.append(
            f"config.json has quant_method {section.get('quant_method')!r} although modules are "
            "EXL3; the tensors are believed"
        )
