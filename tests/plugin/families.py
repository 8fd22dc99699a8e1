"""Tiny checkpoints of real model families, quantised by our own quantiser, and what they must say.

The config is the family's own, with small numbers in it; weights are random. The truth is
transformers' own class of that family in float32, on the weights that the numpy oracle
(`exl3_plugin.format`) decodes from the stored words: no code of the plugin, the operators or vLLM
has a part in it. Where vLLM's arithmetic is another one than transformers' (latent attention on the
CPU, plain or not), it is vLLM's unquantised model of those decoded weights.

Run as a program it builds checkpoints: `families.py FOLDER [FAMILY ...]`.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from exl3_plugin import format as exl3

HIDDEN, WIDE, VOCAB = 128, 256, 256
BITS, HEAD_BITS = 4, 6

DECODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
SQUARE = {name: value for name, value in DECODER.items() if name != "head_dim"}
"""For families that take the head size from the others."""

HYBRID = DECODER | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
}


def _config(name: str, **settings):
    import transformers

    return getattr(transformers, name)(**settings)


def _qwen3_5_wrapper():
    vision = {
        "depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
        "out_hidden_size": HIDDEN, "patch_size": 16, "num_position_embeddings": 16,
    }  # fmt: skip
    return _config(
        "Qwen3_5Config", text_config=HYBRID, vision_config=vision, tie_word_embeddings=False,
        image_token_id=250, video_token_id=251, vision_start_token_id=252, vision_end_token_id=253,
    )  # fmt: skip


def _gemma3_wrapper():
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
    }  # fmt: skip
    return _config(
        "Gemma3Config", text_config=_gemma3(), vision_config=vision, mm_tokens_per_image=4,
        image_token_index=250, boi_token_index=251, eoi_token_index=252,
    )  # fmt: skip


def _gemma3() -> dict:
    return DECODER | {
        "sliding_window": 16,
        "query_pre_attn_scalar": 64,
        "sliding_window_pattern": 2,
    }


def _qwen3_vl():
    vision = {
        "depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
        "out_hidden_size": HIDDEN, "patch_size": 16, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8],
            "mrope_interleaved": True}  # fmt: skip
    return _config(
        "Qwen3VLConfig", text_config=DECODER | {"rope_parameters": rope}, vision_config=vision,
        tie_word_embeddings=False, image_token_id=250, video_token_id=251,
        vision_start_token_id=252, vision_end_token_id=253,
    )  # fmt: skip


def _deepseek():
    """Multi-head latent attention in its real head sizes, dense layers throughout."""
    return _config(
        "DeepseekV3Config", **{k: v for k, v in SQUARE.items() if k != "num_key_value_heads"},
        num_key_value_heads=4, q_lora_rank=128, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=2, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=64,
        tie_word_embeddings=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Family:
    """`config` makes the family's own configuration.

    wrapper: the decoder is the language model of a multimodal one.
    mtp: there is a draft.
    also: linears that the quantiser leaves plain and that are EXL3 here, as others store them.
    apart: vLLM's own unquantised model is far from transformers', so that it is the truth instead.
    tied: vLLM's class has no head and takes the embedding for it, whatever is stored.
    dtype: the one that says most of those that vLLM's CPU kernels compute this family in.
    """

    config: Callable[[], object]
    wrapper: bool = False
    mtp: bool = False
    also: str = r"^$"
    apart: bool = False
    tied: bool = False
    dtype: str = "float32"

    @property
    def engine(self) -> dict:
        """Arguments that vLLM needs: towers are not built, which would want a tokenizer."""
        return {"limit_mm_per_prompt": {"image": 0, "video": 0}} if self.wrapper else {}


FAMILIES = {
    "llama": Family(lambda: _config("LlamaConfig", **DECODER, tie_word_embeddings=True)),
    "mistral": Family(lambda: _config("MistralConfig", **DECODER, sliding_window=16)),
    "qwen2": Family(lambda: _config("Qwen2Config", **SQUARE)),
    "qwen3": Family(lambda: _config("Qwen3Config", **DECODER)),
    "gemma2": Family(
        lambda: _config("Gemma2Config", **DECODER, sliding_window=16, query_pre_attn_scalar=64),
        tied=True,
    ),
    "gemma3": Family(lambda: _config("Gemma3TextConfig", **_gemma3())),
    "gemma3-wrapper": Family(_gemma3_wrapper, wrapper=True),
    "glm4": Family(lambda: _config("Glm4Config", **DECODER)),
    "phi3": Family(lambda: _config("Phi3Config", **SQUARE)),
    "qwen3-vl": Family(_qwen3_vl, wrapper=True),
    "qwen3.5": Family(lambda: _config("Qwen3_5TextConfig", **HYBRID), dtype="bfloat16"),
    "qwen3.5-wrapper": Family(_qwen3_5_wrapper, wrapper=True, dtype="bfloat16"),
    "qwen3.5-mtp": Family(
        _qwen3_5_wrapper, wrapper=True, mtp=True, also=r"^mtp\.", dtype="bfloat16"
    ),
    "deepseek": Family(_deepseek, also=r"kv_b_proj", apart=True),
}


def random_model(family: Family, seed: int):
    """The family's own class with random weights whose rows and channels differ in size."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if family.wrapper else AutoModelForCausalLM
    model = auto.from_config(family.config()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[1]))
            elif parameter.ndim == 2:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[1]))
                parameter *= torch.exp(0.3 * torch.randn(parameter.shape[1]))
            else:
                parameter += 0.1 * torch.randn(parameter.shape)
            if family.mtp:
                # What follows depends mostly on the last token, so that a draft can be right.
                if "embed_tokens" in name:
                    parameter *= math.sqrt(HIDDEN)
                elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    parameter *= 0.1
    return model


