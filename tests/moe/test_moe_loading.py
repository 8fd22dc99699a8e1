"""Mixtures of experts that are incomplete, wrong or too much to ask: refused by name, early."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from load_cases import load_all
from safetensors.torch import load_file, save_file

from exl3_plugin.checkpoint import CheckpointError, read_checkpoint
from exl3_plugin.expert_names import check_experts
from exl3_plugin.shards import ShardingError, check_tensor_parallel
from tests.moe import moe_cases as cases
from tests.moe.moe_models import awkward_moe

TINY = "tiny-qwen3-moe-mcg4"
EXPERT = "model.layers.1.mlp.experts.5"


@pytest.fixture
def damaged(reference_data, tmp_path):
    """Returns a function: the tiny checkpoint with tensors and config.json changed."""
    source = reference_data / "tiny" / TINY

    def make(change=lambda tensors: None, **config) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        text = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(text | config))
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        shutil.copy(source / "tokenizer.json", folder)
        return folder

    return make


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        check_experts(read_checkpoint(folder))
    return str(error.value)


def drop(prefix: str):
    def change(tensors):
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


def test_whole_checkpoints_pass(reference_data, tmp_path):
    check_experts(read_checkpoint(reference_data / "tiny" / TINY))
    check_experts(read_checkpoint(reference_data / "tiny" / "tiny-llama-mcg4"))
    check_experts(read_checkpoint(awkward_moe().save(tmp_path / "model")))


def test_a_missing_expert_and_a_missing_projection_are_named(damaged):
    assert f"{EXPERT}.down_proj, {EXPERT}.gate_proj, {EXPERT}.up_proj of 8 experts" in refusal(
        damaged(drop(f"{EXPERT}."))
    )


def test_a_missing_projection_is_named(damaged):
    assert f"{EXPERT}.up_proj of 8 experts a layer missing" in refusal(
        damaged(drop(f"{EXPERT}.up_proj."))
    )


def test_a_plain_expert_among_quantised_ones_is_named(damaged):
    def change(tensors):
        drop(f"{EXPERT}.up_proj.")(tensors)
        tensors[f"{EXPERT}.up_proj.weight"] = torch.zeros(128, 256, dtype=torch.float16)

    assert f"{EXPERT}.up_proj is not EXL3, but other experts" in refusal(damaged(change))


def test_more_experts_than_config_says(damaged):
    text = refusal(damaged(num_experts=5, num_local_experts=5))
    assert "experts.5 is there, but config.json speaks of 5 experts" in text


def test_too_many_experts_a_token(damaged):
    assert "to 17 experts, at most 16 are possible" in refusal(damaged(num_experts_per_tok=17))


def test_experts_cut_for_one_rank(damaged):
    """By size, and by name as earlier systems wrote them."""

    def halves(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            if name.endswith("gate_proj.trellis"):
                tensors[name] = tensors[name][:, :4].contiguous()

    assert "gate_proj" in refusal(damaged(halves))


def test_experts_with_a_rank_in_their_name(damaged):
    def rename(tensors):
        for name in [name for name in tensors if name.startswith(f"{EXPERT}.gate_proj.")]:
            tensors[name.replace("gate_proj.", "gate_proj.rank0.")] = tensors.pop(name)

    assert "cut for one rank of tensor parallelism" in refusal(damaged(rename))


def test_stacked_experts_are_not_mistaken_for_one(damaged):
    def stack(tensors):
        drop("model.layers.1.mlp.experts.")(tensors)
        for number, leaf in enumerate(("fused_in", "down_proj")):
            trellis = torch.zeros(16, 16 + 16 * number, 64, dtype=torch.int16)
            name = f"model.layers.1.mlp.experts.0.{leaf}"
            tensors |= {
                f"{name}.trellis": trellis,
                f"{name}.suh": torch.ones(256, dtype=torch.float16),
                f"{name}.svh": torch.ones(256 + 256 * number, dtype=torch.float16),
            }

    assert "model.layers.1.mlp.experts" in refusal(damaged(stack))


def test_a_width_that_does_not_divide_names_the_sizes_that_do(tmp_path):
    checkpoint = read_checkpoint(awkward_moe().save(tmp_path / "model"))
    with pytest.raises(ShardingError) as error:
        check_tensor_parallel(checkpoint, 8)
    assert "cannot be divided among 8 ranks" in str(error.value)
    assert "work for this checkpoint: 1, 2, 4" in str(error.value)
    check_tensor_parallel(checkpoint, 2)


def test_experts_need_not_divide_where_ranks_hold_them_whole(reference_data):
    whole = read_checkpoint(reference_data / "tiny" / TINY)
    experts = {name: module for name, module in whole.modules.items() if ".experts." in name}
    checkpoint = replace(whole, modules=experts)  # attention would not divide either
    with pytest.raises(ShardingError, match=r"experts\.0\.\w+: 128 .* among 3 ranks"):
        check_tensor_parallel(checkpoint, 3)
    check_tensor_parallel(checkpoint, 3, whole_experts=True)


@pytest.fixture(scope="module")
def loaded(reference_data, tmp_path_factory) -> dict[str, dict]:
    """What vLLM's own loader makes of some checkpoints."""
    whole = reference_data / "tiny" / TINY
    model = awkward_moe()
    folders = {"whole": whole, "awkward": model.save(tmp_path_factory.mktemp("awkward") / "model")}
    model.stored["model.layers.0.mlp.experts.7.gate_proj.scale"] = model.stored["model.norm.weight"]
    folders["stray"] = model.save(tmp_path_factory.mktemp("stray") / "model")
    starts = {name: {"model": folder} for name, folder in folders.items()}
    starts["invented"] = {
        "model": whole,
        "env": {"EXL3_SELF_TEST": "1"},
        "args": {"load_format": "dummy", "dtype": "float32"},
    }
    return dict(zip(starts, load_all(list(starts.values()))))


