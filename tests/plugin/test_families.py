"""Families of models, each as a tiny checkpoint of our own quantiser, through vLLM on the CPU.

`families.py` says how they are made and what the truth is. In float32 nothing but rounding may
differ; the hybrid families compute in bfloat16 alone here, which has the thresholds of bfloat16.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from families import FAMILIES, build

ROUNDING = {"float32": 1e-4, "bfloat16": 0.08}
SAME_BEST = {"float32": 1.0, "bfloat16": 0.97}
NEEDS_TORCHVISION = [name for name in FAMILIES if name.startswith("qwen3.5") or
                     FAMILIES[name].wrapper]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """All families' checkpoints, made in a process of its own with the quantiser's threads."""
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        build(name, root)
    return root


@pytest.fixture(scope="module")
def served(checkpoints) -> dict[str, dict]:
    """What verify says of each family; one process serves them one after the other."""
    # Three ways in which a class may leave layers out of the quantisation.
    pins = {"llama-down": ["down_proj"], "llama-mlp": ["gate_up_proj"], "llama-qkv": ["qkv_proj"]}
    have_torchvision = importlib.util.find_spec("torchvision") is not None
    names = [n for n in FAMILIES if have_torchvision or n not in NEEDS_TORCHVISION]
    cases = [
        {
            "model": checkpoints / name / "model",
            "golden": checkpoints / name / "golden.npz",
            "dtype": FAMILIES[name].dtype,
            "engine": FAMILIES[name].engine,
            "save": checkpoints / f"{name}.npz",
        }
        for name in names
    ]
    apart = [name for name in names if FAMILIES[name].apart]
    cases += [
        {
            "model": checkpoints / name / "twin",
            "golden": checkpoints / name / "golden.npz",
            "dtype": FAMILIES[name].dtype,
            "save": checkpoints / f"{name}-twin.npz",
        }
        for name in apart
    ]
    names += [f"{name}-twin" for name in apart]
    llama = cases[names.index("llama")]
    cases += [llama | {"pin": pin} for pin in pins.values()]
    names += pins
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("serve_cases.py")],
        input=json.dumps(cases, default=str),
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"EXL3_SELF_TEST": "1"},
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(cases), done.stderr[-6000:]
    return dict(zip(names, results))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_family_says_what_its_dense_twin_says(served, checkpoints, name):
    if name not in served:
        pytest.skip("no torchvision, which vLLM needs to import this family: it is NOT tested here")
    result, dtype = served[name], FAMILIES[name].dtype
    print(name, result)
    assert result["positions"] == 68
    if FAMILIES[name].apart:
        twin = served[f"{name}-twin"]
        ours, dense = (dict(np.load(checkpoints / f"{n}.npz")) for n in (name, f"{name}-twin"))
        differences = [np.abs(ours[key] - dense[key]).ravel() for key in dense]
        assert np.concatenate(differences).mean() < ROUNDING[dtype]
        assert abs(result["nll"] - twin["nll"]) < ROUNDING[dtype]
        return
    assert result["mean_logprob_diff"] < ROUNDING[dtype]
    assert result["top1_agreement_clear"] >= SAME_BEST[dtype]
    assert abs(result["nll"] - result["nll_reference"]) < ROUNDING[dtype]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("llama-down", ["down_proj"]),
        ("llama-mlp", ["gate_proj", "up_proj"]),
        ("llama-qkv", ["q_proj", "k_proj", "v_proj"]),
    ],
)
def test_a_layer_built_without_quantisation_is_dequantised_alone_and_said(served, name, modules):
    result = served[name]
    assert result["mean_logprob_diff"] < ROUNDING["float32"]
    said = [line for line in result["warned"] if "is dequantised" in line]
    assert len(said) == 2 * len(modules)
    assert {line.partition(":")[0].rpartition(".")[2] for line in said} == set(modules)
    assert not any("is dequantised" in line for line in served["llama"]["warned"])
