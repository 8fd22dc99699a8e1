"""A disk that fills up: the server that runs goes on, and nothing is begun that cannot end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from exl3_host import preflight, service, spec, status
from exl3_host.errors import HostError
from supervised import run_supervisor

# Writes a line a millisecond into its log and does not mind when that fails, as a server's logging.
CHATTER = """\
import sys, time
while True:
    try:
        sys.stdout.write("x" * 99 + "\\n"); sys.stdout.flush()
    except OSError:
        pass
    time.sleep(0.001)
"""


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.02)
    return value


@pytest.fixture
def disk(tmp_path, request):
    """An empty disk of as many MiB as the test says."""
    if os.geteuid() != 0:
        pytest.skip("FULL DISKS NOT TESTED: mounting one needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    size = f"size={request.param}m"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"FULL DISKS NOT TESTED: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, leave_kib: int = 0) -> Path:
    """Write a file until no more fits; give some of it back."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as out:
        with pytest.raises(OSError, match="No space left"):
            while True:
                out.write(b"\0" * (1 << 15))
        out.truncate(max(0, out.tell() - (leave_kib << 10)))
    return filler


@pytest.mark.parametrize("disk", [1], indirect=True)
def test_a_server_outlives_its_log(disk):
    program, state, logs = run_supervisor(
        disk, [sys.executable, "-c", CHATTER], env={}, log_max_bytes=200_000, burst=5
    )
    try:
        log = logs / "log"
        until(state.exists)
        server = json.loads(state.read_text())["server"]["pid"]
        until(lambda: log.stat().st_size > 150_000)
        # Turning the log over needs room that is not there: its lines go, the server stays.
        filler = fill(disk, leave_kib=110)
        until(lambda: "the lines before were not kept" in log.read_text())
        assert program.poll() is None and Path(f"/proc/{server}").exists()
        # A crash while the disk is full: it comes back, and is written down when there is room.
        filler.unlink()
        fill(disk)
        os.kill(server, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{server}").exists())
        time.sleep(1.5)
        (disk / "filler").unlink()
        after = until(lambda: (json.loads(state.read_text())["starts"] == 2) and state.read_text())
        assert Path(f"/proc/{json.loads(after)['server']['pid']}").exists()
    finally:
        program.terminate()
        assert program.wait(20) == 0


@pytest.mark.parametrize("disk", [100], indirect=True)
def test_nothing_is_replaced_on_a_full_disk(disk, make_plan):
    store, options = disk / "store", service.Options(manager="supervisor")
    store.mkdir()
    paths = spec.Paths(store, "small")
    try:
        service.ensure(make_plan(), store, options)
        pid = status.look(paths).pid
        fill(disk, leave_kib=1024)
        with pytest.raises(HostError, match=r"store is full: \d MiB free, 64 MiB are needed"):
            service.ensure(make_plan("--answer", "Paris again"), store, options)
        found = status.look(paths)
        assert (found.state, found.pid) == ("serving", pid)
        assert not service.ensure(make_plan(), store, options).changed
        with pytest.raises(HostError, match="exl3_store_dir to another disk"):
            preflight.check_room(store / "not" / "there" / "yet")
    finally:
        service.remove(paths)
