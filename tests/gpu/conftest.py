"""The GPU tests need a CUDA device and `_C_cuda.so`; without a device they skip, and say so."""

import warnings

import pytest
import torch

from exl3_plugin import ops

NO_DEVICE = "no CUDA device: GPU kernels are not tested here"


def pytest_configure(config):
    config.addinivalue_line("markers", "quick: the half minute of GPU tests that says most")


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The CUDA device, with the kernels loaded; a library that is missing is a failure."""
    if not torch.cuda.is_available():
        warnings.warn(NO_DEVICE, stacklevel=2)
        pytest.skip(NO_DEVICE)
    ops.require_cuda()
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def options():
    """`ops.configure`, undone afterwards."""
    yield ops.configure
    ops.configure()
