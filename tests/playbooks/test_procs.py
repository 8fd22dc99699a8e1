"""Who listens, and who would be in the way."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest
from exl3_host import procs


@contextlib.contextmanager
def listening(family, address):
    with socket.socket(family) as one:
        one.bind((address, 0))
        one.listen()
        yield one.getsockname()[1]


def test_owner_is_found():
    with listening(socket.AF_INET, "127.0.0.1") as port:
        (found,) = procs.listeners(port)
        assert (found.address, found.port, found.pid) == ("127.0.0.1", port, os.getpid())
        assert f"pid {os.getpid()}" in str(found)


@pytest.mark.parametrize(
    ("family", "address", "wanted", "clash"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1", True),
        (socket.AF_INET, "127.0.0.1", "localhost", True),
        (socket.AF_INET, "127.0.0.1", "0.0.0.0", True),
        (socket.AF_INET, "0.0.0.0", "127.0.0.1", True),
        (socket.AF_INET, "127.0.0.2", "127.0.0.1", False),
        (socket.AF_INET6, "::", "127.0.0.1", True),
        (socket.AF_INET6, "::1", "127.0.0.1", False),
    ],
)
def test_addresses_that_clash(family, address, wanted, clash):
    with listening(family, address) as port:
        assert bool(procs.conflicting(wanted, port)) is clash


def test_connections_do_not_count_as_listeners():
    with listening(socket.AF_INET, "127.0.0.1") as port, socket.socket() as client:
        client.connect(("127.0.0.1", port))
        assert procs.listeners(client.getsockname()[1]) == []


def test_tree_and_identity():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        record = {"pid": child.pid, "start_ticks": procs.start_ticks(child.pid)}
        assert procs.same_process(record)
        assert not procs.same_process({**record, "start_ticks": record["start_ticks"] + 1})
        assert procs.tree(os.getpid())[0] == os.getpid() and child.pid in procs.tree(os.getpid())
        assert procs.resident_bytes([child.pid]) > 1_000_000
        child.communicate(b"\n")
    assert not procs.same_process(record) and procs.tree(record["pid"]) == []


def test_ended_process_is_never_the_same_as_none():
    assert not procs.same_process({"pid": 2**22 + 1, "start_ticks": None})
    assert not procs.same_process(None)
