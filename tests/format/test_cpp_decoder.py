"""The C++ decoder headers, compiled, against exllamav3's results and the document's vectors."""

import os
import shutil
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest
from format_vectors import CODEBOOK_SHA256, RATES
from test_format import CASES, sha

from exl3_plugin.format import CODEBOOKS, PERM, bits_from_words, codebook

HERE = Path(__file__).parent
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]


def compile_or_fail(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"


@pytest.fixture(scope="module")
def decoder(checkout: Path, tmp_path_factory: pytest.TempPathFactory):
    """Runs the compiled decoder: (arguments, stdin) -> stdout."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "no C++ compiler; the project cannot be built without one (install g++)"
    program = tmp_path_factory.mktemp("decoder") / "decode_main"
    source = HERE / "decode_main.cpp"
    include = f"-I{checkout / 'csrc'}"
    compile_or_fail(
        [compiler, "-std=c++20", "-O2", *WARNINGS, include, str(source), "-o", str(program)]
    )

    def run(*arguments: object, stdin: bytes = b"") -> bytes:
        command = [str(program), *map(str, arguments)]
        return subprocess.run(command, input=stdin, capture_output=True, check=True).stdout

    return run


def decode(decoder, name: str, trellis: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """States uint16 `[..., 256]` and tiles float32 `[..., 16, 16]` of packed tiles."""
    half_bits = int(2 * bits_from_words(trellis.shape[-1]))
    output = decoder("tiles", CODEBOOKS.index(name), half_bits, stdin=trellis.tobytes())
    record = np.dtype(
        [("single", "<u2", 256), ("by_lane", "<u2", 256), ("values", "<f4", (16, 16))]
    )
    tiles = np.frombuffer(output, record).reshape(trellis.shape[:-1])
    assert np.array_equal(tiles["single"], tiles["by_lane"])
    return tiles["single"], tiles["values"]


@pytest.mark.parametrize("name", CODEBOOKS)
def test_codebook(decoder, name):
    output = decoder("codebook", CODEBOOKS.index(name))
    assert sha(np.frombuffer(output, np.uint16)) == CODEBOOK_SHA256[name]


@pytest.mark.parametrize("vector", RATES, ids=lambda v: f"{v.bits:g}bits")
def test_rate_vector(decoder, vector):
    for name, (_, digest) in vector.tiles.items():
        states, values = decode(decoder, name, vector.packed()[None])
        assert sha(states)[:16] == vector.states_sha
        assert sha(values.astype(np.float16))[:16] == digest, name


def check_case(decoder, case: str, trellis: np.ndarray, expected: np.ndarray) -> None:
    _, tiles = decode(decoder, case.split("_")[0], trellis)
    found = tiles.transpose(0, 2, 1, 3).reshape(expected.shape)
    assert np.array_equal(found.view(np.uint32), expected.astype(np.float32).view(np.uint32)), case


def test_decodes_as_exllamav3_does(decoder, reference_data):
    matrices = np.load(reference_data / "matrices" / "matrices.npz")
    for case in CASES:
        check_case(decoder, case, matrices[f"{case}_trellis"], matrices[f"{case}_w"])


def test_decodes_corners_as_exllamav3_does(decoder, checkout):
    corners = np.load(checkout / "tests" / "fixtures" / "matrices" / "corners.npz")
    for case in CASES:
        check_case(decoder, case, corners[f"{case}_corner_trellis"], corners[f"{case}_corner_w"])


def test_half_rates_need_mul1(decoder):
    with pytest.raises(subprocess.CalledProcessError):
        decoder("tiles", CODEBOOKS.index("mcg"), 3)


def test_tile_order_is_the_oracle_s(decoder):
    """Position by position, so that a wrong order is not hidden by equal values."""
    trellis = np.arange(64, dtype=np.int16)[None] * 1031
    states, values = decode(decoder, "mul1", trellis)
    by_element = np.empty(256, np.float16)
    by_element[PERM] = codebook("mul1")[states[0]]
    assert np.array_equal(values[0].reshape(-1), by_element.astype(np.float32))


def test_headers_compile_for_a_device(checkout, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        message = "NVCC MISSING: the decoder headers are NOT being compiled for a device"
        warnings.warn(message, stacklevel=2)
        pytest.skip(message)
    options = ["-std=c++20", "-arch=sm_90a", "-Werror", "all-warnings", f"-I{checkout / 'csrc'}"]
    source, target = HERE / "decode_device.cu", tmp_path / "decode_device.o"
    compile_or_fail([nvcc, *options, "-c", str(source), "-o", str(target)])
