"""Which memory node each GPU is nearest to, who says so, and how sure that is.

Sources, best first; the first that knows decides, all are kept for the reader:

    manual      the inventory's map                                     certain
    trivial     only one node has CPUs                                  certain
    sysfs       numa_node of the device                                 high
    nvml        memory affinity names one node with CPUs                high
    topo        the matrix, CPU-less nodes left out, names one          high
    bridge      a bridge above it, or the root bus' own CPU list        medium
    measured    see measure.py                                          high
    hint        firmware's name of the root bus, a neighbour's node     low: orders a measurement

Two sources of medium confidence or more that disagree are a conflict, which a measurement settles.
What stays unknown is not pinned. Standard library only.
"""

from __future__ import annotations

from . import cpus as cpu_lists
from .errors import HostError

CONFIDENCE = {
    "manual": "certain",
    "trivial": "certain",
    "sysfs": "high",
    "nvml": "high",
    "topo": "high",
    "bridge": "medium",
    "measured": "high",
    "hint": "low",
}
HOW_TO_TELL = (
    "Measure it (exl3ctl topology --measure), or tell it in the inventory: "
    "gpu_nodes: {{{uuid}: NODE}} with NODE one of {nodes}"
)


def nodes_with_cpus(facts: dict) -> dict[int, dict]:
    """Nodes that have online CPUs, by id; a host without node information is one node 0."""
    nodes = {n["id"]: n for n in facts["numa"]["nodes"] if n["has_cpu"] and n["cpus"]}
    if not facts["numa"]["nodes"]:
        nodes = {0: {"id": 0, "cpus": facts["cpus"]["online"], "packages": [0]}}
    return nodes


def sockets(facts: dict) -> dict[int, list[int]]:
    """CPU nodes by socket (package). A node that reports no package is a socket of its own."""
    out: dict[int, list[int]] = {}
    for number, node in nodes_with_cpus(facts).items():
        packages = node.get("packages") or [number]
        out.setdefault(packages[0], []).append(number)
    return {socket: sorted(nodes) for socket, nodes in sorted(out.items())}


def socket_of(facts: dict, node: int) -> int:
    """The socket that a node belongs to."""
    return next(s for s, nodes in sockets(facts).items() if node in nodes)


def decide(facts: dict, manual: dict | None = None, measured: dict | None = None) -> list[dict]:
    """One answer per GPU, in the order of facts["gpus"].

    {"uuid", "index", "node", "nodes", "source", "confidence", "conflict", "why", "sources", "fix"}.
    `node` is None where it is unknown; `nodes` then still holds a socket's nodes where a
    measurement could tell the socket and no more. `sources` is [{"source", "nodes", "note"}].
    `manual` is {GPU uuid or PCI address: node}; `measured` is {uuid: see measure.decide}.
    Raises HostError where the manual map names a GPU or node that is not there.
    """
    told = _manual(facts, manual or {})
    return [_decide(facts, gpu, told, measured or {}) for gpu in facts["gpus"]]


def _manual(facts: dict, manual: dict) -> dict[str, int]:
    known = nodes_with_cpus(facts)
    names = {g["uuid"]: g["uuid"] for g in facts["gpus"]}
    names |= {g["bus_id"]: g["uuid"] for g in facts["gpus"] if g["bus_id"]}
    out = {}
    for name, node in manual.items():
        if name not in names:
            raise HostError(
                f"gpu_nodes names the GPU {name}, which this host does not have.",
                f"It has {', '.join(str(g['uuid']) for g in facts['gpus']) or 'no GPU'}.",
            )
        if isinstance(node, bool) or not str(node).isdigit() or int(node) not in known:
            raise HostError(
                f"gpu_nodes puts {name} on node {node}; nodes with CPUs here are "
                f"{cpu_lists.format_list(known)}.",
                "Give one of these, or take the GPU out of the map.",
            )
        out[names[name]] = int(node)
    return out


def _decide(facts: dict, gpu: dict, manual: dict[str, int], measured: dict) -> dict:
    known = nodes_with_cpus(facts)
    found = _sources(facts, gpu, known)
    if gpu["uuid"] in manual:
        found.insert(0, _said("manual", [manual[gpu["uuid"]]], "gpu_nodes of the inventory"))
    probe = measured.get(gpu["uuid"])
    if probe is not None:
        found.append(_said("measured", probe.get("nodes") or [], probe["why"]))
    sure = [s for s in found if len(s["nodes"]) == 1 and s["source"] != "hint"]
    answer = {
        "uuid": gpu["uuid"],
        "index": gpu["index"],
        "node": None,
        "nodes": [],
        "source": "unknown",
        "confidence": "none",
        "conflict": False,
        "why": "no source knows the node",
        "sources": found,
        "fix": "",
    }
    if sure and sure[0]["source"] in ("manual", "trivial"):
        return _settle(answer, sure[0])
    answer["conflict"] = len({s["nodes"][0] for s in sure}) > 1
    if answer["conflict"]:
        winner = _settle_conflict(sure, probe)
        if winner is not None:
            return _settle(answer, winner, _disagreement(sure))
        answer["source"], answer["why"] = "conflict", _disagreement(sure)
    elif sure:
        return _settle(answer, sure[0])
    elif probe is not None and probe.get("nodes"):
        # Several nodes of one socket that no measurement can tell apart.
        answer |= {"nodes": sorted(probe["nodes"]), "source": "measured", "confidence": "high"}
        answer["why"] = probe["why"]
        return answer
    else:
        answer["why"] = _unknown_why(gpu, found, known)
    answer["fix"] = HOW_TO_TELL.format(uuid=gpu["uuid"], nodes=cpu_lists.format_list(known))
    return answer