def draft_tensors(seed: int) -> dict[str, torch.Tensor]:
    """`mtp.*` of a draft that is often right: it passes the last token on to the head."""
    rng = torch.Generator().manual_seed(seed)

    def linear(n: int, k: int, size: float = 1.0) -> torch.Tensor:
        return size * torch.randn(n, k, generator=rng) / math.sqrt(k)

    heads, kv = DECODER["num_attention_heads"] * 64, DECODER["num_key_value_heads"] * 64
    fc = torch.cat([torch.eye(HIDDEN), 0.05 * torch.eye(HIDDEN)], dim=1)
    layer = {
        "self_attn.q_proj": linear(2 * heads, HIDDEN),
        "self_attn.k_proj": linear(kv, HIDDEN),
        "self_attn.v_proj": linear(kv, HIDDEN),
        "self_attn.o_proj": linear(HIDDEN, heads, 0.1),
        "mlp.gate_proj": linear(WIDE, HIDDEN),
        "mlp.up_proj": linear(WIDE, HIDDEN),
        "mlp.down_proj": linear(HIDDEN, WIDE, 0.1),
    }
    tensors = {f"mtp.layers.0.{name}.weight": weight for name, weight in layer.items()}
    tensors["mtp.fc.weight"] = fc
    for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        tensors[f"mtp.{norm}.weight"] = torch.zeros(HIDDEN)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"mtp.layers.0.{norm}.weight"] = torch.zeros(HIDDEN)
    for norm in ("q_norm", "k_norm"):
        tensors[f"mtp.layers.0.self_attn.{norm}.weight"] = torch.zeros(64)
    return tensors


def quantise_more(folder: Path, names: str) -> None:
    """Make EXL3 linears of plain ones whose names match."""
    from exl3_plugin.quantize.ldlq import Encoder
    from exl3_plugin.quantize.tensor import quantize_linear

    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [n for n, t in tensors.items() if re.search(names, n) and t.ndim == 2]:
        module = name.removesuffix(".weight")
        weight = tensors.pop(name).float().T.contiguous()
        stored, _ = quantize_linear(weight, None, Encoder(BITS, "mul1"), module, module)
        tensors |= {f"{module}.{s}": getattr(stored, s) for s in ("trellis", "suh", "svh")}
        tensors[f"{module}.mul1"] = torch.tensor(exl3.MARKERS["mul1"]).to(torch.int32)
    save_file(tensors, file)


def with_plain_draft(model: Path, out: Path) -> Path:
    """A copy of a checkpoint whose draft is dense, with the weights that its words decode to."""
    tensors = load_file(model / "model.safetensors")
    for name in [n for n in tensors if n.startswith("mtp.") and n.endswith(".trellis")]:
        module = name.removesuffix(".trellis")
        parts = [tensors.pop(f"{module}.{s}").numpy() for s in ("trellis", "suh", "svh")]
        del tensors[f"{module}.mul1"]
        dense = np.ascontiguousarray(exl3.dense_weight(*parts, "mul1").T)
        tensors[f"{module}.weight"] = torch.from_numpy(dense).half()
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text((model / "config.json").read_text())
    return out


