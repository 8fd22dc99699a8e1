"""The fixtures' checkpoints in vLLM on the GPU: `serving.py` says what is compared and how."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from serving import FIXTURES, ORDER, PLANTED, complaints, find_cases, name_of

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
