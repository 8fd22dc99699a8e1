"""The GPUs of a host from nvidia-smi, NVML, procfs and sysfs, and how they are joined.

A value that a device does not tell (`[N/A]` for the memory of a GB10) is None. What could not be
asked is written to `errors` with what to do about it; GPUs that answer are listed all the same.
Standard library only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from . import commands, pci, topo_matrix

IDENTITY = (
    "index",
    "uuid",
    "pci.bus_id",
    "name",
    "compute_cap",
    "memory.total",
    "driver_version",
)
# Asked in a second query, since one name that a driver does not know makes it refuse them all.
STATE = (
    "mig.mode.current",
    "power.limit",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "ecc.errors.uncorrected.volatile.total",
    "persistence_mode",
)
# GPUs whose memory is a NUMA node of the host, or that have no memory but the host's.
COHERENT = re.compile(r"\b(GH200|GB200|GB300|GB10)\b")


def collect(root: Path, runner: commands.Runner, online: str, container: str | None) -> dict:
    """{"gpus": [...], "topology": {...}, "gpu_errors": [text]}.

    One entry of `gpus`: index, uuid, bus_id (as sysfs spells it), name, compute_capability,
    memory_bytes, driver, minor, mig (None, or one {"profile", "uuid"} per instance), memory_node
    (of coherent GPUs), coherent, nvml_nodes, topo_nodes (None where not told), pci (see
    pci.device), power_limit_w, ecc_uncorrected, persistence.
    `topology`: {"matrix": see topo_matrix.parse, "p2p": {"r", "w"}, "nics", "roots"}.
    """
    bus = pci.scan(root)
    errors: list[str] = []
    listed = _identity(runner, bus["gpus"], container, errors)
    topology = {"matrix": None, "p2p": {}, "nics": bus["nics"], "roots": bus["roots"]}
    if not listed:
        return {"gpus": [], "topology": topology, "gpu_errors": errors}
    state = _state(runner)
    mig = _mig(runner) if any(_on(state, g, "mig.mode.current") for g in listed) else {}
    near = _nvml(runner)
    answer = runner(["nvidia-smi", "topo", "-m"])
    table = topo_matrix.parse(answer.out, online) if answer.ok else None
    if table is None:
        errors.append(f"nvidia-smi topo -m: {answer.error or 'no answer'}")
    topology["matrix"] = table
    if len(listed) > 1:
        for letter in ("r", "w"):
            told = runner(["nvidia-smi", "topo", "-p2p", letter])
            topology["p2p"][letter] = topo_matrix.parse_p2p(told.out) if told.ok else {}
    for gpu in listed:
        row = (table or {"rows": {}})["rows"].get(f"GPU{gpu['index']}", {})
        nvml = near.get(gpu["uuid"], {})
        values = state.get(gpu["index"], {})
        memory_node = row.get("memory_node")
        gpu |= {
            "minor": _minor(root, gpu["bus_id"]),
            "mig": mig.get(gpu["index"], []) if _on(state, gpu, "mig.mode.current") else None,
            "memory_node": nvml.get("memory_node") if memory_node is None else memory_node,
            "nvml_nodes": nvml.get("nodes"),
            "topo_nodes": row.get("nodes"),
            "pci": pci.device(root, gpu["bus_id"]) if gpu["bus_id"] else None,
            "power_limit_w": _number(values.get("power.limit")),
            "ecc_uncorrected": _number(values.get("ecc.errors.uncorrected.volatile.total")),
            "persistence": values.get("persistence_mode"),
        }
        if gpu["topo_nodes"] is None and nvml.get("nodes") is None:
            asked = runner(["nvidia-smi", "topo", "-C", "-i", str(gpu["index"])])
            gpu["topo_nodes"] = topo_matrix.parse_nearest(asked.out) if asked.ok else None
        gpu["coherent"] = gpu["memory_node"] is not None or bool(COHERENT.search(gpu["name"] or ""))
    return {"gpus": listed, "topology": topology, "gpu_errors": errors}


def parse_query(text: str, fields: tuple[str, ...]) -> list[dict[str, str | None]]:
    """Rows of nvidia-smi's CSV without header and units; lines of another width are dropped.

    `[N/A]`, `[Not Supported]`, `[Unknown Error]` and the like are None.
    """
    rows = []
    for line in text.splitlines():
        cells = [c.strip() for c in line.split(",")]
        if len(cells) == len(fields) and cells[0].isdigit():
            known = (None if c.startswith("[") or c in ("", "N/A") else c for c in cells)
            rows.append(dict(zip(fields, known)))
    return rows


def parse_identity(text: str) -> list[dict]:
    """GPUs of the first query: index, uuid, bus_id, name, compute_capability, memory, driver."""
    out = []
    for row in parse_query(text, IDENTITY):
        out.append(
            {
                "index": int(row["index"] or 0),
                "uuid": row["uuid"],
                "bus_id": pci.address(row["pci.bus_id"] or ""),
                "name": row["name"],
                "compute_capability": row["compute_cap"],
                "memory_bytes": _mib(row["memory.total"]),
                "driver": row["driver_version"],
            }
        )
    return out


def parse_mig(text: str) -> dict[int, list[dict]]:
    """MIG instances in `nvidia-smi -L`: {GPU index: [{"profile": "1g.10gb", "uuid"}]}."""
    out: dict[int, list[dict]] = {}
    index = -1
    for line in text.splitlines():
        head = re.match(r"GPU (\d+):", line)
        if head:
            index = int(head.group(1))
        part = re.match(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (\S+)\)", line)
        if part and index >= 0:
            out.setdefault(index, []).append({"profile": part.group(1), "uuid": part.group(2)})
    return out


def _query(runner: commands.Runner, fields: tuple[str, ...]) -> commands.Answer:
    return runner(
        ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    )


def _identity(
    runner: commands.Runner, on_bus: list[str], container: str | None, errors: list[str]
) -> list[dict]:
    answer = _query(runner, IDENTITY)
    listed = parse_identity(answer.out)
    seen = f"{len(on_bus)} NVIDIA GPU{'s' if len(on_bus) != 1 else ''} on the PCI bus"
    if not answer.ok and (on_bus or answer.rc is not None):
        said = answer.error or f"exit status {answer.rc}"
        errors.append(
            f"nvidia-smi: {said} ({seen}). Install or reload the NVIDIA driver; after a driver "
            "update or a lost GPU, reboot."
        )
    elif answer.ok and len(listed) < len(on_bus) and container is None:
        missing = sorted(set(on_bus) - {g["bus_id"] for g in listed})
        errors.append(
            f"nvidia-smi lists {len(listed)} GPUs, {seen}; not listed: {', '.join(missing)}. "
            "Look for Xid messages in dmesg; a lost GPU needs a reboot."
        )
    return listed


def _state(runner: commands.Runner) -> dict[int, dict[str, str | None]]:
    """Second query by GPU index; a name that the driver does not know is left out."""
    fields = ["index", *STATE]
    while len(fields) > 1:
        answer = _query(runner, tuple(fields))
        unknown = re.search(r'Field "([^"]+)" is not a valid field', answer.out + answer.error)
        if unknown is None or unknown.group(1) not in fields:
            rows = parse_query(answer.out, tuple(fields))
            return {int(row["index"] or 0): row for row in rows}
        fields.remove(unknown.group(1))
    return {}


def _on(state: dict[int, dict], gpu: dict, field: str) -> bool:
    return state.get(gpu["index"], {}).get(field) == "Enabled"


def _mig(runner: commands.Runner) -> dict[int, list[dict]]:
    answer = runner(["nvidia-smi", "-L"])
    return parse_mig(answer.out) if answer.ok else {}


def _nvml(runner: commands.Runner) -> dict[str, dict]:
    answer = runner([commands.NVML])
    if not answer.ok:
        return {}
    try:
        return {entry["uuid"]: entry for entry in json.loads(answer.out)}
    except (ValueError, TypeError, KeyError):
        return {}


def _minor(root: Path, bus_id: str | None) -> int | None:
    """The N of /dev/nvidiaN, which is not the index that nvidia-smi counts."""
    text = pci.read(root / f"proc/driver/nvidia/gpus/{bus_id}/information") or ""
    match = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
    return int(match.group(1)) if match else None


def _mib(text: str | None) -> int | None:
    value = _number(text)
    return None if value is None else int(value * 2**20)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
