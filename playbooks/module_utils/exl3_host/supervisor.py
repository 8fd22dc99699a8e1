"""Keep one server running where no systemd does: start, log, restart a bounded number of times,
stop gently.

Run as `python3 supervisor.py SPEC.json [--once]`. This file is copied beside the service it runs
and imports nothing of this package, so an upgrade of the package never pulls the ground from under
a running server.

The spec (one JSON object, written by `service.py`):
  argv, cwd, env       what to run, where, and its whole environment (nothing is inherited)
  secret_env           {"VARIABLE": "file"}: read at start, so that no secret stands in the spec
  state, log           files written here: state is one JSON object, the log is rotated
  stop_argv, kill_argv optional: end a server that is no child of ours (a container), gently and not
  log_max_bytes, log_keep, grace_s, burst, interval_s, backoff_s, config_hash

At most `burst` starts within `interval_s` seconds; then the state says "failed" and the program
ends with 1. With `--once` a failed server is not started again (systemd does that, and the state
goes on counting) and its exit status becomes ours. SIGTERM is passed on to the server, which has
`grace_s` seconds to drain before its process group is killed.

A disk that is full costs lines of the log, and makes the state late; it never costs the server.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ORPHAN_GRACE_S = 5.0
KEPT_EXITS = 20


def start_ticks(pid):
    """Start time of a process in clock ticks since boot: with the pid it names one process for
    ever.
    """
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[19])


def boot_id():
    """Identity of this boot: process ids of an earlier one mean nothing."""
    with open("/proc/sys/kernel/random/boot_id") as text:
        return text.read().strip()


def children_of(pid):
    """Process ids whose parent is `pid`, zombies left out."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{entry}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
            if int(fields[1]) == pid and fields[0] != b"Z":
                found.append(int(entry))
    return found


class RotatingLog:
    """Log file that is copied to `.1`, `.2`, ... and emptied when it has grown to `max_bytes`.

    The server appends to the file itself: it goes on writing whatever becomes of its supervisor,
    and a write in append mode after the file was emptied lands at its new end.
    """

    def __init__(self, path, max_bytes, keep):
        self.path, self.max_bytes, self.keep = path, max_bytes, keep
        os.makedirs(os.path.dirname(path), mode=0o750, exist_ok=True)
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115  (lives as long as the process)

    def size(self):
        return os.fstat(self.file.fileno()).st_size

    def rotate_if_big(self):
        if self.size() >= self.max_bytes:
            self.rotate()

    def rotate(self):
        for number in range(self.keep - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{self.path}.{number}", f"{self.path}.{number + 1}")
        if self.keep > 0:
            try:
                shutil.copyfile(self.path, f"{self.path}.1")
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.unlink(f"{self.path}.1")
                self.file.truncate(0)
                self.note(f"the lines before were not kept: {error}")
                return
        self.file.truncate(0)

    def note(self, text):
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):
            self.file.write(f"[exl3 {stamp}] {text}\n".encode())


