"""The load audit, on damaged checkpoints, through vLLM's own loader and model classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from load_cases import load_all
from plugin_models import awkward_llama
from safetensors.torch import load_file, save_file

from exl3_plugin.audit import LoadWatch

CHECKPOINT = "tiny-llama-mul1-2.5"


def damage(source: Path, folder: Path, change) -> None:
    """Copy a checkpoint, letting `change` edit its tensors (by name)."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def rename(old: str, new: str):
    def change(tensors):
        tensors[new] = tensors.pop(old)

    return change


def drop(name: str):
    return lambda tensors: tensors.pop(name)


def copy(old: str, new: str):
    def change(tensors):
        tensors[new] = tensors[old].clone()

    return change


def swap(one: str, two: str):
    def change(tensors):
        tensors[one], tensors[two] = tensors[two], tensors[one]

    return change


def widen(name: str):
    def change(tensors):
        tensors[name] = tensors[name].float()

    return change


NORM = "model.layers.1.post_attention_layernorm.weight"
UNKNOWN = "model.layers.0.self_attn.rotation.weight"
DAMAGED = {
    "lost_svh": (drop("model.layers.1.self_attn.k_proj.svh"), "model.layers.1.self_attn.k_proj"),
    "lost_norm": (drop(NORM), f"1 parameters were not filled: {NORM}"),
    "lost_embedding": (drop("model.embed_tokens.weight"), "filled: model.embed_tokens.weight"),
    "unknown": (copy("model.norm.weight", UNKNOWN), f"stopped at tensor {UNKNOWN}"),
    "renamed_norm": (rename(NORM, NORM.replace("norm.", "norms.")), "post_attention_layernorms"),
    "swapped": (
        swap("model.layers.0.mlp.gate_proj.suh", "model.layers.0.mlp.down_proj.suh"),
        "model.layers.0.mlp.gate_proj (in model.safetensors): suh is F16",
    ),
    "other_dtype": (
        widen("model.layers.1.self_attn.q_proj.svh"),
        "model.layers.1.self_attn.q_proj (in model.safetensors): svh is F32",
    ),
    # vLLM drops a bias that the model has no place for without a word.
    "ignored_bias": (
        copy("model.norm.weight", "model.layers.0.mlp.down_proj.bias"),
        "1 stored tensors have no place in LlamaForCausalLM: model.layers.0.mlp.down_proj.bias",
    ),
}


@pytest.fixture(scope="module")
def loaded(reference_data, smollm2, tmp_path_factory) -> dict[str, dict]:
    """What vLLM says to every case, by its name."""
    root, source = tmp_path_factory.mktemp("damaged"), reference_data / "tiny" / CHECKPOINT
    cases = {name: root / name for name in DAMAGED}
    for name, (change, _) in DAMAGED.items():
        damage(source, cases[name], change)

    cases["whole"] = source
    cases["rotary"] = root / "rotary"
    damage(source, cases["rotary"],
           copy("model.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"))  # fmt: skip

    awkward = awkward_llama()
    cases["awkward"] = awkward.save(root / "awkward")
    cases["awkward_lost_member"] = root / "awkward_lost_member"
    damage(cases["awkward"], cases["awkward_lost_member"],
           drop("model.layers.0.self_attn.v_proj.weight"))  # fmt: skip

    # All of layer 1's attention plain, one member lost: vLLM's own fused weight is filled in part.
    cases["lost_plain_member"] = root / "lost_plain_member"
    dense = {name: value for name, value in awkward.dense.items() if "layers.1.self_attn" in name}
    plain = awkward_llama()
    plain.stored = {
        name: value for name, value in plain.stored.items() if "layers.1.self_attn" not in name
    } | {name: value.astype("float16") for name, value in dense.items()}
    del plain.stored["model.layers.1.self_attn.k_proj.weight"]
    plain.save(cases["lost_plain_member"])

    # A stale index that lists one file of two: vLLM reads only that one.
    cases["stale_index"] = root / "stale_index"
    damage(source, cases["stale_index"], drop(NORM))
    tensors = load_file(source / "model.safetensors")
    save_file({NORM: tensors[NORM]}, cases["stale_index"] / "extra.safetensors")
    index = {"weight_map": {n: "model.safetensors" for n in tensors if n != NORM}}
    (cases["stale_index"] / "model.safetensors.index.json").write_text(json.dumps(index))

    cases["smollm2"] = smollm2
    arguments = {name: {"model": folder} for name, folder in cases.items()}
    arguments["only_warned"] = {
        "model": cases["ignored_bias"], "env": {"EXL3_LOAD_AUDIT": "warn"}
    }  # fmt: skip
    permuted = "model.layers.0.mlp.up_proj.trellis"
    arguments["permuted"] = {"model": source, "permute": permuted}
    arguments["copied"] = {"model": source, "permute": permuted, "flips": 2}
    arguments["dummy"] = {"model": source, "args": {"load_format": "dummy"}}

    unmarked = awkward_llama()
    del unmarked.config["quantization_config"]
    arguments["forced"] = {
        "model": unmarked.save(root / "unmarked"), "args": {"quantization": "exl3"}
    }  # fmt: skip
    return dict(zip(arguments, load_all(list(arguments.values()))))


