"""Mixture-of-experts checkpoints through the real vLLM engine on the CPU: TP 1, TP 2 and EP 2.

The truth is what exllamav3 computed for its own checkpoint, and a dense float32 twin for the
synthetic one, in which every expert differs from the others and a shared expert stands beside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.moe.moe_models import awkward_moe, decoded

TINY = "tiny-qwen3-moe-mcg4"
MEAN_DIFFERENCE = {"float32": 0.01, "float16": 0.01, "bfloat16": 0.08}
SAME_BEST = {"float32": 0.99, "float16": 0.99, "bfloat16": 0.97}
MODES = {"TP 1": (1, False), "TP 2": (2, False), "EP 2": (2, True)}
CASES = [(TINY, "float32"), (TINY, "float16"), (TINY, "bfloat16"), ("awkward", "float32")]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(reference_data, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Checkpoint and golden file of each name."""
    from plugin_models import prompts

    root = tmp_path_factory.mktemp("moe")
    model = awkward_moe()
    tiny = reference_data / "tiny" / TINY
    return {
        TINY: (tiny, tiny / "golden.npz"),
        "awkward": (model.save(root / "model"), model.golden(root / "golden.npz", prompts(384))),
    }


@pytest.fixture(scope="module", params=MODES)
def served(request, models, tmp_path_factory) -> tuple[str, dict, Path]:
    """Results of all checkpoints in one way of sharing them out, and the load report."""
    ranks, expert_parallel = MODES[request.param]
    wanted = CASES if ranks == 1 else [c for c in CASES if c[1] == "float32"]
    arguments = [
        {
            "model": models[name][0],
            "golden": models[name][1],
            "dtype": dtype,
            "ranks": ranks,
            "expert_parallel": expert_parallel,
        }
        for name, dtype in wanted
    ]
    report = tmp_path_factory.mktemp("report") / "report.json"
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("serve_moe.py")],
        input=json.dumps(arguments, default=str),
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"EXL3_LOAD_REPORT": str(report), "EXL3_SELF_TEST": "1"},
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(arguments), done.stderr[-6000:]
    return request.param, dict(zip(wanted, results)), report


def test_exllamav3s_checkpoint_serves_right(served):
    mode, results, _ = served
    for (name, dtype), result in results.items():
        if name == TINY:
            print(mode, dtype, result)
            assert result["mean_logprob_diff"] < MEAN_DIFFERENCE[dtype]
            assert result["top1_agreement_clear"] >= SAME_BEST[dtype]


def test_mixed_experts_and_a_shared_one_are_exact(served):
    """float32 against float32: nothing but rounding may differ, whatever the cut."""
    mode, results, _ = served
    result = results["awkward", "float32"]
    print(mode, result)
    assert result["max_logprob_diff"] < 1e-4
    assert result["top1_agreement"] == 1.0
    assert abs(result["nll"] - result["nll_reference"]) < 1e-5


def test_the_report_tells_who_holds_what(served):
    mode, _, report = served
    ranks, expert_parallel = MODES[mode]
    files = [report] if ranks == 1 else [Path(f"{report}.rank{r}") for r in range(ranks)]
    held = []
    for file in files:
        modules = json.loads(file.read_text())["modules"]
        found = {m["module"]: m for m in modules if ".experts." in str(m["module"])}
        held.append(set(found))
        for name, entry in found.items():
            axis = "k" if name.endswith("down_proj") else "n"
            used = entry[axis] - entry["padding"][axis]
            assert used == (96 if mode == "TP 2" else 192), (name, entry)
            assert entry[axis] % 128 == 0
    everything = 2 * 6 * 3
    assert all(len(names) == everything // (2 if expert_parallel else 1) for names in held)
    assert len(set().union(*held)) == everything


def test_exllamav3s_checkpoint_is_as_far_from_the_truth_as_exllamav3(models):
    """transformers' own model on decoded weights says how far exllamav3's fp16 alone goes."""
    import torch
    from plugin_models import transformers_twin

    from exl3_plugin.verify import read_golden

    folder, golden = models[TINY]
    config, dense = decoded(folder)
    twin = transformers_twin(config, dense)
    far = []
    for prompt in read_golden(golden):
        with torch.inference_mode():
            logits = twin(torch.from_numpy(prompt.ids.astype(np.int64))[None]).logits[0]
        wanted = torch.from_numpy(prompt.top_ids.astype(np.int64))
        exact = logits.double().log_softmax(-1).gather(1, wanted).numpy()
        far.append(np.abs(exact - prompt.top_lp))
    print("twin to golden", np.concatenate(far).mean())
    assert np.concatenate(far).mean() < MEAN_DIFFERENCE["float32"]
