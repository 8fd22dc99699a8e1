"""The package of the images' entry point, and the CPU image itself where a test wants it."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
for place in ("images", "scripts/lib"):
    sys.path.insert(0, str(CHECKOUT / place))

IMAGE = "exl3-fleet:cpu"


def loudly_skip(reason: str) -> None:
    warnings.warn(reason, stacklevel=2)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def docker_host():
    """DOCKER_HOST of the engine below build/docker, which keeps its layers between runs."""
    folder = CHECKOUT / "build" / "docker"
    dockerd = CHECKOUT / "scripts" / "lib" / "dockerd.sh"
    was_running = (folder / "pid").exists()
    done = subprocess.run([dockerd, "start", folder], capture_output=True, text=True)
    if done.returncode != 0:
        loudly_skip(f"NO DOCKER ENGINE, images are NOT tested: {done.stderr.strip()[-300:]}")
    yield done.stdout.strip()
    if not was_running:
        subprocess.run([dockerd, "stop", folder], check=True)


@pytest.fixture(scope="session")
def build_log(docker_host):
    """What building the CPU image printed; a machine that has it all builds nothing.

    With EXL3_TEST_IMAGE=NAME the image of that name is tested as it is.
    """
    if os.environ.get("EXL3_TEST_IMAGE"):
        return ""
    command = [CHECKOUT / "scripts" / "build-images", "cpu", "--debootstrap"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "DOCKER_HOST": docker_host}
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    return log


@pytest.fixture(scope="session")
def image(build_log):
    """The name of the CPU image."""
    return os.environ.get("EXL3_TEST_IMAGE", IMAGE)