def watched(load) -> LoadWatch:
    """Let `load(model, weights)` place a, b and c, four elements each, and watch it."""
    model = torch.nn.Module()
    model.register_parameter("one", torch.nn.Parameter(torch.zeros(4), requires_grad=False))
    model.register_parameter("two", torch.nn.Parameter(torch.zeros(8), requires_grad=False))
    model.register_buffer("table", torch.zeros(4))
    watch = LoadWatch(model)
    stored = ((name, torch.full((4,), i, dtype=torch.float16)) for i, name in enumerate("abc"))
    with watch:
        load(model, watch.stream(stored))
    watch.finish(model)
    watch.filled = {
        name: watch.written[p.untyped_storage().data_ptr()] for name, p in model.named_parameters()
    }
    return watch


def test_watch_tells_a_tensor_that_was_only_looked_at():
    def load(model, weights):
        for name, tensor in weights:
            if name == "a" and tensor.sum() >= 0:
                model.one.data.copy_(tensor)

    watch = watched(load)
    assert (watch.placed, watch.offered) == ({"a"}, set("abc"))
    assert watch.filled == {"one": 4, "two": 0}


def test_watch_follows_casts_cuts_joins_and_tensors_held_back():
    def load(model, weights):
        a, b, c = (tensor for _, tensor in weights)
        model.two.data.copy_(torch.cat([b.float() * 2, c[[3, 2, 1, 0]].float()]))
        model.one.data[:2] = a[:2]

    watch = watched(load)
    assert watch.placed == set("abc")
    assert watch.filled == {"one": 2, "two": 8}


def test_watch_sees_buffers_lists_outputs_and_tensors_taken_over():
    def load(model, weights):
        a, b, c = (tensor.float() for _, tensor in weights)
        model.table.add_(a)
        torch._foreach_copy_([model.one.data], [b])
        model.two.data = c

    assert watched(load).placed == set("abc")

    def load_out(model, weights):
        for name, tensor in weights:
            if name == "b":
                torch.mul(tensor.float(), 2, out=model.one.data)

    assert watched(load_out).placed == {"b"}


def test_watch_forgets_memory_that_is_used_again():
    def load(model, weights):
        for _, tensor in weights:
            del tensor
        model.one.data.copy_(torch.ones(4, dtype=torch.float16))

    assert watched(load).placed == set()


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_refused_and_named(loaded, name):
    error = loaded[name]["error"]
    assert error is not None and DAMAGED[name][1] in error, error


def test_a_whole_checkpoint_passes_and_is_summed_up(loaded):
    assert loaded["whole"]["error"] is None
    assert any("EXL3: 9 layers from 15 modules (2.5 bits: 14, 4 bits: 1)" in line
               for line in loaded["whole"]["log"])  # fmt: skip


def test_what_a_model_leaves_out_is_left_out_by_rule_and_logged(loaded):
    assert loaded["rotary"]["error"] is None
    assert (
        "EXL3: 1 stored tensors left out: rotary tables, computed at start"
        in (loaded["rotary"]["log"])
    )


def test_the_audit_can_be_told_to_warn_only(loaded):
    assert loaded["only_warned"]["error"] is None
    assert any("serving all the same" in line and "down_proj.bias" in line
               for line in loaded["only_warned"]["log"])  # fmt: skip


def test_contents_that_the_models_loader_permutes_are_refused(loaded):
    error = loaded["permuted"]["error"]
    assert "model.layers.0.mlp.up_proj.trellis: the model's loader passed other contents" in error
    assert loaded["copied"]["error"] is None


def test_invented_weights_need_no_checkpoint_tensors(loaded):
    assert loaded["dummy"]["error"] is None


def test_a_checkpoint_whose_config_says_nothing_can_be_forced(loaded):
    assert loaded["forced"]["error"] is None
    assert loaded["forced"]["parameters"]["lm_head.trellis"][0] == "torch.int16"


def test_a_lost_member_of_a_mixed_layer_is_named(loaded):
    error = loaded["awkward_lost_member"]["error"]
    assert "model.layers.0.self_attn.v_proj" in error, error


def test_a_plain_fused_layer_filled_in_part_is_named(loaded):
    error = loaded["lost_plain_member"]["error"]
    assert "model.layers.1.self_attn.qkv_proj.weight (61440 of 73728 elements)" in error, error


def test_a_file_hidden_by_a_stale_index_is_named(loaded):
    error = loaded["stale_index"]["error"]
    assert f"{NORM} (in extra.safetensors, never read)" in error, error
    assert "delete that index" in error


def test_no_dense_copy_and_no_marker_stays(loaded, reference_data):
    for name in ("whole", "awkward"):
        parameters = loaded[name]["parameters"]
        assert not [p for p in parameters if p.endswith((".mcg", ".mul1", ".su", ".sv", "qweight"))]
        assert parameters["lm_head.trellis"][0] == "torch.int16"
    stored = load_file(reference_data / "tiny" / CHECKPOINT / "model.safetensors")
    trellis = sum(t.numel() for n, t in stored.items() if n.endswith(".trellis"))
    held = loaded["whole"]["parameters"]
    assert sum(size for n, (_, size) in held.items() if n.endswith(".trellis")) == trellis


def test_resident_weights_are_the_checkpoint_plus_5_percent_at_most(loaded, smollm2):
    """Both by what the model holds and by what the process grew, 181 MB of SmolLM2."""
    stored = (smollm2 / "model.safetensors").stat().st_size
    found = loaded["smollm2"]
    assert found["error"] is None
    assert 0.95 * stored < found["bytes"] < 1.05 * stored
    assert found["grown_bytes"] < 1.05 * stored
