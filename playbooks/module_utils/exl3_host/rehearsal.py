"""A new container serves once on a spare port before the old one is stopped.

Where both find room side by side, a release that dies at its start, stalls or answers nonsense is
found out while the old server goes on answering: not one request is lost. It costs a second start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from . import containers, procs, wait
from .errors import HostError
from .runner import gpus_of
from .spec import Paths, endpoint_of, engine_of, own_pids

SUFFIX = "-rehearsal"
MODES = ("auto", "always", "never")
GIB = 1 << 30


def wanted(mode: str, spec: dict, plan: dict, paths: Paths) -> tuple[bool, str]:
    """Whether to rehearse, and why. A GPU has room for one server: there it is on request only."""
    if not spec.get("container"):
        return False, "only containers are rehearsed"
    if mode != "auto":
        return mode == "always", f"exl3_instance_rehearsal is {mode}"
    if gpus_of(spec):
        return False, "the GPUs have room for one server"
    fit = plan.get("fit") or {}
    needed, available = fit.get("needed_gib"), fit.get("available_gib")
    if needed is None or available is None:
        return False, "it is not known whether both find room"
    beside = available - procs.resident_bytes(own_pids(paths)) / GIB
    room = needed <= beside
    return room, f"{needed:.2f} GiB needed, {beside:.2f} GiB available beside the old one"


def rehearse(spec: dict, tell: Callable[[str], None]) -> wait.Progress:
    """Run the new container on a spare port until it gives the right answer, then remove it.

    Raises wait.NotReady with its log, and HostError when the engine refuses it.
    """
    engine = engine_of(spec)
    port = spare_port(spec["endpoint"]["host"])
    box = dict(spec["container"])
    box["body"] = containers.on_another_port(box["body"], port)
    # Its own label keeps it out of the list of releases.
    box["labels"] = {**box["labels"], containers.LABEL_INSTANCE: f"{spec['instance']}{SUFFIX}"}
    containers.prepare(box, box["api_key_file"])
    name = containers.create(engine, box, spec["config_hash"], SUFFIX)
    tell(f"rehearsal of {name} on port {port}")
    try:
        engine.start(name)
        endpoint = dataclasses.replace(endpoint_of(spec), port=port)
        log = containers.ContainerLog(engine, name)
        alive = containers.alive_check(engine, name)
        return wait.wait_ready(endpoint, alive, log, **spec["health"], tell=tell)
    except wait.NotReady:
        failed = Path(spec["log"]).with_name("failed.log")
        failed.parent.mkdir(parents=True, exist_ok=True)
        failed.write_text("\n".join(engine.logs(name)) + "\n")
        raise
    finally:
        containers.drop(engine, name, spec["grace_s"])


def clear(spec: dict) -> None:
    """Remove what a play that was killed during a rehearsal left."""
    if not spec.get("container"):
        return
    engine = engine_of(spec)
    for one in containers.of_instance(engine, f"{spec['instance']}{SUFFIX}"):
        containers.drop(engine, one["Id"], 10)


def spare_port(host: str) -> int:
    """A port that nobody listens on at this address now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise HostError(
                f"no port can be had on {host}: {error.strerror}.",
                "Correct exl3_bind_address or host of the instance.",
            ) from None
        return probe.getsockname()[1]


def keep_log(paths: Paths) -> Path:
    """Copy the log of a failed start, which the next start would rotate away."""
    failed = paths.log.with_name("failed.log")
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(paths.log, failed)
    return failed
