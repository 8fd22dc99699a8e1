"""A server as a systemd unit, where systemd runs. The unit starts our supervisor with `--once`:
systemd restarts it, and the log, the state file and the clean-up of workers are the same as on a
host without systemd.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

from .errors import HostError

UNIT_DIR = Path("/etc/systemd/system")

UNIT = """\
# Written by the exl3-fleet playbooks; changes are overwritten by the next deploy.
[Unit]
Description=EXL3 model server {instance}
After=network.target{engine}
StartLimitIntervalSec={interval_s}
StartLimitBurst={burst}

[Service]
Type=exec
User={user}
ExecStart={command}
Restart=always
RestartSec={backoff_s}
KillMode=mixed
TimeoutStopSec={stop_s}

[Install]
WantedBy=multi-user.target
"""


# A container's client has nothing to attach to before its engine runs.
ENGINE = " docker.service\nWants=docker.service"


def running(root: str = "/") -> bool:
    """Whether systemd is this host's init (the test that sd_booted(3) documents)."""
    return os.path.isdir(os.path.join(root, "run/systemd/system"))


def unit_name(instance: str) -> str:
    return f"exl3-{instance}.service"


def quote(word: str) -> str:
    """One word of ExecStart=, with all that systemd would expand or split taken literally."""
    literal = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{literal}"'


def unit_text(instance: str, command: list[str], spec: dict) -> str:
    """The unit file of one instance."""
    return UNIT.format(
        instance=instance,
        engine=ENGINE if spec.get("container") else "",
        command=" ".join(quote(word) for word in command),
        user=pwd.getpwuid(os.geteuid()).pw_name,
        burst=spec["burst"],
        interval_s=spec["interval_s"],
        backoff_s=spec["backoff_s"],
        stop_s=spec["grace_s"] + 15,
    )


def systemctl(*arguments: str, check: bool = True) -> str:
    """Output of a systemctl call; HostError when it fails."""
    done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True)
    if check and done.returncode != 0:
        raise HostError(
            f"systemctl {' '.join(arguments)} failed: {(done.stderr or done.stdout).strip()}",
            "See `systemctl status` and `journalctl -xe` on the host.",
        )
    return done.stdout


def start(instance: str, command: list[str], spec: dict, unit_dir: Path = UNIT_DIR) -> None:
    """Write the unit, enable it, start it."""
    name = unit_name(instance)
    (unit_dir / name).write_text(unit_text(instance, command, spec))
    systemctl("daemon-reload")
    systemctl("reset-failed", name, check=False)
    systemctl("enable", name)
    systemctl("restart", name)


def stop(instance: str) -> None:
    """Stop the unit, which waits for the drain; no error when there is none."""
    systemctl("stop", unit_name(instance), check=False)


def remove(instance: str, unit_dir: Path = UNIT_DIR) -> bool:
    """Stop, disable and delete the unit; whether there was one."""
    path = unit_dir / unit_name(instance)
    if not path.exists():
        return False
    stop(instance)
    systemctl("disable", path.name, check=False)
    path.unlink()
    systemctl("daemon-reload", check=False)
    systemctl("reset-failed", path.name, check=False)
    return True


def between_restarts(instance: str) -> bool:
    """Whether systemd waits before it starts the unit again."""
    return _property(instance, "SubState") == "auto-restart"


def gave_up(instance: str) -> bool:
    """Whether systemd does not start the unit again: with Restart=always, it ended too often."""
    return _property(instance, "ActiveState") == "failed"


def _property(instance: str, name: str) -> str:
    return systemctl("show", "-p", name, "--value", unit_name(instance), check=False).strip()
