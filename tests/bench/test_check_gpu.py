"""scripts/check-gpu where it cannot run: it says why, and does nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def check_gpu(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "check-gpu", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.mark.parametrize(
    "arguments,said",
    [
        (["--fast"], "unknown argument --fast; there are --out, --python and --seconds"),
        (["--seconds", "soon"], "--seconds takes a whole number, found soon"),
        (["--out"], "--out needs a value"),
        (["--python", "no-such-python"], "no no-such-python; name an interpreter"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, said):
    done = check_gpu(*arguments, cwd=tmp_path)
    assert done.returncode == 1 and said in done.stderr
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu(tmp_path):
    done = check_gpu("--python", sys.executable, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"no exl3_plugin/_C_cuda.so; build|sees no CUDA device", done.stderr)


def test_help_names_every_option(tmp_path):
    done = check_gpu("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(option in done.stdout for option in ("--out", "--python", "--seconds"))
