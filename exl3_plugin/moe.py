"""Exl3MoEMethod: vLLM's routed experts served straight from the trellis.

All experts of a layer that live on this rank are one op call. Tensors are found by name and expert,
never by their rank: a trellis has three dimensions, which loaders take for stacked experts. A cut
between tensor-parallel ranks may fall inside a 128-block; a rank then holds the whole block and
uses its own columns, as in linear layers.

Workspaces come from torch's allocator in each call, so vLLM may run shared experts beside this on
another stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from exl3_plugin import loading, moe_selftest, ops
from exl3_plugin.checkpoint import CheckpointError
from exl3_plugin.experts import (
    DOWN,
    GATE,
    UP,
    Activation,
    Arrangement,
    Kind,
    Stored,
    arrange,
)
from exl3_plugin.format import MARKERS, TILE, bits_from_words
from exl3_plugin.loading import LoadError
from exl3_plugin.moe_options import activation_of, refuse_options
from exl3_plugin.shards import Cut, ShardingError, covering, round_up

if TYPE_CHECKING:
    from exl3_plugin.checkpoint import Module
    from exl3_plugin.config import Exl3Config

PROJECTIONS = {"w1": GATE, "w3": UP, "w2": DOWN}
"""vLLM's names of the shards."""
KEPT = ("trellis", "suh", "svh")
LEGACY = {"su": "suh", "sv": "svh"}

Three = tuple["Module", "Module", "Module"]


@dataclass
class HeldExperts:
    """What the routed experts of one layer hold, kept on the layer as `layer.exl3`.

    `stored` are gate, up and down of the experts here, in the order of their place on this rank;
    `elsewhere` the modules of the others. `inner` are the columns between the products that this
    rank holds and uses. `missing` are the stored tensors that have not been loaded yet.
    """

    stored: list[Three]
    elsewhere: frozenset[str]
    arrangement: Arrangement
    inner: Cut
    sizes: list[int]
    dtype: torch.dtype
    activation: Activation
    strips: bool = False
    missing: set[str] = field(default_factory=set)

    @property
    def modules(self) -> list[Module]:
        """All stored modules that are here."""
        return [module for three in self.stored for module in three]


def method_for(
    config: Exl3Config, layer: torch.nn.Module, prefix: str
) -> FusedMoEMethodBase | None:
    """The method for a `RoutedExperts`; None where its experts are not EXL3.

    Raises:
        CheckpointError: some experts are EXL3 and others are absent or are not.
    """
    base = prefix.removesuffix(".routed_experts")
    leaves = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    names = [
        [f"{base}.{expert}.{leaf}" for leaf in leaves if leaf is not None]
        for expert in range(layer.global_num_experts)
    ]
    found = [[config.find(name) for name in three] for three in names]
    flat = [module for three in found for module in three]
    if not any(module is not None and module.kind == "exl3" for module in flat):
        config.record.plain(layer, prefix, [])
        return None
    for three, modules in zip(names, found):
        for name, module in zip(three, modules):
            if module is None or module.kind != "exl3":
                what = "is not in the checkpoint" if module is None else "is not EXL3"
                raise CheckpointError(
                    f"{name} {what}, but other experts of this layer are EXL3; all experts of a "
                    "layer must be. Quantise the model again"
                )
    refuse_options(layer, prefix)
    return Exl3MoEMethod(config, prefix, [tuple(three) for three in found], layer.moe_config)


