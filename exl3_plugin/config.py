"""Exl3Config: what vLLM asks a quantisation about a model, answered from the checkpoint's headers.

vLLM builds the config in its front end, pickles it to the workers, tells it how the model class
renames modules, and then asks for one method a layer. The tensors are the truth: what is quantised,
with which bits and codebook, comes from the safetensors headers; both JSON configs are hints.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from exl3_plugin import env
from exl3_plugin.checkpoint import Checkpoint, CheckpointError, Module, read_checkpoint
from exl3_plugin.expert_names import check_experts
from exl3_plugin.shards import check_tensor_parallel

if TYPE_CHECKING:
    from exl3_plugin.report import LoadRecord

logger = init_logger("vllm.exl3")

# Fused layers that some model classes build without saying so in `packed_modules_mapping`.
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    "in_proj_qkvbfg_a": ["q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"],
    "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
    "in_proj_ba": ["in_proj_b", "in_proj_a"],
    "wk_weights_proj": ["wk", "weights_proj"],
}

# Path segments that wrapper classes put in front of, or leave out of, the same module's name.
WRAPPERS = frozenset({"model", "language_model", "text_model", "llm"})


_BY_HEAD = "vLLM sorts its outputs by head while loading"
# Classes whose loaders rearrange a plain weight and would take an EXL3 tensor as it is: which
# modules, and what is done to them. Blocks of 128 outputs share a transform, so the tensors cannot
# be rearranged.
REARRANGED = {
    "BloomForCausalLM": (r"query_key_value$", _BY_HEAD),
    "FalconForCausalLM": (r"query_key_value$", _BY_HEAD),
    "RWForCausalLM": (r"query_key_value$", _BY_HEAD),
    "GPT2LMHeadModel": (r"(c_attn|c_fc|c_proj)$", "vLLM transposes it while loading"),
    "Llama4ForCausalLM": (r"self_attn\.[qk]_proj$", "vLLM sorts its outputs for rotary embedding"),
    "Llama4ForConditionalGeneration": (
        r"language_model\..*self_attn\.[qk]_proj$",
        "vLLM sorts its outputs for rotary embedding",
    ),
}


class Exl3Config(QuantizationConfig):
    """vLLM's view of one EXL3 checkpoint. Picklable; holds headers, no tensors.

    `config` is the `quantization_config` of config.json, kept for reference only.
    """

    def __init__(self, config: dict[str, Any] | None = None):
        super().__init__()
        self.hints = dict(config or {})
        self.checkpoint: Checkpoint | None = None
        self.aliases: dict[str, str] = {}
        self.record: LoadRecord | None = None
        self._stripped: dict[str, str | None] | None = None

    def __repr__(self) -> str:
        held = len(self.checkpoint.modules) if self.checkpoint else "no"
        return f"Exl3Config({held} modules, hints={self.hints})"

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: not what this process has built."""
        return self.__dict__ | {"record": None}

    # -- what vLLM asks of every quantisation -----------------------------------------------------

    def get_name(self) -> str:
        return "exl3"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """vLLM refuses any other before it starts a process, and names these."""
        exact = [] if current_platform.is_cuda() else [torch.float32]
        return [torch.bfloat16, torch.float16, *exact]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Exl3Config:
        return cls(config)

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None) -> str | None:
        """Repackers stamp other names on EXL3 checkpoints; `--quantization exl3` settles it."""
        return "exl3" if user_quant == "exl3" else None

    def maybe_update_config(self, model_name: str, hf_config=None, revision=None) -> None:
        """Read the checkpoint's headers. Runs in the front end, before any process is started."""
        self.checkpoint = read_checkpoint(model_name, revision)
        self.aliases = {name: name for name in self.checkpoint.modules}
        self._stripped = None
        for name, meant in env.misspelt():
            logger.warning(
                "%s is set, but there is no such variable; did you mean %s?", name, meant
            )
        for warning in self.checkpoint.warnings:
            logger.warning("%s", warning)
        refuse_unsupported(self.checkpoint)

    # -- names ------------------------------------------------------------------------------------

    def apply_vllm_mapper(self, hf_to_vllm_mapper) -> None:
        """Learn how a model class renames modules.

        Called for the model, again for models nested in it, and again for a draft that shares this
        object, so checkpoint names are mapped each time and never a name that is mapped already.
        """
        self._prepare()
        for name in self.checkpoint.modules:
            for alias in hf_to_vllm_mapper.apply_dict({name: None}):
                self.aliases.setdefault(alias, name)

    def find(self, name: str) -> Module | None:
        """The stored module behind vLLM's name of a module, or None.

        Exact names and the model's own map first; where neither knows the name, a module that
        differs only in wrapper segments, if there is exactly one.
        """
        if name in self.aliases:
            return self.checkpoint.modules[self.aliases[name]]
        if self._stripped is None:
            self._stripped = {}
            for stored in self.checkpoint.modules:
                key = _strip(stored)
                self._stripped[key] = None if key in self._stripped else stored
        stored = self._stripped.get(_strip(name))
        return self.checkpoint.modules[stored] if stored else None

    def members(self, prefix: str) -> list[tuple[str, Module | None]]:
        """The stored modules that make up the layer `prefix`, in output order, None where absent.

        A layer stored under its own name is one member even if it could also be assembled; one that
        its model class takes for stored fused is assembled where the checkpoint holds the parts.
        """
        own = self.find(prefix)
        parent, dot, leaf = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(leaf)
        if not parts or parts == [leaf]:
            parts = FUSED.get(leaf)
        if own is not None or not parts:
            return [(prefix, own)]
        return [(f"{parent}{dot}{part}", self.find(f"{parent}{dot}{part}")) for part in parts]

    # -- layers -----------------------------------------------------------------------------------

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method for one layer; None leaves vLLM's own unquantised one in place."""
        from vllm.model_executor.layers.fused_moe import RoutedExperts

        from exl3_plugin import fusion
        from exl3_plugin.head import Exl3HeadMethod, LookupOnlyMethod
        from exl3_plugin.linear import Exl3LinearMethod

        self._prepare()
        if isinstance(layer, LinearBase):
            members = self.members(prefix)
            if not any(module is not None and module.kind == "exl3" for _, module in members):
                self.record.plain(layer, prefix, members)
                return UnquantizedLinearMethod()
            missing = [name for name, module in members if module is None]
            if missing:
                raise CheckpointError(
                    f"{prefix}: part of this layer is EXL3, but the checkpoint has no "
                    f"{', '.join(missing)}; the checkpoint {self.checkpoint.path} is incomplete"
                )
            fusion.install(get_current_vllm_config_or_none())
            return Exl3LinearMethod(self, prefix, [module for _, module in members])
        if isinstance(layer, ParallelLMHead):
            module = self.find(prefix)
            if module is not None and module.kind == "exl3":
                return Exl3HeadMethod(self, prefix, module)
            self.record.plain(layer, prefix, [(prefix, module)])
            return None
        if isinstance(layer, VocabParallelEmbedding):
            self.record.plain(layer, prefix, [(prefix, self.find(prefix))])
            return LookupOnlyMethod()
        if isinstance(layer, RoutedExperts):
            from exl3_plugin.moe import method_for

            return method_for(self, layer, prefix)
        return None

    def _prepare(self) -> None:
        """Once in every process that builds the model, before its first layer."""
        if self.record is not None:
            return
        if self.checkpoint is None:
            raise CheckpointError(
                "vLLM did not say where the EXL3 checkpoint is before building the model; "
                "exl3_plugin needs vllm 0.32 or later"
            )
        from vllm.distributed import (
            get_tensor_model_parallel_world_size,
            model_parallel_is_initialized,
        )

        from exl3_plugin import boot
        from exl3_plugin.audit import install_audit
        from exl3_plugin.head import install_head

        if model_parallel_is_initialized():
            current = get_current_vllm_config_or_none()
            check_tensor_parallel(
                self.checkpoint,
                get_tensor_model_parallel_world_size(),
                whole_experts=current is not None
                and current.parallel_config.enable_expert_parallel,
            )
        record = boot.prepare(self.checkpoint)
        install_head()
        install_audit()
        self.record = record


def _strip(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def refuse_unsupported(checkpoint: Checkpoint) -> None:
    """Refuse, from headers alone, what this version cannot serve, naming the first such module."""
    for name, module in checkpoint.modules.items():
        if module.kind == "embedding":
            raise CheckpointError(
                f"{name}.trellis is a quantised embedding, which this version cannot serve; "
                "convert the model without `embed_bits`"
            )
    for architecture in checkpoint.config.get("architectures") or []:
        names, what = REARRANGED.get(architecture, (r"(?!)", ""))
        for name, module in checkpoint.modules.items():
            if module.kind == "exl3" and re.search(names, name):
                raise CheckpointError(
                    f"{name} is EXL3, but of a {architecture} {what}, which EXL3 tensors do not "
                    "survive; quantise the model with this layer left plain"
                )
    check_experts(checkpoint)
