"""Small EXL3 checkpoints made of random words, and what they must compute.

Any words are a valid trellis, so no quantiser is needed. The truth is a dense twin: weights decoded
by the numpy oracle (`exl3_plugin.format`, itself held against exllamav3's results), run by
transformers' own model in float32. Neither shares code with the plugin, the op or vLLM.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from exl3_plugin import format as exl3

MARKER_DTYPE = np.int32


def round_up(size: int) -> int:
    return -(-size // exl3.BLOCK) * exl3.BLOCK


@dataclass
class Stored:
    """One stored linear and its dense weight `[k, n]`, true sizes."""

    tensors: dict[str, np.ndarray]
    dense: np.ndarray


def exl3_linear(
    rng: np.random.Generator, k: int, n: int, codebook: str, bits: float, *, legacy: bool = False
) -> Stored:
    """Random words as an EXL3 linear whose weights have a size that keeps a small Llama sane."""
    k_stored, n_stored = round_up(k), round_up(n)
    words = exl3.words_from_bits(bits)
    trellis = rng.integers(-32768, 32768, (k_stored // 16, n_stored // 16, words), dtype=np.int16)
    tensors = {"trellis": trellis}
    if legacy:
        tensors["su"] = rng.integers(-32768, 32768, k_stored // 16, dtype=np.int16)
        tensors["sv"] = rng.integers(-32768, 32768, n_stored // 16, dtype=np.int16)
        suh, svh = exl3.unpack_signs(tensors["su"]), exl3.unpack_signs(tensors["sv"])
    else:
        signs = rng.choice([-1.0, 1.0], k_stored)
        suh = (signs * rng.uniform(0.5, 1.5, k_stored) / np.sqrt(k)).astype(np.float16)
        svh = (rng.choice([-1.0, 1.0], n_stored) * rng.uniform(0.5, 1.5, n_stored)).astype(
            np.float16
        )
        tensors |= {"suh": suh, "svh": svh}
    if codebook != "3inst":
        tensors[codebook] = np.array(exl3.MARKERS[codebook], dtype=np.uint32).astype(MARKER_DTYPE)
    return Stored(tensors, exl3.dense_weight(trellis, suh, svh, codebook)[:k, :n])


def plain_linear(rng: np.random.Generator, k: int, n: int) -> Stored:
    weight = (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float16)
    return Stored({"weight": weight}, weight.T.astype(np.float64))


@dataclass
class SmallModel:
    """A checkpoint folder's contents and its dense twin's weights, both by tensor name."""

    config: dict
    stored: dict[str, np.ndarray]
    dense: dict[str, np.ndarray]

    def save(self, folder: Path) -> Path:
        """Write the checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.stored, folder / "model.safetensors")
        return folder

    def golden(self, file: Path, prompts: list[np.ndarray]) -> Path:
        """Write what the dense twin says to the prompts, in golden.npz's layout."""
        import torch

        model = transformers_twin(self.config, self.dense)
        arrays = {}
        for i, ids in enumerate(prompts):
            with torch.inference_mode():
                logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
            lp = logits.double().log_softmax(-1)
            top = lp.topk(16)
            nll = -lp[:-1].gather(1, torch.from_numpy(ids[1:, None].astype(np.int64))).mean()
            arrays |= {
                f"ids{i}": ids.astype(np.int32),
                f"nll{i}": np.float32(nll),
                f"top_ids{i}": top.indices.numpy().astype(np.int32),
                f"top_lp{i}": top.values.numpy().astype(np.float32),
            }
        np.savez(file, **arrays)
        return file


