"""How one instance becomes what its plan says, without losing what runs.

The order is: look, validate everything that can be validated, create the new container and let it
serve once on a spare port where there is room, and only then stop the old server and start the new
one. When the new one does not become ready the old one is started again. What served before is
written down first (`pending.json`), so that a play that was killed in the middle is finished, or
taken back, by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import containers, learned, proof, rehearsal, releases, systemd, wait
from .errors import HostError
from .refusals import refuse_unfit, validate
from .runner import halt, launch, make_container, note_ready, start_and_wait
from .spec import Paths, endpoint_of, engine_of, make_spec, read_json, server_pid, write_json
from .spec import releases as everything
from .status import Status, look

__all__ = ["Options", "Outcome", "ensure", "halt", "launch", "refuse_unfit", "remove", "rollback"]

LOCK_WAIT_S = 30


@dataclass(frozen=True)
class Options:
    """How an instance is brought to its plan; see docs/deploy.md for the words."""

    manager: str = "auto"
    rehearsal: str = "auto"
    keep_releases: int = releases.KEEP
    docker_host: str | None = None

    def chosen_manager(self) -> str:
        if self.manager != "auto":
            return self.manager
        return "systemd" if systemd.running() and os.geteuid() == 0 else "supervisor"


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


def ensure(
    plan: dict,
    store: Path,
    options: Options = Options(),
    is_check: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Make the instance serve what the plan says. Raises HostError; then what ran before runs
    again.
    """
    paths = Paths(Path(store), plan["instance"])
    spec = make_spec(plan, Path(store), options.chosen_manager(), options.docker_host)
    old, status = read_json(paths.spec), look(paths)
    outcome = Outcome(False, "unchanged", status, before=_shown(old), after=_shown(spec))
    same = old is not None and old["config_hash"] == spec["config_hash"]
    if same and status.state == "serving" and paths.ready.exists():
        outcome.before = outcome.after
        outcome.answer = (read_json(paths.ready) or {}).get("answer")
        if paths.pending.exists() and not is_check:
            _finish(paths, plan, spec, options)
        return outcome
    outcome.changed = True
    outcome.message = f"was {status.state}, has to be started" if same else "configuration differs"
    validate(plan, spec, paths, is_check)
    if is_check:
        return outcome
    with _only_one(paths):
        if same and status.state in ("starting", "restarting", "serving"):
            # Somebody else's start (of a play that was killed, say) or the supervisor's: give it
            # its time, and ask it the question, before doing it over.
            with contextlib.suppress(wait.NotReady):
                progress = wait.wait_ready(
                    endpoint_of(spec),
                    lambda: None,
                    wait.FileLog(spec["log"]),
                    **spec["health"],
                    tell=tell,
                )
                note_ready(paths, progress)
                outcome.changed, outcome.message = False, "was starting, is ready now"
                outcome.status, outcome.answer = look(paths), progress.answer
                _finish(paths, plan, spec, options)
                return outcome
        _replace(paths, plan, spec, options, outcome, tell)
    outcome.message = "started" if old is None else "replaced" if not same else "started again"
    return outcome


