"""`lm_head` from the trellis, for any vocabulary at any tensor parallel size.

vLLM pads the vocabulary to 64 rows before it divides it among the ranks, which leaves ranks with
half a 128-block. The layer registered here pads an EXL3 head to 128 per rank instead, so padding
comes in whole blocks at the end; heads that are not EXL3 are built exactly as before.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from exl3_plugin import boot, loading
from exl3_plugin.format import BLOCK
from exl3_plugin.shards import lay_out_head

if TYPE_CHECKING:
    from exl3_plugin.checkpoint import Module
    from exl3_plugin.config import Exl3Config

logger = init_logger("vllm.exl3")


class Exl3HeadMethod(QuantizeMethodBase):
    """Weights and arithmetic of an EXL3 `lm_head`."""

    def __init__(self, config: Exl3Config, prefix: str, module: Module):
        self.config = config
        self.prefix = prefix
        self.module = module

    def create_weights(
        self,
        layer: ParallelLMHead,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Allocate the blocks of this rank's part of the vocabulary; padding blocks are zero."""
        layout = lay_out_head(
            self.prefix,
            loading.member(self.module),
            vocab_start=layer.shard_indices.padded_org_vocab_start_index,
            columns=output_partition_sizes[0],
            input_size=input_size,
            vocab=layer.org_vocab_size,
        )
        loading.create_parameters(layer, layout, (self.module,), params_dtype)
        self.config.record.expect(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Refuse a head that was not filled; bring it into the form that the kernels read."""
        boot.complete(layer, self.prefix, self.config.record, became="head")

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states [rows, hidden] to this rank's logits [rows, padded vocabulary / ranks]."""
        return loading.multiply(layer, x, bias)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module):
        """A stored head wins over a config that still says the embeddings are tied."""
        logger.info("%s is stored; tie_word_embeddings is ignored", self.prefix)
        return layer


class LookupOnlyMethod(UnquantizedEmbeddingMethod):
    """A plain embedding beside an EXL3 head: rows are looked up, never multiplied with.

    vLLM's method packs every embedding a second time for matrix products on a CPU, in case it is
    also the head. Here that copy is made only if somebody does multiply with it.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not hasattr(layer, "cpu_linear"):
            super().process_weights_after_loading(layer)
        return super().apply(layer, x, bias)


class Exl3ParallelLMHead(ParallelLMHead):
    """ParallelLMHead that pads an EXL3 head to whole 128-blocks on every rank."""

    def __init__(self, *args, **kwargs):
        given = _HEAD_SIGNATURE.bind(self, *args, **kwargs)
        given.apply_defaults()
        if _is_exl3(given.arguments["quant_config"], given.arguments["prefix"]):
            whole = given.arguments["disable_tp"]
            ranks = 1 if whole else get_tensor_model_parallel_world_size()
            padding = given.arguments["padding_size"]
            given.arguments["padding_size"] = math.lcm(padding, BLOCK * ranks)
        super().__init__(*given.args[1:], **given.kwargs)


_HEAD_SIGNATURE = inspect.signature(ParallelLMHead.__init__)


def _is_exl3(quant_config, prefix: str) -> bool:
    from exl3_plugin.config import Exl3Config

    if not isinstance(quant_config, Exl3Config):
        return False
    module = quant_config.find(prefix)
    return module is not None and module.kind == "exl3"


def install_head() -> None:
    """Make vLLM build our head class; idempotent. Heads of other models are not changed by it.

    Where another plugin replaced the head already, its class stays: ranks whose part begins inside
    a 128-block then load that block as well, which costs memory but not correctness.
    """
    present = op_registry_oot.get("ParallelLMHead")
    if present is None:
        PluggableLayer.register_oot(Exl3ParallelLMHead, name="ParallelLMHead")
    elif present is not Exl3ParallelLMHead:
        logger.warning("ParallelLMHead is already replaced by %s; left in place", present)
