"""The stand-in for a compiler that Triton calls: right file or a clear no."""

import hashlib
import shutil
import subprocess

import pytest


@pytest.fixture
def compiler(checkout, tmp_path):
    """The program as it lies in a GPU image, with one module."""
    program = tmp_path / "cc"
    shutil.copy(checkout / "images/cc.py", program)
    source = tmp_path / "driver.c"
    source.write_text("int answer(void) { return 42; }\n")
    (tmp_path / "prebuilt").mkdir()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    (tmp_path / "prebuilt" / f"{digest}.so").write_bytes(b"the module")
    return program, source, tmp_path / "out.so"


def call(program, *words):
    return subprocess.run([program, *words], capture_output=True, text=True)


def test_tritons_own_call_gets_the_module(compiler):
    """The words are those of triton.runtime.build in 3.8 and 3.9."""
    program, source, out = compiler
    words = [source, "-O3", "-shared", "-fPIC", "-Wno-psabi", "-o", out, "-l:libcuda.so.1", "-L/x"]
    done = call(program, *words)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == b"the module"


def test_another_source_is_refused(compiler):
    program, source, out = compiler
    source.write_text("int other;\n")
    done = call(program, source, "-o", out)
    assert done.returncode == 1 and not out.exists()
    assert "this image has no compiler" in done.stderr and "EXTRA_PACKAGES" in done.stderr
    done = call(program, "--version")
    assert done.returncode == 1 and "only Triton's driver module" in done.stderr


def test_triton_really_calls_it(compiler, monkeypatch):
    """The Triton that is installed here, with its own function for compiling."""
    build = pytest.importorskip("triton.runtime.build")
    program, source, _ = compiler
    monkeypatch.setenv("CC", str(program))
    build._find_compiler.cache_clear()
    made = build._build("cuda_utils", str(source), str(source.parent), [], [], ["libcuda.so.1"], [])
    build._find_compiler.cache_clear()
    with open(made, "rb") as file:
        assert file.read() == b"the module"
