"""PCI devices as the kernel shows them: where a device hangs, and which node it says it is on.

Every reader takes `root`, the folder that stands for `/`. `numa_node` is -1 in sysfs where firmware
said nothing; here that is None. Then the kernel's `local_cpulist` names every CPU, so it is never
read as an affinity. Standard library only.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from . import cpus as cpu_lists

NVIDIA = "0x10de"
# The upper 16 bits of a device's class: VGA and 3D controllers, Ethernet and InfiniBand.
GPU_CLASSES = ("0x0300", "0x0302")
NIC_CLASSES = ("0x0200", "0x0207")

_ADDRESS = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")
# Firmware of AMD servers names root bridges by socket: S0D2 is the third one of socket 0.
_SOCKET_NAME = re.compile(r"\bS(\d)D\d\b")


def address(text: str) -> str | None:
    """An address as sysfs spells it, `000f:01:00.0`, from nvidia-smi's `0000000F:01:00.0`.

    The domain is not always 0000. None for what is no address.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus.lower()}:{device.lower()}.{function}"


def device(root: Path, where: str) -> dict | None:
    """One device; None where this host (or container) does not show it.

    numa_node    its own node or None
    bridges      [{address, numa_node}] above it, nearest first
    root         the root bus, `pci0000:40`
    root_cpus    CPUs near that bus as a kernel list, None where it is not told
    socket_hint  the socket in the firmware's name of the root bridge, a weak hint
    link         {width, width_max, speed, speed_max} of the PCIe link, or None
    """
    link = root / "sys/bus/pci/devices" / where
    if not link.exists():
        return None
    place = Path(os.path.realpath(link))
    parts = list(place.parts)
    start = next((i for i, p in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]+:[0-9a-f]+", p)), -1)
    bridges, root_name, root_cpus, hint = [], None, None, None
    if start >= 0:
        root_name = parts[start]
        base = Path(*parts[: start + 1])
        for depth in range(len(parts) - 2, start, -1):
            above = Path(*parts[: depth + 1])
            bridges.append({"address": parts[depth], "numa_node": _node(above)})
        bus = root_name.removeprefix("pci")
        root_cpus = _list(base / "pci_bus" / bus / "cpulistaffinity")
        named = _SOCKET_NAME.search(read(base / "firmware_node/path") or "")
        hint = int(named.group(1)) if named else None
    return {
        "address": where,
        "numa_node": _node(place),
        "bridges": bridges,
        "root": root_name,
        "root_cpus": root_cpus,
        "socket_hint": hint,
        "link": _link(place),
    }


def scan(root: Path) -> dict:
    """GPUs and network cards on the bus, and the nodes that devices below each root bus name.

    {"gpus": [address], "nics": [{address, names, rdma, numa_node, root}], "roots": {root: [node]}}
    NVIDIA devices are found here also where their driver is not loaded.
    """
    gpus: list[str] = []
    nics: list[dict] = []
    roots: dict[str, set[int]] = {}
    base = root / "sys/bus/pci/devices"
    for where in sorted(_names(base)):
        place = Path(os.path.realpath(base / where))
        kind = (read(place / "class") or "")[:6]
        bus = next((p for p in place.parts if re.fullmatch(r"pci[0-9a-f]+:[0-9a-f]+", p)), None)
        node = _node(place)
        if bus is not None and node is not None:
            roots.setdefault(bus, set()).add(node)
        if kind in GPU_CLASSES and read(place / "vendor") == NVIDIA:
            gpus.append(where)
        if kind in NIC_CLASSES:
            nics.append(
                {
                    "address": where,
                    "names": sorted(_names(place / "net")),
                    "rdma": sorted(_names(place / "infiniband")),
                    "numa_node": node,
                    "root": bus,
                }
            )
    return {"gpus": gpus, "nics": nics, "roots": {k: sorted(v) for k, v in sorted(roots.items())}}


def read(path: Path) -> str | None:
    """The stripped text of a file, or None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _node(place: Path) -> int | None:
    text = read(place / "numa_node")
    return int(text) if text is not None and text.isdigit() else None


def _list(path: Path) -> str | None:
    text = read(path)
    if not text:
        return None
    try:
        return cpu_lists.format_list(cpu_lists.parse_list(text))
    except ValueError:
        return None


def _link(place: Path) -> dict | None:
    """Widths in lanes, speeds in GT/s. A GPU that idles shows a lower speed than it can do."""
    out: dict[str, float | int | None] = {}
    for name, file in (("width", "current_link_width"), ("width_max", "max_link_width")):
        text = read(place / file)
        # 255 is what the kernel prints for an unknown width.
        out[name] = int(text) if text and text.isdigit() and text not in ("0", "255") else None
    for name, file in (("speed", "current_link_speed"), ("speed_max", "max_link_speed")):
        match = re.match(r"([0-9.]+) GT/s", read(place / file) or "")
        out[name] = float(match.group(1)) if match else None
    return out if any(v is not None for v in out.values()) else None
