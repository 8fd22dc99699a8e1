"""Fixtures shared by every room: where the reference data lies."""

import os
import warnings
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]

TOGETHER = {
    "e2e": "checkout",
    "test_readme.py": "checkout",
    "images": "checkout-docker",
    "docker/test_real_vllm.py": "checkout-docker",
    "docker": "docker",
    "gpu": "gpu",
}
"""What `scripts/test`, which runs tests in two processes, leaves to one of these, since it shares
the checkout's venv and store, its Docker engine, another one, or the card. Else a file is a group.
"""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Names each test's group to pytest-xdist, where that is in use; the longest come first."""
    if not config.getoption("loadgroup", False):
        return

    def group(item: pytest.Item) -> str:
        path = item.path.relative_to(CHECKOUT / "tests").as_posix()
        return TOGETHER.get(path) or TOGETHER.get(path.partition("/")[0], path)

    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
    items.sort(key=lambda item: group(item) not in TOGETHER.values())


def find_reference_data() -> Path | None:
    """The folder with exllamav3's own results: `EXL3_TEST_DATA`, else `../shared/data`."""
    override = os.environ.get("EXL3_TEST_DATA")
    if override:
        path = Path(override)
        if not path.is_dir():
            raise pytest.UsageError(f"EXL3_TEST_DATA={override} is not a folder")
        return path
    path = CHECKOUT.parent / "shared" / "data"
    return path if path.is_dir() else None


@pytest.fixture(scope="session")
def checkout() -> Path:
    """Root of this checkout."""
    return CHECKOUT


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """Root of the reference data; a test that needs it is skipped, loudly, where it is absent."""
    path = find_reference_data()
    if path is None:
        message = (
            "REFERENCE DATA MISSING: nothing at ../shared/data and EXL3_TEST_DATA is not set; "
            "results are NOT being compared with exllamav3's own"
        )
        warnings.warn(message, stacklevel=2)
        pytest.skip(message)
    return path


@pytest.fixture(scope="session")
def smollm2(reference_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M as a complete 4.0 bpw EXL3 checkpoint folder made by exllamav3."""
    import runpy

    out = tmp_path_factory.mktemp("smollm2")
    script = reference_data / "smollm2-135m-exl3-4.0bpw" / "assemble.py"
    runpy.run_path(str(script))["main"](out)
    return out
