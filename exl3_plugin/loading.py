"""Parameters of EXL3 layers: allocated in their final place, filled by loaders that know the cut.

A layer's trellis is one flat tensor, the stored tiles of its segments one after the other, which is
what the op reads. Loaders copy each stored tensor's share straight there, so nothing is
concatenated afterwards and no second copy of a weight ever exists. The CUDA kernels read tiles in
another order, into which each matrix is brought in place once it is loaded.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter
from vllm.model_executor.utils import set_weight_attrs

from exl3_plugin import ops
from exl3_plugin.format import CODEBOOKS, MARKERS, SHARD_FIELDS, TILE
from exl3_plugin.shards import Cut, Layout, Member

if TYPE_CHECKING:
    from exl3_plugin.checkpoint import Module

# The stored suffixes of an EXL3 linear, and the parameter each is copied into.
SCALES = {"suh": "suh", "su": "suh", "svh": "svh", "sv": "svh"}

OFFERED: dict[str, torch.Tensor] = {}
"""Stored tensors that were handed to a model's loader and have not come back yet, by name."""

SHARD_NAMES = {"q": 0, "k": 1, "v": 2, "index_q": 3, "index_k": 4}


class LoadError(ValueError):
    """A tensor could not be placed, or a parameter was not filled."""


@dataclass
class Held:
    """What one layer holds, kept on the layer as `layer.exl3`.

    `shards` and `k_begin` are the op's arguments. Where some members are plain, the outputs are
    split into `decoded_sizes` and `plain_sizes`, and `order` says (is EXL3, which piece) for each
    piece of the result; it is empty where no member is plain.
    `missing` are the stored tensors that have not been loaded yet. `dtype` is the model's; `strips`
    says that the trellis is in the order of the CUDA kernels.
    """

    layout: Layout
    modules: tuple[Module, ...]
    shards: list[int]
    k_begin: int
    dtype: torch.dtype
    strips: bool = False
    order: list[tuple[bool, int]] = field(default_factory=list)
    decoded_sizes: list[int] = field(default_factory=list)
    plain_sizes: list[int] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)


def member(module: Module) -> Member:
    """The sizes that decide how a stored module is cut."""
    if module.kind == "exl3":
        words = module.tensors["trellis"].shape[-1]
        return Member(module.name, "exl3", module.k, module.n, words, module.codebook)
    if "weight" not in module.tensors or module.k is None:
        raise LoadError(
            f"{module.name} holds {', '.join(module.tensors)}: neither an EXL3 layer nor a plain "
            "weight matrix"
        )
    return Member(module.name, "plain", module.k, module.n)


