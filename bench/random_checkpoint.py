#!/usr/bin/env python3
"""Checkpoints of real models' shapes with random weights, for measuring speed.

    bench/random_checkpoint.py SHAPE OUT --bits 4        EXL3, random words
    bench/random_checkpoint.py SHAPE OUT --bits 4 --holes    the same, the words left out
    bench/random_checkpoint.py SHAPE OUT --bf16          the same model unquantised, config alone

Speed does not depend on what the words are, and any words are a valid trellis. Scales make every
layer's outputs as large as its inputs. Words come from one pool of random bytes, each tensor from a
place of its own, so writing is as fast as the disk: use a folder in memory (/dev/shm). With
`--holes` the files have their headers and sizes and no contents: vLLM started with
`--load-format dummy` reads none, and the plugin invents the weights on the device. An unquantised
twin is served with `--load-format dummy` as well. `bench/serving.py` does so by itself.

The tokenizer that is written knows one word a token, so that a text of n words is n tokens.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from exl3_plugin.format import BLOCK, MARKERS, TILE, words_from_bits

POOL_BYTES = 256 << 20
DTYPES = {"I16": 2, "F16": 2, "BF16": 2, "I32": 4}


def decoder(architecture: str, **sizes: int) -> dict:
    """config.json of a Qwen3 model, dense or with experts."""
    return {
        "architectures": [architecture],
        "model_type": "qwen3_moe" if "Moe" in architecture else "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **sizes,
    }


SHAPES = {
    "qwen3-8b": decoder(
        "Qwen3ForCausalLM", hidden_size=4096, num_hidden_layers=36, intermediate_size=12288,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=151936,
    ),
    # The linears of a 27B model of today (hidden 5120, 64 layers, MLP 17408): as many query heads
    # as bring attention to the size it has there, and that vocabulary.
    "dense-27b": decoder(
        "Qwen3ForCausalLM", hidden_size=5120, num_hidden_layers=64, intermediate_size=17408,
        num_attention_heads=80, num_key_value_heads=8, vocab_size=248320,
    ),
    "qwen3-30b-a3b": decoder(
        "Qwen3MoeForCausalLM", hidden_size=2048, num_hidden_layers=48, intermediate_size=6144,
        num_attention_heads=32, num_key_value_heads=4, vocab_size=151936, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    ),
    # For trying the commands out on a CPU.
    "tiny": decoder(
        "Qwen3ForCausalLM", hidden_size=256, num_hidden_layers=2, intermediate_size=384,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: its safetensors dtype and shape; `fill` says what with (see `pools`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: str
    scale: float = 1.0

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype] * math.prod(self.shape)


def round_up(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def linears(config: dict, layer: int) -> Iterator[tuple[str, int, int]]:
    """(name, inputs, outputs) of the linears that are quantised in one decoder layer."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * dim
    keys = config["num_key_value_heads"] * dim
    attention = f"model.layers.{layer}.self_attn"
    yield f"{attention}.q_proj", hidden, queries
    yield f"{attention}.k_proj", hidden, keys
    yield f"{attention}.v_proj", hidden, keys
    yield f"{attention}.o_proj", queries, hidden
    experts = config.get("num_experts")
    wide = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    for part in [f"experts.{i}." for i in range(experts)] if experts else [""]:
        mlp = f"model.layers.{layer}.mlp.{part}"
        yield f"{mlp}gate_proj", hidden, wide
        yield f"{mlp}up_proj", hidden, wide
        yield f"{mlp}down_proj", wide, hidden


