"""Hosts with GPUs for tests: a sysfs tree like the kernel's, and what nvidia-smi says there."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from exl3_host import cpus as cpu_lists
from exl3_host import facts, gpus
from host_files import HostFiles, NodeFiles, write_host

DATA = Path(__file__).parent / "data"
GIB_KB = 1 << 20
GPU_CLASS, NIC_CLASS, BRIDGE_CLASS = "0x030200", "0x020000", "0x060400"


@dataclass
class PciDevice:
    """A device below a root bus. `numa` and `bridge_numa` are what firmware said, -1 for nothing.

    root_cpus is the CPU list of the root bus; the kernel prints every online CPU where firmware
    gave the bus no node.
    """

    address: str
    root: str
    bridges: list[str] = field(default_factory=list)
    numa: int = -1
    bridge_numa: list[int] = field(default_factory=list)
    kind: str = GPU_CLASS
    vendor: str = "0x10de"
    root_cpus: str | None = None
    firmware_path: str | None = None
    files: dict[str, str] = field(default_factory=dict)


def write_pci(root: Path, devices: list[PciDevice], online: str, node_cpus: dict[int, str]) -> None:
    """Folders, files and links of the devices, as below /sys."""
    for device in devices:
        base = root / "sys/devices" / device.root
        bus = device.root.removeprefix("pci")
        _put(base / "pci_bus" / bus / "cpulistaffinity", device.root_cpus or online)
        if device.firmware_path:
            _put(base / "firmware_node/path", device.firmware_path)
        place = base
        nodes = device.bridge_numa or [device.numa] * len(device.bridges)
        for bridge, numa in zip(device.bridges, nodes):
            place = place / bridge
            _device(root, place, numa, BRIDGE_CLASS, "0x8086", online, node_cpus)
        place = place / device.address
        _device(root, place, device.numa, device.kind, device.vendor, online, node_cpus)
        for name, text in device.files.items():
            _put(place / name, text)


def _device(
    root: Path, place: Path, numa: int, kind: str, vendor: str, online: str, cpus: dict[int, str]
) -> None:
    _put(place / "class", kind)
    _put(place / "vendor", vendor)
    _put(place / "numa_node", str(numa))
    _put(place / "local_cpulist", cpus.get(numa, online))
    link = root / "sys/bus/pci/devices" / place.name
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(os.path.relpath(place, link.parent))


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@dataclass
class GpuHost:
    """A host by its nodes and GPUs; memory of a node in MiB.

    The twin of CPU n is n + smt_offset, or its neighbour with smt_adjacent.
    """

    nodes: dict[int, str]
    sockets: dict[int, int]
    devices: list[PciDevice]
    names: list[str]
    topo: str | None = None
    smt_offset: int | None = None
    smt_adjacent: bool = False
    offline: str = ""
    node_mib: dict[int, int] = field(default_factory=dict)
    default_mib: int = 262144
    compute: str = "12.0"
    memory: str = "97887"
    driver: str = "580.126.09"
    answers: dict[str, dict] = field(default_factory=dict)
    cpus_allowed: str | None = None
    mems_allowed: str | None = None
    minors: list[int] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


def smi_bus(address: str) -> str:
    """An address as nvidia-smi prints it: eight digits of domain, upper case."""
    domain, rest = address.split(":", 1)
    return f"{domain.rjust(8, '0')}:{rest}".upper()


def ok(out: str) -> dict:
    return {"rc": 0, "out": out, "error": ""}


def query(fields: tuple[str, ...]) -> str:
    return f"nvidia-smi --query-gpu={','.join(fields)} --format=csv,noheader,nounits"


def answers_of(host: GpuHost) -> dict[str, dict]:
    """What nvidia-smi prints on this host, for commands.replay and for the fake nvidia-smi."""
    rows, state = [], []
    gpu_devices = [d for d in host.devices if d.kind == GPU_CLASS]
    for index, (device, name) in enumerate(zip(gpu_devices, host.names)):
        cells = (
            str(index),
            uuid(index),
            smi_bus(device.address),
            name,
            host.compute,
            host.memory,
            host.driver,
        )
        rows.append(", ".join(cells))
        state.append(f"{index}, Disabled, 600.00, 16, 16, 0, Enabled")
    out = {
        query(gpus.IDENTITY): ok("\n".join(rows) + "\n"),
        query(("index", *gpus.STATE)): ok("\n".join(state) + "\n"),
    }
    if host.topo is not None:
        out["nvidia-smi topo -m"] = ok(host.topo)
    return out | host.answers


def write_gpu_host(root: Path, host: GpuHost) -> Path:
    """Write the whole tree and return its root."""
    online = sorted(c for cpus in host.nodes.values() for c in cpu_lists.parse_list(cpus))
    text = cpu_lists.format_list(online)
    node_of = {c: n for n, cpus in host.nodes.items() for c in cpu_lists.parse_list(cpus)}
    half = host.smt_offset

    def siblings(cpu: int) -> str:
        if host.smt_adjacent:
            return cpu_lists.format_list(c for c in (cpu & ~1, cpu | 1) if c in node_of)
        if half is None:
            return str(cpu)
        pair = [c for c in (cpu % half, cpu % half + half) if c in node_of]
        return cpu_lists.format_list(pair)

    count = len(host.nodes)
    ids = sorted(host.nodes)
    sizes = {n: host.node_mib.get(n, host.default_mib) * 1024 for n in ids}
    files = HostFiles(
        online=online,
        online_text=text,
        nodes={
            n: NodeFiles(
                host.nodes[n],
                sizes[n],
                sizes[n] * 9 // 10,
                distances=" ".join("10" if n == m else "32" for m in ids),
            )
            for n in ids
        },
        siblings=siblings,
        package=lambda c: host.sockets[node_of[c]],
        has_cpu=cpu_lists.format_list(n for n in ids if host.nodes[n]),
        has_memory=cpu_lists.format_list(n for n in ids if sizes[n]),
        cpus_allowed=host.cpus_allowed or text,
        mems_allowed=host.mems_allowed or cpu_lists.format_list(ids),
        total_kb=count * host.default_mib * 1024,
        available_kb=count * host.default_mib * 900,
        files={"sys/devices/system/cpu/offline": host.offline, **host.extra},
    )
    write_host(root, files)
    write_pci(root, host.devices, text, host.nodes)
    gpu_devices = [d for d in host.devices if d.kind == GPU_CLASS]
    for device, minor in zip(gpu_devices, host.minors):
        _put(
            root / f"proc/driver/nvidia/gpus/{device.address}/information",
            f"Model: \t\t NVIDIA\nDevice Minor: \t {minor}",
        )
    return root


def look(root: Path, host: GpuHost) -> dict:
    """Facts of a host that is written below `root` first."""
    from exl3_host import commands

    return facts.collect(write_gpu_host(root, host), runner=commands.replay(answers_of(host)))