def transformers_twin(config: dict, dense: dict[str, np.ndarray]):
    """transformers' own model in float32 with the weights given, by their checkpoint names."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    left_out = ("quantization_config", "dtype", "architectures", "model_type")
    own = {key: value for key, value in config.items() if key not in left_out}
    own["tie_word_embeddings"] = False
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **own))
    model = model.float()
    weights = {name: torch.as_tensor(w).float() for name, w in dense.items()}
    unmatched = model.load_state_dict(weights, strict=False)
    assert not unmatched.unexpected_keys and not unmatched.missing_keys, unmatched
    return model.eval()


def dense_twin(checkpoint):
    """The twin of a checkpoint on disk: every EXL3 module decoded by the numpy oracle."""
    from safetensors import safe_open

    dense = {}
    with safe_open(checkpoint.path / "model.safetensors", "pt") as file:
        for name, module in checkpoint.modules.items():
            tensors = {s: file.get_tensor(f"{name}.{s}") for s in module.tensors}
            if module.kind == "exl3":
                parts = [tensors[s].numpy() for s in ("trellis", "suh", "svh")]
                weight = exl3.dense_weight(*parts, module.codebook)
                tensors = {"weight": weight.T.astype(np.float32)}
            dense |= {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}
    return transformers_twin(checkpoint.config, dense)


def top_logprobs(model, ids: np.ndarray, top_ids: np.ndarray) -> np.ndarray:
    """Log probabilities [T, 16] that a twin gives the tokens `top_ids` [T, 16]."""
    import torch

    with torch.inference_mode():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        wanted = torch.from_numpy(top_ids.astype(np.int64))
        return logits.double().log_softmax(-1).gather(1, wanted).numpy()


def awkward_llama(seed: int = 0) -> SmallModel:
    """Every storage a dense Llama can come in, in one checkpoint.

    Hidden 192, intermediate 320 and the single 64-wide key/value head are not multiples of 128, so
    they are stored padded, and at tensor parallel size 2 rows and columns are cut inside blocks;
    the vocabulary of 384 leaves half a block on every rank. Fused layers mix bits, codebooks,
    legacy signs and a plain member; attention has biases; config.json still claims tied embeddings.
    """
    rng = np.random.default_rng(seed)
    hidden, heads, head_dim, wide, vocab, layers = 192, 4, 64, 320, 384, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": True,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "quantization_config": {"quant_method": "exl3", "bits": 4.0, "head_bits": 6},
    }
    linears: dict[str, Stored] = {"lm_head": exl3_linear(rng, hidden, vocab, "mul1", 6)}
    for i in range(layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        linears |= {
            f"{attention}.q_proj": exl3_linear(rng, hidden, heads * head_dim, "3inst", 2),
            f"{attention}.k_proj": exl3_linear(rng, hidden, head_dim, "mcg", 5),
            f"{attention}.v_proj": (plain_linear if i == 0 else _v_proj)(rng, hidden, head_dim),
            f"{attention}.o_proj": exl3_linear(rng, heads * head_dim, hidden, "mul1", 1.5),
            f"{mlp}.gate_proj": exl3_linear(rng, hidden, wide, "mul1", 2.5),
            f"{mlp}.up_proj": exl3_linear(rng, hidden, wide, "3inst", 3, legacy=i == 1),
            f"{mlp}.down_proj": exl3_linear(rng, wide, hidden, "mcg", 8),
        }
    stored = {f"{m}.{s}": t for m, linear in linears.items() for s, t in linear.tensors.items()}
    dense = {f"{name}.weight": linear.dense.T.copy() for name, linear in linears.items()}
    plain = {
        f"{name}.bias": 0.3 * rng.standard_normal(linear.dense.shape[1])
        for name, linear in linears.items()
        if "self_attn" in name
    }
    plain["model.embed_tokens.weight"] = rng.standard_normal((vocab, hidden))
    plain["model.norm.weight"] = rng.uniform(0.5, 1.5, hidden)
    for i in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plain[f"model.layers.{i}.{norm}.weight"] = rng.uniform(0.5, 1.5, hidden)
    plain = {name: value.astype(np.float16) for name, value in plain.items()}
    # A bias may be stored as wide as the padded layer, with anything in the padding.
    padded = {
        name: np.pad(value, (0, round_up(len(value)) - len(value)), constant_values=9)
        for name, value in plain.items()
        if name.endswith("layers.0.self_attn.o_proj.bias")
    }
    return SmallModel(config, stored | plain | padded, dense | plain)


def awkward_qwen3() -> SmallModel:
    """The same for another architecture: norms on queries and keys, no attention biases, and
    embeddings that are really tied, so the head is plain."""
    model = awkward_llama(seed=2)
    model.config |= {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
    }
    rng = np.random.default_rng(3)
    for tensors in (model.stored, model.dense):
        for name in [name for name in tensors if name.endswith(".bias")]:
            del tensors[name]
    for name in [name for name in model.stored if name.startswith("lm_head.")]:
        del model.stored[name]
    embedding = model.stored["model.embed_tokens.weight"] / np.float16(8)
    model.stored["model.embed_tokens.weight"] = embedding
    model.dense["model.embed_tokens.weight"] = model.dense["lm_head.weight"] = embedding
    for i in range(model.config["num_hidden_layers"]):
        for norm in ("q_norm", "k_norm"):
            scale = rng.uniform(0.5, 1.5, model.config["head_dim"]).astype(np.float16)
            name = f"model.layers.{i}.self_attn.{norm}.weight"
            model.stored[name] = model.dense[name] = scale
    return model


def _v_proj(rng: np.random.Generator, k: int, n: int) -> Stored:
    return exl3_linear(rng, k, n, "mul1", 7)


def prompts(vocab: int, lengths=(23, 5, 40), seed: int = 1) -> list[np.ndarray]:
    """Random prompts."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length) for length in lengths]