def _sources(facts: dict, gpu: dict, known: dict[int, dict]) -> list[dict]:
    found = []
    if len(known) == 1:
        found.append(_said("trivial", list(known), "only one node has CPUs"))
    device = gpu.get("pci")
    if device is not None and device["numa_node"] is not None:
        note = "numa_node of the device"
        found.append(_said("sysfs", [n for n in [device["numa_node"]] if n in known], note))
    for source, key in (("nvml", "nvml_nodes"), ("topo", "topo_nodes")):
        nodes = gpu.get(key)
        if nodes is not None:
            inside = [n for n in nodes if n in known]
            dropped = "" if len(inside) == len(nodes) else ", nodes without CPUs left out"
            found.append(_said(source, inside, f"names {cpu_lists.format_list(nodes)}{dropped}"))
    if device is not None:
        found += _from_bridges(facts, device, known)
        found += _hints(facts, device, known)
    return found


def _from_bridges(facts: dict, device: dict, known: dict[int, dict]) -> list[dict]:
    for bridge in device["bridges"]:
        if bridge["numa_node"] in known:
            return [_said("bridge", [bridge["numa_node"]], f"bridge {bridge['address']}")]
    near = device["root_cpus"]
    online = set(cpu_lists.parse_list(facts["cpus"]["online"]))
    if near is not None:
        cpus = set(cpu_lists.parse_list(near)) & online
        for number, node in known.items():
            # A root bus that nobody described lists every CPU, which is no node's list.
            if cpus == set(cpu_lists.parse_list(node["cpus"])) & online:
                return [_said("bridge", [number], f"CPUs {near} of {device['root']}")]
    return []


def _hints(facts: dict, device: dict, known: dict[int, dict]) -> list[dict]:
    out = []
    if device["socket_hint"] is not None:
        nodes = sockets(facts).get(device["socket_hint"], [])
        if nodes and len(nodes) < len(known):
            out.append(_said("hint", nodes, f"firmware names {device['root']} after this socket"))
    neighbours = facts["topology"]["roots"].get(device["root"], [])
    nodes = [n for n in neighbours if n in known]
    if device["numa_node"] is None and nodes:
        out.append(_said("hint", nodes, f"other devices of {device['root']}"))
    return out


def _said(source: str, nodes: list[int], note: str) -> dict:
    return {"source": source, "nodes": nodes, "confidence": CONFIDENCE[source], "note": note}


def _settle(answer: dict, source: dict, conflict: str = "") -> dict:
    why = source["note"] if not conflict else f"{source['note']}; {conflict}"
    return answer | {
        "node": source["nodes"][0],
        "nodes": list(source["nodes"]),
        "source": source["source"],
        "confidence": source["confidence"],
        "why": why,
    }


def _settle_conflict(sure: list[dict], probe: dict | None) -> dict | None:
    """The measurement where it is clear; against the firmware's word, where twice as clear."""
    measured = next((s for s in sure if s["source"] == "measured"), None)
    if measured is None or probe is None:
        return None
    firmware = next((s for s in sure if s["source"] == "sysfs"), None)
    agrees = firmware is None or firmware["nodes"] == measured["nodes"]
    return measured if agrees or probe.get("gap", 0) >= 2 * probe["min_gap"] else None


def _disagreement(sure: list[dict]) -> str:
    said = ", ".join(f"{s['source']} says {s['nodes'][0]}" for s in sure)
    bug = ""
    if any(s["source"] == "measured" for s in sure) and any(s["source"] == "sysfs" for s in sure):
        bug = " (if sysfs is wrong, that is a firmware bug: report it to the board's vendor)"
    return f"sources disagree: {said}{bug}"


def _unknown_why(gpu: dict, found: list[dict], known: dict[int, dict]) -> str:
    ambiguous = [s for s in found if len(s["nodes"]) > 1 and s["source"] != "hint"]
    if ambiguous:
        first = ambiguous[0]
        return (
            f"{first['source']} names {len(first['nodes'])} nodes "
            f"({cpu_lists.format_list(first['nodes'])}): a virtual machine or firmware hides the "
            "sockets"
        )
    if any(s["source"] == "measured" for s in found):
        return next(s["note"] for s in found if s["source"] == "measured")
    if gpu.get("pci") is None:
        return f"{gpu['bus_id']} is not in this host's sysfs and no other source knows the node"
    outside = [s for s in found if not s["nodes"]]
    if outside:
        return f"{outside[0]['source']} names a node without CPUs ({outside[0]['note']})"
    return (
        f"numa_node is -1 and no bridge knows better; nodes with CPUs: "
        f"{cpu_lists.format_list(known)}"
    )
