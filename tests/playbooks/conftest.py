"""A store in a temporary folder, plans for a small server, and ports that nobody uses."""

import contextlib
import itertools
import os
import socket
import sys
from pathlib import Path

import pytest
from exl3_host import service, spec

from tests import plans

SMALL_SERVER = Path(__file__).with_name("small_server.py")
_ports = itertools.count(18100 + os.getpid() % 700)


def free_port() -> int:
    """A port between 18000 and 18999 that nothing listens on."""
    for number in _ports:
        port = 18000 + (number - 18000) % 1000
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise AssertionError("unreachable")


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def store(tmp_path):
    """An empty store; whatever runs out of it is stopped at the end, whoever started it."""
    folder = tmp_path / "store"
    folder.mkdir()
    yield folder
    for run in (folder / "run").glob("*"):
        service.remove(spec.Paths(folder, run.name))


@pytest.fixture
def make_plan(tmp_path, port):
    """A function that returns a plan for the small server with the given extra options."""
    model = plans.model_folder(tmp_path)

    def make(*options: str, **changes) -> dict:
        number = changes.pop("port", port)
        argv = [sys.executable, str(SMALL_SERVER), "--port", str(number), *options]
        plan = plans.small(model, argv, number)
        plan["model"] |= {"source": {"kind": "path", "path": str(model)}, "quantize": None}
        return plans.changed(plan, changes)

    return make