class Exl3MoEMethod(FusedMoEMethodBase):
    """Weights and arithmetic of the routed experts of one layer.

    Args:
        config: the checkpoint's config, kept so the load audit finds it through the layer.
        prefix: vLLM's name of the layer.
        modules: gate, up and down of every expert of the model, all EXL3.
        moe: vLLM's description of the layer.
    """

    def __init__(self, config: Exl3Config, prefix: str, modules: Sequence[Three], moe):
        super().__init__(moe)
        self.config = config
        self.prefix = prefix
        self.modules = list(modules)

    def maybe_roundup_sizes(
        self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
    ) -> tuple[int, int]:
        """Sizes stay: padding to 128 is in the checkpoint, and cuts may fall anywhere."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """None: vLLM's own kernels are not used."""

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Allocate this rank's experts, each at its own rate, with loaders that know the cut."""
        ops.load()
        loading.refuse_dtype(self.prefix, params_dtype, torch.get_default_device())
        places = _places(layer, len(self.modules))
        if sorted(places.values()) != list(range(num_experts)):
            raise LoadError(
                f"{self.prefix}: vLLM keeps {num_experts} experts on this rank, its map places "
                f"{len(places)}"
            )
        here = sorted(places, key=places.get)
        stored = [self.modules[expert] for expert in here]
        inner = self._cut(layer, hidden_size, intermediate_size_per_partition)
        kinds = [[_kind(module) for module in three] for three in stored]
        k, n = round_up(hidden_size), round_up(hidden_size)
        plan = arrange(kinds, k, inner.loaded, n)
        held = HeldExperts(
            stored=stored,
            elsewhere=frozenset(
                module.name
                for expert, three in enumerate(self.modules)
                if expert not in places
                for module in three
            ),
            arrangement=plan,
            inner=inner,
            sizes=[inner.begin, inner.size, hidden_size, int(plan.paired)],
            dtype=params_dtype,
            activation=activation_of(layer, self.prefix),
        )
        held.missing = {t.name for module in held.modules for t in module.tensors.values()}
        layer.exl3 = held
        half = {"dtype": torch.float16}
        for name, data in {
            "w13_trellis": torch.empty(plan.w13_words, dtype=torch.int16),
            "w13_suh": torch.empty(num_experts, 2, k, **half),
            "w13_svh": torch.empty(num_experts, 2, inner.loaded, **half),
            "w2_trellis": torch.empty(plan.w2_words, dtype=torch.int16),
            "w2_suh": torch.empty(num_experts, inner.loaded, **half),
            "w2_svh": torch.empty(num_experts, n, **half),
        }.items():
            layer.register_parameter(name, Parameter(data, requires_grad=False))
        layer.register_buffer("exl3_table", plan.table.to(layer.w13_suh.device), persistent=False)
        suffixes = {suffix for three in self.modules for m in three for suffix in m.tensors}
        for suffix in sorted(suffixes - set(KEPT)):
            if suffix not in LEGACY and suffix not in MARKERS:
                owner = next(m.name for t in self.modules for m in t if suffix in m.tensors)
                raise LoadError(f"{owner}.{suffix} is not part of an EXL3 expert; remove it")
            for side in ("w13", "w2"):
                # Only for the loader's eyes: markers were checked in the headers, legacy signs go
                # into the scales.
                size = num_experts * 2 if suffix in MARKERS else 0
                extra = Parameter(torch.zeros(size, dtype=torch.int32), requires_grad=False)
                layer.register_parameter(f"{side}_{suffix}", extra)
        for side in ("w13", "w2"):
            for suffix in sorted(suffixes | set(KEPT)):
                loader = _loader(layer, self.modules, places, suffix)
                set_weight_attrs(getattr(layer, f"{side}_{suffix}"), {"weight_loader": loader})
        self.config.record.expect(layer)

    def _cut(self, layer: torch.nn.Module, hidden: int, per_rank: int) -> Cut:
        """The columns of this rank; refuses experts whose stored sizes are not the model's."""
        whole = self.moe.intermediate_size
        for three in self.modules:
            for projection, module in enumerate(three):
                expected = [round_up(hidden), round_up(whole)]
                if projection == DOWN:
                    expected.reverse()
                if [module.k, module.n] != expected:
                    raise ShardingError(
                        f"{module.name} stores {module.k} x {module.n}, but {self.prefix} needs "
                        f"{expected[0]} x {expected[1]} (hidden {hidden}, intermediate {whole}, "
                        "rounded up to 128): the tensors contradict config.json, or were cut for "
                        "one rank; use the uncut checkpoint"
                    )
        rank, ranks = self.moe.tp_rank, self.moe.tp_size
        if per_rank * ranks != whole:
            raise ShardingError(
                f"{self.prefix}: {whole} columns between the products cannot be divided among "
                f"{ranks} ranks"
            )
        return covering(rank * per_rank, per_rank)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Refuse a layer that was not filled; bring it into the form that the kernels read."""
        held: HeldExperts = layer.exl3
        if held.strips and not hasattr(layer.w13_trellis, "weight_loader"):
            return
        if held.missing:
            if not loading.dummy_weights():
                names = sorted(held.missing)
                raise LoadError(
                    f"{self.prefix} was not filled; not loaded: {', '.join(names[:20])}"
                    + (f", and {len(names) - 20} more" if len(names) > 20 else "")
                )
            invent(layer, self.prefix)
        keep = {f"{side}_{suffix}" for side in ("w13", "w2") for suffix in KEPT}
        for name in [name for name, _ in layer.named_parameters(recurse=False)]:
            if name not in keep:
                delattr(layer, name)
        record = self.config.record
        # The truth is taken from the words as stored, so that a wrong order shows too.
        test = self._prepare_test(layer) if record.self_test else None
        if layer.w13_trellis.is_cuda:
            to_strips(layer)
        if test is not None:
            record.results.append(
                moe_selftest.run(test, partial(multiply, layer), held.activation, held.dtype)
            )
        record.loaded(layer, self.prefix, "exl3")

    def _prepare_test(self, layer: torch.nn.Module) -> moe_selftest.Prepared | None:
        """Experts to test, unless a layer like this one was tested before."""
        held: HeldExperts = layer.exl3
        places = sorted({0, len(held.stored) - 1})
        kinds = tuple(_kind(module) for place in places for module in held.stored[place])
        sizes = (layer.w13_suh.shape, layer.w13_svh.shape, *held.sizes)
        if ("experts", sizes, kinds) in self.config.record.tested:
            return None
        self.config.record.tested.add(("experts", sizes, kinds))
        inner = slice(held.inner.begin, held.inner.begin + held.inner.size)
        experts = {place: stored_expert(layer, place) for place in places}
        return moe_selftest.prepare(self.prefix, experts, inner, held.sizes[2])

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts=None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x` `[tokens, hidden]` to this rank's part of the routed sum, in x's dtype."""
        return multiply(
            layer, x, topk_weights.float(), topk_ids, layer.expert_map,
            layer.apply_router_weight_on_input,
        )  # fmt: skip


