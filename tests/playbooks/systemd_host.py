"""A host whose process 1 is systemd, in namespaces of its own: it boots in a second.

It has its own processes, cgroup, network, host name, and a root in memory that shows /usr, this
checkout and the tests' Python, read-only. One folder is shared with the machine; units are kept in
it, so that they outlive a restart of the host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

SYSTEMD = Path("/lib/systemd/systemd")
UNITS = Path("/lib/systemd/system")
# As much of a boot as a server's unit refers to. Everything else of this machine's units stays out.
FROM_SYSTEMD = (
    "systemd-journald.service",
    "systemd-journald.socket",
    "systemd-journald-dev-log.socket",
    "exit.target",
    "systemd-exit.service",
    "shutdown.target",
    "umount.target",
    "final.target",
)
OWN = {
    "default.target": "Requires=multi-user.target\n",
    "multi-user.target": "Requires=basic.target\nAfter=basic.target\nAllowIsolate=yes\n",
    "basic.target": "Requires=sysinit.target\nAfter=sysinit.target\n",
    "sysinit.target": "DefaultDependencies=no\nRequires=systemd-journald.service\n"
    "After=systemd-journald.service\n",
    "network.target": "",
}
# A cgroup of the host's own, before the namespace is made whose root it becomes.
OUTSIDE = """\
set -eu
groups=$(mktemp -d)
mount -t cgroup2 none "$groups"
mkdir "$groups/$GROUP"
echo $$ > "$groups/$GROUP/cgroup.procs"
umount "$groups"
rmdir "$groups"
exec unshare --mount --pid --cgroup --uts --ipc --net --fork --kill-child \
  --propagation private bash -c "$INSIDE"
"""
INSIDE = """\
set -eu
root=$FOLDER/root
mkdir -p "$root"
mount -t tmpfs -o mode=755,size=64m root "$root"
cd "$root"
mkdir -p usr etc/systemd/system proc sys dev run tmp var/log old
for name in bin sbin lib lib32 lib64 libx32; do
  if [ -L "/$name" ]; then ln -s "$(readlink "/$name")" "$name"; fi
done
for name in passwd group nsswitch.conf ld.so.cache alternatives; do
  if [ -e "/etc/$name" ]; then cp -a "/etc/$name" etc/; fi
done
echo 0123456789abcdef0123456789abcdef > etc/machine-id
echo 127.0.0.1 localhost > etc/hosts
mount -t tmpfs tmp tmp
mount -t tmpfs run run
for place in /usr $VISIBLE; do
  mkdir -p ".$place"
  mount --bind "$place" ".$place"
  mount -o remount,bind,ro ".$place"
done
mkdir -p ".$FOLDER/own"
mount --bind "$FOLDER/own" ".$FOLDER/own"
mount --bind "$FOLDER/units" etc/systemd/system
mount -t proc proc proc
mount -t sysfs sys sys
mount -t cgroup2 cgroup sys/fs/cgroup
mount -t tmpfs dev dev
mkdir dev/shm
for name in null zero full random urandom tty; do
  touch "dev/$name"
  mount --bind "/dev/$name" "dev/$name"
done
ip link set lo up
hostname box
pivot_root . old
umount -l /old
exec env -i container=exl3 PATH=/usr/sbin:/usr/bin SYSTEMD_UNIT_PATH=/etc/systemd/system \
  /lib/systemd/systemd --system --log-target=journal
"""


def needed() -> None:
    """Skip, loudly, where such a host cannot be made."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [one for one in ("unshare", "nsenter", "ip") if not shutil.which(one, path=path)]
    missing += [str(one) for one in (SYSTEMD, UNITS / "exit.target") if not one.exists()]
    if os.geteuid() != 0:
        pytest.skip("SYSTEMD NOT TESTED: namespaces need root")
    if missing:
        pytest.skip(f"SYSTEMD NOT TESTED: {', '.join(missing)} not there (package systemd)")
    spaces = ["--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net", "--fork"]
    inside = ["mount", "-t", "cgroup2", "none", "/mnt"]
    probe = subprocess.run(["unshare", *spaces, *inside], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"SYSTEMD NOT TESTED: {probe.stderr.strip()}")


