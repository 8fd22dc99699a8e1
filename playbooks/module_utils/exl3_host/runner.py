"""One start, one stop: a supervisor is launched, watched until its server answers, and ended.

Native servers and containers go the same way; a container has to exist before it is started, and
the engine is asked to stop what its client left running.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from . import containers, gpu_use, procs, supervisor, systemd, wait
from .errors import HostError
from .spec import (
    DEFAULT_GRACE_S,
    Paths,
    container_pids,
    endpoint_of,
    engine_of,
    own_pids,
    read_json,
    write_json,
)


def launch(spec: dict, paths: Paths) -> None:
    """Write the spec and start its supervisor; returns as soon as that has begun."""
    if spec.get("container"):
        make_container(spec)
    for path in (paths.state, paths.ready):
        path.unlink(missing_ok=True)
    if paths.log.exists() and paths.log.stat().st_size:
        supervisor.RotatingLog(spec["log"], spec["log_max_bytes"], spec["log_keep"]).rotate()
    program = paths.run / "supervisor.py"
    program.write_bytes(pkgutil.get_data(__package__, "supervisor.py"))
    write_json(paths.spec, spec)
    # -I -S: the supervisor needs no installed package and must not depend on one.
    command = [sys.executable, "-I", "-S", str(program), str(paths.spec)]
    if spec["manager"] == "systemd":
        systemd.start(paths.instance, [*command, "--once"], spec)
        return
    with open(paths.run / "supervisor.log", "w") as complaints:
        started = subprocess.Popen(
            command,
            cwd=paths.run,
            stdin=subprocess.DEVNULL,
            stdout=complaints,
            stderr=complaints,
            start_new_session=True,
        )
    deadline = time.monotonic() + 20
    while not paths.state.exists():
        if started.poll() is not None or time.monotonic() > deadline:
            said = (paths.run / "supervisor.log").read_text().strip()
            raise HostError(f"the supervisor did not start: {said or started.returncode}")
        time.sleep(0.05)


def halt(paths: Paths) -> bool:
    """Stop the instance, whoever supervises it; whether anything ran. The spec stays."""
    spec, state = read_json(paths.spec), read_json(paths.state)
    ran = bool(own_pids(paths))
    if spec and spec["manager"] == "systemd":
        systemd.stop(paths.instance)
    if state is None or state["boot_id"] != procs.boot_id():
        _halt_container(spec)
        return ran
    grace_s = (spec or {}).get("grace_s", DEFAULT_GRACE_S)
    records = [one for one in (state["supervisor"], state["server"]) if procs.same_process(one)]
    members = [
        {"pid": pid, "start_ticks": procs.start_ticks(pid)}
        for record in records
        for pid in procs.tree(record["pid"])
    ]
    if records:
        with contextlib.suppress(ProcessLookupError):
            os.kill(records[0]["pid"], signal.SIGTERM)
    for left in procs.wait_gone(members, grace_s + supervisor.ORPHAN_GRACE_S + 5):
        with contextlib.suppress(ProcessLookupError):
            os.kill(left["pid"], signal.SIGKILL)
    procs.wait_gone(members, 5)
    _halt_container(spec)
    return ran


def alive_check(paths: Paths) -> Callable[[], str | None]:
    """A function that tells what became of the current start, None while it runs."""
    first: list[dict] = []

    def check() -> str | None:
        state = read_json(paths.state)
        if state is None:
            return None
        first[:] = first or [state["supervisor"]]
        if state["exits"]:
            last = state["exits"][-1]
            signalled = f"was ended by {last['signal']}"
            return signalled if last["signal"] else f"ended with exit status {last['code']}"
        if state["phase"] == "failed":
            return f"did not start: {state.get('reason')}"
        if state["supervisor"] != first[0]:
            return "ended and was started again"
        return None if procs.same_process(state["supervisor"]) else "lost its supervisor"

    return check


def start_and_wait(
    spec: dict, paths: Paths, tell: Callable[[str], None], notes: list[str]
) -> wait.Progress:
    """Start, wait until ready, try again after a known failure. Raises wait.NotReady."""
    attempts = spec["start"].get("attempts") or 1
    for attempt in range(1, attempts + 1):
        began = time.monotonic()
        launch(spec, paths)
        try:
            progress = wait.wait_ready(
                endpoint_of(spec),
                alive_check(paths),
                wait.FileLog(spec["log"]),
                **spec["health"],
                tell=tell,
                activity=lambda: gpu_use.memory_mib(gpus_of(spec)),
            )
        except wait.NotReady as failure:
            halt(paths)
            lasted = f"attempt {attempt} of {attempts} died after {time.monotonic() - began:.0f} s"
            known = _known_failure(spec, failure)
            notes.append(f"{lasted}: {known or failure.reason}")
            tell(notes[-1])
            if known is None or attempt == attempts:
                raise
            time.sleep(spec["start"].get("backoff_s") or 0)
        else:
            note_ready(paths, progress)
            notes.append(f"attempt {attempt} ready in {time.monotonic() - began:.0f} s")
            return progress
    raise AssertionError("the loop above returns or raises")


def note_ready(paths: Paths, progress: wait.Progress) -> None:
    """Write down that the server which runs now gave the right answer."""
    server = (read_json(paths.state) or {}).get("server")
    found = {"server": server, "reached": progress.reached, "answer": progress.answer}
    write_json(paths.ready, found)


def _known_failure(spec: dict, failure: wait.NotReady) -> str | None:
    text = "\n".join([*failure.tail, failure.exception or ""])
    for entry in spec["start"].get("retry_on") or []:
        if re.search(entry["pattern"], text):
            return f"{entry['id']} (known{', ' + entry['why'] if entry.get('why') else ''})"
    return None


def make_container(spec: dict) -> str:
    """Create the container of a spec where it is not there yet, and what it mounts; its name.

    Raises HostError in the engine's words. Nothing that runs is touched.
    """
    box = spec["container"]
    containers.prepare(box, box["api_key_file"])
    return containers.create(engine_of(spec), box, spec["config_hash"])


def _halt_container(spec: dict | None) -> None:
    """What a killed client left running is stopped; its GPU memory has to come back."""
    if not spec or not spec.get("container"):
        return
    engine, name = engine_of(spec), spec["container"]["name"]
    found = engine.container(name)
    if found is not None and found["State"]["Running"]:
        engine.stop(name, spec["grace_s"])
    gpu_use.wait_free(gpus_of(spec), container_pids(spec))


def gpus_of(spec: dict) -> list[str]:
    """UUIDs of the GPUs that a server was given."""
    requests = spec.get("container", {}).get("body", {}).get("HostConfig", {}).get("DeviceRequests")
    ids = [one for request in requests or [] for one in request["DeviceIDs"]]
    return [one.removeprefix("nvidia.com/gpu=") for one in ids]
