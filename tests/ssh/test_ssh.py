"""Our playbooks on two hosts behind real SSH: `become`, `serial`, a host that fails, one that goes.

Each host has its own sshd, host key, user and sudo rule. The engine is a small server, since the
subject is what happens to a fleet; one host in trouble must not take the other one along.
"""

import contextlib
import json
import re
import stat
import sys
import time
from pathlib import Path

import pytest

from tests import two_hosts
from tests.fleet import Fleet, small_recipe

PORT = 18421
SMALL = Path(__file__).resolve().parents[1] / "playbooks" / "small_server.py"
RECIPE = small_recipe("answer: Paris")


@pytest.fixture
def fleet(checkout, tmp_path):
    two_hosts.needed("sshd", "ssh", "sudo", "curl")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    vllm = f"#!{sys.executable}\n{SMALL.read_text()}"
    with two_hosts.TwoHosts() as hosts:
        site = two_hosts.Site(hosts, tmp_path)
        instance = {"name": "tiny", "recipe": str(site.own / "tiny.yaml"), "port": PORT}
        instance["api_key_file"] = "generate"
        yield Fleet(site, checkout, RECIPE, model, vllm, PORT, exl3_instances=[instance])


def recap(text: str) -> dict[str, dict[str, int]]:
    """The counters of the play's last lines, by host."""
    found = {}
    for host, rest in re.findall(r"^(host-\w)\s*: (.*)$", text, re.M):
        found[host] = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", rest)}
    return found


def change_recipe(fleet, host, old: str, new: str) -> None:
    path = fleet.site.real(host) / "tiny.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def said(done) -> str:
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
def test_two_hosts_and_a_failure_in_the_middle(fleet):
    one, other = fleet.site.hosts
    done = fleet.play("deploy", "--diff", "-vv")
    assert all(counts["changed"] > 0 for counts in recap(done.stdout).values())
    assert fleet.both() == ["200", "200"]
    check_keys(fleet, done.stdout + done.stderr)
    for host in (one, other):
        owner = (fleet.site.real(host) / "store" / "run" / "tiny" / "state.json").stat().st_uid
        assert owner == 0, "the user became root"
    before = [fleet.server(host) for host in (one, other)]
    assert before[0] != before[1]
    counts = recap(fleet.play("deploy").stdout)
    assert [counts[f"host-{name}"]["changed"] for name in "ab"] == [0, 0]
    assert [fleet.server(host) for host in (one, other)] == before

    # A mistake on one host: it is named, its server goes on, the other one gets its new server.
    change_recipe(fleet, one, "answer: Paris", "answer: It is Paris")
    change_recipe(fleet, other, "answer: Paris", "answer: Rome")
    done = fleet.play("deploy", check=False)
    assert done.returncode != 0
    counts = recap(done.stdout)
    assert counts["host-a"]["failed"] == 0 and counts["host-b"]["failed"] == 1
    assert "it says 'Rome', expected /(?i)paris/" in said(done)
    assert "The previous server was started again and serves" in said(done)
    assert fleet.both() == ["200", "200"]
    assert fleet.server(one) != before[0]

    # One host after the other: the first one's failure keeps the release from the second.
    before = [fleet.server(host) for host in (one, other)]
    change_recipe(fleet, one, "answer: It is Paris", "answer: Oslo")
    change_recipe(fleet, other, "answer: Rome", "answer: In Paris")
    done = fleet.play("upgrade", check=False)
    assert done.returncode != 0 and "host-b" not in recap(done.stdout), done.stdout
    assert fleet.both() == ["200", "200"] and fleet.server(other) == before[1]
    change_recipe(fleet, one, "answer: Oslo", "answer: Paris it is")
    done = fleet.play("upgrade")
    assert done.stdout.index("[host-a]") < done.stdout.index("[host-b]")
    assert fleet.server(other) != before[1] and fleet.both() == ["200", "200"]

    assert fleet.play("teardown").returncode == 0
    assert fleet.both() == ["000", "000"]


