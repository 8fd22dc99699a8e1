"""Two hosts on this machine: network namespaces joined by a cable, each with files of its own.

A host is a network namespace plus, where sshd runs, a mount and a UTS namespace: its own host name,
`/dev/shm`, user accounts, sudo rules and one folder with other content on each host. Nothing of the
machine is changed, and all of it ends with the processes inside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

SUBNET = "10.97"
USER = "deployer"
UID = 4711


def needed(*programs: str) -> None:
    """Skip, loudly, where a host cannot be made."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [one for one in ("ip", "ping", *programs) if shutil.which(one, path=path) is None]
    if os.geteuid() != 0:
        pytest.skip("TWO HOSTS NOT TESTED: network namespaces need root")
    if missing:
        pytest.skip(f"TWO HOSTS NOT TESTED: {', '.join(missing)} not installed")
    probe = subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"TWO HOSTS NOT TESTED: {probe.stderr.strip()}")


class Host:
    """One end of the cable. `address` is that of its first interface, `twin` of the second."""

    def __init__(self, name: str, number: int, interfaces: tuple[str, str]) -> None:
        self.name, self.number = name, number
        self.space = f"exl3-{os.getpid()}-{name}"
        self.interface, self.second = interfaces
        self.address = f"{SUBNET}.1.{number}"
        self.twin = f"{SUBNET}.2.{number}"
        self.sshd: subprocess.Popen | None = None

    def command(self, *argv: str) -> list[str]:
        """An argv that runs inside."""
        return ["ip", "netns", "exec", self.space, *argv]

    def run(self, *argv: str, check: bool = True, **named) -> subprocess.CompletedProcess[str]:
        """Run a program inside and wait for it."""
        return subprocess.run(
            self.command(*argv), check=check, capture_output=True, text=True, **named
        )

    def popen(self, *argv: str, **named) -> subprocess.Popen:
        """Start a program inside."""
        return subprocess.Popen(self.command(*argv), **named)

    def cable(self, plugged: bool) -> None:
        """Pull or plug both cables on this side."""
        for interface in (self.interface, self.second):
            ip("-n", self.space, "link", "set", interface, "up" if plugged else "down")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class TwoHosts:
    """Hosts `a` and `b`; their interfaces have other names on each, as on real hosts."""

    def __init__(self) -> None:
        self.a = Host("a", 1, ("fab0", "fab1"))
        self.b = Host("b", 2, ("enp7s0", "enp8s0"))

    def __iter__(self):
        return iter((self.a, self.b))

    def __enter__(self) -> TwoHosts:
        self._remove()
        for host in self:
            ip("netns", "add", host.space)
            ip("-n", host.space, "link", "set", "lo", "up")
        for subnet, which in ((1, "interface"), (2, "second")):
            one, other = getattr(self.a, which), getattr(self.b, which)
            ip("link", "add", one, "netns", self.a.space, "type", "veth", "peer", "name", other,
               "netns", self.b.space)  # fmt: skip
            for host, name in ((self.a, one), (self.b, other)):
                address = f"{SUBNET}.{subnet}.{host.number}/24"
                ip("-n", host.space, "address", "add", address, "dev", name)
                ip("-n", host.space, "link", "set", name, "up")
        return self

    def __exit__(self, *_) -> None:
        for host in self:
            if host.sshd is not None:
                host.sshd.terminate()
                host.sshd.wait(10)
        self._remove()

    def _remove(self) -> None:
        for host in self:
            inside = subprocess.run(
                ["ip", "netns", "pids", host.space], capture_output=True, text=True
            )
            for pid in inside.stdout.split():
                subprocess.run(["kill", "-9", pid], capture_output=True)
            subprocess.run(["ip", "netns", "del", host.space], capture_output=True)


INSIDE = """\
set -eu
hostname "$HOST"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$FILES/own" "$OWN"
for name in passwd group shadow; do mount --bind "$FILES/$name" "/etc/$name"; done
if [ -d /etc/sudoers.d ]; then mount --bind "$FILES/sudoers.d" /etc/sudoers.d; fi
mkdir -p /run/sshd
exec "$SSHD" -D -e -f "$FILES/sshd_config"
"""


