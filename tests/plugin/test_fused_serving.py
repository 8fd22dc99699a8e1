"""The fusion pass inside vLLM: when it is given to the compiler, and what a compiled model says.

Graphs are cut into pieces, passed through vLLM's own passes and compiled by Inductor, on the CPU;
`compiled_cases.py` says how.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from plugin_models import awkward_qwen3, prompts
from vllm.compilation.passes.inductor_pass import CallableInductorPass
from vllm.config import CompilationConfig, CompilationMode
from vllm.platforms.interface import DeviceCapability

from exl3_plugin import fused, fusion, ops

KEY = "post_grad_custom_post_pass"
LLAMA = "tiny-llama-mcg4"
LAYERS = 2


@pytest.fixture(scope="module", autouse=True)
def library():
    ops.load()


# When the pass is installed


@pytest.mark.parametrize(
    ("environment", "key", "capability", "reason"),
    [
        ({}, "CPU", None, "capability 9.0"),
        ({"EXL3_FUSE": "1"}, "CPU", None, None),
        ({"EXL3_FUSE": "0"}, "CPU", None, "EXL3_FUSE=0"),
        ({"EXL3_FUSE": "1", "VLLM_BATCH_INVARIANT": "1"}, "CPU", None, "VLLM_BATCH_INVARIANT"),
        ({"EXL3_FUSE": "1"}, "XPU", None, "no exl3::norm_linear for XPU"),
    ],
)
def test_when_it_is_given_to_vllm(monkeypatch, environment, key, capability, reason):
    for name in ("EXL3_FUSE", "VLLM_BATCH_INVARIANT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = fusion.reason_against(key, capability)
    assert found is None if reason is None else reason in found


def test_gpus_that_it_was_measured_on(monkeypatch):
    """The rule alone: on which compute capabilities the operators are used unasked."""
    monkeypatch.setattr(fusion, "_missing", lambda key: None)
    monkeypatch.delenv("EXL3_FUSE", raising=False)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    assert fusion.reason_against("CUDA", DeviceCapability(9, 0)) is None
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0), (12, 1)):
        assert "not measured" in fusion.reason_against("CUDA", DeviceCapability(*capability))
    monkeypatch.setenv("EXL3_FUSE", "1")
    assert fusion.reason_against("CUDA", DeviceCapability(12, 0)) is None


def compilation(**settings) -> SimpleNamespace:
    """What of a VllmConfig is looked at: vLLM's own compilation config."""
    return SimpleNamespace(compilation_config=CompilationConfig(**settings))


def test_installed_once_and_never_over_a_users_pass(monkeypatch):
    monkeypatch.setenv("EXL3_FUSE", "1")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    config = compilation(mode=CompilationMode.VLLM_COMPILE)
    fusion.install(config)
    passes = config.compilation_config.inductor_compile_config
    installed = passes[KEY]
    assert isinstance(installed, fusion.Exl3FusionPass)
    fusion.install(config)
    assert passes[KEY] is installed

    users = {KEY: "compiled_cases.leave_alone"}
    config = compilation(mode=CompilationMode.VLLM_COMPILE, inductor_passes=users)
    fusion.install(config)
    own = config.compilation_config.inductor_compile_config[KEY]
    assert isinstance(own, CallableInductorPass)

    for config in (None, compilation(mode=CompilationMode.NONE), compilation()):
        fusion.install(config)
        assert config is None or KEY not in config.compilation_config.inductor_compile_config


def test_compiled_graphs_are_kept_apart(monkeypatch, tmp_path):
    """vLLM's key for compiled graphs differs with and without the pass, and follows its source."""
    monkeypatch.setenv("EXL3_FUSE", "1")
    plain, with_pass = (compilation(mode=CompilationMode.VLLM_COMPILE) for _ in range(2))
    fusion.install(with_pass)
    keys = {c.compilation_config.compute_hash() for c in (plain, with_pass)}
    assert len(keys) == 2
    before = fusion.Exl3FusionPass().uuid()
    assert before == fusion.Exl3FusionPass().uuid()
    for module in (fusion, fused):
        changed = tmp_path / Path(module.__file__).name
        changed.write_text(Path(module.__file__).read_text() + "\n")
        with monkeypatch.context() as patch:
            patch.setattr(module, "__file__", str(changed))
            assert fusion.Exl3FusionPass().uuid() != before


def test_it_travels_to_workers():
    made = fusion.Exl3FusionPass()
    made.norms = 3
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert other.norms == 3 and other.uuid() == made.uuid()


# What a compiled model says


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> dict[str, Path]:
    """A synthetic checkpoint, little in it a multiple of 128, and what its dense twin says."""
    root, model = tmp_path_factory.mktemp("qwen3"), awkward_qwen3()
    return {
        "model": model.save(root / "model"),
        "golden": model.golden(root / "golden.npz", prompts(384)),
    }


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("VLLM_BATCH_INVARIANT", "EXL3_FUSE")}


