"""How one instance becomes what its plan says, without losing what runs.

The order is: look, validate everything that can be validated, and only then stop the old server and
start the new one. When the new one does not become ready the old one is started again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import procs, supervisor, systemd, wait
from .errors import HostError
from .spec import DEFAULT_GRACE_S, Paths, endpoint_of, make_spec, own_pids, read_json, write_json
from .status import Status, look


@dataclass
class Outcome:
    """What `ensure` did."""

    changed: bool
    message: str
    status: Status | None = None
    answer: str | None = None
    reached: dict[str, float] = field(default_factory=dict)
    attempts: list[str] = field(default_factory=list)
    before: str = ""
    after: str = ""


def refuse_unfit(plan: dict) -> None:
    """Raise HostError when the plan says that memory is too small.

    The planner counts the memory of a server that is to be replaced as free.
    """
    fit = plan.get("fit") or {"ok": True}
    if fit["ok"]:
        return
    have = fit.get("available_gib")
    figures = f"{fit['needed_gib']:.1f} GiB needed"
    figures += "" if have is None else f", {have:.1f} GiB available"
    reasons = [f"because {one}" for one in fit.get("reasons", [])]
    ways = "; or ".join(fit.get("would_fit", []))
    raise HostError(
        "\n".join([f"not enough memory: {figures}.", *fit.get("lines", []), *reasons]),
        f"Free memory, or: {ways}." if ways else "Free memory or choose a smaller model.",
    )


def validate(plan: dict, spec: dict, paths: Paths, is_check: bool) -> None:
    """Refuse what would fail, while the old server still serves. Raises HostError."""
    mine = own_pids(paths)
    host, port = spec["endpoint"]["host"], spec["endpoint"]["port"]
    foreign = [one for one in procs.conflicting(host, port) if one.pid not in mine]
    if mine and (read_json(paths.spec) or {}).get("endpoint", {}).get("port") == port:
        foreign = [one for one in foreign if one.pid is not None]
    if foreign:
        raise HostError(
            f"port {port} is in use: {foreign[0]}.",
            f"Stop that program or give instance {paths.instance!r} another port.",
            port=port,
            owner=foreign[0].pid,
        )
    refuse_unfit(plan)
    if is_check:
        return
    program = spec["argv"][0]
    for word, what in ((program, "program"), (plan["serve"]["argv"][0], "server program")):
        if shutil.which(word, path=spec["env"].get("PATH")) is None:
            raise HostError(f"{what} {word} is not there or may not be run.", "Deploy the venv.")
    model = Path(plan["model"]["dir"])
    if not (model / "config.json").is_file():
        raise HostError(
            f"model folder {model} is not there or has no config.json.",
            "Check model.path in the recipe, or deploy without --tags so that the store is filled.",
        )
    for variable, path in spec["secret_env"].items():
        if not os.access(path, os.R_OK):
            raise HostError(
                f"{variable} should come from {path}, which cannot be read.",
                "Write the secret there (mode 0600, one line), or leave secrets out of the recipe.",
            )


@contextlib.contextmanager
def _only_one(paths: Paths):
    paths.run.mkdir(parents=True, exist_ok=True, mode=0o750)
    with open(paths.run / "deploy.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HostError(
                f"another deploy of instance {paths.instance!r} is running.", "Wait for its end."
            ) from None
        yield


def launch(spec: dict, paths: Paths) -> None:
    """Write the spec and start its supervisor; returns as soon as that has begun."""
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
                endpoint_of(spec), alive_check(paths), spec["log"], **spec["health"], tell=tell
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
            _note_ready(paths, progress)
            notes.append(f"attempt {attempt} ready in {time.monotonic() - began:.0f} s")
            return progress
    raise AssertionError("the loop above returns or raises")


def _note_ready(paths: Paths, progress: wait.Progress) -> None:
    server = (read_json(paths.state) or {}).get("server")
    found = {"server": server, "reached": progress.reached, "answer": progress.answer}
    write_json(paths.ready, found)


def _known_failure(spec: dict, failure: wait.NotReady) -> str | None:
    text = "\n".join([*failure.tail, failure.exception or ""])
    for entry in spec["start"].get("retry_on") or []:
        if re.search(entry["pattern"], text):
            return f"{entry['id']} (known{', ' + entry['why'] if entry.get('why') else ''})"
    return None


def ensure(
    plan: dict,
    store: Path,
    manager: str = "auto",
    is_check: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Make the instance serve what the plan says. Raises HostError; then what ran before runs
    again.
    """
    paths = Paths(Path(store), plan["instance"])
    if manager == "auto":
        manager = "systemd" if systemd.running() and os.geteuid() == 0 else "supervisor"
    spec, old = make_spec(plan, Path(store), manager), read_json(paths.spec)
    status = look(paths)
    outcome = Outcome(False, "unchanged", status, before=_shown(old), after=_shown(spec))
    same = old is not None and old["config_hash"] == spec["config_hash"]
    if same and status.state == "serving":
        outcome.before = outcome.after
        outcome.answer = (read_json(paths.ready) or {}).get("answer")
        return outcome
    outcome.changed = True
    outcome.message = f"was {status.state}, has to be started" if same else "configuration differs"
    validate(plan, spec, paths, is_check)
    if is_check:
        return outcome
    with _only_one(paths):
        if same and status.state in ("starting", "restarting"):
            # Somebody else's start, or the supervisor's: give it its time before doing it over.
            with contextlib.suppress(wait.NotReady):
                progress = wait.wait_ready(
                    endpoint_of(spec), lambda: None, spec["log"], **spec["health"], tell=tell
                )
                _note_ready(paths, progress)
                outcome.changed, outcome.message = False, "was starting, is ready now"
                outcome.status, outcome.answer = look(paths), progress.answer
                return outcome
        had_served = halt(paths)
        if old is not None and old["manager"] == "systemd" and manager != "systemd":
            systemd.remove(paths.instance)
        try:
            progress = start_and_wait(spec, paths, tell, outcome.attempts)
        except (wait.NotReady, HostError, OSError) as failure:
            halt(paths)
            back = _restore(old, paths, tell) if had_served and not same else _forget(paths, old)
            raise HostError(
                f"instance {paths.instance!r} did not become ready: {failure}",
                back,
                tail=getattr(failure, "tail", []),
                log=spec["log"],
                attempts=outcome.attempts,
            ) from failure
    outcome.status, outcome.answer, outcome.reached = look(paths), progress.answer, progress.reached
    outcome.message = "started" if old is None else "replaced" if not same else "started again"
    return outcome


