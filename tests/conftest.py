"""Fixtures shared by every room: where the reference data lies."""

import os
import warnings
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]

TOGETHER = {
    "tests/e2e": "checkout",
    "tests/test_readme.py": "checkout",
    "tests/images": "checkout's Docker",
    "tests/docker/test_real_vllm.py": "checkout's Docker",
    "tests/docker": "another Docker",
    "tests/gpu": "card",
}
"""What `scripts/test`, which runs tests in two processes, leaves to one of these, since it shares
the checkout's venv and store, a Docker engine, or the card. All other files share nothing."""


def group_of(nodeid: str) -> str:
    """What is left to one process together: users of one thing, else the tests of a file."""
    file = nodeid.partition("::")[0]
    return TOGETHER.get(file) or TOGETHER.get("/".join(file.split("/")[:2]), file)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where processes share the work, what takes long comes first: neither is idle at the end."""

    def turn(item: pytest.Item) -> int:
        if group_of(item.nodeid) in TOGETHER.values():
            return 0
        return 1 if item.nodeid.startswith("tests/plugin/test_serving.py") else 2

    if hasattr(config, "workerinput"):
        items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """`--dist loadfile`, by groups."""
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log) if config.option.dist == "loadfile" else None


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