def invent(layer: torch.nn.Module, prefix: str) -> None:
    """Random experts, of the size of the random weights that `loading.invent` makes."""
    gate, _, down = layer.exl3.stored[0]
    for side, k in (("w13", gate.k), ("w2", down.k)):
        trellis, suh, svh = (getattr(layer, f"{side}_{suffix}").data for suffix in KEPT)
        loading.random_words(trellis, f"{prefix}.{side}")
        suh.fill_(k**-0.5)
        svh.fill_(1)


def multiply(
    layer: torch.nn.Module,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    weight_on_input: bool = False,
) -> torch.Tensor:
    """The op on a layer's experts; without a map, ids are places on this rank."""
    held: HeldExperts = layer.exl3
    return torch.ops.exl3.moe(
        x, weights, ids, expert_map, layer.w13_trellis, layer.w13_suh, layer.w13_svh,
        layer.w2_trellis, layer.w2_suh, layer.w2_svh, layer.exl3_table, held.arrangement.kinds,
        held.sizes, *held.activation.arguments, weight_on_input,
    )  # fmt: skip


def _places(layer: torch.nn.Module, experts: int) -> dict[int, int]:
    """Where vLLM puts each expert that lives on this rank: its number in the model to that here."""
    mapping = layer.expert_map
    if mapping is None:
        return {expert: expert for expert in range(experts)}
    return {expert: place for expert, place in enumerate(mapping.tolist()) if place >= 0}


def _kind(module: Module) -> Kind:
    return Kind(module.codebook, module.tensors["trellis"].shape[-1])


