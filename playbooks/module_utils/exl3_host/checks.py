"""Is this host fit to serve on its GPUs? One finding per check, nothing is changed.

Every finding is {"id", "status", "found", "fix"}; status is ok, warning, blocked or unknown (what
could not be read is said, never passed over). Standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from . import commands, numa
from .errors import count
from .pci import read

# Xid numbers after which a GPU needs a reset or a reboot: fallen off the bus, GSP timeout.
FATAL_XIDS = (79, 119)
MIN_ENGINE = 25  # the first Docker engine that knows CDI devices
FREE_DISK_GIB = 20.0


def run(
    facts: dict,
    runner: commands.Runner,
    root: str | Path = "/",
    store: Path | None = None,
    runtime: str = "native",
    driver_min: str | None = None,
) -> list[dict]:
    """All findings, in the order in which a person would repair them."""
    root = Path(root)
    out = [_driver(facts, driver_min)]
    out += [_finding("gpu-lost", "blocked", text, "") for text in facts["gpu_errors"]]
    if facts["gpus"]:
        out += [_kinds(facts), _mig(facts), _ecc(facts), _xid(runner), _links(facts)]
        out += [_persistence(facts), *_nodes(facts)]
    out += [_cpus(facts), _numactl(facts), _balancing(facts, root)]
    out.append(_container(facts))
    if runtime == "docker":
        out += [_engine(facts, runner), _cdi(facts, runner)]
    out.append(_vendor(root))
    if store is not None:
        out.append(_disk(store))
    return [f for f in out if f is not None]


def verdict(findings: list[dict]) -> dict:
    """{"ok", "blocked", "warnings", "checks"}; ok while nothing is blocked."""
    blocked = [f["id"] for f in findings if f["status"] == "blocked"]
    warnings = [f["id"] for f in findings if f["status"] in ("warning", "unknown")]
    return {"ok": not blocked, "blocked": blocked, "warnings": warnings, "checks": findings}


def older(version: str, least: str) -> bool:
    """Whether a dotted version is older than another: 575.57.08 is older than 580."""

    def parts(text: str) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", text)]

    return parts(version) < parts(least)


def _driver(facts: dict, least: str | None) -> dict:
    drivers = sorted({g["driver"] for g in facts["gpus"] if g["driver"]})
    if not drivers:
        if facts["gpu_errors"]:
            return _finding("driver", "unknown", "the driver does not answer", "")
        return _finding("driver", "ok", "no NVIDIA GPU: this host serves on its CPUs", "")
    if least is not None and older(drivers[0], least):
        branch = least.split(".")[0]
        return _finding(
            "driver",
            "blocked",
            f"driver {drivers[0]}, {least} or newer is needed",
            f"Install nvidia-driver-{branch} or newer (or its -open variant) and reboot.",
        )
    return _finding("driver", "ok", f"driver {drivers[0]}", "")


def _kinds(facts: dict) -> dict:
    names: dict[str, int] = {}
    for gpu in facts["gpus"]:
        names[gpu["name"]] = names.get(gpu["name"], 0) + 1
    text = ", ".join(f"{n} x {name}" for name, n in names.items())
    if len(names) == 1:
        return _finding("gpu-kinds", "ok", text, "")
    return _finding("gpu-kinds", "warning", text, "One instance uses GPUs of one kind: name them.")


def _mig(facts: dict) -> dict | None:
    split = [g["index"] for g in facts["gpus"] if g["mig"] is not None]
    if not split:
        return None
    return _finding(
        "mig",
        "warning",
        f"GPUs {', '.join(map(str, split))} are in MIG mode and will not be used",
        "Tensor parallelism needs whole GPUs: nvidia-smi -i N -mig 0.",
    )


def _ecc(facts: dict) -> dict:
    bad = [g["index"] for g in facts["gpus"] if (g["ecc_uncorrected"] or 0) > 0]
    if bad:
        return _finding(
            "ecc",
            "blocked",
            f"uncorrected memory errors since the last reset on GPU {', '.join(map(str, bad))}",
            "Reset the GPU; if they come back, replace it.",
        )
    counted = [g for g in facts["gpus"] if g["ecc_uncorrected"] is not None]
    text = "no uncorrected errors" if counted else "these GPUs do not count memory errors"
    return _finding("ecc", "ok", text, "")


def _xid(runner: commands.Runner) -> dict:
    answer = runner(["dmesg"])
    if not answer.ok:
        return _finding("xid", "unknown", f"dmesg: {answer.error or answer.rc}", "Run it as root.")
    numbers = [int(n) for n in re.findall(r"NVRM: Xid \([^)]*\): (\d+)", answer.out)]
    fatal = sorted({n for n in numbers if n in FATAL_XIDS})
    if fatal:
        found = f"Xid {', '.join(map(str, fatal))} since the last boot"
        return _finding("xid", "blocked", found, "A GPU fell off the bus or hung: reboot.")
    if numbers:
        found = f"Xid {', '.join(map(str, sorted(set(numbers))))} since the last boot"
        return _finding("xid", "warning", found, "Look it up in NVIDIA's list of Xid errors.")
    return _finding("xid", "ok", "no Xid error since the last boot", "")


def _links(facts: dict) -> dict:
    narrow = []
    for gpu in facts["gpus"]:
        link = (gpu["pci"] or {}).get("link") or {}
        if link.get("width") and link.get("width_max") and link["width"] < link["width_max"]:
            narrow.append(f"{gpu['bus_id']} x{link['width']} of x{link['width_max']}")
    if narrow:
        fix = "Reseat the card, check the riser and the slot's lanes in the board's manual."
        return _finding("pcie-width", "warning", ", ".join(narrow), fix)
    return _finding("pcie-width", "ok", "every link has its full width", "")


def _persistence(facts: dict) -> dict | None:
    told = [g["persistence"] for g in facts["gpus"] if g["persistence"] is not None]
    if not told or all(t == "Enabled" for t in told):
        return None
    return _finding(
        "persistence",
        "warning",
        "persistence mode is off: the driver unloads between uses",
        "Enable the service nvidia-persistenced.",
    )


def _nodes(facts: dict) -> list[dict]:
    out = []
    answers = numa.decide(facts)
    for answer in answers:
        if answer["node"] is None:
            found = f"GPU {answer['index']}: {answer['why']}"
            out.append(_finding("gpu-node", "warning", found, answer["fix"]))
    if not out:
        told = sorted({a["node"] for a in answers})
        found = f"the node of every GPU is known ({', '.join(map(str, told))})"
        out.append(_finding("gpu-node", "ok", found, ""))
    for warning in (facts["topology"]["matrix"] or {}).get("warnings", []):
        out.append(_finding("topo", "warning", warning, "The other sources are used instead."))
    return out


def _cpus(facts: dict) -> dict:
    offline, isolated = facts["cpus"].get("offline"), facts["cpus"]["isolated"]
    notes = [f"{w} {n}" for w, n in (("offline", offline), ("isolated", isolated)) if n]
    if notes:
        found = f"CPUs {'; '.join(notes)}: left out of every pin"
        return _finding("cpus", "warning", found, "Planned again by itself when that changes.")
    return _finding("cpus", "ok", f"CPUs {facts['cpus']['online']} are online", "")


def _numactl(facts: dict) -> dict | None:
    several = len(numa.nodes_with_cpus(facts)) > 1
    if not several or facts["tools"].get("numactl"):
        return None
    found = "several memory nodes and no numactl"
    return _finding("numactl", "warning", found, "Install the package numactl.")


def _balancing(facts: dict, root: Path) -> dict | None:
    value = read(root / "proc/sys/kernel/numa_balancing")
    if value in (None, "0") or len(numa.nodes_with_cpus(facts)) < 2:
        return None
    return _finding(
        "numa-balancing",
        "warning",
        "the kernel moves pages between nodes (kernel.numa_balancing is on)",
        "sysctl kernel.numa_balancing=0, if latency jumps while serving.",
    )


def _container(facts: dict) -> dict | None:
    if facts["container"] is None:
        return None
    return _finding(
        "container",
        "warning",
        f"this runs inside a container ({facts['container']}): parts of the host are hidden",
        "Run it on the host itself before pinning a server there.",
    )


def _engine(facts: dict, runner: commands.Runner) -> dict:
    if not facts["tools"].get("docker"):
        return _finding("engine", "blocked", "no docker", "Install a Docker engine.")
    answer = runner(["docker", "version", "--format", "{{.Server.Version}}"])
    version = answer.out.strip()
    if not answer.ok or not version:
        fix = "Start the service docker; may this user reach its socket?"
        return _finding("engine", "blocked", f"docker: {answer.error or 'no answer'}", fix)
    if facts["gpus"] and older(version, str(MIN_ENGINE)):
        found = f"Docker engine {version}, GPUs by CDI need {MIN_ENGINE}"
        return _finding("engine", "blocked", found, "Upgrade the engine.")
    if facts["gpus"]:
        told = runner(["docker", "info", "--format", "{{json .CDISpecDirs}}"])
        if told.ok and told.out.strip() in ("null", "[]"):
            found = f"Docker engine {version} has CDI devices switched off"
            fix = 'Set exl3_engine_gpus: true, or {"features": {"cdi": true}} in daemon.json.'
            return _finding("engine", "blocked", found, fix)
    return _finding("engine", "ok", f"Docker engine {version}", "")


def _cdi(facts: dict, runner: commands.Runner) -> dict | None:
    if not facts["gpus"]:
        return None
    answer = runner(["nvidia-ctk", "cdi", "list"])
    if not answer.ok:
        found = f"nvidia-ctk: {answer.error or 'no answer'}"
        return _finding("cdi", "blocked", found, "Install the NVIDIA Container Toolkit.")
    missing = [g["uuid"] for g in facts["gpus"] if g["uuid"] and g["uuid"] not in answer.out]
    if missing:
        return _finding(
            "cdi",
            "blocked",
            f"no CDI device for {', '.join(missing)}",
            "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, after each driver update.",
        )
    return _finding("cdi", "ok", f"CDI knows {count(len(facts['gpus']), 'GPU')}", "")


def _vendor(root: Path) -> dict | None:
    if read(root / "etc/dgx-release") is None:
        return None
    found = "DGX OS: the vendor manages engine and toolkit"
    return _finding("vendor-managed", "ok", found, "Our roles change neither.")


def _disk(store: Path) -> dict:
    place = store
    while not place.exists() and place != place.parent:
        place = place.parent
    free_gib = shutil.disk_usage(place).free / 2**30
    stat = os.statvfs(place)
    if stat.f_files and stat.f_favail < 1000:
        found = f"{place} has {stat.f_favail} inodes left"
        return _finding("disk", "blocked", found, "Remove small files or use another disk.")
    if free_gib < FREE_DISK_GIB:
        found = f"{place} has {free_gib:.1f} GiB free; keep {FREE_DISK_GIB:.0f} beside the model"
        return _finding("disk", "warning", found, "Free space or move the store.")
    return _finding("disk", "ok", f"{free_gib:.0f} GiB free at {place}", "")


def _finding(name: str, status: str, found: str, fix: str) -> dict:
    return {"id": name, "status": status, "found": found, "fix": fix}
