"""The whole way with nothing replaced: default recipe, quantiser, playbooks, vLLM, plugin, kernels.

It needs the venv that scripts/test makes. The model is quantised once and kept in the checkout's
store, as for a person who uses the checkout; everything else lies in a folder of this test.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from exl3_host import procs, spec, venv

RECIPE = "smollm2-135m-exl3-6bpw"
QUESTION = "What is the name of the capital of France?"


class Deployment:
    """One server of the default recipe on a port of its own."""

    def __init__(self, folder: Path, checkout: Path):
        self.folder, self.checkout, self.store = folder, checkout, folder / "store"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.store.mkdir()
        for name in ("models", "sources"):
            kept = checkout / ".exl3" / name
            kept.mkdir(parents=True, exist_ok=True)
            (self.store / name).symlink_to(kept)
        host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        variables = {
            "exl3_store_dir": str(self.store),
            "exl3_service_manager": "supervisor",
            "exl3_instances": [{"name": "e2e", "recipe": RECIPE, "port": self.port}],
        }
        group = {"hosts": {"localhost": host}, "vars": variables}
        inventory = {"all": {"children": {"exl3_hosts": group}}}
        (folder / "hosts.json").write_text(json.dumps(inventory))

    def play(self, name: str, *arguments: str) -> subprocess.CompletedProcess:
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [str(Path(sys.executable).with_name("ansible-playbook"))]
        command += [f"playbooks/{name}.yml", "-i", str(self.folder / "hosts.json"), *arguments]
        return subprocess.run(command, cwd=self.checkout, env=env, capture_output=True, text=True)

    def deploy(self, *arguments: str) -> tuple[int, str]:
        done = self.play("deploy", *arguments)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr
        return int(re.search(r"changed=(\d+)", done.stdout)[1]), done.stdout

    def server(self) -> dict:
        return spec.read_json(spec.Paths(self.store, "e2e").state)["server"]

    def ask(self) -> str:
        body = {
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 32,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]


@pytest.fixture
def deployment(tmp_path, checkout):
    settings = venv.Settings(venv=checkout / ".venv", checkout=checkout)
    good, why = venv.is_current(settings)
    if not good:
        pytest.skip(f"needs the venv that scripts/test makes ({why})")
    made = Deployment(tmp_path, checkout)
    yield made
    made.play("teardown")


@pytest.mark.slow
def test_default_recipe_serves_and_goes_without_a_trace(deployment):
    changed, said = deployment.deploy()
    assert changed > 0 and "Paris" in said and f"127.0.0.1:{deployment.port}/v1" in said
    assert "Paris" in deployment.ask()
    # 1 GiB of cache for 30 layers x 2 x 3 heads x 64 numbers of 2 or 4 bytes, in whole blocks.
    learned = spec.read_json(deployment.store / "learned" / "kv.json")["entries"][0]
    assert any(0 <= (1 << 30) / 11520 / size - learned["tokens"] < 256 for size in (2, 4))
    assert deployment.deploy()[0] == 0
    assert deployment.deploy("--check", "--diff")[0] == 0
    done = deployment.play("status")
    assert done.returncode == 0 and re.search(r"e2e +serving", done.stdout)

    first = deployment.server()
    os.kill(first["pid"], signal.SIGKILL)
    done = deployment.play("status")
    assert done.returncode != 0 and re.search(r"e2e is (dead|restarting)", done.stdout)
    deployment.deploy()
    assert deployment.server() != first and "Paris" in deployment.ask()

    paths = spec.Paths(deployment.store, "e2e")
    members = spec.own_pids(paths)
    assert len(members) >= 3, "supervisor, API server and engine"
    assert deployment.play("teardown").returncode == 0
    assert [pid for pid in members if procs.start_ticks(pid) is not None] == []
    assert procs.listeners(deployment.port) == [] and not paths.run.exists()
