"""The engine's client against sockets that misbehave, as engines do."""

import contextlib
import json
import os
import re
import socket
import tempfile
import threading
from pathlib import Path

import pytest
from exl3_host import engine
from exl3_host.errors import HostError


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)


class Scripted:
    """A socket that answers each request with the next prepared HTTP response."""

    def __init__(self, path: Path, *answers: bytes):
        self.path, self.answers, self.heard = path, list(answers), []
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(path))
        self.socket.listen()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while self.answers:
            connection, _ = self.socket.accept()
            with contextlib.closing(connection):
                request = connection.recv(65536)
                # A body comes in a piece of its own; an answer before it would break the pipe.
                length = re.search(rb"Content-Length: (\d+)", request)
                while length and len(request.partition(b"\r\n\r\n")[2]) < int(length[1]):
                    request += connection.recv(65536)
                self.heard.append(request.partition(b"\r\n")[0].decode())
                connection.sendall(self.answers.pop(0))

    @property
    def url(self) -> str:
        return f"unix://{self.path}"


def http(status: int, body: object) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


VERSION = {"Version": "29.0.1", "ApiVersion": "1.52", "Os": "linux", "Arch": "amd64"}


def test_no_engine(folder):
    with pytest.raises(HostError, match="no Docker engine: there is no socket") as caught:
        engine.Engine(f"unix://{folder}/none.sock").version()
    assert "exl3_engine_manage" in caught.value.fix


def test_an_engine_that_was_stopped(folder):
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as left:
        left.bind(f"{folder}/left.sock")
    with pytest.raises(HostError, match="does not run: nobody answers") as caught:
        engine.Engine(f"unix://{folder}/left.sock").version()
    assert "systemctl start docker" in caught.value.fix


def test_an_engine_of_another_machine():
    with pytest.raises(HostError, match="only a local socket can be used"):
        engine.Engine("tcp://192.0.2.1:2375")


def test_the_default_socket_and_the_environment(monkeypatch):
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    assert engine.Engine().socket == "/var/run/docker.sock"
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/user/1000/docker.sock")
    assert engine.Engine().socket == "/run/user/1000/docker.sock"
    assert engine.Engine("unix:///x").socket == "/x"


def test_an_engine_that_is_too_old(folder):
    old = Scripted(folder / "s", http(200, {**VERSION, "Version": "19.3", "ApiVersion": "1.40"}))
    with pytest.raises(HostError, match=r"engine 19\.3 is too old \(API 1\.40, needed 1\.41\)"):
        engine.Engine(old.url).version()


def test_each_request_names_the_engines_own_version(folder):
    """Engine 29 refuses what is older than 1.44, engine 20.10 what is newer than 1.41."""
    server = Scripted(folder / "s", http(200, VERSION), http(200, []))
    assert engine.Engine(server.url).containers("a=b") == []
    server.thread.join(5)
    assert server.heard[0] == "GET /version HTTP/1.1"
    assert server.heard[1].startswith("GET /v1.52/containers/json?all=1&filters=")


def test_its_own_words_are_kept(folder):
    refusal = {"message": "Conflict. The container name is already in use\n"}
    server = Scripted(folder / "s", http(200, VERSION), http(409, refusal))
    with pytest.raises(engine.EngineError, match="already in use") as caught:
        engine.Engine(server.url).create("x", {})
    assert caught.value.status == 409


def test_a_pull_that_fails_after_it_began(folder):
    """The engine answers 200 at once; the failure stands in the stream."""
    stream = b'{"status":"Pulling"}\n{"errorDetail":{},"error":"manifest unknown"}\n'
    server = Scripted(folder / "s", http(200, VERSION), http(200, stream))
    with pytest.raises(engine.EngineError, match="manifest unknown"):
        engine.Engine(server.url).pull("registry.example.org/x@sha256:00")
    server.thread.join(5)
    assert "fromImage=registry.example.org%2Fx&tag=sha256%3A00" in server.heard[1]


def test_both_streams_of_a_log_in_order(folder):
    frames = b"\x01\0\0\0\0\0\0\x04out\n" + b"\x02\0\0\0\0\0\0\x04err\n"
    server = Scripted(folder / "s", http(200, VERSION), http(200, frames))
    assert engine.Engine(server.url).logs("x") == ["out", "err"]


def test_an_engine_that_breaks_off(folder):
    server = Scripted(folder / "s", http(200, VERSION), b"")
    with pytest.raises(HostError, match=r"broke off \(GET /images"):
        engine.Engine(server.url).image("x")


def test_a_socket_of_somebody_else(folder):
    server = Scripted(folder / "s", http(200, VERSION))
    folder.chmod(0o755)
    server.path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may use every socket
    try:
        with pytest.raises(HostError, match="may not be used by this user") as caught:
            engine.Engine(server.url).version()
    finally:
        os.seteuid(user)
    assert "group docker" in caught.value.fix