def create_parameters(
    layer: torch.nn.Module, layout: Layout, modules: Sequence[Module], dtype: torch.dtype
) -> None:
    """Register `trellis` (int16, flat), `suh` [segments, k], `svh` [sum of n] (both float16),
    marker and plain parameters on `layer`, with loaders, and its `Held` as `layer.exl3`.

    Sizes are this rank's. `dtype` is that of the activations and of plain members.

    Raises:
        LoadError: the checkpoint holds a tensor that no EXL3 layer has, or the device's kernels do
            not compute in `dtype`.
    """
    ops.load()
    names = ", ".join(module.name for module in modules)
    refuse_dtype(names, dtype, torch.get_default_device())
    quantised, plain, rows = layout.quantised, layout.plain, layout.rows
    tiles = [
        (rows.loaded // TILE) * (s.columns.loaded // TILE) * layout.members[s.member].words
        for s in quantised
    ]
    shards: list[int] = []
    for segment in quantised:
        source, columns = layout.members[segment.member], segment.columns
        codebook = CODEBOOKS.index(source.codebook)
        shards += [codebook, source.words, columns.loaded, columns.begin, columns.size]
    held = Held(layout, tuple(modules), shards, rows.begin, dtype)
    if plain:
        kinds = [layout.members[s.member].kind == "exl3" for s in layout.segments]
        held.order = [(kind, kinds[:i].count(kind)) for i, kind in enumerate(kinds)]
        held.decoded_sizes = [s.columns.size for s in quantised]
        held.plain_sizes = [s.columns.size for s in plain]
    layer.exl3 = held

    wide = sum(s.columns.loaded for s in quantised)
    parameters = {
        "trellis": torch.empty(sum(tiles), dtype=torch.int16),
        "suh": torch.empty(len(quantised), rows.loaded, dtype=torch.float16),
        "svh": torch.empty(wide, dtype=torch.float16),
    }
    if any(s.columns.stop > layout.members[s.member].n for s in quantised):
        # Padding of the vocabulary: blocks that are stored nowhere decode to exact zeros.
        parameters["trellis"].zero_()
        parameters["svh"].zero_()
    if plain:
        parameters["weight"] = torch.empty(sum(held.plain_sizes), rows.size, dtype=dtype)
    for name, data in parameters.items():
        layer.register_parameter(name, Parameter(data, requires_grad=False))

    destinations = _destinations(layer, layout)
    stored = {suffix for module in modules for suffix in module.tensors} - {"bias"}
    for suffix in sorted(stored):
        if suffix not in destinations and suffix not in MARKERS:
            owner = next(m.name for m in modules if suffix in m.tensors)
            raise LoadError(f"{owner}.{suffix} is not part of an EXL3 layer; remove it")
        if suffix not in parameters:
            # Markers, and legacy signs, which go into `suh` and `svh`: only for the loader's eyes.
            size = len(modules) if suffix in MARKERS else 0
            layer.register_parameter(
                suffix, Parameter(torch.zeros(size, dtype=torch.int32), requires_grad=False)
            )
        loader = _loader(held, suffix, destinations.get(suffix))
        set_weight_attrs(getattr(layer, suffix), {"weight_loader": loader})
    held.missing = {
        f"{module.name}.{suffix}" for module in modules for suffix in module.tensors.keys() & stored
    }


def refuse_dtype(layer: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse activations that the kernels of a device do not take.

    Raises:
        LoadError: names the layer and what to pass to vLLM.
    """
    if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        raise LoadError(
            f"{layer}: this layer is to compute in {str(dtype).removeprefix('torch.')}, and the "
            "EXL3 kernels on CUDA take bfloat16 or float16; serve with --dtype bfloat16 or "
            "--dtype float16"
        )


Destination = Callable[[int], Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]]


def _overlap(cut: Cut, stored: int) -> slice:
    """The stored part of a cut; padding beyond it stays zero."""
    return slice(cut.first, min(cut.stop, stored))


def _destinations(layer: torch.nn.Module, layout: Layout) -> dict[str, Destination]:
    """For each suffix: member index -> pairs of (where to copy, how to cut the stored tensor)."""
    rows = layout.rows

    def trellis(index: int):
        at, source = 0, layout.members[index]
        k_tiles = slice(rows.first // TILE, rows.stop // TILE)
        for segment in layout.quantised:
            words = layout.members[segment.member].words
            shape = (rows.loaded // TILE, segment.columns.loaded // TILE, words)
            count = shape[0] * shape[1] * shape[2]
            if segment.member == index:
                columns = _overlap(segment.columns, source.n)
                n_tiles = slice(columns.start // TILE, columns.stop // TILE)
                place = layer.trellis.data[at : at + count].view(shape)
                yield (
                    place[:, : max(n_tiles.stop - n_tiles.start, 0)],
                    lambda w, n_tiles=n_tiles: _int16(w)[k_tiles, n_tiles],
                )
            at += count

    def suh(index: int):
        for number, segment in enumerate(layout.quantised):
            if segment.member == index:
                yield layer.suh.data[number], lambda w: scales(w)[rows.first : rows.stop]

    def svh(index: int):
        at = 0
        for segment in layout.quantised:
            if segment.member == index:
                columns = _overlap(segment.columns, layout.members[index].n)
                count = max(columns.stop - columns.start, 0)
                yield (
                    layer.svh.data[at : at + count],
                    lambda w, columns=columns: scales(w)[columns],
                )
            at += segment.columns.loaded

    def weight(index: int):
        at, first = 0, rows.first + rows.begin
        for segment in layout.plain:
            size = segment.columns.size
            if segment.member == index:
                start = segment.columns.first + segment.columns.begin
                yield (
                    layer.weight.data[at : at + size],
                    lambda w, start=start, size=size: w[
                        start : start + size, first : first + rows.size
                    ],
                )
            at += size

    return {"trellis": trellis, "suh": suh, "su": suh, "svh": svh, "sv": svh, "weight": weight}


def _int16(words: torch.Tensor) -> torch.Tensor:
    return words if words.dtype == torch.int16 else words.view(torch.int16)


def scales(vector: torch.Tensor) -> torch.Tensor:
    """`suh`/`svh` as stored; legacy packed signs as float16 +-1, bit i of word q for 16q + i."""
    if vector.is_floating_point():
        return vector
    bits = _int16(vector).to(torch.int32)[:, None] >> torch.arange(TILE, device=vector.device)
    return (1 - 2 * (bits & 1)).to(torch.float16).reshape(-1)


def _loader(held: Held, suffix: str, destination: Destination | None) -> Callable[..., None]:
    """The weight loader of one parameter, for every way vLLM's models call one."""

    def load(param: Parameter, loaded: torch.Tensor, *args, **kwargs) -> None:
        shard = args[0] if args else kwargs.get("shard_id", kwargs.get("loaded_shard_id"))
        index = _member_of(held.layout, shard)
        module = held.modules[index]
        stored = module.tensors.get(suffix)
        if stored is None or tuple(loaded.shape) != stored.shape:
            expected = "no such tensor" if stored is None else list(stored.shape)
            raise LoadError(
                f"{module.name}.{suffix}: the model's loader passed {list(loaded.shape)}, the "
                f"checkpoint holds {expected}; {_REARRANGED}"
            )
        _refuse_rearranged(stored.name, loaded)
        if destination is None:
            _check_marker(stored.name, loaded)
            param.data[index : index + 1].copy_(loaded.reshape(1))
        else:
            for place, cut in destination(index):
                place.copy_(cut(loaded))
        held.missing.discard(stored.name)

    return load


_REARRANGED = "this model rearranges weights in a way that EXL3 tensors do not survive"


def _refuse_rearranged(name: str, loaded: torch.Tensor) -> None:
    """Refuse a tensor of the right shape whose contents a model's loader has permuted.

    Some classes sort fused query, key and value rows by head (Bloom). What was handed out mostly
    comes back as the same memory; copies are compared.
    """
    stored = OFFERED.pop(name, None)
    if stored is None or loaded is stored:
        return
    here = (loaded.data_ptr(), loaded.stride()) == (stored.data_ptr(), stored.stride())
    if not here and not torch.equal(loaded, stored.to(loaded.device)):
        raise LoadError(f"{name}: the model's loader passed other contents; {_REARRANGED}")


def _member_of(layout: Layout, shard) -> int:
    """Which member a shard id means: a partition, a span of them, or all (None)."""
    if shard is None:
        if len(layout.members) == 1:
            return 0
        raise LoadError(
            f"a tensor without shard id was loaded into a layer fused from "
            f"{', '.join(m.name for m in layout.members)}"
        )
    span = shard if isinstance(shard, tuple) else (SHARD_NAMES.get(shard, shard),)
    for index, owned in enumerate(layout.spans):
        if owned == span:
            return index
    raise LoadError(
        f"shard {shard!r} matches none of {', '.join(m.name for m in layout.members)}, which cover "
        f"outputs {list(layout.spans)}"
    )


def _check_marker(name: str, loaded: torch.Tensor) -> None:
    expected = MARKERS[name.rpartition(".")[2]]
    found = int(loaded.reshape(-1)[0]) & 0xFFFFFFFF
    if found != expected:
        raise LoadError(f"{name} is {found:#010x}, expected {expected:#010x}")


def finish(layer: torch.nn.Module, prefix: str) -> None:
    """After loading: refuse a layer that lacks tensors, drop parameters that only loading needed.

    `qweight` is there because vLLM's MLA looks for it, and for its device, to learn that
    `kv_b_proj` is quantised. It is empty and not registered: a second reference to the trellis
    would keep the words of a reload alive beside those that graphs use.
    """
    held: Held = layer.exl3
    if held.missing:
        if not dummy_weights():
            missing = ", ".join(sorted(held.missing))
            raise LoadError(f"{prefix} was not filled; not loaded: {missing}")
        invent(layer, prefix)
    keep = {"trellis", "suh", "svh", "weight", "bias"}
    for name in [name for name, _ in layer.named_parameters(recurse=False) if name not in keep]:
        delattr(layer, name)
    if held.plain_sizes:
        weight = layer.weight
        del layer.weight
        layer.register_parameter("plain_weight", weight)
    layer.__dict__["qweight"] = layer.trellis.new_empty(0)


def invent(layer: torch.nn.Module, prefix: str) -> None:
    """Random weights for a layer that none were loaded into, the same ones for the same `prefix`.

    Any words are a valid trellis, and they decode to values of size 1. Input scales of 1 / sqrt(k)
    make outputs as large as inputs, so that a model of any depth stays finite; padding stays zero.
    """
    held: Held = layer.exl3
    random_words(layer.trellis.data, prefix)
    layer.suh.data.fill_(held.layout.members[0].k ** -0.5)
    layer.svh.data.fill_(1)
    at = 0
    for segment in held.layout.quantised:
        columns = segment.columns
        beyond = columns.stop - max(held.layout.members[segment.member].n, columns.first)
        at += columns.loaded
        if beyond > 0:
            layer.svh.data[at - beyond : at].zero_()


def random_words(trellis: torch.Tensor, seed: str) -> None:
    """Fills words with random bits, the same ones for the same `seed`."""
    generator = torch.Generator(trellis.device).manual_seed(zlib.crc32(seed.encode()))
    trellis.view(torch.uint8).random_(0, 256, generator=generator)


def matrices(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The trellis of each segment as stored, int16 `[k/16, n/16, 16*bits]`.

    Views where the layer holds the stored order; copies, made one at a time, where it holds strips.
    """
    held: Held = layer.exl3
    for (_, words, n, _, _), flat in _pieces(layer):
        k = layer.suh.shape[1]
        if held.strips:
            yield ops.from_strips(flat, k, n)
        else:
            yield flat.view(k // TILE, n // TILE, words)


def to_kernel_order(layer: torch.nn.Module) -> None:
    """Bring the trellis into the order that the kernels of its device read; the CPU's is as stored.

    In place, matrix by matrix: what is needed beyond the layer is a copy of its widest member.
    """
    if layer.trellis.is_cuda:
        reorder(layer)


def reorder(layer: torch.nn.Module) -> None:
    """Make strips of a trellis in the stored order.

    Its loader goes, so that a tensor in the stored order cannot be written over strips unnoticed;
    vLLM's weight reloading brings a parameter of its own, in the stored order and with a loader.
    """
    held: Held = layer.exl3
    held.strips = False
    for matrix, (_, flat) in zip(matrices(layer), _pieces(layer)):
        flat.copy_(ops.to_strips(matrix))
    held.strips = True
    del layer.trellis.weight_loader


def is_finished(layer: torch.nn.Module) -> bool:
    """Whether the layer is in kernel order and nothing was loaded since."""
    return layer.exl3.strips and not hasattr(layer.trellis, "weight_loader")


def _pieces(layer: torch.nn.Module) -> Iterator[tuple[list[int], torch.Tensor]]:
    """For each segment its numbers in `Held.shards` and its words, a flat view of the trellis."""
    shards, at = layer.exl3.shards, 0
    for i in range(0, len(shards), SHARD_FIELDS):
        shard = shards[i : i + SHARD_FIELDS]
        count = layer.suh.shape[1] // TILE * (shard[2] // TILE) * shard[1]
        yield shard, layer.trellis.data[at : at + count]
        at += count


def multiply(
    layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The quantised part of a layer: `x` [..., k of this rank] to [..., its outputs], in x's dtype.

    Every product of an EXL3 layer goes through here: linears, heads and the self-test.
    """
    held: Held = layer.exl3
    return torch.ops.exl3.linear(
        x, layer.trellis, layer.suh, layer.svh, bias, held.shards, held.k_begin
    )


def dummy_weights() -> bool:
    """Whether vLLM was told to invent weights (`--load-format dummy`, for benchmarks)."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == "dummy"
