"""Builds the files under `/` of another machine, to hold readers against known hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

GIB = 2**30
MIB_KB = 1024
X86_FLAGS = "fpu sse2 fma f16c avx2 avx512f avx512bw avx512dq avx512vl avx512_bf16"


@dataclass
class NodeFiles:
    """One folder of sys/devices/system/node."""

    cpus: str
    total_kb: int
    free_kb: int
    active_file_kb: int = 0
    inactive_file_kb: int = 0
    reclaimable_kb: int = 0
    distances: str = "10"


@dataclass
class HostFiles:
    """What is written; lists are in the kernel's format."""

    online: list[int]
    nodes: dict[int, NodeFiles]
    online_text: str
    siblings: Callable[[int], str] = str
    package: Callable[[int], int] = lambda cpu: 0
    isolated: str = ""
    has_cpu: str | None = None
    has_memory: str | None = None
    cpus_allowed: str | None = None
    mems_allowed: str | None = None
    total_kb: int = 64 * GIB // 1024
    available_kb: int = 60 * GIB // 1024
    cgroup: str = "0::/\n"
    files: dict[str, str] = field(default_factory=dict)
    flags: str = X86_FLAGS


def write_host(root: Path, host: HostFiles) -> Path:
    """Write the tree and return its root."""
    cpu_base = "sys/devices/system/cpu"
    files = {
        f"{cpu_base}/online": host.online_text,
        f"{cpu_base}/isolated": host.isolated,
        "sys/devices/system/node/online": _ids(host.nodes),
        "proc/meminfo": f"MemTotal:       {host.total_kb} kB\nMemFree:        1 kB\n"
        f"MemAvailable:   {host.available_kb} kB\nSwapFree:              0 kB\n",
        "proc/self/cgroup": host.cgroup,
        "proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{host.cpus_allowed}\n"
        f"Mems_allowed_list:\t{host.mems_allowed}\n"
        if host.cpus_allowed is not None
        else "Name:\tpython\n",
        "proc/cpuinfo": "".join(
            f"processor\t: {cpu}\nmodel name\t: Test CPU\nflags\t\t: {host.flags}\n\n"
            for cpu in host.online
        ),
        "etc/os-release": 'PRETTY_NAME="Debian"\nID=debian\nVERSION_ID="12"\n',
        "proc/sys/kernel/osrelease": "6.1.0-57-amd64\n",
    }
    for cpu in host.online:
        files[f"{cpu_base}/cpu{cpu}/topology/thread_siblings_list"] = host.siblings(cpu)
        files[f"{cpu_base}/cpu{cpu}/topology/physical_package_id"] = str(host.package(cpu))
    for number, node in host.nodes.items():
        base = f"sys/devices/system/node/node{number}"
        files[f"{base}/cpulist"] = node.cpus
        files[f"{base}/distance"] = node.distances
        files[f"{base}/meminfo"] = (
            f"Node {number} MemTotal:       {node.total_kb} kB\n"
            f"Node {number} MemFree:        {node.free_kb} kB\n"
            f"Node {number} Active(file):   {node.active_file_kb} kB\n"
            f"Node {number} Inactive(file): {node.inactive_file_kb} kB\n"
            f"Node {number} SReclaimable:   {node.reclaimable_kb} kB\n"
            f"Node {number} HugePages_Total:     0\n"
        )
    if host.has_cpu is not None:
        files["sys/devices/system/node/has_cpu"] = host.has_cpu
    if host.has_memory is not None:
        files["sys/devices/system/node/has_memory"] = host.has_memory
    files.update(host.files)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + ("" if text.endswith("\n") else "\n"))
    return root


def _ids(nodes: dict[int, NodeFiles]) -> str:
    return ",".join(str(n) for n in sorted(nodes))


def two_sockets_one_cpu_offline() -> HostFiles:
    """A real 2 x 64-core EPYC with SMT whose CPU 239 did not come up, as its owner reported it.

    lscpu: on-line 0-238,240-255; node 0 has 0-63,128-191, node 1 has 64-127,192-238,240-255;
    773676 and 774030 MB; distances 10 32 / 32 10.
    """
    online = [c for c in range(256) if c != 239]
    return HostFiles(
        online=online,
        online_text="0-238,240-255",
        nodes={
            0: NodeFiles("0-63,128-191", 773676 * MIB_KB, 700000 * MIB_KB, distances="10 32"),
            1: NodeFiles(
                "64-127,192-238,240-255", 774030 * MIB_KB, 720000 * MIB_KB, distances="32 10"
            ),
        },
        siblings=lambda c: f"{c % 128},{c % 128 + 128}" if c % 128 != 111 else str(c),
        package=lambda c: c % 128 // 64,
        has_cpu="0-1",
        has_memory="0-1",
        cpus_allowed="0-255",
        mems_allowed="0-1",
        total_kb=1547706 * MIB_KB,
        available_kb=1420000 * MIB_KB,
    )


def two_small_nodes(**changes: object) -> HostFiles:
    """Eight CPUs, no SMT, two nodes of 16 GiB: node 0 has 6 GiB free, node 1 has 14 GiB."""
    gib_kb = GIB // 1024
    host = HostFiles(
        online=list(range(8)),
        online_text="0-7",
        nodes={
            0: NodeFiles("0-3", 16 * gib_kb, 6 * gib_kb, distances="10 21"),
            1: NodeFiles("4-7", 16 * gib_kb, 14 * gib_kb, distances="21 10"),
        },
        package=lambda c: c // 4,
        has_cpu="0-1",
        has_memory="0-1",
        cpus_allowed="0-7",
        mems_allowed="0-1",
        total_kb=32 * gib_kb,
        available_kb=20 * gib_kb,
    )
    for name, value in changes.items():
        setattr(host, name, value)
    return host
