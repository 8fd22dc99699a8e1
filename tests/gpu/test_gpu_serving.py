"""The fixtures' checkpoints in vLLM on the GPU: `serving.py` says what is compared and how."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import stages
from serving import FIXTURES, ORDER, PLANTED, complaints, find_cases, name_of

from exl3_plugin.checkpoint import read_checkpoint

CASES = [name_of(*case) for case in find_cases([FIXTURES], "")]
NO_VLLM = "no vllm: serving on the GPU is not tested here"

GOOD = {
    "mean_logprob_diff": 0.002,
    "top1_agreement_clear": 1.0,
    "decode_gap": 0.01,
    "self_test": {"layers": 5},
}


@pytest.fixture(scope="module")
def served(gpu) -> dict[str, dict]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip(NO_VLLM)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("serving.py")],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(CASES) + 1, done.stderr[-8000:]
    return {result["case"]: result for result in results}


@pytest.mark.parametrize("case", [*CASES, PLANTED])
def test_checkpoints_serve_right_on_the_gpu_and_a_fault_stops_the_start(served, case):
    print(served[case])
    assert served[case]["ok"], served[case]


def test_every_mode_and_dtype_is_among_the_cases():
    assert len(CASES) == 2 * len(ORDER)
    assert {tuple(case.rsplit("-", 2)[1:]) for case in CASES} == set(ORDER)


@pytest.mark.parametrize(
    "change",
    [
        {"mean_logprob_diff": 0.02},
        {"mean_logprob_diff": float("nan")},
        {"top1_agreement_clear": 0.98},
        {"decode_gap": 0.06},
        {"self_test": {"layers": 0}},
    ],
)
def test_a_result_that_is_off_is_a_complaint(change):
    assert complaints(GOOD, "float16") == []
    assert len(complaints(GOOD | change, "float16")) == 1


def test_where_texts_part_and_how_clear_the_choice_was():
    assert stages.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert stages.first_difference([1, 2, 3], [1, 4, 3]) == 1
    best = {7: SimpleNamespace(logprob=-0.5), 3: SimpleNamespace(logprob=-1.25)}
    assert stages.gap_at(SimpleNamespace(logprobs=[{}, best]), 1) == 0.75


def test_families_are_asked_for_by_name():
    options = SimpleNamespace(cases="llama,lama", compile=True, device="cuda")
    with pytest.raises(ValueError, match=r"--cases lama: there are llama, mistral, "):
        next(stages.families(options))


def test_prompts_differ_in_length_and_stay_inside_the_vocabulary():
    prompts = stages.random_prompts(100)
    assert len(prompts) == stages.PROMPTS and {len(p) for p in prompts} == set(range(3, 41))
    assert all(3 <= token < 100 for prompt in prompts for token in prompt)
    assert len({tuple(prompt) for prompt in prompts}) == stages.PROMPTS


def test_loaded_bytes_are_compared_with_those_of_the_same_modules(tmp_path):
    model = FIXTURES / "tiny-llama-mul1-2.5"
    modules = read_checkpoint(model).modules
    names = ("model.layers.0.mlp.up_proj", "lm_head")
    entries = [{"module": name, "bytes": 2 * modules[name].nbytes} for name in names]
    entries.append({"module": None, "bytes": 12345})
    report = tmp_path / "report"
    report.write_text(json.dumps({"modules": entries}))
    assert stages.loaded_share(model, report, 1)["loaded_share"] == 2
    for rank in (0, 1):
        (tmp_path / f"report.rank{rank}").write_text(report.read_text())
    assert stages.loaded_share(model, report, 2)["loaded_share"] == 4
