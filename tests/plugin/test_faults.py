"""A server under clients that misbehave, and one whose engine dies: `vllm serve` on the CPU.

Two hundred clients at once ask for texts of all lengths; a third of them hang up, before or while
the answer streams. Afterwards nothing may be left running, the cache must be free, a second such
wave must not need more memory or files than the first, and answers must be what they were.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench import random_checkpoint

CLIENTS, SLOTS = 200, 16
READY_S, SETTLE_S, DEATH_S = 120, 30, 60
PROMPT = [5, 17, 99, 3, 42, 256, 8]


class Server:
    """`vllm serve` on a tiny random EXL3 checkpoint."""

    def __init__(self, model: Path, log: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", self.port]
        command += ["--dtype", "float32", "--max-model-len", 128, "--max-num-seqs", SLOTS]
        command += ["--enforce-eager", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
        with log.open("w") as out:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True, env=os.environ | environment,
            )  # fmt: skip
        try:
            self.wait_until_healthy()
        except BaseException:
            self.close()
            raise

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + READY_S
        while self.get("/health")[0] != 200:
            ended = self.process.poll() is not None
            assert not ended and time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.5)

    def get(self, path: str) -> tuple[int | None, str]:
        """(status, body); the status is None where nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return None, ""
        finally:
            connection.close()

    def ask(self, prompt: list[int], tokens: int, hang_up: int | None = None) -> dict | None:
        """Ask for `tokens` tokens; `hang_up` closes the connection after so many chunks."""
        body = {
            "model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": hang_up is not None,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            if hang_up is None:
                answer = connection.getresponse()
                return {"status": answer.status} | json.loads(answer.read())
            if hang_up:
                answer = connection.getresponse()
                for _ in range(hang_up):
                    answer.readline()
            return None
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(li.split()[-1]) for li in lines if li.startswith(f"vllm:{name}{{"))

    def family(self) -> list[int]:
        """The server's process and those it started."""
        pids = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                group = stat.read_text().rpartition(")")[2].split()[2]
            except OSError:
                continue
            if int(group) == self.process.pid:
                pids.append(int(stat.parent.name))
        return pids

    def engine(self) -> int:
        """The process of vLLM's engine core."""
        titles = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in self.family()}
        (found,) = [pid for pid, title in titles.items() if "EngineCor" in title]
        return found

    def held(self) -> dict[str, int]:
        """Anonymous memory in MiB and open files of all processes together."""
        memory = files = 0
        for pid in self.family():
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            memory += sum(int(li.split()[1]) for li in status if li.startswith("RssAnon"))
            files += len(os.listdir(f"/proc/{pid}/fd"))
        return {"mib": memory // 1024, "files": files}

    def close(self) -> None:
        for pid in [self.process.pid, *self.family()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    random_checkpoint.make("tiny", folder, 4)
    return folder


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    server = Server(model, tmp_path_factory.mktemp("server") / "log")
    yield server
    server.close()


def wave(server: Server) -> None:
    """200 clients at once; every answer that is waited for must be whole."""

    def client(i: int) -> None:
        prompt = [2 + (31 * i + 7 * j) % 500 for j in range(1 + i % 61)]
        tokens = 1 + (i * 13) % 50
        hang_up = {0: 0, 1: 1 + i % 5}.get(i % 6)
        answer = server.ask(prompt, tokens, hang_up)
        if hang_up is None:
            assert answer["status"] == 200, answer
            assert answer["usage"]["completion_tokens"] == tokens
            assert answer["usage"]["prompt_tokens"] == len(prompt)

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(client, range(CLIENTS)))
    deadline = time.monotonic() + SETTLE_S
    busy = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while left := {name: server.metric(name) for name in busy if server.metric(name)}:
        assert time.monotonic() < deadline, f"still there after {SETTLE_S} s: {left}"
        time.sleep(0.5)


@pytest.mark.slow
def test_nothing_is_left_of_clients_that_hang_up(server):
    before = server.ask(PROMPT, 20)["choices"][0]["text"]
    wave(server)
    first = server.held()
    wave(server)
    second = server.held()
    print(first, second)
    assert second["mib"] < first["mib"] + 64
    assert second["files"] < first["files"] + 20
    assert server.ask(PROMPT, 20)["choices"][0]["text"] == before
    assert server.get("/health")[0] == 200


@pytest.mark.slow
def test_a_bad_request_is_refused_and_harms_nobody(server):
    for body in ({"prompt": [1] * 500}, {"prompt": [10**6]}, {"max_tokens": -1}, {"prompt": []}):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        asked = {"model": "m", "prompt": PROMPT, "max_tokens": 4} | body
        connection.request(
            "POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"}
        )
        assert 400 <= connection.getresponse().status < 500, body
        connection.close()
    assert server.ask(PROMPT, 4)["usage"]["completion_tokens"] == 4


@pytest.mark.slow
def test_a_killed_engine_is_an_unhealthy_server_that_ends(server):
    """Last of this file: the server does not survive it. A supervisor starts another one.

    vLLM ends with exit code 0 then, so a supervisor must not look at the code.
    """
    with ThreadPoolExecutor(1) as clients:
        waiting = clients.submit(server.ask, PROMPT, 100)
        os.kill(server.engine(), signal.SIGKILL)
        killed, seen = time.monotonic(), set()
        while server.process.poll() is None:
            assert time.monotonic() < killed + DEATH_S, f"alive after {DEATH_S} s, saw {seen}"
            seen.add(server.get("/health")[0])
            time.sleep(0.1)
        try:
            status = waiting.result()["status"]
        except (OSError, http.client.HTTPException, ValueError):
            status = None  # the connection was closed
    print(f"ended after {time.monotonic() - killed:.1f} s with {server.process.returncode}; {seen}")
    assert status is None or status >= 500 or status == 200
    assert seen <= {200, 503, None}
    assert server.get("/health")[0] is None
    # Helpers of the dead engine notice that their parent is gone a moment later.
    until = time.monotonic() + DEATH_S
    while server.family() and time.monotonic() < until:
        time.sleep(0.2)
    assert server.family() == []
