"""Sizes that a config tells, and the many that it does not."""

import pytest

from exl3_plugin.sizes import match_size, true_sizes

LLAMA = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
MOE = {
    "text_config": {
        **LLAMA,
        "head_dim": 128,
        "moe_intermediate_size": 300,
        "shared_expert_intermediate_size": 200,
    },
    "vision_config": {"hidden_size": 99},
    "vocab_size": 7,
}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("lm_head", ((576,), (49152,))),
        ("model.embed_tokens", ((576,), (49152,))),
        ("model.layers.3.self_attn.q_proj", ((576,), (576, 1152))),
        ("model.layers.3.self_attn.v_proj", ((576,), (192,))),
        ("model.layers.3.self_attn.o_proj", ((576,), (576,))),
        ("model.layers.3.mlp.up_proj", ((576,), (1536,))),
        ("language_model.model.layers.3.mlp.down_proj", ((1536,), (576,))),
        ("model.layers.3.mlp.gate", ((), ())),
        ("model.layers.3.linear_attn.in_proj_z", ((), ())),
        ("model.visual.layers.3.mlp.down_proj", ((), ())),
        ("vision_tower.encoder.layers.3.self_attn.q_proj", ((), ())),
        ("mtp.layers.0.self_attn.q_proj", ((), ())),
        ("mtp.fc", ((), ())),
    ],
)
def test_dense_model(name, sizes):
    assert true_sizes(name, LLAMA) == sizes


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("lm_head", ((576,), (49152,))),
        ("model.layers.0.mlp.experts.7.gate_proj", ((576,), (300,))),
        ("model.layers.0.block_sparse_moe.experts.7.w2", ((300,), (576,))),
        ("model.layers.0.mlp.shared_expert.down_proj", ((200,), (576,))),
        ("model.layers.0.self_attn.k_proj", ((576,), (384,))),
    ],
)
def test_nested_mixture_of_experts(name, sizes):
    assert true_sizes(name, MOE) == sizes


@pytest.mark.parametrize(
    ("gate", "outputs"), [(None, (576, 1152)), (True, (1152,)), (False, (576,))]
)
def test_gated_attention_doubles_the_queries(gate, outputs):
    config = LLAMA if gate is None else {**LLAMA, "attn_output_gate": gate}
    assert true_sizes("model.layers.0.self_attn.q_proj", config)[1] == outputs


@pytest.mark.parametrize(
    "irregular",
    [{"kv_lora_rank": 512}, {"global_head_dim": 512}, {"num_attention_heads": [8, 9]}],
)
def test_irregular_attention_is_unknown(irregular):
    assert true_sizes("model.layers.0.self_attn.q_proj", {**LLAMA, **irregular}) == ((), ())
    assert true_sizes("model.layers.0.mlp.up_proj", {**LLAMA, **irregular}) == ((576,), (1536,))


def test_widths_that_differ_between_layers_are_unknown():
    config = {**LLAMA, "intermediate_size": [1536, 768]}
    assert true_sizes("model.layers.0.mlp.up_proj", config) == ((576,), ())
    assert true_sizes("lm_head", {**LLAMA, "draft_vocab_size": 32000}) == ((), ())
    config = {**LLAMA, "block_configs": [{}]}
    assert true_sizes("model.layers.0.mlp.up_proj", config) == ((), ())


def test_matching_allows_for_whole_blocks():
    assert match_size(640, (576,), 128) == 576
    assert match_size(640, (640, 576), 128) == 640
    assert match_size(1152, (576, 1152), 128) == 1152
    assert match_size(640, (512,), 128) is None
    assert match_size(576, (576,), 1) == 576
    assert match_size(640, (576,), 1) is None
    assert match_size(640, (), 128) is None


@pytest.mark.parametrize(
    ("leaf", "sizes"),
    [
        ("q_a_proj", ((7168,), (1536,))),
        ("q_b_proj", ((1536,), (24576,))),
        ("kv_a_proj_with_mqa", ((7168,), (576,))),
        ("kv_b_proj", ((512,), (32768,))),
        ("o_proj", ((), ())),
    ],
)
def test_latent_attention(leaf, sizes):
    """DeepSeek-V3's config and the shapes of its published weights."""
    config = {
        "hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    assert true_sizes(f"model.layers.3.self_attn.{leaf}", config) == sizes
    assert true_sizes(f"model.layers.3.self_attn.{leaf}", config | {"v_head_dim": None})[1] == ()
