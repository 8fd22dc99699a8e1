"""One model on two hosts, for real: SSH, playbook, guards, vLLM with tensor parallelism 2.

The hosts are network namespaces on this machine, their devices its CPU, their link a pair of
virtual cables that Gloo uses. The checkpoint is a tiny one whose log-probabilities exllamav3
computed; both halves of it have to be served right for the answers to agree.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests import two_hosts
from tests.fleet import Fleet

CHECKPOINT = "tiny-llama-mul1-2.5"
PORT = 18411
RECIPE = """\
schema: exl3-recipe/1
name: tiny
model: {path: {model}, served_name: tiny}
profiles:
  cpu:
    match: {device: cpu}
    parallel: {tp: 2}
    memory: {max_model_len: 256, kv_cache_gib: 1}
serve:
  args: {dtype: float32, max-logprobs: 20, enforce-eager: true}
health:
  ready_timeout_s: 240
  stall_timeout_s: 120
  smoke: {endpoint: completion, prompt: hello, max_tokens: 2}
"""
# The plugin's entry point, for a checkout whose wheel is not installed.
ENTRY = "[vllm.general_plugins]\nexl3 = exl3_plugin:register\n"


@pytest.fixture(scope="module")
def fleet(checkout, tmp_path_factory):
    two_hosts.needed("sshd", "ssh", "sudo", "curl")
    folder = tmp_path_factory.mktemp("fleet")
    entry = folder / "site" / "exl3_fleet-0.0.0.dist-info"
    entry.mkdir(parents=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: exl3-fleet\nVersion: 0\n")
    (entry / "entry_points.txt").write_text(ENTRY)
    paths = [folder / "site", checkout, checkout / "playbooks" / "module_utils"]
    vllm = f"#!/bin/sh\nexport PYTHONPATH={':'.join(map(str, paths))}\n"
    vllm += f'exec {Path(sys.executable).with_name("vllm")} "$@"\n'
    with two_hosts.TwoHosts() as hosts:
        site = two_hosts.Site(hosts, folder)
        yield Fleet(site, checkout, RECIPE, checkout / "tests/fixtures" / CHECKPOINT, vllm, PORT)


def ask(fleet: Fleet, body: dict) -> dict:
    """One completion from the head, on its loopback address."""
    url = f"http://127.0.0.1:{PORT}/v1/completions"
    command = ["curl", "-sS", "-m", "60", url, "-H", "Content-Type: application/json"]
    done = fleet.site.hosts.a.run(*command, "-d", json.dumps(body), check=False)
    assert done.returncode == 0, done.stderr + fleet.logs()
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_model_over_two_hosts(fleet, checkout):
    done = fleet.play("nodes")
    hosts = fleet.site.hosts
    assert "all-reduce of 2 ranks: values right" in done.stdout
    assert f"10.97.1.1 on {hosts.a.interface}" in done.stdout
    assert f"10.97.1.2 on {hosts.b.interface}" in done.stdout
    assert fleet.both() == ["200", "200"]

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
    answer = ask(fleet, {**body, "prompt_logprobs": 16, "logprobs": 1})
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
    before = [fleet.server(host) for host in hosts]
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
        pids = [fleet.server(host) for host in hosts]
        fresh = all(new not in (None, old) for new, old in zip(pids, before))
        if fresh and fleet.both() == ["200", "200"]:
            break
        time.sleep(1)
    else:
        raise AssertionError(fleet.logs())
    answer = ask(fleet, {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2})
    assert answer["usage"]["completion_tokens"] == 2
    said = fleet.logs(last=1 << 20)
    assert "the rank of host 1 was ended by signal 9" in said
    assert "host 1 stops: the rank of host 1" in said, "the head was not told"

    done = fleet.play("teardown")
    assert done.returncode == 0
    assert fleet.both() == ["000", "000"]


def in_space(pid: int, host: two_hosts.Host) -> bool:
    """Whether a process lives in the network namespace of a host."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"/run/netns/{host.space}").st_ino
    except OSError:
        return False
