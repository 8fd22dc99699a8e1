"""The NEON path, cross-compiled and run by an emulator, against the float64 oracle."""

import shutil
import subprocess
import warnings

import numpy as np
import pytest
import torch

from tests.ops import linear_cases as cases

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"


@pytest.fixture(scope="module")
def program(checkout, tmp_path_factory):
    missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    if missing:
        message = (
            f"NEON IS NOT TESTED: {', '.join(missing)} not found; on Debian: "
            "apt-get install g++-aarch64-linux-gnu qemu-user-static"
        )
        warnings.warn(message, stacklevel=2)
        pytest.skip(message)
    binary = tmp_path_factory.mktemp("neon") / "linear_main"
    csrc = checkout / "csrc"
    sources = [
        csrc / "cpu" / f"{name}.cpp" for name in ("isa", "linear", "linear_neon", "linear_portable")
    ]
    command = [COMPILER, "-std=c++20", "-O1", "-static", "-ffp-contract=off", "-Wall", "-Wextra"]
    command += [f"-I{csrc}", *map(str, sources)]
    command += [str(checkout / "tests" / "ops" / "linear_main.cpp"), "-o", str(binary)]
    subprocess.run(command, check=True, timeout=900)
    return binary


def test_neon_matches_the_oracle(program, tmp_path):
    problems = []
    with (tmp_path / "problems").open("wb") as file:
        for codebook, words in cases.RATES:
            rng = np.random.default_rng([11, words])
            shard = cases.random_shard(rng, 256, 128, codebook, words)
            for m in (1, 9):
                x = rng.standard_normal((m, 256)).astype(np.float32)
                index = cases.exl3.CODEBOOKS.index(codebook)
                file.write(np.array([m, 256, 128, words, index], np.int32).tobytes())
                for part in (x, shard.suh, shard.svh, shard.trellis):
                    file.write(part.tobytes())
                problems.append((torch.from_numpy(x), shard))
    command = [EMULATOR, str(program), str(tmp_path / "problems"), str(tmp_path / "outputs")]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    assert result.stdout.strip() == "neon"
    outputs = torch.from_numpy(np.fromfile(tmp_path / "outputs", np.float32))
    for x, shard in problems:
        y, outputs = outputs[: len(x) * 128].reshape(len(x), 128), outputs[len(x) * 128 :]
        statistical, worst = cases.Oracle(x, [shard]).fractions(y)
        assert statistical <= 1 and worst <= 1, (shard.codebook, shard.trellis.shape[2])
    assert len(outputs) == 0
