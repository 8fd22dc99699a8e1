"""A server as a unit of a real systemd: deployed, crashing, stopped, restarted with its host.

The engine is the small server; systemd, its journal, the playbooks and the supervisor are real.
"""

import re
import sys
import time
from pathlib import Path

import pytest
import systemd_host
from exl3_host import spec

from tests.fleet import Fleet, small_recipe

pytestmark = pytest.mark.slow
PORT = 18077
UNIT = "exl3-tiny.service"
SMALL = Path(__file__).with_name("small_server.py")
RECIPE = small_recipe("answer: Paris, drain: 1")


@pytest.fixture(scope="module")
def fleet(checkout, tmp_path_factory):
    systemd_host.needed()
    folder = tmp_path_factory.mktemp("systemd")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    host = systemd_host.SystemdHost(folder, checkout)
    vllm = f"#!{sys.executable}\n{SMALL.read_text()}"
    made = Fleet(
        systemd_host.Site(host),
        checkout,
        RECIPE,
        model,
        vllm,
        PORT,
        exl3_service_manager="auto",
    )
    # An operator's own settings beside ours: less time between two starts.
    hurry = host.units / f"{UNIT}.d" / "hurry.conf"
    hurry.parent.mkdir()
    hurry.write_text("[Service]\nRestartSec=1\n")
    try:
        host.boot()
        yield made
    finally:
        host.destroy()


@pytest.fixture(scope="module")
def host(fleet):
    return fleet.site.hosts.a


def until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.1)
    return value


def changed(done) -> int:
    return int(re.search(r"^host-box\s*:.*changed=(\d+)", done.stdout, re.M)[1])


def status_rows(done) -> list[dict[str, str]]:
    """The table of `status.yml`."""
    (text,) = re.findall(r'"msg": "(instance .*?)"$', done.stdout, re.M)
    head, *rows = text.split(r"\n")
    names = re.split(r"\s{2,}", head.strip())
    return [dict(zip(names, re.split(r"\s{2,}", row.strip()))) for row in rows]


def kill_server(fleet, host) -> int:
    """End the server as the kernel would; its process id."""
    pid = fleet.server(host)
    host.run("kill", "-9", str(pid))
    return pid


def serves_again(fleet, host, before: int):
    return lambda: fleet.health(host) == "200" and fleet.server(host) != before


def test_a_deploy_makes_a_unit(fleet, host):
    done = fleet.play("deploy")
    assert changed(done) > 0 and fleet.health(host) == "200"
    assert host.show(UNIT, "ActiveState") == "active"
    assert host.systemctl("is-enabled", UNIT).stdout.strip() == "enabled"
    # The unit's main process is our supervisor, whose child is the server.
    assert host.show(UNIT, "MainPID") == str(fleet.state(host)["supervisor"]["pid"])
    before = fleet.server(host)
    host.systemctl("daemon-reload", check=True)
    assert changed(fleet.play("deploy")) == 0 and fleet.server(host) == before
    # The server's words are in its own log, which is bounded, and not in the journal too.
    journal = host.run("journalctl", "--no-pager", "-u", UNIT).stdout
    assert "Started" in journal and "listening" not in journal
    assert "listening" in (fleet.store / "logs/tiny/server.log").read_text()


def test_a_new_release_is_what_systemd_runs(fleet, host):
    """No stale unit: deepops#1109."""
    path, before = fleet.site.own / "tiny.yaml", fleet.server(host)
    path.write_text(path.read_text().replace("answer: Paris", "answer: Paris., noise: 60000000"))
    assert changed(fleet.play("deploy")) > 0
    assert fleet.server(host) != before and host.show(UNIT, "NeedDaemonReload") == "no"
    words = Path("/proc").joinpath(str(fleet.server(host)), "cmdline")
    assert "Paris." in host.run("cat", str(words)).stdout.split("\0")
    # It says a lot, which stays bounded here too.
    logs = fleet.store / "logs" / "tiny"
    until(lambda: (logs / "server.log").stat().st_size < spec.LOG_MAX_BYTES)
    assert (logs / "server.log.1").stat().st_size > spec.LOG_MAX_BYTES


def test_restarts_are_bounded_and_counted(fleet, host):
    """eugr/spark-vllm-docker#257: a restart without an end leaks until the host is dead."""
    for count in (1, 2):
        until(serves_again(fleet, host, kill_server(fleet, host)))
        (row,) = status_rows(fleet.play("status"))
        assert (row["state"], row["restarts"]) == ("serving", str(count))
        assert row["last exit"].startswith("signal SIGKILL")
    kill_server(fleet, host)
    until(lambda: host.show(UNIT, "ActiveState") == "failed")
    done = fleet.play("status", check=False)
    assert done.returncode != 0 and [row["state"] for row in status_rows(done)] == ["dead"]
    assert "systemd does not start it again so often" in done.stdout
    # A deploy is a wish for another try.
    assert changed(fleet.play("deploy")) > 0 and fleet.health(host) == "200"


def test_stopped_by_hand_is_no_failure(fleet, host):
    host.systemctl("stop", UNIT, check=True)
    assert host.show(UNIT, "ActiveState") == "inactive"
    assert fleet.state(host)["phase"] == "stopped"
    done = fleet.play("status", check=False)
    assert done.returncode != 0 and [row["state"] for row in status_rows(done)] == ["stopped"]
    host.systemctl("start", UNIT, check=True)
    until(lambda: fleet.health(host) == "200")
    assert fleet.state(host)["starts"] == 1, "a start that somebody asked for is no restart"


def test_a_shutdown_drains_and_a_boot_serves_again(fleet, host):
    log = fleet.store / "logs/tiny/server.log"
    before = fleet.state(host)["server"]
    host.shut_down()
    assert re.search(r"drained\n\[exl3 [^\]]*\] ended with exit status 0\n$", log.read_text())
    host.boot()
    until(lambda: fleet.health(host) == "200")
    after = fleet.state(host)
    assert after["server"]["start_ticks"] > before["start_ticks"] and after["starts"] == 1


def test_nothing_stays(fleet, host):
    fleet.play("teardown")
    assert fleet.health(host) == "000" and not list(host.units.glob("**/exl3-tiny.service"))
    assert host.show(UNIT, "LoadState") == "not-found"
    left = host.run("ps", "-eo", "args").stdout
    assert "supervisor.py" not in left and "small_server" not in left
