"""The guards: start together, stop together, and say why; with commands that only sleep."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from exl3_host import rank_guard

PARTS = {"model": "m1", "release": "r1", "arguments": "a1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Group:
    """Guards of one server on 127.0.0.1, each with a log; ended with the test."""

    def __init__(self, folder, hosts=2):
        self.folder, self.hosts = folder, hosts
        self.meet, self.listen, self.health = free_port(), free_port(), free_port()
        self.running: dict[int, subprocess.Popen] = {}

    def start(self, rank: int, command: str = "sleep 60", parts=PARTS, **options) -> None:
        argv = [sys.executable, "-m", "exl3_host.rank_guard", "--rank", str(rank)]
        argv += ["--hosts", str(self.hosts), "--meet", f"127.0.0.1:{self.meet}"]
        argv += ["--parts", json.dumps(parts), "--grace-s", "2"]
        argv += ["--join-s", str(options.get("join_s", 20))]
        if rank:
            argv += ["--listen", f"127.0.0.1:{self.listen + rank - 1}", "--served-name", "m"]
        else:
            argv += ["--health", f"http://127.0.0.1:{self.health}/health"]
        argv += ["--", "sh", "-c", f"echo child $$; exec {command}"]
        with open(self.folder / f"{rank}.log", "w") as log:
            self.running[rank] = subprocess.Popen(argv, stdout=log, stderr=log)

    def log(self, rank: int) -> str:
        return (self.folder / f"{rank}.log").read_text()

    def until(self, rank: int, text: str) -> None:
        deadline = time.monotonic() + 20
        while text not in self.log(rank):
            assert time.monotonic() < deadline, self.log(rank)
            time.sleep(0.05)

    def child(self, rank: int) -> int:
        self.until(rank, "child ")
        return int(self.log(rank).split("child ")[1].split()[0])

    def ended(self, rank: int) -> int:
        return self.running[rank].wait(20)

    def asked(self, path: str) -> tuple[int, str]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self.listen}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def group(tmp_path):
    made = Group(tmp_path)
    yield made
    for guard in made.running.values():
        guard.kill()
        guard.wait()


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_head_starts_last_and_nobody_without_the_other(group):
    group.start(0)
    group.until(0, "waiting for 1 host")
    time.sleep(0.3)
    assert "child" not in group.log(0)
    group.start(1)
    head, worker = group.child(0), group.child(1)
    assert group.log(0).index("the workers start") < group.log(0).index("the head starts")
    assert worker != head and not gone(worker) and not gone(head)


def test_a_worker_may_come_first(group):
    group.start(1)
    group.until(1, "looking for the head")
    group.start(0)
    assert group.child(1) and group.child(0)


@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_rank_dies_all_stop(group, victim):
    """Else the others wait in a collective, and /health of the head goes on answering 200."""
    group.start(0)
    group.start(1)
    children = [group.child(0), group.child(1)]
    os.kill(children[victim], signal.SIGKILL)
    assert group.ended(0) == 1 and group.ended(1) == 1
    assert all(gone(pid) for pid in children)
    assert f"the rank of host {victim} was ended by signal 9" in group.log(victim)
    assert f"host {victim} stops: the rank of host {victim}" in group.log(1 - victim)


def test_a_host_that_freezes_is_given_up(group, monkeypatch):
    """No packet says that a host has stood still; missing beats do."""
    program = (
        "import sys; from exl3_host import rank_guard as g; g.LOST_S = 3.0; sys.exit(g.main())"
    )
    honest = subprocess.Popen

    def quicker(argv, **named):
        return honest([argv[0], "-c", program, *argv[3:]], **named)

    monkeypatch.setattr(subprocess, "Popen", quicker)
    group.start(0)
    group.start(1)
    worker = group.child(1)
    group.child(0)
    os.kill(group.running[0].pid, signal.SIGSTOP)
    try:
        assert group.ended(1) == 1
    finally:
        os.kill(group.running[0].pid, signal.SIGCONT)
    assert "host 0 has not been heard for 3 s" in group.log(1) and gone(worker)
    assert group.ended(0) == 1


def test_stopped_on_request_takes_the_others_along(group):
    group.start(0)
    group.start(1)
    children = [group.child(0), group.child(1)]
    group.running[1].terminate()
    assert group.ended(1) == 0 and group.ended(0) == 1
    assert all(gone(pid) for pid in children)
    assert "host 1 stops: stopped on request" in group.log(0)


@pytest.mark.parametrize("part", sorted(PARTS))
def test_hosts_that_would_serve_something_else_are_refused(group, part):
    """dgx-spark-playbooks#75: the model under one name here and another there."""
    group.start(0)
    group.start(1, parts={**PARTS, part: "other"})
    assert group.ended(0) == 1 and group.ended(1) == 1
    wanted = f"host 1 would serve something else ({part}: other there, {PARTS[part]} on the head)"
    assert wanted in group.log(0) and wanted in group.log(1)
    assert "child" not in group.log(0) + group.log(1)


def test_two_hosts_with_one_number(tmp_path):
    group = Group(tmp_path, hosts=3)
    try:
        group.start(0)
        group.start(1)
        group.until(0, "host 1 is here")
        group.listen += 10
        group.start(1)
        assert group.ended(0) == 1
        assert "two hosts say that they are host 1 of 3" in group.log(0)
    finally:
        for guard in group.running.values():
            guard.kill()
            guard.wait()


def test_a_host_that_never_comes_is_named(group):
    group.start(0, join_s=1)
    assert group.ended(0) == 1 and "host(s) [1] did not come within 1 s" in group.log(0)
    group.start(1, join_s=1)
    assert group.ended(1) == 1 and "the head does not answer on 127.0.0.1:" in group.log(1)


def test_strangers_do_not_stop_the_roll_call(group):
    group.start(0)
    group.until(0, "waiting for 1 host")
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"kind": "hello"'):
        with socket.create_connection(("127.0.0.1", group.meet), timeout=5) as link:
            link.sendall(noise)
    group.start(1)
    assert group.child(0) and group.child(1)


def test_a_worker_answers_for_the_head(group):
    group.start(1)
    group.until(1, "looking for the head")
    assert group.asked("/health") == (503, '{"error": "the rank does not run"}')
    group.start(0)
    group.child(0)
    assert group.asked("/health") == (503, '{"error": "the head does not serve yet"}')
    assert 'exl3_rank_up{rank="1"} 0' in group.asked("/metrics")[1]
    server = subprocess.Popen(
        [sys.executable, "-c", "import http.server as h\nclass A(h.BaseHTTPRequestHandler):\n"
         " def do_GET(s): s.send_response(200); s.end_headers()\n"
         f"h.HTTPServer(('127.0.0.1', {group.health}), A).serve_forever()"],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        group.until(0, "the server answers")
        deadline = time.monotonic() + 5
        while group.asked("/health")[0] != 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert group.asked("/health")[0] == 200
        assert json.loads(group.asked("/v1/models")[1])["data"] == [{"id": "m"}]
        assert 'exl3_rank_up{rank="1"} 1' in group.asked("/metrics")[1]
    finally:
        server.kill()
        server.wait()
    group.until(0, "does not answer any more")


def test_the_port_of_another_program_is_named(group):
    with socket.socket() as other:
        other.bind(("127.0.0.1", group.meet))
        other.listen()
        group.start(0)
        assert group.ended(0) == 1
    assert f"cannot listen on 127.0.0.1:{group.meet}: Address already in use" in group.log(0)


def test_the_guard_needs_nothing_but_python():
    done = subprocess.run(
        [sys.executable, "-I", "-S", rank_guard.__file__, "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "--meet" in done.stdout