def matrix(layer: torch.nn.Module, place: int, projection: int) -> torch.Tensor:
    """The words of one matrix, a flat view of the trellis."""
    held: HeldExperts = layer.exl3
    trellis = layer.w2_trellis if projection == DOWN else layer.w13_trellis
    first = int(held.arrangement.table[projection, place, 0])
    words = _kind(held.stored[place][projection]).words
    outer = (layer.w2_svh if projection == DOWN else layer.w13_suh).shape[-1]
    return trellis.data[first : first + outer * held.inner.loaded // TILE**2 * words]


def stored_expert(layer: torch.nn.Module, place: int) -> tuple[Stored, ...]:
    """Gate, up and down of one expert as views; their words must be in the stored order."""
    held: HeldExperts = layer.exl3
    found = []
    for projection, module in enumerate(held.stored[place]):
        inner, words = held.inner.loaded // TILE, _kind(module).words
        shape = (inner, -1, words) if projection == DOWN else (-1, inner, words)
        trellis = matrix(layer, place, projection).view(shape)
        if projection == DOWN:
            scales = layer.w2_suh.data[place], layer.w2_svh.data[place]
        else:
            scales = layer.w13_suh.data[place, projection], layer.w13_svh.data[place, projection]
        found.append(Stored(trellis, *scales, module.codebook))
    return tuple(found)


def to_strips(layer: torch.nn.Module) -> None:
    """Bring every matrix into the order of the CUDA kernels, in place, one at a time."""
    held: HeldExperts = layer.exl3
    for place in range(len(held.stored)):
        for projection, stored in enumerate(stored_expert(layer, place)):
            matrix(layer, place, projection).copy_(ops.to_strips(stored.trellis))
    held.strips = True
    del layer.w13_trellis.weight_loader, layer.w2_trellis.weight_loader


def _loader(layer: torch.nn.Module, modules: list[Three], places: dict[int, int], suffix: str):
    """The weight loader of one parameter, for both ways in which vLLM's models call one."""
    held: HeldExperts = layer.exl3
    inner = slice(held.inner.first, held.inner.stop)
    tiles = slice(held.inner.first // TILE, held.inner.stop // TILE)

    def place_in(place: int, projection: int, loaded: torch.Tensor) -> None:
        if suffix == "trellis":
            loaded = loading._int16(loaded)
            loaded = loaded[tiles] if projection == DOWN else loaded[:, tiles]
            matrix(layer, place, projection).view(loaded.shape).copy_(loaded)
            return
        kind, scales = LEGACY.get(suffix, suffix), loading.scales(loaded)
        if projection == DOWN:
            to = (layer.w2_suh if kind == "suh" else layer.w2_svh).data[place]
            scales = scales[inner] if kind == "suh" else scales
        else:
            to = (layer.w13_suh if kind == "suh" else layer.w13_svh).data[place, projection]
            scales = scales[inner] if kind == "svh" else scales
        to.copy_(scales)

    def load(
        param: Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str = "",
        shard_id: str | None = None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        if shard_id not in PROJECTIONS or expert_id is None or not 0 <= expert_id < len(modules):
            raise LoadError(
                f"{weight_name}: the model's loader passed shard {shard_id!r} of expert "
                f"{expert_id}, expected w1, w2 or w3 of 0 to {len(modules) - 1}"
            )
        projection = PROJECTIONS[shard_id]
        module = modules[expert_id][projection]
        stored = module.tensors.get(suffix)
        if stored is None or tuple(loaded_weight.shape) != stored.shape:
            expected = "no such tensor" if stored is None else list(stored.shape)
            raise LoadError(
                f"{module.name}.{suffix}: the model's loader passed {list(loaded_weight.shape)}, "
                f"the checkpoint holds {expected}; this model rearranges weights in a way that "
                "EXL3 tensors do not survive"
            )
        place = places.get(expert_id)
        if place is None:
            return False if return_success else None
        if suffix in MARKERS:
            at = 2 * place + projection % DOWN
            param.data[at : at + 1].copy_(loaded_weight.reshape(1))
        else:
            place_in(place, projection, loaded_weight)
        held.missing.discard(stored.name)
        return True if return_success else None

    return load


def report_entries(layer: torch.nn.Module, prefix: str, became: str) -> list[dict]:
    """One entry of the load report for each stored module of the experts here."""
    held: HeldExperts = layer.exl3
    outer = layer.w13_suh.shape[2]
    padding = held.inner.loaded - held.inner.size
    entries = []
    for three in held.stored:
        for projection, module in enumerate(three):
            sizes = {"k": outer, "n": held.inner.loaded}
            spare = {"k": outer - held.sizes[2], "n": padding}
            if projection == DOWN:
                sizes, spare = ({"k": s["n"], "n": s["k"]} for s in (sizes, spare))
            words = _kind(module).words
            entries.append(
                {
                    "module": module.name,
                    "layer": prefix,
                    "became": became,
                    "bits": bits_from_words(words),
                    "codebook": module.codebook,
                    **sizes,
                    "padding": spare,
                    "bytes": 2 * (sizes["k"] * sizes["n"] // TILE**2 * words + sum(sizes.values())),
                    "plans": None,
                }
            )
    return entries