class SystemdHost:
    """One host; `folder`/own is the folder that both sides see under the same name."""

    name = "box"

    def __init__(self, folder: Path, *visible: Path) -> None:
        self.folder, self.own, self.units = folder, folder / "own", folder / "units"
        self.group = f"exl3-tests-{os.getpid()}"
        roots = {str(path) for path in (*visible, Path(sys.base_prefix), Path(sys.prefix))}
        self.visible = sorted(one for one in roots if not one.startswith("/usr"))
        self.outside: subprocess.Popen | None = None
        self.own.mkdir()
        self.units.mkdir()
        for name in FROM_SYSTEMD:
            shutil.copy(UNITS / name, self.units)
        for name, text in OWN.items():
            (self.units / name).write_text(f"[Unit]\n{text}")

    def boot(self) -> None:
        """Start process 1 and wait until it has started what it is to start."""
        env = {**os.environ, "FOLDER": str(self.folder), "VISIBLE": " ".join(self.visible)}
        env |= {"INSIDE": INSIDE, "GROUP": self.group}
        with open(self.folder / "boot.log", "w") as log:
            self.outside = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "bash", "-c", OUTSIDE],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 30
        while self.systemctl("is-system-running").stdout.strip() not in ("running", "degraded"):
            said = (self.folder / "boot.log").read_text()
            assert self.outside.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.1)

    def shut_down(self) -> None:
        """As `systemctl poweroff` does: every unit is stopped, then process 1 ends."""
        self.systemctl("exit", check=True)
        assert self.outside is not None
        self.outside.wait(60)
        self._forget_group()

    def destroy(self) -> None:
        """End whatever is left."""
        if self.outside is not None and self.outside.poll() is None:
            self.outside.kill()
            self.outside.wait()
        self._forget_group()

    def command(self, *argv: str, cwd: str | Path = "/") -> list[str]:
        """An argv that runs inside."""
        assert self.outside is not None
        children = Path(f"/proc/{self.outside.pid}/task/{self.outside.pid}/children")
        (first, *_) = [*children.read_text().split(), "0"]
        spaces = ["-m", "-p", "-u", "-i", "-n", "-C", "-r", "-w"]
        return ["nsenter", "-t", first, *spaces, "env", "-C", str(cwd), *argv]

    def run(
        self, *argv: str, check: bool = True, cwd: str | Path = "/", **named
    ) -> subprocess.CompletedProcess[str]:
        """Run a program inside and wait for it."""
        command = self.command(*argv, cwd=cwd)
        return subprocess.run(command, check=check, capture_output=True, text=True, **named)

    def systemctl(self, *words: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        return self.run("systemctl", "--no-pager", *words, check=check)

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.systemctl("show", "-p", name, "--value", unit).stdout.strip()

    def _forget_group(self) -> None:
        for top in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
            folder = Path(top) / self.group
            deadline = time.monotonic() + 5
            while folder.is_dir():
                # The last process may still be on its way out.
                with contextlib.suppress(OSError):
                    for one in sorted(folder.rglob("*/"), reverse=True):
                        one.rmdir()
                    folder.rmdir()
                assert time.monotonic() < deadline, f"{folder} cannot be removed"
                time.sleep(0.05)


class Site:
    """That host in the shape which tests/fleet.py asks for; the controller sits on it too."""

    class Hosts:
        def __init__(self, host: SystemdHost) -> None:
            self.a = host

        def __iter__(self):
            return iter((self.a,))

    def __init__(self, host: SystemdHost) -> None:
        self.hosts, self.folder, self.own = Site.Hosts(host), host.own, host.own

    def real(self, host: SystemdHost) -> Path:
        return host.own

    def variables(self, host: SystemdHost, python: str) -> dict:
        return {"ansible_connection": "local", "ansible_python_interpreter": python}
