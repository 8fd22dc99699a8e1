"""Names, detection, environment: what vLLM asks before it loads anything."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import PPMissingLayer, WeightsMapper

from exl3_plugin import env
from exl3_plugin.audit import skip_rules
from exl3_plugin.checkpoint import Checkpoint, CheckpointError, Module
from exl3_plugin.config import Exl3Config, refuse_unsupported

# As Qwen3.5's wrapper class has it; "mtp." is for the draft class to load.
WRAPPER = WeightsMapper(
    orig_to_new_prefix={
        "model.visual.": "visual.",
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
        "mtp.": None,
    }
)

# As Gemma 4's has it: mapping a mapped name once more would grow another prefix.
COMPOUNDING = WeightsMapper(orig_to_new_prefix={"model": "language_model.model"})


def module(name: str, kind: str = "exl3") -> Module:
    exl3 = kind == "exl3"
    return Module(name, kind, 4.0 if exl3 else None, "mul1" if exl3 else None, 128, 128, 128, 128,
                  {}, 0)  # fmt: skip


def config_of(*names: str, kinds: dict[str, str] | None = None) -> Exl3Config:
    modules = {name: module(name, (kinds or {}).get(name, "exl3")) for name in names}
    config = Exl3Config({"quant_method": "exl3"})
    config.checkpoint = Checkpoint(Path("folder"), {"num_hidden_layers": 2}, modules, {}, [])
    config.aliases = {name: name for name in modules}
    return config


def test_names_of_a_wrapper_class_resolve():
    q = "model.language_model.layers.0.self_attn.q_proj"
    config = config_of(q, "lm_head", "model.visual.blocks.0.attn.qkv", "mtp.fc")
    config.apply_vllm_mapper(WRAPPER.get_rename_mapper())
    assert config.find("language_model.model.layers.0.self_attn.q_proj").name == q
    assert config.find("language_model.lm_head").name == "lm_head"
    assert config.find("visual.blocks.0.attn.qkv").name == "model.visual.blocks.0.attn.qkv"
    assert config.find("language_model.model.layers.1.self_attn.q_proj") is None


def test_a_draft_that_shares_the_config_finds_its_own_names_and_the_head():
    config = config_of("model.language_model.layers.0.mlp.up_proj", "lm_head", "mtp.fc")
    config.apply_vllm_mapper(WRAPPER.get_rename_mapper())
    config.apply_vllm_mapper(WeightsMapper())
    assert config.find("mtp.fc").name == "mtp.fc"
    assert config.find("lm_head").name == "lm_head"


def test_mapping_again_does_not_compound():
    config = config_of("model.layers.0.mlp.down_proj")
    for _ in range(3):
        config.apply_vllm_mapper(COMPOUNDING.get_rename_mapper())
    name = "language_model.model.layers.0.mlp.down_proj"
    assert config.find(name).name == "model.layers.0.mlp.down_proj"
    assert set(config.aliases) == {"model.layers.0.mlp.down_proj", name}


def test_without_a_map_wrapper_segments_are_seen_through_unless_ambiguous():
    config = config_of("model.language_model.layers.0.mlp.down_proj", "model.norm_proj",
                       "language_model.norm_proj")  # fmt: skip
    assert config.find("language_model.model.layers.0.mlp.down_proj") is not None
    assert config.find("norm_proj") is None
    assert config.find("mtp.layers.0.mlp.down_proj") is None


def test_llama_fuses_by_its_own_map():
    layer = "model.layers.0.self_attn"
    config = config_of(*(f"{layer}.{p}_proj" for p in "qkvo"))
    config.apply_vllm_mapper(LlamaForCausalLM.hf_to_vllm_mapper.get_rename_mapper())
    config.packed_modules_mapping.update(LlamaForCausalLM.packed_modules_mapping)
    found = config.members(f"{layer}.qkv_proj")
    assert [m.name for _, m in found] == [f"{layer}.{p}_proj" for p in "qkv"]
    assert [m.name for _, m in config.members(f"{layer}.o_proj")] == [f"{layer}.o_proj"]


def test_fused_layers_that_a_class_does_not_declare():
    parent = "model.layers.0.self_attn"
    config = config_of(f"{parent}.q_a_proj", f"{parent}.kv_a_proj_with_mqa")
    found = config.members(f"{parent}.fused_qkv_a_proj")
    assert [m.name for _, m in found] == [f"{parent}.q_a_proj", f"{parent}.kv_a_proj_with_mqa"]


def test_a_module_stored_fused_is_one_member():
    config = config_of("model.layers.0.self_attn.qkv_proj")
    config.packed_modules_mapping["qkv_proj"] = ["q_proj", "k_proj", "v_proj"]
    found = config.members("model.layers.0.self_attn.qkv_proj")
    assert [m.name for _, m in found] == ["model.layers.0.self_attn.qkv_proj"]


def test_the_config_travels_to_workers():
    config = config_of("model.layers.0.mlp.down_proj")
    config.apply_vllm_mapper(COMPOUNDING.get_rename_mapper())
    again = pickle.loads(pickle.dumps(config))
    assert again.find("language_model.model.layers.0.mlp.down_proj").bits == 4.0


def test_detection():
    assert Exl3Config.override_quantization_method({"quant_method": "modelopt"}, "exl3") == "exl3"
    assert Exl3Config.override_quantization_method({"quant_method": "exl3"}, None) is None
    assert Exl3Config.from_config({"quant_method": "exl3", "bits": 4.0}).get_name() == "exl3"


def test_quantised_embeddings_are_refused_by_name(tmp_path, monkeypatch):
    from exl3_plugin import config as config_module

    held = config_of("model.embed_tokens", kinds={"model.embed_tokens": "embedding"}).checkpoint
    monkeypatch.setattr(config_module, "read_checkpoint", lambda *_: held)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.trellis is a quantised embed"):
        Exl3Config().maybe_update_config("folder")


def test_register_is_idempotent_cheap_and_leaves_other_models_alone():
    program = """
