"""A GGUF file as a source: llama.cpp's names, layouts and metadata turned back into Hugging Face's.

Weights stored in one of GGUF's quantised forms are dequantised; the EXL3 rounding starts from
exactly the weights that llama.cpp would compute with.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from exl3_plugin.quantize.ldlq import QuantizeError
from exl3_plugin.quantize.source import Source, file_identity, quiet_transformers


@dataclass(frozen=True)
class _Architecture:
    """How one GGUF architecture maps to a transformers model.

    `permuted`: llama.cpp stores the rows of q and k pairwise interleaved for its rotary embedding.
    """

    model_type: str
    class_name: str
    permuted: bool
    attention_bias: bool = False
    head_norms: bool = False


_ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", permuted=False, attention_bias=True),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", permuted=False, head_norms=True),
}

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_REFUSED_NAMES = {
    "rope_freqs": "the rope scaling it stands for cannot be rebuilt from it",
}


class GGUFSource(Source):
    """One GGUF file. Quantised and float32 tensors that stay unquantised are kept as bfloat16."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise QuantizeError(
                f"reading {path.name} needs the gguf package: pip install 'exl3-fleet[quantize]'"
            ) from error
        self._gguf = gguf
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, OSError) as error:
            raise QuantizeError(f"{path} is no readable GGUF file: {error}") from error
        name = self._field("general.architecture")
        if name not in _ARCHITECTURES:
            raise QuantizeError(
                f"{path} has the GGUF architecture {name!r}, supported are "
                f"{', '.join(sorted(_ARCHITECTURES))}; convert from the Hugging Face folder instead"
            )
        if (self._field("split.count", 0) or 0) > 1:
            raise QuantizeError(f"{path} is one of several parts; merge them with llama-gguf-split")
        self._name = name
        self._architecture = _ARCHITECTURES[name]
        if self._parameter("expert_count", 0):
            raise QuantizeError(f"{path} is a mixture of experts, which is not read from GGUF")
        if self._parameter("rope.scaling.type", "none") not in (None, "none"):
            raise QuantizeError(
                f"{path} scales its rotary embedding ({self._parameter('rope.scaling.type')}), "
                "which is not read from GGUF; convert from the Hugging Face folder instead"
            )
        self._tensors = {}
        for tensor in self._reader.tensors:
            self._tensors[self._hugging_face_name(tensor.name)] = tensor
        self.shapes = {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        self.config = self._build_config()

    # Metadata

    def _field(self, key: str, default=None):
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _parameter(self, key: str, default=None):
        return self._field(f"{self._name}.{key}", default)

    def _required(self, key: str):
        value = self._parameter(key)
        if value is None:
            raise QuantizeError(f"{self.path}: the metadata has no {self._name}.{key}")
        return value

    def _build_config(self) -> dict:
        architecture = self._architecture
        hidden, heads = self._required("embedding_length"), self._required("attention.head_count")
        head_dim = self._parameter("attention.key_length", hidden // heads)
        vocabulary = self.shapes["model.embed_tokens.weight"][0]
        config = {
            "architectures": [architecture.class_name],
            "model_type": architecture.model_type,
            "hidden_size": hidden,
            "intermediate_size": self._required("feed_forward_length"),
            "num_hidden_layers": self._required("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._parameter("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._required("context_length"),
            # Stored as float32: the shortest decimal that reads back the same is what was meant.
            "rms_norm_eps": _shortest(self._required("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self._parameter("rope.freq_base", 10000.0)),
            "attention_dropout": 0.0,
            "vocab_size": vocabulary,
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }
        if architecture.model_type == "llama":
            config |= {"attention_bias": False, "mlp_bias": False}
        if architecture.model_type == "qwen3":
            config["attention_bias"] = False
        rotary = self._parameter("rope.dimension_count", head_dim)
        if rotary != head_dim:
            raise QuantizeError(
                f"{self.path}: rotary embedding over {rotary} of {head_dim} channels is not "
                "supported from GGUF; convert from the Hugging Face folder instead"
            )
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            value = self._field(f"tokenizer.ggml.{theirs}_token_id")
            if value is not None:
                config[f"{ours}_token_id"] = int(value)
        return config

    # Tensors

    def _hugging_face_name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        known = _LAYER_NAMES.get(layer[2]) if layer else _TOP_NAMES.get(stem)
        if known is None or suffix not in ("weight", "bias"):
            reason = _REFUSED_NAMES.get(stem, f"the architecture {self._name!r} has none such here")
            raise QuantizeError(f"{self.path}: tensor {name} cannot be converted: {reason}")
        return f"model.layers.{layer[1]}.{known}.{suffix}" if layer else f"{known}.{suffix}"

    def load_exact(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        kind = tensor.tensor_type
        types = self._gguf.GGMLQuantizationType
        if kind == types.BF16:
            weight = torch.from_numpy(tensor.data.copy()).view(torch.bfloat16)
        elif kind in (types.F16, types.F32):
            weight = torch.from_numpy(tensor.data.copy())
        else:
            try:
                weight = torch.from_numpy(self._gguf.quants.dequantize(tensor.data, kind))
            except NotImplementedError as error:
                raise QuantizeError(
                    f"{self.path}: tensor {tensor.name} has the type {kind.name}, which the gguf "
                    "package cannot dequantise"
                ) from error
        weight = weight.reshape(self.shapes[name])
        if self._architecture.permuted and ".self_attn." in name:
            if ".q_proj." in name:
                weight = _undo_rope_order(weight, self.config["num_attention_heads"])
            elif ".k_proj." in name:
                weight = _undo_rope_order(weight, self.config["num_key_value_heads"])
        return weight

    def load(self, name: str) -> torch.Tensor:
        weight = self.load_exact(name)
        return weight if weight.dtype == torch.float16 else weight.to(torch.bfloat16)

    # Companions

    def identity(self) -> dict:
        return {"kind": "gguf", "files": {self.path.name: file_identity(self.path)}}

    @cached_property
    def _tokenizer(self):
        from transformers import AutoTokenizer

        quiet_transformers()
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self.path.parent, gguf_file=self.path.name, local_files_only=True
            )
        except Exception as error:
            raise QuantizeError(
                f"transformers cannot build a tokenizer from {self.path}: {error}"
            ) from error
        if self._field("tokenizer.ggml.pre") == "smollm":
            _split_digits(tokenizer)
        return tokenizer

    def tokenizer(self):
        return self._tokenizer

    def write_companions(self, folder: Path) -> None:
        tokenizer = self._tokenizer
        tokenizer.save_pretrained(folder)
        _repair_tokenizer_config(folder / "tokenizer_config.json", tokenizer)
        generation = {
            key: value
            for key, value in self.config.items()
            if key in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")

    def transformers_model(self) -> torch.nn.Module:
        import transformers

        quiet_transformers()
        state = {name: self.load_exact(name).float() for name in self._tensors}
        if self.config["tie_word_embeddings"]:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model, report = getattr(transformers, self._architecture.class_name).from_pretrained(
            None,
            config=transformers.AutoConfig.for_model(**self.config),
            state_dict=state,
            dtype=torch.float32,
            output_loading_info=True,
        )
        wrong = sorted(report["missing_keys"]) + sorted(report["unexpected_keys"])
        if wrong:
            raise QuantizeError(f"{self.path} does not fit {self._name}: {', '.join(wrong)}")
        return model.eval()


def _undo_rope_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k back from (pair member, half) to (half, pair member) order per head."""
    rows = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)


def _shortest(value: float) -> float:
    """The shortest decimal number that is this float32."""
    import numpy as np

    return float(np.format_float_scientific(np.float32(value), unique=True, trim="-"))


def _split_digits(tokenizer) -> None:
    """SmolLM's pre-tokenizer takes digits one by one, before the byte-level split.

    GGUF says so only by the name of the pre-tokenizer, which transformers does not look at; without
    it, blanks in front of digits come out as other tokens than the model was trained with.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )


def _repair_tokenizer_config(path: Path, tokenizer) -> None:
    """Keep what every reader of tokenizer_config.json understands, free of the local path."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("name_or_path", "gguf_file", "local_files_only", "is_local"):
        config.pop(key, None)
    # The name that transformers 4 and 5 both know; 5 would write one of its own.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.pop("backend", None)
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = getattr(tokenizer, key, None)
        if value is not None:
            config[key] = str(value)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
