"""A pin is proved on real processes of this machine, and on the files of others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from exl3_host import proof
from typer.testing import CliRunner

from exl3_host import cli  # isort: skip

CODE = (
    "import sys, threading\n"
    "memory = bytearray(16 << 20)\n"
    "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    "print('ready', flush=True)\nsys.stdin.read()\n"
)


@pytest.fixture
def server() -> Iterator:
    """Starts processes that run on given CPUs only, each with a second thread."""
    running: list[subprocess.Popen] = []

    def start(cpus: set[int]) -> int:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield start
    for process in running:
        process.kill()
        process.wait()


def pin(cpus: str, mode: str = "container", **more: object) -> dict:
    body = {"mode": mode, "cpus": cpus, "mems": None, "numactl": [], "ranks": []}
    return body | more


def checks(answer: dict) -> dict[str, str]:
    return {c["id"]: c["status"] for c in answer["checks"]}


def test_a_process_in_its_place(server) -> None:
    cpu = min(os.sched_getaffinity(0))
    answer = proof.prove(pin(str(cpu)), server({cpu}))
    assert answer["ok"]
    assert checks(answer) == {"processes": "ok", "cpus": "ok", "cpuset": "ok", "mems": "ok"}
    assert answer["processes"][0]["threads"] == 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be left")
def test_a_process_that_may_run_elsewhere(server) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    pid = server({first, second})
    answer = proof.prove(pin(str(first)), pid)
    assert not answer["ok"]
    (bad,) = [c for c in answer["checks"] if c["status"] == "failed"]
    assert bad["id"] == "cpus"
    assert bad["found"].startswith(f"pid {pid} thread {pid} (")
    assert f"may run on {second} and 1 more" in bad["found"]
    assert "Restart" in bad["fix"]
    narrow = proof.prove(pin(f"{first},{second}"), server({first}))
    assert checks(narrow)["cpuset"] == "failed", "a container got fewer CPUs than planned"


def test_pages_of_a_numa_maps() -> None:
    # One line of each kind, as kernel 6.1 prints them.
    text = (
        "55d0c0000000 default heap anon=300 dirty=300 N0=100 N1=200 kernelpagesize_kB=4\n"
        "7f1000000000 bind:1 anon=512 dirty=512 N1=512 kernelpagesize_kB=4\n"
        "7f2000000000 default file=/usr/lib/libc.so.6 mapped=20 N0=20 kernelpagesize_kB=4\n"
        "7f3000000000 prefer:1 file=/dev/shm/nccl-Ab3 dirty=8 N0=2 N1=6 kernelpagesize_kB=4\n"
        "7f4000000000 default file=/memfd:x\\040(del) huge dirty=1 N1=1 kernelpagesize_kB=2048\n"
        "7ffc00000000 default stack anon=3 dirty=3 N0=3 kernelpagesize_kB=4\n"
    )
    found = proof.pages(text)
    assert found["anonymous"] == {0: 103 * 4096, 1: 712 * 4096}
    assert found["shared"] == {
        "/dev/shm/nccl-Ab3": {0: 2 * 4096, 1: 6 * 4096},
        "/memfd:x\\040(del)": {1: 2 << 20},
    }
    assert found["files"] == {0: 20 * 4096}
    assert found["policies"] == ["bind:1", "prefer:1"]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def other_host(root: Path, maps: str | None, cpus: str = "0-31", mems: str = "0") -> Path:
    """Two processes of a container on a host with an offline CPU and two nodes."""
    write(root / "sys/devices/system/cpu/online", "0-6,8-15")
    write(root / "sys/devices/system/node/online", "0-1")
    write(root / "sys/devices/system/node/node0/cpulist", "0-6")
    write(root / "sys/devices/system/node/node1/cpulist", "8-15")
    for pid, parent in ((10, 1), (11, 10)):
        status = f"Cpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}\n"
        write(root / f"proc/{pid}/stat", f"{pid} (vllm) S {parent} {'0 ' * 30}")
        write(root / f"proc/{pid}/cmdline", "vllm\0serve\0")
        write(root / f"proc/{pid}/task/{pid}/status", status)
        if maps is not None:
            write(root / f"proc/{pid}/numa_maps", maps)
    return root


GOOD = "7f1000000000 default anon=9000 N0=9000 kernelpagesize_kB=4\n"
BAD = "7f1000000000 default anon=9000 N0=8000 N1=1000 kernelpagesize_kB=4\n"


def test_a_raw_list_that_names_cpus_which_do_not_exist(tmp_path: Path) -> None:
    root = other_host(tmp_path, GOOD, cpus="0-7,16-31")
    answer = proof.prove(pin("0-6", mems="0"), 10, root)
    assert answer["ok"], answer
    assert len(answer["processes"]) == 2


def test_pages_on_the_wrong_node(tmp_path: Path) -> None:
    answer = proof.prove(pin("0-6", mems="0"), 10, other_host(tmp_path, BAD, cpus="0-6"))
    (bad,) = [c for c in answer["checks"] if c["status"] == "failed"]
    assert bad["id"] == "pages-anonymous"
    assert bad["found"] == "88.9% (node 0: 62 MiB, node 1: 7 MiB)"
    assert bad["expected"] == "95% of anonymous memory on 0"


def test_what_cannot_be_read_is_not_called_good(tmp_path: Path) -> None:
    answer = proof.prove(pin("0-6", mems="0"), 10, other_host(tmp_path, None, cpus="0-6"))
    assert answer["ok"] and checks(answer)["pages"] == "unknown"
    found = next(c for c in answer["checks"] if c["id"] == "pages")
    assert found["fix"] == "Run as root."


def test_a_daemon_reload_that_widened_the_cpuset(tmp_path: Path) -> None:
    answer = proof.prove(pin("0-6", mems="0"), 10, other_host(tmp_path, GOOD, "0-15", "0-1"))
    assert checks(answer)["cpus"] == "failed"
    assert checks(answer)["mems"] == "failed"
    mems = next(c for c in answer["checks"] if c["id"] == "mems")
    assert mems["found"] == "pid 10 may allocate on 1"


def test_shared_memory_by_node(tmp_path: Path) -> None:
    for node, kb in ((0, 1940), (1, 32768)):
        write(
            tmp_path / f"sys/devices/system/node/node{node}/meminfo",
            f"Node {node} MemTotal: 99999 kB\nNode {node} Shmem:  {kb} kB\n",
        )
    write(tmp_path / "sys/devices/system/node/online", "0-1")
    after = proof.shmem_by_node(tmp_path)
    assert after == {0: 1940 * 1024, 1: 32768 * 1024}
    before = {0: 1940 * 1024, 1: 0}
    assert proof.shmem_check(pin("8", mems="1"), before, after)["status"] == "ok"
    wrong = proof.shmem_check(pin("0", mems="0"), before, after)
    assert wrong["status"] == "failed" and wrong["found"] == "0.0% (node 1: 32 MiB)"


def test_shared_memory_stands_in_for_page_counts(tmp_path: Path) -> None:
    root = other_host(tmp_path, None, cpus="0-6")
    for node, kb in ((0, 100), (1, 20000)):
        write(root / f"sys/devices/system/node/node{node}/meminfo", f"Node {node} Shmem: {kb} kB\n")
    answer = proof.prove(pin("0-6", mems="0"), 10, root, shmem_before={0: 0, 1: 0})
    assert answer["shmem_by_node"] == {0: 102400, 1: 20480000}
    assert not answer["ok"]
    assert checks(answer)["shmem"] == "failed" and checks(answer)["pages"] == "unknown"


def test_on_the_command_line(server, tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    pid = server({cpu})
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"schema": "exl3-plan/1", "pin": pin(str(cpu))}))
    runner = CliRunner()
    good = runner.invoke(cli.app, ["prove-pin", "--pid", str(pid), "--plan", str(plan)])
    assert good.exit_code == 0 and "the pin holds" in good.stdout
    plan.write_text(json.dumps(pin("4090")))
    bad = runner.invoke(cli.app, ["prove-pin", "--pid", str(pid), "--plan", str(plan), "--json"])
    assert bad.exit_code == 1 and json.loads(bad.stdout)["ok"] is False
    plan.write_text("{}")
    none = runner.invoke(cli.app, ["prove-pin", "--pid", str(pid), "--plan", str(plan), "--json"])
    assert none.exit_code == 1
    assert "holds no plan: pin has no mode, cpus, mems, numactl" in json.loads(none.stdout)["error"]
