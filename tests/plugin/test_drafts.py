"""A draft with EXL3 linears speculates in vLLM on the CPU: stage `mtp` of tests/gpu/stages.py."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STAGES = Path(__file__).resolve().parents[1] / "gpu" / "stages.py"


@pytest.mark.slow
def test_an_exl3_draft_is_right_as_often_as_a_dense_one_and_changes_no_text():
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("no torchvision, which vLLM needs to import Qwen3.5: NOT tested here")
    done = subprocess.run(
        [sys.executable, STAGES, "mtp", "--eager"],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    print(results)
    assert len(results) == 2 and all(line["ok"] for line in results), done.stderr[-4000:]
    texts, accepted = results
    assert texts["prompts"] == 64
    assert 0.2 < accepted["exl3_draft"] < 1
