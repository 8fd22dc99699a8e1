"""The whole picture of a host in one object: nodes, GPUs with their node, links, pins per TP size.

Standard library only.
"""

from __future__ import annotations

import json

from . import gpupin, numa
from .errors import HostError

SCHEMA = "exl3-topology/1"


def describe(
    facts: dict,
    manual: dict | None = None,
    measured: dict | None = None,
    peer_access: bool | None = None,
    runtime: str = "docker",
) -> dict:
    """`exl3-topology/1`: {"nodes", "gpus", "matrix", "p2p", "nics", "pins", "warnings"}.

    A GPU carries numa.decide's answer beside its name and address. `pins` holds one pin (see
    GpuPin.as_dict, with "tp" and "indices") for each power of two of GPUs, and for all of them.
    """
    answers = numa.decide(facts, manual, measured)
    cpu_nodes = numa.nodes_with_cpus(facts)
    gpus = []
    for gpu, answer in zip(facts["gpus"], answers):
        names = {k: gpu[k] for k in ("bus_id", "name", "coherent", "memory_node")}
        gpus.append({**names, **answer})
    warnings = list(facts["gpu_errors"])
    warnings += (facts["topology"]["matrix"] or {}).get("warnings", [])
    warnings += [f"GPU {a['index']}: {a['why']}" for a in answers if a["conflict"]]
    if facts["container"] is not None:
        warnings.append(f"inside a container ({facts['container']}), parts of the host are hidden")
    return {
        "schema": SCHEMA,
        "nodes": [
            {
                "id": n["id"],
                "socket": numa.socket_of(facts, n["id"]) if n["id"] in cpu_nodes else None,
                "cpus": n["cpus"],
                "memory_gib": round(n["total_bytes"] / gpupin.GIB, 1),
                "distances": n["distances"],
            }
            for n in facts["numa"]["nodes"]
        ],
        "gpus": gpus,
        "matrix": facts["topology"]["matrix"],
        "p2p": facts["topology"]["p2p"],
        "nics": facts["topology"]["nics"],
        "pins": _pins(facts, manual, measured, peer_access, runtime),
        "warnings": warnings,
    }


def lines(picture: dict) -> list[str]:
    """A picture in a few lines, for a playbook's output."""
    out = []
    for gpu in picture["gpus"]:
        node = "unknown" if gpu["node"] is None else gpu["node"]
        who = f"{gpu['source']}, {gpu['confidence']}"
        out.append(f"GPU {gpu['index']} {gpu['bus_id']} {gpu['name']}: node {node} ({who})")
        if gpu["node"] is None:
            out.append(f"  {gpu['why']}")
    out += [gpu["fix"] for gpu in picture["gpus"] if gpu["fix"]][:1]
    for pin in picture["pins"]:
        if "error" in pin:
            out.append(f"{pin['tp']} ranks: {pin['error']}")
            continue
        gpus = ",".join(str(n) for n in pin["indices"])
        where = f"CPUs {pin['cpus']}" + (f", nodes {pin['mems']}" if pin["mems"] else "")
        out.append(f"{pin['tp']} ranks: GPUs {gpus}, {pin['mode']}, {where}")
    return [*(out or ["no GPU"]), *picture["warnings"]]


def lasting(picture: dict) -> dict:
    """A picture without sizes of memory, which some virtual machines change while they run."""
    nodes = [{k: v for k, v in n.items() if k != "memory_gib"} for n in picture["nodes"]]
    # What travels as JSON has text for keys and no tuples; only that can be compared.
    return json.loads(json.dumps({**picture, "nodes": nodes}))


def text(picture: dict | None) -> str:
    """A picture for a diff; nothing where there is none."""
    return "" if picture is None else json.dumps(picture, indent=1, sort_keys=True) + "\n"


def _pins(
    facts: dict,
    manual: dict | None,
    measured: dict | None,
    peer_access: bool | None,
    runtime: str,
) -> list[dict]:
    index = {g["uuid"]: g["index"] for g in facts["gpus"]}
    total = len(facts["gpus"])
    sizes = [n for n in (1, 2, 4, 8, 16) if n < total] + ([total] if total else [])
    out = []
    for tp in sizes:
        try:
            pin = gpupin.decide_gpus(
                facts,
                tp,
                manual=manual,
                measured=measured,
                peer_access=peer_access,
                runtime=runtime,
            )
        except HostError as error:
            out.append({"tp": tp, "error": error.message, "fix": error.fix})
            continue
        out.append({"tp": tp, "indices": [index[u] for u in pin.gpus], **pin.as_dict()})
    return out