import sys, exl3_plugin
exl3_plugin.register(); exl3_plugin.register()
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
assert QUANTIZATION_METHODS.count("exl3") == 1
assert get_quantization_config("exl3").__name__ == "Exl3Config"
assert "exl3_plugin.ops" not in sys.modules
assert "ParallelLMHead" not in op_registry_oot
assert not hasattr(DefaultModelLoader.load_weights, "exl3_audited")
import torch
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


class Built(torch.nn.Module):
    """A text model without draft and tower, of which this rank builds layer 0."""

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"model.extra.": None})

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1), PPMissingLayer()])

    def is_unused_checkpoint_weight(self, name):
        return name.endswith(".unused")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "rotary tables"),
        ("model.layers.2.mlp.down_proj.weight", "multi-token prediction"),
        ("mtp.fc.trellis", "towers and drafts"),
        ("model.visual.blocks.0.attn.qkv.weight", "towers and drafts"),
        ("model.extra.weight", "dropped by Built's weight map"),
        ("model.layers.1.mlp.down_proj.trellis", "modules built on other ranks"),
        ("model.layers.0.unused", "declared unused by Built"),
        ("model.layers.0.mlp.down_proj.trellis", None),
        ("model.layers.10.weight_scale", "multi-token prediction"),
        ("model.norm.weight", None),
    ],
)
def test_rules_by_which_tensors_are_left_out(name, rule):
    rules = skip_rules(Built(), config_of("lm_head"))
    found = next((title for title, test in rules if test(name)), None)
    assert (found is None) if rule is None else found.startswith(rule)


def test_a_tower_that_is_built_may_not_lose_tensors():
    model = Built()
    model.visual = torch.nn.Module()
    rules = skip_rules(model, config_of("lm_head"))
    assert not any(test("model.visual.blocks.0.attn.qkv.weight") for _, test in rules)


def test_environment_old_names_resolve_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(env, "_warned", set())
    monkeypatch.delenv("EXL3_LOAD_AUDIT", raising=False)
    assert env.get("EXL3_LOAD_AUDIT") == "refuse"
    monkeypatch.setenv("VLLM_EXL3_LOAD_AUDIT", "warn")
    assert env.get("EXL3_LOAD_AUDIT") == "warn"
    assert "VLLM_EXL3_LOAD_AUDIT is an old name; set EXL3_LOAD_AUDIT" in caplog.text
    monkeypatch.setenv("EXL3_LOAD_AUDIT", "refuse")
    assert env.get("EXL3_LOAD_AUDIT") == "refuse"


def test_environment_mistakes_are_named(monkeypatch):
    monkeypatch.setenv("EXL3_LOAD_AUDIT", "maybe")
    with pytest.raises(ValueError, match="EXL3_LOAD_AUDIT='maybe': expected one of refuse, warn"):
        env.get("EXL3_LOAD_AUDIT")
    monkeypatch.setenv("EXL3_LAOD_AUDIT", "warn")
    monkeypatch.setenv("EXL3_TEST_DATA", "elsewhere")
    assert env.misspelt() == [("EXL3_LAOD_AUDIT", "EXL3_LOAD_AUDIT")]
    with pytest.raises(KeyError):
        env.get("EXL3_NOT_DECLARED")


def test_a_model_of_another_format_is_not_audited():
    from exl3_plugin.audit import _config_of

    assert _config_of(SimpleNamespace(modules=lambda: iter([torch.nn.Linear(1, 1)]))) is None


@pytest.mark.parametrize(
    ("architecture", "name", "refused"),
    [
        ("FalconForCausalLM", "transformer.h.0.self_attention.query_key_value", True),
        ("FalconForCausalLM", "transformer.h.0.self_attention.dense", False),
        ("GPT2LMHeadModel", "transformer.h.0.attn.c_proj", True),
        ("Llama4ForCausalLM", "model.layers.0.self_attn.k_proj", True),
        ("Llama4ForCausalLM", "model.layers.0.self_attn.v_proj", False),
        ("LlamaForCausalLM", "model.layers.0.self_attn.k_proj", False),
    ],
)
def test_layers_whose_plain_weights_vllm_rearranges_are_refused(architecture, name, refused):
    checkpoint = config_of(name).checkpoint
    checkpoint.config["architectures"] = [architecture]
    if refused:
        with pytest.raises(CheckpointError, match=rf"{name} is EXL3, but of a {architecture} vLLM"):
            refuse_unsupported(checkpoint)
        checkpoint.modules[name] = module(name, "plain")
    refuse_unsupported(checkpoint)


def test_a_class_that_takes_a_layer_for_stored_fused_gets_it_assembled_from_its_parts():
    mlp = "model.layers.0.mlp"
    config = config_of(f"{mlp}.gate_proj", f"{mlp}.up_proj", "a.qkv_proj")
    config.packed_modules_mapping = {"gate_up_proj": ["gate_up_proj"], "qkv_proj": ["qkv_proj"]}
    found = config.members(f"{mlp}.gate_up_proj")
    assert [name.rpartition(".")[2] for name, _ in found] == ["gate_proj", "up_proj"]
    assert [name for name, _ in config.members("a.qkv_proj")] == ["a.qkv_proj"]
