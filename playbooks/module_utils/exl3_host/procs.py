"""What runs on this host, read from /proc: processes, who listens on a port, how much memory they
hold.

Readers take `root` so that tests can point them at a fixture tree. Linux only, standard library
only.
"""

import contextlib
import os
import socket
import struct
import time
from dataclasses import dataclass

TCP_LISTEN = "0A"


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket and, where we may see it, the process that holds it."""

    address: str
    port: int
    inode: str
    pid: int | None
    command: str

    def __str__(self) -> str:
        who = f"pid {self.pid} ({self.command})" if self.pid else "a process that only root can see"
        return f"{self.address}:{self.port} is held by {who}"


def start_ticks(pid: int, root: str = "/proc") -> int | None:
    """Start time of a process in clock ticks since boot; None when there is no such process."""
    try:
        with open(f"{root}/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else int(fields[19])


def same_process(record: dict | None, root: str = "/proc") -> bool:
    """Whether the process written down as `{"pid", "start_ticks"}` is still that process."""
    if not record or record["start_ticks"] is None:
        return False
    return start_ticks(record["pid"], root) == record["start_ticks"]


def boot_id() -> str:
    """Identity of this boot."""
    with open("/proc/sys/kernel/random/boot_id") as text:
        return text.read().strip()


def command_line(pid: int, root: str = "/proc") -> str:
    """Command line of a process, at most 160 characters, for messages."""
    with contextlib.suppress(OSError):
        with open(f"{root}/{pid}/cmdline", "rb") as text:
            words = text.read().replace(b"\0", b" ").decode(errors="replace").strip()
        return words if len(words) <= 160 else words[:157] + "..."
    return "?"


def _parents(root: str) -> dict[int, int]:
    parents = {}
    for entry in os.listdir(root):
        if entry.isdigit():
            # A process may end between the listing and the reading.
            with (
                contextlib.suppress(OSError, ValueError, IndexError),
                open(f"{root}/{entry}/stat", "rb") as stat,
            ):
                parents[int(entry)] = int(stat.read().rpartition(b")")[2].split()[1])
    return parents


def tree(pid: int, root: str = "/proc") -> list[int]:
    """`pid` and all its descendants, parents first."""
    parents = _parents(root)
    found = [pid] if pid in parents else []
    for member in found:
        found.extend(child for child, parent in parents.items() if parent == member)
    return found


def resident_bytes(pids: list[int], root: str = "/proc") -> int:
    """Memory that these processes would give back: their anonymous and shared resident pages."""
    total_kib = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"{root}/{pid}/status") as status:
            for line in status:
                if line.startswith(("RssAnon:", "RssShmem:")):
                    total_kib += int(line.split()[1])
    return total_kib * 1024


def _address(text: str, family: int) -> str:
    raw = bytes.fromhex(text)
    # The kernel prints each 32-bit word of the address in the byte order of the host.
    words = struct.unpack(f"={len(raw) // 4}I", raw)
    packed = b"".join(struct.pack(">I", word) for word in words)
    return socket.inet_ntop(family, packed)


def listeners(port: int, root: str = "/proc") -> list[Listener]:
    """Every socket that listens on `port`, with its owner."""
    found = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(FileNotFoundError), open(f"{root}/net/{table}") as text:
            for line in text.readlines()[1:]:
                fields = line.split()
                address, _, number = fields[1].partition(":")
                if fields[3] == TCP_LISTEN and int(number, 16) == port:
                    found[fields[9]] = _address(address, family)
    owners = _socket_owners(set(found), root) if found else {}
    return [
        Listener(
            address=address,
            port=port,
            inode=inode,
            pid=owners.get(inode),
            command=command_line(owners[inode], root) if inode in owners else "?",
        )
        for inode, address in found.items()
    ]


def _socket_owners(inodes: set[str], root: str) -> dict[str, int]:
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    owners: dict[str, int] = {}
    for entry in sorted((e for e in os.listdir(root) if e.isdigit()), key=int):
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"{root}/{entry}/fd"):
                with contextlib.suppress(OSError):
                    inode = wanted.get(os.readlink(f"{root}/{entry}/fd/{descriptor}"))
                    if inode:
                        # A forked worker inherits the socket: the oldest holder is the owner.
                        owners.setdefault(inode, int(entry))
    return owners


def conflicting(host: str, port: int, root: str = "/proc") -> list[Listener]:
    """Listeners that keep a server from binding `host:port`.

    A wildcard address conflicts with every address, and two different specific ones never do.
    """
    wildcards = {"0.0.0.0", "::"}
    wanted = "127.0.0.1" if host == "localhost" else host
    return [
        listener
        for listener in listeners(port, root)
        if wanted in wildcards
        or listener.address in wildcards
        or listener.address in (wanted, f"::ffff:{wanted}")
    ]


def wait_gone(records: list[dict], timeout_s: float) -> list[dict]:
    """Wait until these processes are gone; return those that are still there at the end."""
    deadline = time.monotonic() + timeout_s
    left = [record for record in records if same_process(record)]
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = [record for record in left if same_process(record)]
    return left
