"""Exl3LinearMethod: linear layers served straight from the trellis.

One layer is one op call, whatever it was fused from: each stored module keeps its own bits,
codebook and input scales. Members of a fused layer that are not EXL3 stay ordinary weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    QKVParallelLinear,
    ReplicatedLinear,
)

from exl3_plugin import boot, loading
from exl3_plugin.shards import lay_out

if TYPE_CHECKING:
    from exl3_plugin.checkpoint import Module
    from exl3_plugin.config import Exl3Config


class Exl3LinearMethod(LinearMethodBase):
    """Weights and arithmetic of one replicated, column, merged, qkv or row parallel layer.

    Args:
        config: the checkpoint's config, kept so the load audit finds it through the layer.
        prefix: vLLM's name of the layer.
        modules: stored modules in output order; at least one is EXL3.
    """

    def __init__(self, config: Exl3Config, prefix: str, modules: Sequence[Module]):
        self.config = config
        self.prefix = prefix
        self.modules = tuple(modules)

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Allocate this rank's share of the trellis, `suh`, `svh` and plain weights.

        vLLM's own loader (in `extra_weight_attrs`) is not used: it narrows tensors at places where
        a 128-block may not be cut.
        """
        whole = isinstance(layer, ReplicatedLinear)
        tp_rank, tp_size = (0, 1) if whole else (layer.tp_rank, layer.tp_size)
        replicas = None
        if isinstance(layer, QKVParallelLinear):
            shared = layer.num_kv_head_replicas
            replicas = [1] + [shared] * (len(output_partition_sizes) - 1)
        elif len(output_partition_sizes) == 1 and output_partition_sizes[0] == output_size:
            replicas = [tp_size]
        layout = lay_out(
            self.prefix,
            [loading.member(module) for module in self.modules],
            partition_sizes=output_partition_sizes,
            input_size=input_size,
            input_size_per_rank=input_size_per_partition,
            tp_rank=tp_rank,
            tp_size=tp_size,
            replicas=replicas,
        )
        loading.create_parameters(layer, layout, self.modules, params_dtype)
        self.config.record.expect(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Refuse a layer that was not filled; bring it into the form that the kernels read."""
        boot.complete(layer, self.prefix, self.config.record)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x` [..., k of this rank] to [..., outputs of this rank], in x's dtype."""
        held: loading.Held = layer.exl3
        if not held.order:
            return loading.multiply(layer, x, bias)
        decoded = loading.multiply(layer, x).split(held.decoded_sizes, dim=-1)
        plain = F.linear(x, layer.plain_weight).split(held.plain_sizes, dim=-1)
        out = torch.cat([decoded[i] if exl3 else plain[i] for exl3, i in held.order], dim=-1)
        return out if bias is None else out + bias
