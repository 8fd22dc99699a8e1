"""A small Qwen2-MoE checkpoint of random words and its dense twin in transformers.

The twin's weights are decoded by the numpy oracle and run by transformers' own model in float32;
nothing of it is the plugin's, the operator's or vLLM's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "plugin"))

from plugin_models import SmallModel, Stored, exl3_linear

from exl3_plugin import format as exl3

RATES = (("mcg", 4), ("mul1", 2.5), ("3inst", 3), ("mul1", 1.5), ("mcg", 8), ("3inst", 1))
EXPERTS = 6


class SmallMoe(SmallModel):
    """Experts are stored one by one; transformers keeps them stacked."""

    def golden(self, file: Path, prompts: list[np.ndarray]) -> Path:
        """As `SmallModel.golden`."""
        return SmallModel(self.config, self.stored, stacked(self.dense)).golden(file, prompts)


def stacked(dense: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`experts.N.*_proj.weight` joined to what transformers calls `experts.gate_up_proj`."""
    plain = {name: value for name, value in dense.items() if ".experts." not in name}
    bases = {name.split(".experts.")[0] for name in dense if ".experts." in name}
    for base in bases:
        inside = [name.removeprefix(f"{base}.experts.") for name in dense]
        numbers = sorted({int(n.split(".")[0]) for n in inside if n[0].isdigit()})

        def of(number: int, leaf: str, base=base) -> np.ndarray:
            return dense[f"{base}.experts.{number}.{leaf}.weight"]

        both = [np.concatenate([of(i, "gate_proj"), of(i, "up_proj")]) for i in numbers]
        plain[f"{base}.experts.gate_up_proj"] = np.stack(both)
        plain[f"{base}.experts.down_proj"] = np.stack([of(i, "down_proj") for i in numbers])
    return plain


def awkward_moe(seed: int = 0) -> SmallMoe:
    """Every way in which experts may differ, in one checkpoint.

    Each projection of each expert has a rate and codebook of its own, one legacy signs. The width
    between the products, 192, is not a multiple of 128; at tensor parallel size 2 it is cut inside
    a block. Beside them a shared expert of width 320 with a gate of its own.
    """
    rng = np.random.default_rng(seed)
    hidden, heads, wide, shared, vocab, layers = 256, 4, 192, 320, 384, 2
    config = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "dtype": "float32",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "moe_intermediate_size": wide,
        "shared_expert_intermediate_size": shared,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "quantization_config": {"quant_method": "exl3", "bits": 4.0, "head_bits": 6},
    }
    head_dim = hidden // heads
    linears: dict[str, Stored] = {"lm_head": exl3_linear(rng, hidden, vocab, "mul1", 6)}
    for i in range(layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        for leaf, k, n in (
            ("q_proj", hidden, hidden),
            ("k_proj", hidden, 2 * head_dim),
            ("v_proj", hidden, 2 * head_dim),
            ("o_proj", hidden, hidden),
        ):
            linears[f"{attention}.{leaf}"] = exl3_linear(rng, k, n, "mcg", 5)
        sizes = (("gate_proj", hidden, 1), ("up_proj", hidden, 1), ("down_proj", 1, hidden))
        for number, (leaf, k, n) in enumerate(sizes):
            linears[f"{mlp}.shared_expert.{leaf}"] = exl3_linear(
                rng, shared if k == 1 else k, shared if n == 1 else n, "mul1", 4
            )
            for expert in range(EXPERTS):
                codebook, bits = RATES[(expert + number * (1 + i)) % len(RATES)]
                linears[f"{mlp}.experts.{expert}.{leaf}"] = exl3_linear(
                    rng, wide if k == 1 else k, wide if n == 1 else n, codebook, bits,
                    legacy=expert == 2 and number == i,
                )  # fmt: skip
    stored = {f"{m}.{s}": t for m, linear in linears.items() for s, t in linear.tensors.items()}
    dense = {f"{name}.weight": linear.dense.T.copy() for name, linear in linears.items()}
    plain: dict[str, np.ndarray] = {
        "model.embed_tokens.weight": rng.standard_normal((vocab, hidden)),
        "model.norm.weight": rng.uniform(0.5, 1.5, hidden),
    }
    for i in range(layers):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plain[f"{layer}.{norm}.weight"] = rng.uniform(0.5, 1.5, hidden)
        for leaf, n in (("q_proj", hidden), ("k_proj", 2 * head_dim), ("v_proj", 2 * head_dim)):
            plain[f"{layer}.self_attn.{leaf}.bias"] = 0.3 * rng.standard_normal(n)
        plain[f"{layer}.mlp.gate.weight"] = rng.standard_normal((EXPERTS, hidden)) / 8
        plain[f"{layer}.mlp.shared_expert_gate.weight"] = rng.standard_normal((1, hidden)) / 8
    plain = {name: value.astype(np.float16) for name, value in plain.items()}
    return SmallMoe(config, stored | plain, dense | plain)


def decoded(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """config.json and the dense weights of a checkpoint on disk, in transformers' names."""
    import json

    import torch
    from safetensors import safe_open

    from exl3_plugin.checkpoint import read_checkpoint

    dense: dict[str, np.ndarray] = {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name, module in read_checkpoint(folder).modules.items():
            tensors = {s: file.get_tensor(f"{name}.{s}") for s in module.tensors}
            if module.kind == "exl3":
                parts = [tensors[s].numpy() for s in ("trellis", "suh", "svh")]
                weight = exl3.dense_weight(*parts, module.codebook)
                tensors = {"weight": torch.from_numpy(weight.T.astype(np.float32))}
            dense |= {f"{name}.{suffix}": t.float().numpy() for suffix, t in tensors.items()}
    return json.loads((folder / "config.json").read_text()), stacked(dense)