@pytest.fixture(scope="module")
def served(reference_data, qwen3, environment, tmp_path_factory) -> dict[str, dict]:
    """The cases below, served one after the other by one process."""
    root = tmp_path_factory.mktemp("fused")
    tiny = reference_data / "tiny" / LLAMA
    llama = {"model": tiny, "golden": tiny / "golden.npz", "dtype": "bfloat16"}
    cases = {
        "fused": llama | {"fuse": "1"},
        "plain": llama | {"fuse": "0"},
        "fused again": llama | {"fuse": "1"},
        "user's pass": llama | {"fuse": "1", "pass": "compiled_cases.leave_alone"},
        "qwen3": qwen3 | {"dtype": "float32", "fuse": "1"},
    }
    for name, case in cases.items():
        case |= {"cache": root / "cache", "save": root / f"{name}.npz"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compiled_cases.py")],
        input=json.dumps(list(cases.values()), default=str),
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(cases), done.stderr[-6000:]
    for (name, case), result in zip(cases.items(), results):
        with np.load(case["save"]) as saved:
            result["top_lp"] = np.concatenate([saved[key].ravel() for key in saved])
        print(name, {key: value for key, value in result.items() if key != "top_lp"})
    return dict(zip(cases, results)) | {"log": done.stderr}


@pytest.mark.slow
def test_every_place_of_a_llama_is_fused(served):
    """Each layer has two norms and a gated activation; the first norm has no residual."""
    for name in ("fused", "qwen3"):
        result = served[name]
        assert (result["norms"], result["gated"]) == (2 * LAYERS - 1, LAYERS), name
        called, prompts_run = result["called"], result["called"]["gated_linear"] // LAYERS
        assert called["norm_linear"] == (2 * LAYERS - 1) * prompts_run
        assert called["gated_linear"] == LAYERS * prompts_run
    assert "2 norms and 1 gated activations run inside the layers behind them" in served["log"]


@pytest.mark.slow
def test_a_fused_model_says_what_the_reference_says(served):
    for name in ("fused", "plain"):
        assert served[name]["mean_logprob_diff"] < 0.08
        assert served[name]["top1_agreement_clear"] >= 0.97
    assert served["qwen3"]["max_logprob_diff"] < 1e-4
    assert served["qwen3"]["top1_agreement"] == 1.0
    difference = np.abs(served["fused"]["top_lp"] - served["plain"]["top_lp"]).mean()
    print("fused against unfused, bfloat16: mean difference", difference)
    assert difference < 0.08


@pytest.mark.slow
def test_switched_off_nothing_is_fused(served):
    result = served["plain"]
    assert result["installed"] == "NoneType" and set(result["called"]) == {"linear"}
    assert "norms and activations stay outside the layers: EXL3_FUSE=0" in served["log"]


@pytest.mark.slow
def test_compiled_graphs_from_the_cache_are_the_right_ones(served):
    """Three starts on one folder, of which the second one fuses nothing."""
    first, plain, again = (served[name] for name in ("fused", "plain", "fused again"))
    assert again["norms"] == again["gated"] == 0, "compiled anew"
    assert again["called"] == first["called"] and plain["called"] != first["called"]
    assert np.array_equal(again["top_lp"], first["top_lp"])
    assert len({result["folder"] for result in (first, plain)}) == 2


@pytest.mark.slow
def test_a_users_pass_stays(served):
    result = served["user's pass"]
    assert result["installed"] == "CallableInductorPass"
    assert set(result["called"]) == {"linear"}
    assert f"{KEY} is CallableInductorPass already" in served["log"]


@pytest.mark.slow
def test_in_workers_of_two_ranks(qwen3, environment, tmp_path):
    """As CPUs compile, in processes of their own; rank 1's part of `down_proj` begins inside a
    block. The first rank of a host is the one that says what was fused."""
    command = [sys.executable, "-m", "exl3_plugin.verify", qwen3["model"], "--compile"]
    command += ["--golden", qwen3["golden"], "--prompt", "1", "--dtype", "float32"]
    done = subprocess.run(
        [*command, "--tensor-parallel-size", "2"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment | {"EXL3_FUSE": "1", "VLLM_CACHE_ROOT": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    result = json.loads(done.stdout)
    assert result["max_logprob_diff"] < 1e-4 and result["top1_agreement"] == 1.0
    said = [line for line in done.stderr.splitlines() if "run inside the layers" in line]
    assert len(said) == 1 and "Worker_TP0" in said[0], said
    assert "0 norms and 2 gated activations" in said[0]
