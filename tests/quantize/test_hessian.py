"""Activations captured layer by layer are those of the model run as a whole."""

import copy

import pytest
import small_models
import torch

from exl3_plugin.quantize.hessian import BlockRunner
from exl3_plugin.quantize.inventory import Linear
from exl3_plugin.quantize.ldlq import QuantizeError

TOKENS = torch.randint(256, (3, 40), generator=torch.Generator().manual_seed(2))

INPUTS = {
    "self_attn.q_proj": "qkv",
    "self_attn.k_proj": "qkv",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate_up",
    "mlp.down_proj": "down",
}


def linears(layer: int) -> list[Linear]:
    found = []
    for leaf, shared in INPUTS.items():
        name = f"model.layers.{layer}.{leaf}"
        found.append(Linear(name, f"{name}.weight", 192, 192, shared, shared, layer))
    return found


@torch.no_grad()
def whole_model_moments(model, wanted: dict[str, str]) -> dict[str, torch.Tensor]:
    """Mean of `x^T x` in float64 over all tokens, by hooks on an ordinary forward pass."""
    seen: dict[str, list[torch.Tensor]] = {key: [] for key in wanted}
    modules = dict(model.named_modules())
    handles = [
        modules[name].register_forward_pre_hook(
            lambda _, x, key=key: seen[key].append(x[0].reshape(-1, x[0].shape[-1]).double())
        )
        for key, name in wanted.items()
    ]
    model(TOKENS, use_cache=False)
    for handle in handles:
        handle.remove()
    rows = {key: torch.cat(parts) for key, parts in seen.items()}
    return {key: x.T @ x / len(x) for key, x in rows.items()}


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_layerwise_activations_are_those_of_the_whole_model(tied):
    model = small_models.llama(dtype=torch.float32, tie_word_embeddings=tied)
    reference = copy.deepcopy(model)
    runner = BlockRunner(model, TOKENS)
    assert runner.count == 2
    for layer in range(2):
        found = runner.capture(layer, linears(layer))
        wanted = {key: f"model.layers.{layer}.{leaf}" for leaf, key in INPUTS.items()}
        expected = whole_model_moments(reference, wanted)
        assert found.keys() == expected.keys()
        assert all(close(found[key], expected[key]) for key in found)
        # From here on both run with a changed layer, as after quantisation.
        changed = next(linear for linear in linears(layer) if "o_proj" in linear.name)
        weight = reference.model.layers[layer].self_attn.o_proj.weight.detach()
        weight.mul_(1.5)
        runner.replace(layer, changed, weight.T.clone())
        runner.advance(layer)
        runner.release(layer)
    head = whole_model_moments(reference, {"head": "lm_head"})["head"]
    assert close(runner.capture_head(), head)


def test_a_part_of_a_fused_tensor_is_replaced_in_place():
    model = small_models.llama(dtype=torch.float32)
    runner = BlockRunner(model, TOKENS)
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    name = "model.layers.0.mlp.up_proj"
    part = Linear(name, f"{name}.weight", 192, 64, "g", "i", 0, rows=(64, 128))
    runner.replace(0, part, torch.ones(192, 64))
    after = model.model.layers[0].mlp.up_proj.weight
    assert bool((after[64:128] == 1).all())
    assert torch.equal(after[:64], before[:64])
    assert torch.equal(after[128:], before[128:])


def test_tokens_with_infinite_activations_are_left_out():
    model = small_models.llama(dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("inf")
    tokens = TOKENS.clone()
    tokens[tokens == 7] = 8
    tokens[:, -1] = 7
    runner = BlockRunner(model, tokens)
    found = runner.capture(0, linears(0))
    assert torch.isfinite(found["qkv"]).all()
    assert found["qkv"].diagonal().min() > 0


def test_a_model_without_layers_is_refused():
    model = small_models.llama(dtype=torch.float32)
    model.config.num_hidden_layers = 5
    with pytest.raises(QuantizeError, match="no list of 5 decoder layers"):
        BlockRunner(model, TOKENS)
