"""What becomes EXL3 and what stays, from names and shapes as real models have them."""

from pathlib import Path

import pytest
import torch

from exl3_plugin.quantize.inventory import take_inventory
from exl3_plugin.quantize.ldlq import QuantizeError


class Names:
    """A source of names and shapes; the inventory reads nothing else."""

    path = Path("model")

    def __init__(self, shapes: dict[str, tuple[int, ...]], **config):
        self.shapes = shapes
        self.text_config = {"hidden_size": 256, "num_attention_heads": 4, **config}
        self.config = self.text_config


def names_of(source) -> tuple[set[str], set[str]]:
    inventory = take_inventory(source)
    return {linear.name for linear in inventory.linears}, set(inventory.plain)


def test_a_tied_head_is_made_from_the_embedding_and_the_embedding_stays():
    embedding = "model.embed_tokens.weight"
    source = Names(
        {embedding: (512, 256), "model.layers.0.mlp.up_proj.weight": (512, 256), "norm": (256,)}
    )
    inventory = take_inventory(source)
    head = inventory.heads[0]
    assert (head.name, head.tensor, head.k, head.n) == ("lm_head", embedding, 256, 512)
    assert set(inventory.plain) == {embedding, "norm"}


def test_an_own_head_replaces_its_tensor():
    linears, plain = names_of(
        Names(
            {
                "model.embed_tokens.weight": (512, 256),
                "lm_head.weight": (512, 256),
                "model.layers.0.mlp.up_proj.weight": (512, 256),
            }
        )
    )
    assert linears == {"lm_head", "model.layers.0.mlp.up_proj"}
    assert plain == {"model.embed_tokens.weight"}


def test_fused_tensors_are_split_with_their_biases():
    source = Names(
        {
            "model.embed_tokens.weight": (512, 256),
            "model.layers.0.self_attn.qkv_proj.weight": (512, 256),
            "model.layers.0.self_attn.qkv_proj.bias": (512,),
            "model.layers.0.mlp.gate_up_proj.weight": (1024, 256),
        },
        num_key_value_heads=2,
        head_dim=64,
    )
    inventory = take_inventory(source)
    rows = {linear.name.rpartition(".")[2]: linear.rows for linear in inventory.decoder}
    assert rows == {
        "q_proj": (0, 256),
        "k_proj": (256, 384),
        "v_proj": (384, 512),
        "gate_proj": (0, 512),
        "up_proj": (512, 1024),
    }
    biased = {linear.name.rpartition(".")[2] for linear in inventory.decoder if linear.bias}
    assert biased == {"q_proj", "k_proj", "v_proj"}
    assert inventory.plain == ["model.embed_tokens.weight"]


def test_a_fused_tensor_that_contradicts_the_config_is_refused():
    source = Names(
        {
            "model.embed_tokens.weight": (512, 256),
            "model.layers.0.self_attn.qkv_proj.weight": (640, 256),
        },
        num_key_value_heads=2,
        head_dim=64,
    )
    with pytest.raises(QuantizeError, match="qkv_proj has 640 rows"):
        take_inventory(source)


@pytest.mark.parametrize("model_type, transposed", [("qwen3_5_moe", False), ("llama4", True)])
def test_stacked_experts_become_one_module_each(model_type, transposed):
    shapes = {"gate_up_proj": (2, 512, 256), "down_proj": (2, 256, 384)}
    if transposed:
        shapes = {name: (e, k, n) for name, (e, n, k) in shapes.items()}
    source = Names(
        {"model.embed_tokens.weight": (512, 256)}
        | {f"model.layers.0.mlp.experts.{name}": shape for name, shape in shapes.items()},
        model_type=model_type,
    )
    inventory = take_inventory(source)
    by_name = {linear.name: linear for linear in inventory.decoder}
    base = "model.layers.0.mlp.experts"
    assert set(by_name) == {
        f"{base}.{expert}.{leaf}"
        for expert in (0, 1)
        for leaf in ("gate_proj", "up_proj", "down_proj")
    }
    up, down = by_name[f"{base}.1.up_proj"], by_name[f"{base}.1.down_proj"]
    assert (up.k, up.n, up.rows, up.expert, up.transposed) == (256, 256, (256, 512), 1, transposed)
    assert (down.k, down.n, down.rows) == (384, 256, (0, 256))
    assert len({linear.group for linear in inventory.decoder}) == 1
    assert up.input == by_name[f"{base}.0.gate_proj"].input != down.input


def test_small_and_special_projections_stay_plain():
    layer = "model.language_model.layers.3"
    plain = {
        "model.language_model.embed_tokens.weight": (512, 256),
        f"{layer}.input_layernorm.weight": (256,),
        f"{layer}.mlp.gate.weight": (128, 256),
        f"{layer}.mlp.shared_expert_gate.weight": (1, 256),
        f"{layer}.linear_attn.conv1d.weight": (512, 1, 4),
        f"{layer}.linear_attn.in_proj_a.weight": (128, 256),
        f"{layer}.linear_attn.in_proj_ba.weight": (128, 256),
        f"{layer}.linear_attn.A_log": (32,),
        f"{layer}.self_attn.tiny_proj.weight": (32, 256),
        "model.visual.blocks.0.attn.qkv.weight": (768, 256),
        "model.visual.layers.0.attn.qkv.weight": (768, 256),
        "mtp.layers.0.mlp.up_proj.weight": (512, 256),
    }
    linears = {
        f"{layer}.linear_attn.in_proj_qkv.weight": (768, 256),
        f"{layer}.linear_attn.in_proj_z.weight": (256, 256),
        f"{layer}.mlp.shared_expert.gate_proj.weight": (512, 256),
        f"{layer}.mlp.experts.0.w1.weight": (512, 256),
    }
    inventory = take_inventory(Names(plain | linears))
    found = {linear.tensor for linear in inventory.decoder}
    assert found == set(linears)
    assert set(inventory.plain) == set(plain)
    groups = {linear.name.rpartition(".")[2]: linear.group for linear in inventory.decoder}
    assert groups["in_proj_qkv"] == groups["in_proj_z"]


def test_nothing_to_quantise_is_refused():
    with pytest.raises(QuantizeError, match="no decoder linears"):
        take_inventory(Names({"model.embed_tokens.weight": (512, 256)}))


def test_layers_come_in_numerical_order():
    shapes = {f"model.layers.{i}.mlp.up_proj.weight": (128, 128) for i in (10, 2, 0)}
    inventory = take_inventory(Names({"model.embed_tokens.weight": (128, 128), **shapes}))
    assert [linear.layer for linear in inventory.linears] == [0, 2, 10, -1]
    assert torch.tensor([linear.tiles for linear in inventory.linears]).eq(64).all()