def _restore(old: dict, paths: Paths, tell: Callable[[str], None]) -> str:
    # The log of the failed one must survive the start of the old one.
    shutil.copyfile(paths.log, paths.log.with_name("failed.log"))
    tell("starting the previous server again")
    try:
        start_and_wait(old, paths, tell, [])
    except (wait.NotReady, HostError, OSError) as failure:
        return f"The previous server was started again and did not become ready either: {failure}"
    failed = paths.log.with_name("failed.log")
    return f"The previous server was started again and serves; the failed log is {failed}"


def _forget(paths: Paths, old: dict | None) -> str:
    if old is None:
        remove(paths)
    return "Nothing of it was left running."


def _shown(spec: dict | None) -> str:
    if spec is None:
        return ""
    hidden = ("config_hash", "env", "state", "log_max_bytes", "log_keep")
    shown = {key: value for key, value in spec.items() if key not in hidden}
    return json.dumps(shown, indent=1, sort_keys=True) + "\n"


def remove(paths: Paths, is_check: bool = False) -> bool:
    """Stop the instance and delete all that belongs to it except its logs; whether there was
    anything.
    """
    unit = systemd.UNIT_DIR / systemd.unit_name(paths.instance)
    there = paths.run.exists() or unit.exists()
    if not there or is_check:
        return there
    halt(paths)
    systemd.remove(paths.instance)
    shutil.rmtree(paths.run)
    return True