def check_keys(fleet, output: str) -> None:
    """Each host made a key of its own, which nobody but root reads and nothing repeats."""
    files = [fleet.site.real(host) / "store/secrets/tiny.api_key" for host in fleet.site.hosts]
    keys = [file.read_text().strip() for file in files]
    assert keys[0] != keys[1] and [len(key) for key in keys] == [43, 43]
    for host, file, key in zip(fleet.site.hosts, files, keys):
        found = file.stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (0, 0o600)
        url = f"http://127.0.0.1:{PORT}/v1/models"
        command = ["curl", "-s", "-m", "5", "-o", "/dev/null", "-w", "%{http_code}", url]
        assert host.run(*command).stdout == "401"
        # From standard input: an argument list can be read by everybody.
        header = f"Authorization: Bearer {key}\n"
        assert host.run(*command, "-H", "@-", input=header).stdout == "200"
        assert key not in output
        holders = [
            path
            for path in fleet.site.real(host).rglob("*")
            if path.is_file() and not path.is_symlink() and key.encode() in path.read_bytes()
        ]
        assert holders == [file]
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                assert key.encode() not in process.read_bytes(), process


@pytest.mark.slow
def test_a_host_that_drops_off(fleet):
    one, other = fleet.site.hosts
    other.cable(plugged=False)
    done = fleet.play("deploy", check=False)
    counts = recap(done.stdout)
    assert done.returncode != 0 and counts["host-b"]["unreachable"] == 1
    assert counts["host-a"]["failed"] == 0 and fleet.both() == ["200", "000"]
    served = fleet.server(one)
    assert not (fleet.site.real(other) / "store").exists(), "nothing half done"

    # The cable comes out while the server of host b starts.
    plug(other)
    change_recipe(fleet, other, "answer: Paris", "answer: Paris, ready-after: 8")
    play = fleet.start_play("deploy")
    log = fleet.site.real(other) / "store/logs/tiny/server.log"
    deadline = time.monotonic() + 90
    while not (log.exists() and "starting on" in log.read_text()):
        assert time.monotonic() < deadline and play.poll() is None, play.communicate()[0]
        time.sleep(0.2)
    other.cable(plugged=False)
    out, _ = play.communicate(timeout=120)
    assert recap(out)["host-b"]["unreachable"] == 1, out
    assert fleet.server(one) == served and fleet.health(one) == "200"

    # What had begun there goes on without us; the next play finds it and only confirms it.
    plug(other)
    done = fleet.play("deploy")
    assert fleet.both() == ["200", "200"]
    assert recap(done.stdout)["host-a"]["changed"] == 0


@pytest.mark.slow
def test_who_may_not_come_in(fleet):
    """Another host under the same address, and a user who may not become root: both are named."""
    known = fleet.folder / "known_hosts"
    lines = known.read_text().splitlines()
    stranger = fleet.folder / "stranger"
    two_hosts.keygen(stranger)
    public = stranger.with_suffix(".pub").read_text().split()[:2]
    known.write_text("\n".join([lines[0], " ".join([lines[1].split()[0], *public])]) + "\n")
    done = fleet.play("status", check=False)
    assert recap(done.stdout)["host-b"]["unreachable"] == 1
    assert "Host key verification failed" in said(done)
    known.write_text("\n".join(lines) + "\n")

    rule = fleet.site.real(fleet.site.hosts.b).parent / "sudoers.d" / "deployer"
    rule.unlink()
    done = fleet.play("deploy", "--limit", "host-b", check=False)
    counts = recap(done.stdout)
    assert counts["host-b"]["failed"] + counts["host-b"]["unreachable"] == 1
    assert re.search(r"(?i)sudo: a password is required|Missing sudo password", said(done))
    assert not (fleet.site.real(fleet.site.hosts.b) / "store").exists()
    assert json.loads(fleet.inventory.read_text())


def plug(host: two_hosts.Host) -> None:
    """Plug the cables in and wait until packets pass."""
    host.cable(plugged=True)
    other = f"{two_hosts.SUBNET}.1.{3 - host.number}"
    deadline = time.monotonic() + 10
    while host.run("ping", "-c", "1", "-W", "1", other, check=False).returncode:
        assert time.monotonic() < deadline