class Site:
    """Both hosts with sshd, a user who may become root, and a controller that knows their keys.

    own: a folder that is another one on each host. It lies outside the tests' folder, which nobody
    but root may enter.
    """

    own = Path("/mnt")

    def __init__(self, hosts: TwoHosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.key = folder / "id"
        keygen(self.key)
        lines = []
        for host in hosts:
            files = folder / host.name
            self._write_files(host, files)
            self._start_sshd(host, files)
            public = (files / "host_key.pub").read_text().split()[:2]
            lines.append(" ".join([host.address, *public]))
        (folder / "known_hosts").write_text("\n".join(lines) + "\n")
        for host in hosts:
            self._wait_for(host)

    def real(self, host: Host) -> Path:
        """Where the content of `own` on a host lies for us."""
        return self.folder / host.name / "own"

    def ssh_arguments(self, shared: bool = True) -> str:
        """For ansible_ssh_common_args: our own known hosts, short waits, one connection a host."""
        options = [
            f"UserKnownHostsFile={self.folder / 'known_hosts'}",
            "GlobalKnownHostsFile=/dev/null",
            "StrictHostKeyChecking=yes",
            "ConnectTimeout=5",
            "ServerAliveInterval=2",
            "ServerAliveCountMax=3",
        ]
        if shared:
            options += ["ControlMaster=auto", "ControlPersist=10"]
            options.append(f"ControlPath={self.folder}/%h")
        return "-F none " + " ".join(f"-o {option}" for option in options)

    def variables(self, host: Host, python: str) -> dict:
        """What an inventory says about this host."""
        return {
            "ansible_host": host.address,
            "ansible_user": USER,
            "ansible_become": True,
            "ansible_ssh_private_key_file": str(self.key),
            "ansible_ssh_common_args": self.ssh_arguments(),
            "ansible_python_interpreter": python,
        }

    def _write_files(self, host: Host, files: Path) -> None:
        (files / "own").mkdir(parents=True)
        home = files / "own" / "home"
        (home / ".ssh").mkdir(parents=True)
        (home / ".ssh" / "authorized_keys").write_text((self.key.with_suffix(".pub")).read_text())
        for path in (home, home / ".ssh", home / ".ssh" / "authorized_keys"):
            os.chown(path, UID, UID)
            path.chmod(0o600 if path.is_file() else 0o700)
        for name, line in (
            ("passwd", f"{USER}:x:{UID}:{UID}::{self.own / 'home'}:/bin/sh\n"),
            ("group", f"{USER}:x:{UID}:\n"),
            ("shadow", f"{USER}:*:19000:0:99999:7:::\n"),
        ):
            text = Path("/etc", name).read_text()
            if name == "passwd" and "\nsshd:" not in text:
                text += f"sshd:x:{UID + 1}:65534::/run/sshd:/usr/sbin/nologin\n"
            (files / name).write_text(text + line)
        (files / "shadow").chmod(0o600)
        (files / "sudoers.d").mkdir()
        rule = files / "sudoers.d" / "deployer"
        rule.write_text(f"{USER} ALL=(ALL) NOPASSWD: ALL\n")
        rule.chmod(0o440)
        keygen(files / "host_key")
        config = [
            f"ListenAddress {host.address}",
            "Port 22",
            f"HostKey {files / 'host_key'}",
            f"PidFile {files / 'sshd.pid'}",
            "UsePAM no",
            "PasswordAuthentication no",
            "StrictModes no",
            "Subsystem sftp internal-sftp",
        ]
        (files / "sshd_config").write_text("\n".join(config) + "\n")

    def _start_sshd(self, host: Host, files: Path) -> None:
        env = {**os.environ, "HOST": f"host-{host.name}", "FILES": str(files)}
        env["OWN"] = str(self.own)
        env["SSHD"] = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin") or "sshd"
        with open(files / "sshd.log", "w") as log:
            host.sshd = host.popen(
                "unshare", "-m", "-u", "--propagation", "private", "bash", "-c", INSIDE,
                env=env, stdout=log, stderr=log,
            )  # fmt: skip

    def _wait_for(self, host: Host) -> None:
        deadline = time.monotonic() + 15
        command = ["ssh", "-i", str(self.key), *self.ssh_arguments(shared=False).split()]
        command += [f"{USER}@{host.address}", "sudo", "-n", "hostname"]
        # The controller sits on host a, whose network reaches both.
        while True:
            done = self.hosts.a.run(*command, check=False)
            if done.returncode == 0:
                assert done.stdout.strip() == f"host-{host.name}"
                return
            if time.monotonic() > deadline:
                log = (self.folder / host.name / "sshd.log").read_text()
                raise AssertionError(f"no SSH to host {host.name}: {done.stderr}\n{log}")
            time.sleep(0.2)


def keygen(path: Path) -> None:
    """An ed25519 key pair without a passphrase."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True
    )
