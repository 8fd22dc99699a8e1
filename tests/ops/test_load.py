"""Loading the libraries: what is said where CUDA kernels are missing, and what options do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exl3_plugin import env, ops


@pytest.fixture(autouse=True)
def library():
    ops.load()


def test_cuda_kernels_are_missed_only_when_they_are_needed(monkeypatch, tmp_path):
    """On a CUDA build of torch without `_C_cuda.so`: the error names the wheel and the script."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ops, "_find", lambda name: None)
    reason = ops._load_cuda()
    assert "_C_cuda.so" in reason and "scripts/build-kernels" in reason and "wheel" in reason
    monkeypatch.setattr(ops, "_cuda_error", reason)
    with pytest.raises(ops.LibraryError, match=r"no _C_cuda\.so"):
        ops.require_cuda()

    broken = tmp_path / "_C_cuda.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(ops, "_find", lambda name: broken)
    assert str(broken) in ops._load_cuda()


def test_no_device_and_no_cuda_build(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in ops._load_cuda()
    monkeypatch.setattr(ops, "_cuda_error", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ops.LibraryError, match="finds no CUDA device"):
        ops.require_cuda("cuda:0")


@pytest.mark.parametrize(
    "capability,built,ptx,runs",
    [
        (90, [80, 86, 89, 90, 120, 121], [], True),
        (87, [80], [], True),
        (80, [86], [], False),
        (90, [80, 120], [], False),
        (100, [80, 90, 120], [], False),
        (100, [80, 90, 120], [90], True),
        (75, [80], [80], False),
        (121, [120], [], True),
        (90, [], [], False),
    ],
)
def test_capabilities(capability, built, ptx, runs):
    refusal = ops.capability_error(capability, built, ptx)
    assert (refusal is None) == runs
    if not runs:
        assert f"sm_{capability}" in refusal and "scripts/build-kernels" in refusal
        assert all(f"sm_{arch}" in refusal for arch in built)


def test_loading_touches_no_device():
    """A process that only imports and loads may still fork workers that use CUDA."""
    code = (
        "from exl3_plugin import ops; import torch; ops.load(); "
        "print(torch.cuda.is_initialized(), ops.configure())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "EXL3_EXACT": "1", "EXL3_PDL": "off", "VLLM_BATCH_INVARIANT": "1"},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    assert result.stdout.split(maxsplit=1)[0] == "False", result.stderr
    assert "{'exact': True, 'batch_invariant': True, 'dependent_launch': False}" in result.stdout


def test_options_come_from_arguments_and_then_from_the_environment(monkeypatch):
    for name in ("EXL3_EXACT", "EXL3_PDL", "VLLM_BATCH_INVARIANT"):
        monkeypatch.delenv(name, raising=False)
    plain = {"exact": False, "batch_invariant": False, "dependent_launch": True}
    try:
        assert ops.configure() == plain
        assert ops.configure(exact=True) == {**plain, "exact": True}
        assert ops.configure(dependent_launch=False) == {**plain, "dependent_launch": False}
        monkeypatch.setenv("EXL3_EXACT", "yes")
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
        assert ops.configure() == {**plain, "exact": True}
        assert ops.configure(exact=False, batch_invariant=True) == {
            **plain,
            "batch_invariant": True,
        }
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        assert env.batch_invariant() and ops.configure()["batch_invariant"]
        monkeypatch.setenv("EXL3_PDL", "perhaps")
        with pytest.raises(ValueError, match="EXL3_PDL='perhaps': expected 0 or 1"):
            ops.configure()
    finally:
        monkeypatch.undo()
        ops.configure()


def test_fakes_of_the_cuda_operators():
    """Shapes and dtypes that a trace sees, from the functions that loading registers."""
    shards = [1, 64, 256, 10, 200, 2, 40, 128, 0, 77]
    suh = torch.empty(2, 384, dtype=torch.float16, device="meta")
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.empty(2, 5, 300, dtype=dtype, device="meta")
        y = ops._linear_with_fake(x, None, suh, None, None, shards, 0, [0, 8, 0, 0])
        assert y.shape == (2, 5, 277) and y.dtype == dtype
        weight = ops._dense_weight_fake(None, suh, None, shards, 0, 300, dtype == torch.bfloat16)
        assert weight.shape == (277, 300) and weight.dtype == dtype