def exl3_tensors(name: str, k: int, n: int, bits: float, codebook: str) -> Iterator[Tensor]:
    """The tensors of one EXL3 linear; outputs are as large as inputs."""
    k_stored, n_stored = round_up(k), round_up(n)
    shape = (k_stored // TILE, n_stored // TILE, words_from_bits(bits))
    yield Tensor(f"{name}.trellis", "I16", shape, "words")
    yield Tensor(f"{name}.suh", "F16", (k_stored,), "signs", k**-0.5)
    yield Tensor(f"{name}.svh", "F16", (n_stored,), "signs")
    if codebook in MARKERS:
        yield Tensor(f"{name}.{codebook}", "I32", (), "marker", MARKERS[codebook])


def files(config: dict, bits: float, head_bits: float, codebook: str) -> Iterator[list[Tensor]]:
    """The tensors of each file: one file a layer, and one for embedding, norm and head."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield [
        Tensor("model.embed_tokens.weight", "BF16", (vocab, hidden), "normal"),
        Tensor("model.norm.weight", "BF16", (hidden,), "ones"),
        *exl3_tensors("lm_head", hidden, vocab, head_bits, codebook),
    ]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors = [
            Tensor(f"{prefix}.input_layernorm.weight", "BF16", (hidden,), "ones"),
            Tensor(f"{prefix}.post_attention_layernorm.weight", "BF16", (hidden,), "ones"),
            Tensor(f"{prefix}.self_attn.q_norm.weight", "BF16", (config["head_dim"],), "ones"),
            Tensor(f"{prefix}.self_attn.k_norm.weight", "BF16", (config["head_dim"],), "ones"),
        ]
        if experts := config.get("num_experts"):
            tensors.append(Tensor(f"{prefix}.mlp.gate.weight", "BF16", (experts, hidden), "normal"))
        for name, k, n in linears(config, layer):
            tensors += exl3_tensors(name, k, n, bits, codebook)
        yield tensors


def pools(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What tensors are cut from, 16-bit items: random words, and bfloat16 around 0 of size 0.04."""
    words = rng.integers(0, 1 << 63, POOL_BYTES // 8, dtype=np.int64).view(np.uint16)
    normal = rng.standard_normal(POOL_BYTES // 32, dtype=np.float32) * np.float32(0.04)
    return {"words": words, "normal": (normal.view(np.uint32) >> 16).astype(np.uint16)}


def pieces(
    tensor: Tensor, pool: dict[str, np.ndarray], rng: np.random.Generator
) -> Iterator[bytes | memoryview]:
    """The bytes of one tensor."""
    count = math.prod(tensor.shape)
    if tensor.fill == "marker":
        yield struct.pack("<I", int(tensor.scale))
    elif tensor.fill == "ones":
        yield np.full(count, 0x3F80, dtype=np.uint16).tobytes()
    elif tensor.fill == "signs":
        yield (rng.choice([-1.0, 1.0], count) * tensor.scale).astype(np.float16).tobytes()
    else:
        items = pool[tensor.fill]
        while count:
            at = int(rng.integers(0, len(items) - 1))
            part = items[at : at + count]
            yield memoryview(part).cast("B")
            count -= len(part)


def write_file(path: Path, tensors: list[Tensor], pool: dict[str, np.ndarray] | None) -> None:
    """One safetensors file; without a pool its contents are a hole."""
    entries, at = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        end = at + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    rng = np.random.default_rng(len(header) + sum(path.name.encode()))
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        begin = file.tell()
        for tensor in tensors:
            if pool is not None:
                for piece in pieces(tensor, pool, rng):
                    file.write(piece)
            elif tensor.fill == "marker":
                # Headers alone do not tell the codebook: its constant is read from the file.
                file.seek(begin + entries[tensor.name]["data_offsets"][0])
                file.write(struct.pack("<I", int(tensor.scale)))
        file.truncate(begin + at)


def write_tokenizer(folder: Path, vocab: int) -> None:
    """One word a token, `t0 t2 ..`: text and tokens map onto each other one to one.

    Token 1 ends a text. Its name is long because vLLM refuses texts with more characters than as
    many of the longest token as the model has places, and these have a space after each token.
    """
    words = {"<the end of a text of random words>" if i == 1 else f"t{i}": i for i in range(vocab)}
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {"type": "WhitespaceSplit"},
                "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
            }
        )
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 40960})
    )


def make(
    shape: str,
    out: Path,
    bits: float | None,
    *,
    head_bits: float = 6,
    codebook: str = "mul1",
    holes: bool = False,
) -> int:
    """Write a folder, config.json last; returns the bytes of its safetensors files.

    Args:
        bits: rate of the decoder, None for the config of an unquantised model.
    """
    config = json.loads(json.dumps(SHAPES[shape]))
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.safetensors"):
        old.unlink()
    written = 0
    if bits is not None:
        config["quantization_config"] = {
            "quant_method": "exl3", "bits": bits, "head_bits": head_bits, "codebook": codebook,
        }  # fmt: skip
        contents = list(files(config, bits, head_bits, codebook))
        names = [f"model-{i + 1:05d}-of-{len(contents):05d}.safetensors"
                 for i in range(len(contents))]  # fmt: skip
        pool = None if holes else pools(np.random.default_rng(0))
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            list(threads.map(lambda p: write_file(out / p[0], p[1], pool), zip(names, contents)))
        written = sum((out / name).stat().st_size for name in names)
    write_tokenizer(out, config["vocab_size"])
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return written


def main(
    shape: Annotated[str, typer.Argument(help=", ".join(SHAPES))],
    out: Annotated[Path, typer.Argument(help="folder to write; files of an earlier run go")],
    bits: Annotated[float | None, typer.Option(help="rate of the decoder, 1 to 8")] = None,
    head_bits: Annotated[float, typer.Option()] = 6,
    codebook: Annotated[str, typer.Option(help="mul1, mcg or 3inst")] = "mul1",
    holes: Annotated[bool, typer.Option(help="headers alone, for dummy loading")] = False,
    bf16: Annotated[bool, typer.Option(help="config of the unquantised model")] = False,
) -> None:
    """Writes a checkpoint of random weights in the shape of a real model."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"{shape}: there are {', '.join(SHAPES)}", param_hint="SHAPE")
    if bf16 == (bits is not None):
        raise typer.BadParameter("give either --bits or --bf16")
    if codebook not in ("3inst", *MARKERS):
        raise typer.BadParameter(f"{codebook}: there are mul1, mcg and 3inst")
    began = time.monotonic()
    written = make(shape, out, bits, head_bits=head_bits, codebook=codebook, holes=holes)
    print(f"{out}: {shape}, {written / 1e9:.2f} GB, {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    typer.run(main)
