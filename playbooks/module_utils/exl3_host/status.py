"""What an instance is doing, from its files, /proc and its own answers. Reads only."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

from . import procs, proof, systemd, wait
from .errors import HostError
from .spec import Paths, endpoint_of, read_json, releases, server_pid

GIB = 1 << 30


@dataclass
class Status:
    """What an instance is doing. `state` is one of absent, serving, starting, restarting,
    unhealthy, dead, stopped.
    """

    instance: str
    state: str
    reason: str = ""
    url: str = ""
    model: str = ""
    manager: str = ""
    pid: int | None = None
    uptime_s: int | None = None
    memory_gib: float | None = None
    restarts: int = 0
    last_exit: str = ""
    log: str = ""
    config_hash: str = ""
    image: str = ""
    release: str = ""
    pin: str = ""
    pin_ok: bool = True
    kv_tokens: int | None = None


SECOND_LOOK_S = 0.5
"""A dying process loses its sockets well before it is gone, and its supervisor later still."""


def look(paths: Paths) -> Status:
    """What this instance is doing now. Reads only; what looks broken is looked at twice."""
    status = _look_once(paths)
    if status.state in ("unhealthy", "dead"):
        time.sleep(SECOND_LOOK_S)
        status = _look_once(paths)
    return status


def _look_once(paths: Paths) -> Status:
    spec, state = read_json(paths.spec), read_json(paths.state)
    if spec is None:
        return Status(paths.instance, "absent", "nothing is deployed under this name")
    endpoint = endpoint_of(spec)
    status = Status(
        paths.instance,
        "dead",
        url=endpoint.url,
        model=endpoint.served_name,
        manager=spec["manager"],
        log=spec["log"],
        config_hash=spec["config_hash"],
    )
    if state is None:
        status.reason = "it was never started"
        return status
    _look_at_release(status, spec, paths)
    exits = state["exits"]
    status.restarts = max(0, state["starts"] - 1)
    if exits:
        last = exits[-1]
        how = f"signal {last['signal']}" if last["signal"] else f"exit status {last['code']}"
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["time"]))
        status.last_exit = f"{how} at {moment}"
    this_boot = state["boot_id"] == procs.boot_id()
    if not this_boot or not procs.same_process(state["supervisor"]):
        return _without_supervisor(status, state, this_boot, paths)
    if state["phase"] == "waiting to restart":
        status.state, status.reason = "restarting", state.get("reason", "")
    elif state["phase"] == "stopping":
        status.state, status.reason = "stopped", "it is draining"
    elif state["phase"] == "starting":
        status.state, status.reason = "starting", "its supervisor has just begun"
    elif not procs.same_process(state["server"]):
        status.reason = f"process {state['server']['pid']} is gone; its supervisor will notice"
    else:
        pid = server_pid(paths) or state["server"]["pid"]
        _look_at_server(status, state["server"], pid, endpoint, read_json(paths.ready))
        if spec.get("pin") and status.pid is not None:
            _look_at_pin(status, spec["pin"], pid)
    return status


def smoke(paths: Paths, timeout_s: float) -> str:
    """Ask a server the question of its recipe; a sentence with the answer.

    Raises HostError where it does not serve, does not answer in time, or answers otherwise. An
    engine can hang behind a `/health` that says 200, so this is the only proof that it serves.
    """
    name, running = paths.instance, read_json(paths.spec)
    if running is None:
        raise HostError(f"{name} is not deployed here.", "Deploy it first.")
    endpoint = endpoint_of(running)
    good, why = wait.healthy(endpoint)
    if not good:
        raise HostError(f"{name} at {endpoint.url} does not serve: {why}.", f"Log: {paths.log}")
    asked = endpoint.smoke
    if not asked:
        raise HostError(f"{name} has no question in its recipe.", "Write health.smoke into it.")
    began = time.monotonic()
    words = (asked["prompt"], asked["max_tokens"], timeout_s, asked.get("endpoint") or "chat")
    try:
        answer = wait.complete(endpoint, *words)
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        raise HostError(
            f"{name} says that it is healthy and does not answer: {error}.",
            f"Its engine hangs or is overloaded: {paths.log}. A deploy does not replace a server "
            "whose /health is good; stop it first (teardown.yml), then deploy.",
        ) from None
    seconds = time.monotonic() - began
    said = f"{name}: asked {asked['prompt']!r} it says {answer.strip()!r} after {seconds:.2f} s"
    if asked.get("expect") and not re.search(asked["expect"], answer):
        raise HostError(f"{said}, expected /{asked['expect']}/.", "See docs/troubleshooting.md.")
    return said


def _look_at_release(status: Status, spec: dict, paths: Paths) -> None:
    image = (spec.get("container") or {}).get("image")
    if image:
        status.image = f"{image['name']}@{image['digest'].removeprefix('sha256:')[:12]}"
    known = [one for one in releases(paths) if one["id"] == spec["config_hash"][:8]]
    if known:
        status.release = f"{known[-1]['number']} ({known[-1]['id']})"
    ready = read_json(paths.ready) or {}
    status.kv_tokens = ready.get("kv_tokens")


def _look_at_pin(status: Status, pin: dict, pid: int) -> None:
    """Held against /proc every time: a daemon-reload is known to reset a container's limits."""
    found = proof.prove(pin, pid)
    failed = [one for one in found["checks"] if one["status"] == "failed"]
    unknown = [one for one in found["checks"] if one["status"] == "unknown"]
    status.pin_ok = not failed
    if failed:
        status.pin = f"WRONG: {failed[0]['found']}, expected {failed[0]['expected']}"
    elif pin["mode"] == "none":
        status.pin = "none"
    else:
        where = f"CPUs {pin['cpus']}" + (f", nodes {pin['mems']}" if pin.get("mems") else "")
        status.pin = (
            f"proved but for {unknown[0]['id']}: {where}" if unknown else f"proved: {where}"
        )


def _without_supervisor(status: Status, state: dict, this_boot: bool, paths: Paths) -> Status:
    if state.get("reason") == "stopped on request":
        status.state, status.reason = "stopped", "stopped on request"
    elif status.manager == "systemd" and systemd.between_restarts(paths.instance):
        status.state, status.reason = "restarting", state.get("reason", "")
    elif not this_boot:
        status.reason = "the host was restarted since it was started"
    elif state["phase"] in ("failed", "stopped"):
        status.reason = state.get("reason", state["phase"])
        if status.manager == "systemd" and systemd.gave_up(paths.instance):
            status.reason += ", and systemd does not start it again so often"
    else:
        status.reason = f"its supervisor (pid {state['supervisor']['pid']}) is gone"
    return status


def _look_at_server(
    status: Status, server: dict, pid: int, endpoint: wait.Endpoint, ready: dict | None
) -> None:
    status.pid = pid
    hertz = os.sysconf("SC_CLK_TCK")
    with open("/proc/uptime") as text:
        status.uptime_s = int(float(text.read().split()[0]) - server["start_ticks"] / hertz)
    status.memory_gib = round(procs.resident_bytes(procs.tree(pid)) / GIB, 2)
    good, why = wait.healthy(endpoint)
    if good:
        status.state, status.reason = "serving", ""
        return
    if not procs.same_process(server):
        status.pid, status.reason = None, f"process {server['pid']} has just ended"
        return
    # vLLM listens only once its engine is up, so a server that listens was well before.
    was_ready = (ready is not None and ready.get("server") == server) or wait.port_open(endpoint)
    status.state = "unhealthy" if was_ready else "restarting" if status.restarts else "starting"
    status.reason = why