class Supervisor:
    """One server and everything it started."""

    def __init__(self, spec, once):
        self.spec, self.once = spec, once
        self.log = RotatingLog(spec["log"], spec["log_max_bytes"], spec["log_keep"])
        self.stopping_since = None
        self.starts = []
        self.saved = True
        self.state = {
            "schema": "exl3-service-state/1",
            "config_hash": spec["config_hash"],
            "boot_id": boot_id(),
            "supervisor": {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())},
            "server": None,
            "phase": "starting",
            "starts": 0,
            "exits": [],
        }
        earlier = self.earlier() if once else {}
        self.starts_before = earlier.get("starts", 0)
        self.state["exits"] = earlier.get("exits", [])
        self.wake_read, self.wake_write = os.pipe()
        for end in (self.wake_read, self.wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self.wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.on_stop)
        # Workers whose parent was killed come to us instead of to init, so they can be ended too.
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def earlier(self):
        """The state that this unit's process before us left, when systemd starts it again."""
        try:
            with open(self.spec["state"]) as text:
                found = json.load(text)
        except (OSError, ValueError):
            return {}
        same = ("config_hash", "boot_id")
        goes_on = all(found.get(name) == self.state[name] for name in same)
        return found if goes_on and found.get("phase") != "stopped" else {}

    def on_stop(self, *_):
        if self.stopping_since is None:
            self.stopping_since = time.monotonic()

    def save(self, **changes):
        self.state.update(changes, updated=time.time())
        draft = f"{self.spec['state']}.tmp"
        try:
            with open(draft, "w") as out:
                json.dump(self.state, out, indent=1)
            os.replace(draft, self.spec["state"])
        except OSError as error:
            if self.saved:
                self.log.note(f"cannot write the state, trying again: {error}")
            self.saved = False
        else:
            self.saved = True

    def environment(self):
        env = dict(self.spec["env"])
        for variable, path in self.spec["secret_env"].items():
            with open(path) as secret:
                env[variable] = secret.read().strip()
        return env

    def before_exec(self):
        # If this supervisor is killed, its server must not live on where nobody watches it.
        self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    def start(self):
        self.starts.append(time.monotonic())
        self.log.note(f"start {len(self.starts)}: {json.dumps(self.spec['argv'])}")
        child = subprocess.Popen(
            self.spec["argv"],
            cwd=self.spec["cwd"],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=self.log.file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=self.before_exec,
        )
        self.save(
            phase="running",
            starts=self.starts_before + len(self.starts),
            server={"pid": child.pid, "start_ticks": start_ticks(child.pid)},
        )
        return child

    def signal_group(self, child, number):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)

    def ask(self, which):
        """Start the command that ends a container, which is no child of ours; whether there is one.

        The client that is attached ends when its container does. Told to end itself, a newer client
        would leave the container running.
        """
        command = self.spec.get(which)
        if not command:
            return False
        with contextlib.suppress(OSError):
            subprocess.Popen(
                command,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return True

    def rest(self, seconds):
        """Sleep until a signal comes (a child ended, we are asked to stop), at most `seconds`."""
        if select.select([self.wake_read], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake_read, 4096)
        self.log.rotate_if_big()
        if not self.saved:
            self.save()

    def run_once(self):
        """Start the server and stay until it has ended; return its `returncode`."""
        child = self.start()
        told, killed = False, False
        while child.poll() is None:
            self.rest(1.0)
            if self.stopping_since is None:
                continue
            if not told:
                self.save(phase="stopping")
                if not self.ask("stop_argv"):
                    child.send_signal(signal.SIGTERM)
                told = True
            if not killed and time.monotonic() - self.stopping_since > self.spec["grace_s"]:
                self.log.note(f"not gone after {self.spec['grace_s']} s: killing it")
                self.ask("kill_argv")
                self.signal_group(child, signal.SIGKILL)
                killed = True
        self.end_orphans(child)
        return child.returncode

    def end_orphans(self, child):
        """End what the server left behind, so that neither its port nor its memory stays taken."""
        self.signal_group(child, signal.SIGTERM)
        for pid in children_of(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + ORPHAN_GRACE_S
        kill_from = deadline - 1.0
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            left = children_of(os.getpid())
            if not left:
                break
            if time.monotonic() > kill_from:
                self.signal_group(child, signal.SIGKILL)
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.log.rotate_if_big()

    def may_start_again(self):
        horizon = time.monotonic() - self.spec["interval_s"]
        return len([moment for moment in self.starts if moment > horizon]) < self.spec["burst"]

    def nap(self, seconds):
        deadline = time.monotonic() + seconds
        while self.stopping_since is None and time.monotonic() < deadline:
            self.rest(max(0.0, deadline - time.monotonic()))

    def main(self):
        while True:
            try:
                code = self.run_once()
            except OSError as error:
                self.log.note(f"cannot start: {error}")
                self.save(phase="failed", server=None, reason=f"cannot start: {error}")
                return 1
            ended = {"time": time.time(), "code": code if code >= 0 else None}
            ended["signal"] = signal.Signals(-code).name if code < 0 else None
            exits = [*self.state["exits"], ended][-KEPT_EXITS:]
            how = f"signal {ended['signal']}" if code < 0 else f"exit status {code}"
            self.log.note(f"ended with {how}")
            if self.stopping_since is not None:
                self.save(phase="stopped", server=None, exits=exits, reason="stopped on request")
                return 0
            # Nobody asked it to end, so status 0 is no better: vLLM gives it when its engine dies.
            if self.once or not self.may_start_again():
                limit = "" if self.once else f" and {self.spec['burst']} starts are the limit"
                self.save(
                    phase="failed", server=None, exits=exits, reason=f"ended with {how}{limit}"
                )
                return (code if code >= 0 else 128 - code) if self.once else 1
            self.save(phase="waiting to restart", server=None, exits=exits, reason=f"ended: {how}")
            self.nap(self.spec["backoff_s"])
            if self.stopping_since is not None:
                self.save(phase="stopped", reason="stopped on request")
                return 0


def main(arguments):
    """Command line; returns the exit status."""
    if not arguments or arguments[0].startswith("-") or arguments[1:] not in ([], ["--once"]):
        print("usage: supervisor.py SPEC.json [--once]", file=sys.stderr)
        return 2
    with open(arguments[0]) as text:
        spec = json.load(text)
    lock = open(f"{spec['state']}.lock", "w")  # noqa: SIM115  (held until this process ends)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another supervisor holds {lock.name}", file=sys.stderr)
        return 3
    os.set_inheritable(lock.fileno(), False)
    return Supervisor(spec, once="--once" in arguments).main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
