"""The init process: signals, exit statuses, orphans; and the health check beside it."""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

SERVER = """
import signal, sys, time
def stop(number, frame):
    print("draining", flush=True)
    time.sleep(0.5)
    print("drained", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, lambda *_: print("usr1", flush=True))
print("up", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def init(checkout):
    return [sys.executable, "-I", "-S", str(checkout / "images/exl3_image/init.py")]


def test_exit_status_is_the_servers(init):
    for status in (0, 3):
        assert subprocess.run([*init, "/bin/sh", "-c", f"exit {status}"]).returncode == status
    assert subprocess.run([*init, "/bin/sh", "-c", "kill -KILL $$"]).returncode == 128 + 9
    done = subprocess.run([*init, "/no/such/program"], capture_output=True, text=True)
    assert done.returncode == 127
    assert done.stderr == "error: /no/such/program does not start: No such file or directory\n"
    assert subprocess.run([*init, "/etc/passwd"], capture_output=True).returncode == 126


def test_signals_reach_the_server_which_drains(init):
    with subprocess.Popen(
        [*init, sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "usr1\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "draining\ndrained\n"
        assert process.wait(10) == 7


def test_words_are_passed_as_they_are(init):
    words = ["a b", '{"x": "y z"}', "$HOME", "*", ""]
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    done = subprocess.run([*init, sys.executable, "-c", code, *words], capture_output=True)
    assert json.loads(done.stdout) == words


def test_as_process_one_it_stops_a_deaf_program_and_reaps_orphans(init):
    """In a PID namespace: the child has no handler for SIGTERM, and leaves an orphan behind."""
    if os.getuid() != 0:
        pytest.skip("a PID namespace needs root")
    zombies = "grep -c '^State:.Z' /proc/*/status | grep -c ':1$'"
    script = f"(sh -c 'sleep 0.2 & exit 0'); sleep 0.6; {zombies}; exec sleep 60"
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with subprocess.Popen(
        [*command, *init, "/bin/sh", "-c", script], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "0\n"
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        time.sleep(0.2)
        os.kill(int(child), signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(self.server.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_health(checkout, tmp_path):
    def check():
        command = [sys.executable, "-I", "-S", checkout / "images/exl3_image/health.py"]
        env = {"TMPDIR": str(tmp_path)}
        return subprocess.run(command, capture_output=True, text=True, env=env)

    done = check()
    assert (done.returncode, done.stdout) == (1, "no server was started in this container\n")
    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    endpoint = {"host": "127.0.0.1", "port": server.server_port}
    (tmp_path / "exl3-endpoint.json").write_text(json.dumps(endpoint))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for status, code in ((200, 0), (503, 1)):
        server.status = status
        done = check()
        assert (done.returncode, done.stdout) == (code, f"/health says {status}\n")
    server.shutdown()
    server.server_close()
    done = check()
    assert done.returncode == 1 and "does not answer" in done.stdout


def test_a_signal_that_comes_too_early_is_not_lost(init, checkout):
    """Held by the entry point, it waits across exec and reaches the server."""
    code = (
        "import os, signal, sys; from exl3_image import init; init.hold();"
        "os.kill(os.getpid(), signal.SIGTERM);"
        f"os.execv(sys.executable, {[*init, '/bin/sleep', '60']!r})"
    )
    env = {"PYTHONPATH": str(checkout / "images"), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], env=env, timeout=20)
    assert done.returncode == 128 + signal.SIGTERM
