"""What a host is, as one JSON object. Standard library only; nothing is changed on the host.

Every reader takes `root`, the folder that stands for `/`, so that a test can hand it the files of
another machine. Sizes are bytes. What cannot be read is None, never a guess.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from . import commands, gpus
from . import cpus as cpu_lists

SCHEMA = "exl3-facts/1"

# CPU features that choose a kernel or a data type; the names are those of /proc/cpuinfo.
CPU_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512vbmi",
    "avx512_vbmi2",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimdhp",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
    "sve2",
)
TOOLS = ("numactl", "systemctl", "docker", "nvidia-smi")

# cgroup v1 writes the largest page-aligned number where there is no limit.
_NO_LIMIT = 1 << 60


def collect(
    root: str | Path = "/",
    store: str | Path | None = None,
    runner: commands.Runner | None = None,
) -> dict:
    """All facts. `store` is the model store whose free disk space is wanted.

    With a root other than `/` only files below it are read: programs, affinity and the
    architecture of the running machine are left out (None), since they belong to another host.
    `runner` answers for nvidia-smi and NVML; by default they are asked on `/` and nowhere else.
    """
    root = Path(root)
    here = root == Path("/")
    processors = cpus(root, affinity=sorted(os.sched_getaffinity(0)) if here else None)
    inside = container(root)
    ask = runner or (commands.run_here if here else commands.nothing)
    return {
        "schema": SCHEMA,
        "arch": platform.machine() if here else None,
        "os": os_release(root),
        "board": board(root),
        "container": inside,
        "cpus": processors,
        "numa": numa(root),
        "memory": memory(root),
        "tools": tools(root, shutil.which if here else lambda _name: None),
        **gpus.collect(root, ask, processors["online"], inside),
        "disk": disk(store) if store is not None and here else None,
    }


def os_release(root: Path) -> dict:
    """`id` and `version` of the operating system, from etc/os-release; kernel release."""
    values: dict[str, str] = {}
    for line in (_read(root / "etc/os-release") or "").splitlines():
        key, equals, value = line.partition("=")
        if equals:
            values[key.strip()] = value.strip().strip("\"'")
    return {
        "id": values.get("ID"),
        "version": values.get("VERSION_ID"),
        "kernel": _read(root / "proc/sys/kernel/osrelease"),
    }


def cpus(root: Path, affinity: list[int] | None = None) -> dict:
    """Online, isolated and allowed CPUs (kernel lists), packages, cores and SMT siblings.

    `affinity` is the running process's own; without it Cpus_allowed_list of proc/self/status is
    taken. `siblings` holds one list per core with more than one online CPU or exactly one.
    """
    base = root / "sys/devices/system/cpu"
    info = _read(root / "proc/cpuinfo") or ""
    online_text = _read(base / "online")
    if online_text is not None:
        online = cpu_lists.parse_list(online_text)
    else:
        online = [int(v) for k, v in _cpuinfo_pairs(info) if k == "processor" and v.isdigit()]
    packages: set[str] = set()
    siblings: set[tuple[int, ...]] = set()
    for cpu in online:
        topology = base / f"cpu{cpu}/topology"
        packages.add(_read(topology / "physical_package_id") or "0")
        group = cpu_lists.parse_list(_read(topology / "thread_siblings_list") or str(cpu))
        siblings.add(tuple(c for c in group if c in set(online)) or (cpu,))
    if affinity is None:
        allowed = _status_list(root, "Cpus_allowed_list")
        affinity = None if allowed is None else [c for c in allowed if c in set(online)]
    flags = _cpu_flags(info)
    return {
        "model": _cpu_model(info),
        "online": cpu_lists.format_list(online),
        "offline": cpu_lists.format_list(cpu_lists.parse_list(_read(base / "offline") or "")),
        "isolated": cpu_lists.format_list(cpu_lists.parse_list(_read(base / "isolated") or "")),
        "affinity": None if affinity is None else cpu_lists.format_list(affinity),
        "cgroup": _cgroup_cpuset(root, "cpus"),
        "packages": len(packages),
        "cores": len(siblings),
        "threads_per_core": max((len(s) for s in siblings), default=1),
        "siblings": [cpu_lists.format_list(s) for s in sorted(siblings)],
        "flags": [f for f in CPU_FLAGS if f in flags],
    }


def numa(root: Path) -> dict:
    """Memory nodes: id, CPUs (kernel list), packages, has_cpu, has_memory, bytes, distances.

    `available_bytes` counts what vLLM counts before it allocates: free, file cache and
    reclaimable slab of the node. `allowed` is Mems_allowed_list joined with the cgroup's list.
    """
    base = root / "sys/devices/system/node"
    online = cpu_lists.parse_list(_read(base / "online") or "")
    with_memory = _read(base / "has_memory")
    with_cpu = _read(base / "has_cpu")
    nodes = []
    for node in online:
        folder = base / f"node{node}"
        info = _meminfo(_read(folder / "meminfo") or "")
        total = info.get("MemTotal", 0)
        cpu_text = _read(folder / "cpulist") or ""
        nodes.append(
            {
                "id": node,
                "cpus": cpu_lists.format_list(cpu_lists.parse_list(cpu_text)),
                "packages": _packages(root, cpu_lists.parse_list(cpu_text)),
                "has_cpu": node in cpu_lists.parse_list(with_cpu)
                if with_cpu is not None
                else bool(cpu_text),
                "has_memory": node in cpu_lists.parse_list(with_memory)
                if with_memory is not None
                else total > 0,
                "total_bytes": total,
                "available_bytes": info.get("MemFree", 0)
                + info.get("Active(file)", 0)
                + info.get("Inactive(file)", 0)
                + info.get("SReclaimable", 0),
                "distances": [int(d) for d in (_read(folder / "distance") or "").split()],
            }
        )
    _whole_memory(nodes, _meminfo(_read(root / "proc/meminfo") or ""))
    allowed = _status_list(root, "Mems_allowed_list")
    cgroup = _cgroup_cpuset(root, "mems")
    if allowed is not None:
        known = set(online)
        inside = set(cpu_lists.parse_list(cgroup)) if cgroup else known
        allowed = [n for n in allowed if n in known and n in inside]
    return {"nodes": nodes, "allowed": None if allowed is None else cpu_lists.format_list(allowed)}


def _whole_memory(nodes: list[dict], host: dict[str, int]) -> None:
    """Give the only node all of the host's memory.

    Memory that a virtual machine is given after its start is missing in the node's own figures: a
    guest of 252 GiB has been seen whose node counted the 8 it had booted with. What is available
    stays as the node tells it, since vLLM counts no other way.
    """
    holders = [n for n in nodes if n["has_memory"]]
    if len(holders) == 1 and host.get("MemTotal", 0) > holders[0]["total_bytes"]:
        holders[0]["total_bytes"] = host["MemTotal"]


def memory(root: Path) -> dict:
    """MemTotal, MemAvailable and the tightest cgroup limit on the way up, in bytes.

    `cgroup_used_bytes` leaves out inactive file cache, which the kernel drops under pressure.
    `available_bytes` is the smaller of MemAvailable and what the cgroup leaves.
    """
    info = _meminfo(_read(root / "proc/meminfo") or "")
    total, available = info.get("MemTotal"), info.get("MemAvailable")
    limit, used = _cgroup_memory(root)
    usable = available
    if limit is not None:
        left = max(0, limit - (used or 0))
        usable = left if usable is None else min(usable, left)
    return {
        "total_bytes": total,
        "mem_available_bytes": available,
        "cgroup_limit_bytes": limit,
        "cgroup_used_bytes": used,
        "available_bytes": usable,
        "swap_free_bytes": info.get("SwapFree"),
    }


def tools(root: Path, which: Callable[[str], str | None]) -> dict:
    """Where each tool lies, or None; and whether systemd runs this host."""
    found: dict[str, object] = {name: which(name) for name in TOOLS}
    found["systemd_running"] = (root / "run/systemd/system").is_dir()
    return found


def disk(store: str | Path) -> dict:
    """Free and total bytes of the file system that holds, or will hold, the store."""
    place = Path(store).expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    usage = shutil.disk_usage(place)
    return {"path": str(store), "free_bytes": usage.free, "total_bytes": usage.total}


def container(root: Path) -> str | None:
    """The kind of container that this is the inside of, or None on a host."""
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    groups = (_read(root / "proc/1/cgroup") or "") + (_read(root / "proc/self/cgroup") or "")
    for word, kind in (
        ("kubepods", "kubernetes"),
        ("docker", "docker"),
        ("libpod", "podman"),
        ("lxc", "lxc"),
    ):
        if word in groups:
            return kind
    for entry in (_read(root / "proc/1/environ") or "").split("\0"):
        if entry.startswith("container="):
            return entry.partition("=")[2] or "unknown"
    return None


def board(root: Path) -> dict:
    """Maker, name and firmware of the main board (DMI); no serial number is read."""
    base = root / "sys/class/dmi/id"
    names = {"vendor": "board_vendor", "name": "board_name", "firmware": "bios_version"}
    return {key: _read(base / file) or None for key, file in names.items()}


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _read_bytes_value(path: Path) -> int | None:
    """A byte count from a cgroup file; None for `max`, the v1 sentinel and a missing file."""
    text = _read(path)
    if text is None or not text.isdigit():
        return None
    value = int(text)
    return None if value >= _NO_LIMIT else value


def _meminfo(text: str) -> dict[str, int]:
    """`MemTotal:  123 kB` and `Node 0 MemTotal:  123 kB` as bytes."""
    out: dict[str, int] = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        if colon and words and words[0].isdigit():
            scale = 1024 if words[-1] == "kB" else 1
            out[name.split()[-1]] = int(words[0]) * scale
    return out


def _cpuinfo_pairs(text: str) -> list[tuple[str, str]]:
    pairs = (line.partition(":") for line in text.splitlines())
    return [(key.strip(), value.strip()) for key, colon, value in pairs if colon]


def _cpu_flags(text: str) -> set[str]:
    """`flags` on x86, `Features` on Arm; of the first CPU."""
    for key, value in _cpuinfo_pairs(text):
        if key in ("flags", "Features"):
            return set(value.split())
    return set()


def _cpu_model(text: str) -> str | None:
    for key, value in _cpuinfo_pairs(text):
        if key == "model name":
            return value
    return None


def _packages(root: Path, numbers: list[int]) -> list[int]:
    """Sockets of these CPUs; an offline CPU has no topology folder."""
    base = root / "sys/devices/system/cpu"
    told = {_read(base / f"cpu{n}/topology/physical_package_id") for n in numbers}
    return sorted(int(t) for t in told if t is not None and t.isdigit())


def _status_list(root: Path, name: str) -> list[int] | None:
    for line in (_read(root / "proc/self/status") or "").splitlines():
        key, colon, value = line.partition(":")
        if colon and key == name:
            return cpu_lists.parse_list(value)
    return None


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """This process's cgroup folder and those above it, innermost first; v2 before v1.

    Inside a container the path in proc/self/cgroup may name folders of the host that are not
    mounted here; they read as absent, and the mount's root is what applies.
    """
    base = root / "sys/fs/cgroup"
    out: list[Path] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _number, names, place = parts
        if names == "":
            top = base if (base / "cgroup.controllers").exists() else base / "unified"
        elif controller in names.split(","):
            top = base / controller
        else:
            continue
        # A path with `..` leaves the cgroup namespace; what lies outside cannot be seen from here.
        folder = top if ".." in place.split("/") else top / place.lstrip("/")
        while True:
            out.append(folder)
            if folder == top:
                break
            folder = folder.parent
    return out


def _cgroup_memory(root: Path) -> tuple[int | None, int | None]:
    """Limit and use of the cgroup that leaves the least, or (None, None) without a limit."""
    tightest: tuple[int, int, int] | None = None
    for folder in _cgroup_folders(root, "memory"):
        limit = _read_bytes_value(folder / "memory.max")
        used = _read_bytes_value(folder / "memory.current")
        if limit is None:
            limit = _read_bytes_value(folder / "memory.limit_in_bytes")
            used = _read_bytes_value(folder / "memory.usage_in_bytes")
        if limit is None:
            continue
        stat = dict(
            line.split(" ", 1)
            for line in (_read(folder / "memory.stat") or "").splitlines()
            if " " in line
        )
        cache = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
        net = max(0, (used or 0) - int(cache))
        if tightest is None or limit - net < tightest[0]:
            tightest = (limit - net, limit, net)
    return (None, None) if tightest is None else (tightest[1], tightest[2])


def _cgroup_cpuset(root: Path, kind: str) -> str | None:
    """The effective `cpus` or `mems` of this process's cpuset, as a kernel list."""
    for folder in _cgroup_folders(root, "cpuset"):
        for name in (f"cpuset.{kind}.effective", f"cpuset.effective_{kind}"):
            text = _read(folder / name)
            if text:
                return cpu_lists.format_list(cpu_lists.parse_list(text))
    return None