def decoded_tensors(source: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """The source's tensors, each weight replaced by what the checkpoint's words decode to."""
    from exl3_plugin.checkpoint import read_checkpoint

    stored = load_file(folder / "model.safetensors")
    decoded = {}
    for name, module in read_checkpoint(folder).modules.items():
        if module.kind == "exl3":
            parts = [stored[f"{name}.{s}"].numpy() for s in ("trellis", "suh", "svh")]
            n, k = (module.n_true, module.k_true)
            if f"{name}.weight" in source:
                n, k = source[f"{name}.weight"].shape
            dense = exl3.dense_weight(*parts, module.codebook)[:k, :n]
            decoded[f"{name}.weight"] = torch.from_numpy(np.ascontiguousarray(dense.T)).float()
    result = {}
    for name, tensor in source.items():
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        split = {"qkv_proj": ("q", "k", "v"), "gate_up_proj": ("gate", "up")}.get(leaf, ())
        parts = [decoded.pop(f"{parent}.{part}_proj.weight", None) for part in split]
        if parts and parts[0] is not None:
            result[name] = torch.cat(parts)
        else:
            result[name] = decoded.pop(name, tensor).float()
        assert result[name].shape == tensor.shape, (name, result[name].shape, tensor.shape)
    # A head that the source ties to its embedding is a tensor of its own in the checkpoint.
    result |= {name: decoded.pop(name) for name in list(decoded) if name.endswith("lm_head.weight")}
    assert not decoded, f"decoded, but not in the source: {list(decoded)}"
    return result


def build(name: str, root: Path, seed: int = 0) -> Path:
    """Make `root/name` with `model` (EXL3), `twin` (dense, what `model` decodes to) and golden.npz.

    Returns `root/name`; what is there already is used.
    """
    from exl3_plugin.quantize.convert import ConversionProgress, Options, convert

    folder, family = root / name, FAMILIES[name]
    if (folder / "golden.npz").exists():
        return folder
    model = random_model(family, seed)
    source = folder / "source"
    model.half().save_pretrained(source)
    if family.mtp:
        tensors = load_file(source / "model.safetensors")
        drafts = {n: t.half() for n, t in draft_tensors(seed).items()}
        save_file(tensors | drafts, source / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        config.get("text_config", config)["mtp_num_hidden_layers"] = 1
        (source / "config.json").write_text(json.dumps(config))
    with ConversionProgress() as progress:
        convert(source, folder / "model", Options(bits=BITS, head_bits=HEAD_BITS), progress)
    quantise_more(folder / "model", family.also)
    twin = folder / "twin"
    twin.mkdir()
    weights = decoded_tensors(load_file(source / "model.safetensors"), folder / "model")
    if family.tied:
        del weights["lm_head.weight"]
    save_file(weights, twin / "model.safetensors", metadata={"format": "pt"})
    said = {"tie_word_embeddings": family.tied, "dtype": "float32"}
    config = json.loads((source / "config.json").read_text()) | said
    if "text_config" in config:
        config["text_config"] |= said
    (twin / "config.json").write_text(json.dumps(config))
    write_golden(family, twin, folder / "golden.npz")
    return folder


def write_golden(family: Family, twin: Path, file: Path, lengths=(23, 5, 40)) -> None:
    """What transformers says of the twin in float32, in golden.npz's layout."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if family.wrapper else AutoModelForCausalLM
    # "eager" is the one implementation that knows every family's arithmetic (soft caps).
    model, info = auto.from_pretrained(
        twin, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: names for key, names in info.items() if names}
    unexpected = [n for n in wrong.pop("unexpected_keys", ()) if not n.startswith("mtp.")]
    assert not wrong and not unexpected, (wrong, unexpected)
    arrays, rng = {}, np.random.default_rng(1)
    for i, length in enumerate(lengths):
        ids = rng.integers(3, 250, length)
        with torch.inference_mode():
            logits = model.eval()(input_ids=torch.from_numpy(ids)[None]).logits[0]
        lp = logits.double().log_softmax(-1)
        top = lp.topk(16)
        arrays |= {
            f"ids{i}": ids.astype(np.int32),
            f"nll{i}": -lp[:-1].gather(1, torch.from_numpy(ids[1:, None])).mean().numpy(),
            f"top_ids{i}": top.indices.numpy().astype(np.int32),
            f"top_lp{i}": top.values.numpy().astype(np.float32),
        }
    np.savez(file, **arrays)


def main(root: str, *names: str) -> None:
    for name in names or FAMILIES:
        print(build(name, Path(root)))


if __name__ == "__main__":
    main(*sys.argv[1:])
