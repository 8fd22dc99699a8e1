"""One file with everything that facts are read from, so that another host can be looked at here.

`{"schema", "files": {path: text}, "links": {path: target}, "commands": {line: answer}, "tools"}`;
paths are relative to `/`. GPU UUIDs are replaced by numbered ones, and nothing is kept that names a
host or a person. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from . import commands, pci
from .errors import HostError

SCHEMA = "exl3-capture/1"

_FILES = (
    "etc/os-release",
    "proc/meminfo",
    "proc/self/cgroup",
    "proc/1/cgroup",
    "proc/sys/kernel/osrelease",
    "proc/sys/kernel/numa_balancing",
    "sys/class/dmi/id/board_vendor",
    "sys/class/dmi/id/board_name",
    "sys/class/dmi/id/bios_version",
    "sys/devices/system/cpu/online",
    "sys/devices/system/cpu/offline",
    "sys/devices/system/cpu/isolated",
    "sys/devices/system/node/online",
    "sys/devices/system/node/has_cpu",
    "sys/devices/system/node/has_memory",
    "sys/devices/system/node/has_normal_memory",
)
_GLOBS = (
    "sys/devices/system/cpu/cpu[0-9]*/topology/physical_package_id",
    "sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list",
    "sys/devices/system/node/node[0-9]*/cpulist",
    "sys/devices/system/node/node[0-9]*/distance",
    "sys/devices/system/node/node[0-9]*/meminfo",
    "proc/driver/nvidia/gpus/*/information",
    "sys/fs/cgroup/cgroup.controllers",
    "sys/fs/cgroup/cpuset.*",
    "sys/fs/cgroup/memory.max",
    "sys/fs/cgroup/memory.current",
)
_DEVICE_FILES = (
    "class",
    "vendor",
    "numa_node",
    "local_cpulist",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
)
_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_LONG_ID = re.compile(r"\b[0-9a-f]{32,64}\b")


def take(answers: dict[str, dict], tools: dict, root: str | Path = "/") -> dict:
    """Capture this host: the recorded answers of nvidia-smi and NVML, the tools of its facts."""
    root = Path(root)
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    for name in (*_FILES, *_expand(root)):
        text = pci.read(root / name)
        if text is not None:
            files[name] = text
    files["proc/cpuinfo"] = _one_cpu(pci.read(root / "proc/cpuinfo") or "")
    files["proc/self/status"] = _status(pci.read(root / "proc/self/status") or "")
    for mark in (".dockerenv", "run/.containerenv"):
        if (root / mark).exists():
            files[mark] = ""
    _devices(root, files, links)
    body = {"schema": SCHEMA, "files": files, "links": links, "commands": answers}
    body["tools"] = tools
    return json.loads(anonymous(json.dumps(body)))


def anonymous(text: str) -> str:
    """UUIDs numbered in order of their first appearance, long hexadecimal ids zeroed."""
    seen: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        name = match.group(0)
        fresh = f"{match.group(1)}-00000000-0000-0000-0000-{len(seen):012d}"
        return seen.setdefault(name, fresh)

    return _LONG_ID.sub("0" * 12, _UUID.sub(number, text))


def unpack(capture: dict, folder: Path) -> tuple[Path, commands.Runner]:
    """Write a capture's files below `folder`; that root and the runner that replays its answers."""
    if capture.get("schema") != SCHEMA:
        raise HostError(
            f"This is no capture of a host: schema is {capture.get('schema')!r}, expected "
            f"'{SCHEMA}'.",
            "Make one with: exl3ctl topology --save FILE",
        )
    for name, text in capture["files"].items():
        path = _inside(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    for name, target in capture["links"].items():
        path = _inside(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(_inside(folder, target), path.parent))
    return folder, commands.replay(capture["commands"])


def _inside(folder: Path, name: str) -> Path:
    if name.startswith("/") or ".." in Path(name).parts:
        raise HostError(
            f"The capture holds the path {name}, which leads outside.", "Do not use it."
        )
    return folder / name


def _expand(root: Path) -> list[str]:
    out = []
    for pattern in _GLOBS:
        out += [str(p.relative_to(root)) for p in sorted(root.glob(pattern)) if p.is_file()]
    return out


def _devices(root: Path, files: dict[str, str], links: dict[str, str]) -> None:
    """GPUs and network cards, the bridges above them and their root buses."""
    base = root / "sys/bus/pci/devices"
    top = Path(os.path.realpath(root))
    for link in sorted(base.iterdir()) if base.is_dir() else []:
        place = Path(os.path.realpath(link))
        if (pci.read(place / "class") or "")[:6] not in (*pci.GPU_CLASSES, *pci.NIC_CLASSES):
            continue
        links[f"sys/bus/pci/devices/{link.name}"] = str(place.relative_to(top))
        for kind in ("net", "infiniband"):
            for name in sorted(os.listdir(place / kind)) if (place / kind).is_dir() else []:
                files[str((place / kind / name / "name").relative_to(top))] = ""
        while re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", place.name):
            for name in _DEVICE_FILES:
                text = pci.read(place / name)
                if text is not None:
                    files[str((place / name).relative_to(top))] = text
            place = place.parent
        bus = place.name.removeprefix("pci")
        for path in (place / "pci_bus" / bus / "cpulistaffinity", place / "firmware_node/path"):
            text = pci.read(path)
            if text is not None:
                files[str(path.relative_to(top))] = text


def _one_cpu(text: str) -> str:
    """The first CPU's model and features; the others differ in figures of the moment only."""
    keep = ("processor", "model name", "flags", "Features", "CPU implementer", "CPU part")
    first = text.split("\n\n")[0]
    return "\n".join(line for line in first.splitlines() if line.startswith(keep))


def _status(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if "_allowed_list" in line)