@pytest.mark.parametrize("name", ["whole", "awkward"])
def test_weights_take_what_they_take_on_disk(loaded, reference_data, name):
    """No padded copy of an expert, no marker, no legacy sign stays."""
    found = loaded[name]
    assert found["error"] is None, found["error"]
    held = {n: size for n, (_, size) in found["parameters"].items() if ".experts." in n}
    assert {n.rpartition(".")[2] for n in held} == {
        f"{side}_{suffix}" for side in ("w13", "w2") for suffix in ("trellis", "suh", "svh")
    }
    if name == "whole":
        folder = reference_data / "tiny" / TINY
        stored = load_file(folder / "model.safetensors")
        words = sum(t.numel() for n, t in stored.items() if ".experts." in n and "trellis" in n)
        assert sum(size for n, size in held.items() if "trellis" in n) == words
        on_disk = (folder / "model.safetensors").stat().st_size
        assert 0.95 * on_disk < found["bytes"] < 1.02 * on_disk


def test_invented_experts_start(loaded):
    found = loaded["invented"]
    assert found["error"] is None, found["error"]
    assert any("self-test" in line for line in found["log"])


def test_invented_experts_give_outputs_as_large_as_inputs():
    """Scales as vLLM invents them, of 1e-3, make products that halves cannot hold."""
    from exl3_plugin import experts, moe

    hidden, inner, count = 256, 384, 3
    kind = experts.Kind("mcg", 64)
    stored = cases.layer(1, count, hidden, inner, hidden, lambda e, p: kind)
    packed = experts.pack(stored, "cpu")
    layer = torch.nn.Module()
    for side in ("w13", "w2"):
        for suffix in ("trellis", "suh", "svh"):
            empty = torch.zeros_like(getattr(packed, f"{side}_{suffix}"))
            setattr(layer, f"{side}_{suffix}", torch.nn.Parameter(empty, requires_grad=False))
    sized = [SimpleNamespace(k=hidden), SimpleNamespace(k=hidden), SimpleNamespace(k=inner)]
    layer.exl3 = SimpleNamespace(stored=[sized] * count)
    moe.invent(layer, "layer")
    words = layer.w13_trellis.clone()
    moe.invent(layer, "layer")
    assert torch.equal(words, layer.w13_trellis), "the same layer gets the same words"
    packed = replace(packed, **{name: p.data for name, p in layer.named_parameters()})
    y = packed.run(torch.randn(8, hidden), torch.ones(8, 1), torch.arange(8)[:, None].int() % count)
    assert 0.2 < float(y.square().mean().sqrt()) < 2


def test_a_stray_tensor_of_an_expert_stops_the_start(loaded):
    assert "experts.7" in str(loaded["stray"]["error"]), loaded["stray"]["error"]