def rollback(
    paths: Paths,
    wanted: str = "previous",
    options: Options = Options(),
    is_check: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Serve an earlier release again. Raises HostError; then what ran before runs again."""
    old, status = read_json(paths.spec), look(paths)
    release = releases.choose(paths, wanted, old)
    plan, spec = release["plan"], release["spec"]
    outcome = Outcome(False, "unchanged", status, before=_shown(old), after=_shown(spec))
    if old and old["config_hash"] == spec["config_hash"] and status.state == "serving":
        outcome.answer = (read_json(paths.ready) or {}).get("answer")
        return outcome
    outcome.changed = True
    validate({**plan, "fit": None}, spec, paths, is_check)
    if not is_check:
        with _only_one(paths):
            _replace(paths, plan, spec, options, outcome, tell)
        write_json(paths.store / "plans" / f"{paths.instance}.json", plan)
    outcome.message = f"back at release {release['number']} ({release['id']}, {release['time']})"
    return outcome


def _replace(
    paths: Paths,
    plan: dict,
    spec: dict,
    options: Options,
    outcome: Outcome,
    tell: Callable[[str], None],
) -> None:
    """Swap what runs for `spec`. Raises HostError after the old server was brought back."""
    old, fallback = read_json(paths.spec), _fallback(paths, spec)
    rehearsal.clear(spec)
    if spec.get("container"):
        make_container(spec)
    try:
        _rehearse(paths, plan, spec, options, outcome, tell)
    except (wait.NotReady, HostError) as failure:
        failed = paths.log.with_name("failed.log")
        back = f"The server that ran before was not touched; the failed log is {failed}."
        if paths.pending.exists() and fallback is not None:
            # What runs is the leftover of a replacement that was killed: nobody has judged it.
            halt(paths)
            back = _restore(fallback, paths, tell, failed)
        _discard(spec, fallback)
        raise HostError(
            f"instance {paths.instance!r} did not pass its rehearsal: {failure}",
            back,
            tail=getattr(failure, "tail", []),
            attempts=outcome.attempts,
        ) from failure
    if fallback is not None:
        write_json(paths.pending, fallback)
    halt(paths)
    if old is not None and old["manager"] == "systemd" and spec["manager"] != "systemd":
        systemd.remove(paths.instance)
    try:
        progress = start_and_wait(spec, paths, tell, outcome.attempts)
    except (wait.NotReady, HostError, OSError) as failure:
        halt(paths)
        # The log of the failed one must survive the start of the old one.
        failed = rehearsal.keep_log(paths)
        back = _restore(fallback, paths, tell, failed) if fallback else _forget(paths, old)
        _discard(spec, fallback)
        raise HostError(
            f"instance {paths.instance!r} did not become ready: {failure}",
            back,
            tail=getattr(failure, "tail", []),
            log=spec["log"],
            attempts=outcome.attempts,
        ) from failure
    outcome.answer, outcome.reached = progress.answer, progress.reached
    _finish(paths, plan, spec, options)
    outcome.status = look(paths)
    proved = _prove_pin(paths, spec)
    if proved:
        outcome.attempts.append(proved)


def _fallback(paths: Paths, spec: dict) -> dict | None:
    """The spec to return to: what an unfinished replacement had stopped, else what was ready."""
    pending = read_json(paths.pending)
    if pending is not None and pending["config_hash"] != spec["config_hash"]:
        return pending
    old = read_json(paths.spec)
    if old is None or old["config_hash"] == spec["config_hash"] or not paths.ready.exists():
        return None
    return old


def _rehearse(
    paths: Paths,
    plan: dict,
    spec: dict,
    options: Options,
    outcome: Outcome,
    tell: Callable[[str], None],
) -> None:
    running = read_json(paths.spec)
    if look(paths).state != "serving" or running["config_hash"] == spec["config_hash"]:
        return
    do_it, why = rehearsal.wanted(options.rehearsal, spec, plan, paths)
    if do_it:
        began = time.monotonic()
        rehearsal.rehearse(spec, tell)
        outcome.attempts.append(f"rehearsal passed in {time.monotonic() - began:.0f} s ({why})")
    elif spec.get("container"):
        outcome.attempts.append(f"no rehearsal: {why}")


def _finish(paths: Paths, plan: dict, spec: dict, options: Options) -> None:
    releases.record(paths, plan, spec, options.keep_releases)
    paths.pending.unlink(missing_ok=True)
    boot = learned.learn(paths.store, plan, learned.tail(paths.log))
    if boot is not None:
        note = read_json(paths.ready) or {}
        write_json(paths.ready, {**note, "kv_tokens": boot.tokens})


def _prove_pin(paths: Paths, spec: dict) -> str | None:
    """What /proc says about the pin, for the summary. Raises HostError where it does not hold.

    The server is left running: it answers, only from the wrong place.
    """
    pid = server_pid(paths)
    if not spec.get("pin") or pid is None:
        return None
    found = proof.prove(spec["pin"], pid)
    failed = [one for one in found["checks"] if one["status"] == "failed"]
    if failed:
        raise HostError(
            f"instance {paths.instance!r} serves, but not where it was pinned to: "
            f"{failed[0]['found']}, expected {failed[0]['expected']}.",
            failed[0]["fix"],
            checks=found["checks"],
        )
    told = [f"{one['id']} {one['status']} ({one['found']})" for one in found["checks"]]
    return "pin: " + ", ".join(told)


def _discard(spec: dict, fallback: dict | None) -> None:
    """Remove the container that failed, unless it is the one we went back to."""
    box = spec.get("container")
    if box and box["name"] != ((fallback or {}).get("container") or {}).get("name"):
        with contextlib.suppress(HostError):
            containers.drop(engine_of(spec), box["name"], spec["grace_s"])


def _restore(old: dict, paths: Paths, tell: Callable[[str], None], failed: Path) -> str:
    tell("starting the previous server again")
    try:
        start_and_wait(old, paths, tell, [])
    except (wait.NotReady, HostError, OSError) as failure:
        return f"The previous server was started again and did not become ready either: {failure}"
    paths.pending.unlink(missing_ok=True)
    return f"The previous server was started again and serves; the failed log is {failed}"


def _forget(paths: Paths, old: dict | None) -> str:
    if old is None:
        remove(paths)
    return "Nothing of it was left running."


@contextlib.contextmanager
def _only_one(paths: Paths):
    paths.run.mkdir(parents=True, exist_ok=True, mode=0o750)
    with open(paths.run / "deploy.lock", "w") as lock:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise HostError(
                        f"another deploy of instance {paths.instance!r} is running.",
                        "Wait for its end.",
                    ) from None
                time.sleep(0.2)
        yield


def _shown(spec: dict | None) -> str:
    if spec is None:
        return ""
    hidden = ("config_hash", "env", "state", "log_max_bytes", "log_keep", "pin")
    shown = {key: value for key, value in spec.items() if key not in hidden}
    if "container" in shown:
        # The system call list is long, and part of the fingerprint all the same.
        body = json.loads(json.dumps(shown["container"]["body"]))
        options = body["HostConfig"]["SecurityOpt"]
        body["HostConfig"]["SecurityOpt"] = [one.partition("=")[0] for one in options]
        shown["container"] = {**shown["container"], "body": body}
    return json.dumps(shown, indent=1, sort_keys=True) + "\n"


def remove(paths: Paths, is_check: bool = False) -> bool:
    """Stop the instance and delete all that belongs to it except its logs; whether there was
    anything.
    """
    unit = systemd.UNIT_DIR / systemd.unit_name(paths.instance)
    there = paths.run.exists() or unit.exists()
    if not there or is_check:
        return there
    specs = [read_json(paths.spec), read_json(paths.pending)]
    specs += [one["spec"] for one in everything(paths)]
    halt(paths)
    systemd.remove(paths.instance)
    for spec in specs:
        if spec and spec.get("container"):
            rehearsal.clear(spec)
            engine = engine_of(spec)
            for one in containers.of_instance(engine, paths.instance):
                containers.drop(engine, one["Id"], spec["grace_s"])
            break
    shutil.rmtree(paths.run)
    return True
