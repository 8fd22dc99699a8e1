#!/usr/bin/env python3
"""Tokens per second of a mixture of experts in vLLM: EXL3 against the same model in bfloat16.

    bench/moe_serving.py make DIR                     a random Qwen3-30B-A3B at 4 bits, about 16 GB
    bench/moe_serving.py run DIR --json exl3.jsonl
    bench/moe_serving.py run DIR --bfloat16           the same sizes, weights invented by vLLM

Weights are random, so what is generated means nothing and takes as long as if it did. One JSON line
for each number of requests at once, and one for a long prompt.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from exl3_plugin import format as exl3

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
}
"""The sizes of Qwen3-30B-A3B."""

NEW_TOKENS = 128
PROMPT_TOKENS, LONG_PROMPT_TOKENS = 64, 8192

app = typer.Typer(add_completion=False, help=__doc__.splitlines()[0])


class Maker:
    """Random tensors, written shard by shard."""

    def __init__(self, folder: Path, bits: float, codebook: str):
        self.folder, self.words, self.codebook = folder, exl3.words_from_bits(bits), codebook
        self.random = np.random.default_rng(0)
        self.map: dict[str, str] = {}

    def linear(self, name: str, k: int, n: int) -> dict[str, np.ndarray]:
        """One EXL3 matrix whose outputs are of the size of its inputs."""
        shape = (k // 16, n // 16, self.words)
        words = np.frombuffer(self.random.bytes(2 * int(np.prod(shape))), np.int16).reshape(shape)
        scales = (self.random.choice([-1, 1], k) * self.random.uniform(0.5, 1.5, k)) / np.sqrt(k)
        out = self.random.choice([-1, 1], n) * self.random.uniform(0.5, 1.5, n)
        tensors = {
            f"{name}.trellis": words,
            f"{name}.suh": scales.astype(np.float16),
            f"{name}.svh": out.astype(np.float16),
        }
        if self.codebook != "3inst":
            marker = np.array(exl3.MARKERS[self.codebook], np.uint32).astype(np.int32)
            tensors[f"{name}.{self.codebook}"] = marker
        return tensors

    def plain(self, *shape: int) -> np.ndarray:
        """A dense matrix of the usual size."""
        return (self.random.standard_normal(shape, np.float32) / np.sqrt(shape[-1])).astype(
            np.float16
        )

    def save(self, file: str, tensors: dict[str, np.ndarray]) -> None:
        """One shard."""
        from safetensors.numpy import save_file

        save_file(tensors, self.folder / file)
        self.map |= dict.fromkeys(tensors, file)


@app.command()
def make(
    folder: Annotated[Path, typer.Argument(help="where the checkpoint goes")],
    bits: Annotated[float, typer.Option(help="rate of all layers")] = 4.0,
    codebook: Annotated[str, typer.Option(help=", ".join(exl3.CODEBOOKS))] = "mcg",
    layers: Annotated[int, typer.Option(help="fewer for a trial")] = CONFIG["num_hidden_layers"],
) -> None:
    """Writes a random checkpoint of the sizes of Qwen3-30B-A3B."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = CONFIG | {"num_hidden_layers": layers}
    config["quantization_config"] = {"quant_method": "exl3", "bits": bits, "codebook": codebook}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    maker = Maker(folder, bits, codebook)
    hidden, inner, head = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    heads, shared = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    for i in range(layers):
        prefix = f"model.layers.{i}"
        tensors: dict[str, np.ndarray] = {}
        for leaf, k, n in (("q", hidden, heads), ("k", hidden, shared), ("v", hidden, shared),
                           ("o", heads, hidden)):  # fmt: skip
            tensors |= maker.linear(f"{prefix}.self_attn.{leaf}_proj", k, n)
        for expert in range(config["num_experts"]):
            name = f"{prefix}.mlp.experts.{expert}"
            tensors |= maker.linear(f"{name}.gate_proj", hidden, inner)
            tensors |= maker.linear(f"{name}.up_proj", hidden, inner)
            tensors |= maker.linear(f"{name}.down_proj", inner, hidden)
        tensors[f"{prefix}.mlp.gate.weight"] = maker.plain(config["num_experts"], hidden)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = np.ones(hidden, np.float16)
        for norm in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{norm}.weight"] = np.ones(head, np.float16)
        maker.save(f"model-{i + 1:05d}-of-{layers + 1:05d}.safetensors", tensors)
        print(f"layer {i + 1} of {layers}", file=sys.stderr)
    last = maker.linear("lm_head", hidden, config["vocab_size"])
    last["model.embed_tokens.weight"] = maker.plain(config["vocab_size"], hidden)
    last["model.norm.weight"] = np.ones(hidden, np.float16)
    maker.save(f"model-{layers + 1:05d}-of-{layers + 1:05d}.safetensors", last)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": maker.map}))


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(help="what `make` wrote")],
    concurrency: Annotated[str, typer.Option(help="requests at once")] = "1,8,32,64",
    bfloat16: Annotated[bool, typer.Option(help="dense weights instead, invented")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="lines are added")] = None,
    eager: Annotated[bool, typer.Option(help="without CUDA graphs")] = False,
) -> None:
    """Serves it in this process and measures decoding and a long prompt."""
    import os

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    model, options = str(folder), {}
    if bfloat16:
        dense = folder / "bfloat16"
        dense.mkdir(exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        config.pop("quantization_config")
        (dense / "config.json").write_text(json.dumps(config))
        model, options = str(dense), {"load_format": "dummy"}
    began = time.perf_counter()
    sizes = [int(item) for item in concurrency.split(",")]
    llm = LLM(
        model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=LONG_PROMPT_TOKENS + NEW_TOKENS,
        max_num_batched_tokens=LONG_PROMPT_TOKENS,
        max_num_seqs=max(sizes),
        enforce_eager=eager,
        **options,
    )
    out = json_file.open("a") if json_file else None
    arm = {"arm": "bfloat16" if bfloat16 else "exl3", "start_s": time.perf_counter() - began}
    random = np.random.default_rng(1)

    def ask(requests: int, prompt: int, new: int) -> float:
        ids = random.integers(0, 150_000, (requests, prompt)).tolist()
        sampling = SamplingParams(max_tokens=new, temperature=0.0, detokenize=False,
                                  ignore_eos=True)  # fmt: skip
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in ids], sampling, use_tqdm=False)
        return time.perf_counter() - start

    def emit(line: dict[str, Any]) -> None:
        text = json.dumps(arm | line)
        print(text, flush=True)
        if out:
            print(text, file=out, flush=True)

    for requests in sizes:
        ask(requests, PROMPT_TOKENS, 8)
        short, long = ask(requests, PROMPT_TOKENS, 8), ask(requests, PROMPT_TOKENS, NEW_TOKENS)
        step_ms = 1000 * (long - short) / (NEW_TOKENS - 8)
        emit({"requests": requests, "ms_a_step": step_ms, "tokens_s": 1000 * requests / step_ms})
    ask(1, LONG_PROMPT_TOKENS, 1)
    seconds = min(ask(1, LONG_PROMPT_TOKENS, 1) for _ in range(3))
    emit({"prompt": LONG_PROMPT_TOKENS, "prefill_tokens_s": LONG_PROMPT_TOKENS / seconds})


if __name__ == "__main__":
    app()
