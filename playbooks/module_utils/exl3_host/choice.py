"""Which GPUs of a host a server of n ranks gets.

Among all sets of n free GPUs the smallest wins, compared in this order: GPUs whose node is unknown,
sockets, nodes, the worst link, the sum of links, shared uplinks, PCI order. Standard library only.
"""

from __future__ import annotations

from itertools import combinations

from . import numa, topo_matrix
from .errors import HostError, count

# Sixteen GPUs in eights are 12870 sets; more GPUs than that are cut to those of the best node.
MOST_SETS = 20000


def choose(
    facts: dict,
    nodes: list[dict],
    ranks: int,
    wanted: list[str] | None = None,
    taken: tuple[str, ...] = (),
    host_memory: bool = False,
) -> dict:
    """{"gpus": [facts entries in PCI order], "nodes", "sockets", "worst_link", "why"}.

    `nodes` is numa.decide's answer. `wanted` are UUIDs that the inventory asks for, `taken` those
    of other servers. `host_memory` says that peers reach each other through host memory only: then
    GPUs on different roots beat those that share one uplink below a switch.
    Raises HostError where there are too few GPUs, or mixed, partitioned or claimed ones.
    """
    free = _candidates(facts, wanted, taken, ranks)
    by_uuid = {n["uuid"]: n for n in nodes}
    best, best_key = None, None
    for number, group in enumerate(combinations(free, ranks)):
        if number >= MOST_SETS:
            break
        key = _key(facts, by_uuid, list(group), host_memory)
        if best_key is None or key < best_key:
            best, best_key = list(group), key
    assert best is not None
    on = sorted({by_uuid[g["uuid"]]["node"] for g in best} - {None})
    links = _links(facts, best)
    worst = max(links, key=topo_matrix.rank) if links else None
    return {
        "gpus": best,
        "nodes": on,
        "sockets": sorted({numa.socket_of(facts, n) for n in on}),
        "worst_link": worst,
        "why": _why(facts, by_uuid, free, best, on, worst, ranks, wanted),
    }


def _candidates(
    facts: dict,
    wanted: list[str] | None,
    taken: tuple[str, ...],
    ranks: int,
) -> list[dict]:
    gpus = sorted(facts["gpus"], key=lambda g: g["bus_id"] or "")
    known = {g["uuid"] for g in gpus}
    if wanted:
        lost = [u for u in wanted if u not in known]
        if lost:
            have = ", ".join(f"{g['uuid']} ({g['name']})" for g in gpus) or "none"
            if lost[0].startswith("MIG-"):
                raise HostError(
                    f"{lost[0]} is a part of a GPU in MIG mode; a rank needs a whole GPU.",
                    f"Name whole GPUs by their full UUID: {have}.",
                )
            raise HostError(
                f"GPU {lost[0]} is not in this host.",
                f"Name GPUs by their full UUID: {have}.",
                missing=lost,
            )
        claimed = [u for u in wanted if u in taken]
        if claimed:
            raise HostError(
                f"GPU {claimed[0]} is already claimed by another instance.",
                "Give each instance of exl3_instances its own GPUs.",
            )
        gpus = [g for g in gpus if g["uuid"] in wanted]
    free = [g for g in gpus if g["uuid"] not in taken]
    split = [g for g in free if g.get("mig") is not None]
    free = [g for g in free if g not in split]
    if len(free) < ranks:
        notes = []
        if split:
            notes.append(f"{len(split)} in MIG mode, which tensor parallelism cannot use")
        used = len(gpus) - len(free) - len(split)
        if used:
            notes.append(f"{used} claimed by other instances")
        tail = f" ({'; '.join(notes)})" if notes else ""
        raise HostError(
            f"Tensor parallelism {ranks} needs {count(ranks, 'GPU')}; {len(free)} of "
            f"{len(facts['gpus'])} are free{tail}.",
            "Use a profile with a smaller tp, or free GPUs.",
        )
    names: dict[str, list[dict]] = {}
    for gpu in free:
        names.setdefault(gpu["name"] or "?", []).append(gpu)
    if len(names) > 1:
        # One kind of card per server: the slowest and the smallest would set the pace of all.
        fits = [group for group in names.values() if len(group) >= ranks]
        if wanted or not fits:
            have = ", ".join(f"{len(v)} x {k}" for k, v in names.items())
            raise HostError(
                f"The GPUs are of different kinds: {have}.",
                "Name GPUs of one kind for this instance (gpus: [UUID, ...]).",
            )
        return max(fits, key=len)
    return free


def _key(facts: dict, nodes: dict[str, dict], group: list[dict], host_memory: bool) -> tuple:
    on = [nodes[g["uuid"]]["node"] for g in group]
    known = {n for n in on if n is not None}
    links = _links(facts, group)
    costs = [_cost(link, host_memory) for link in links]
    return (
        on.count(None),
        len({numa.socket_of(facts, n) for n in known}),
        len(known),
        max((_rank(link, host_memory) for link in links), default=0),
        sum(costs),
        _shared_uplinks(group) if host_memory else 0,
        [g["index"] for g in group],
    )


def _links(facts: dict, group: list[dict]) -> list[str]:
    table = facts["topology"]["matrix"]
    if table is None:
        return []
    pairs = combinations([g["index"] for g in group], 2)
    return [link for a, b in pairs if (link := topo_matrix.link_between(table, a, b)) is not None]


def _rank(link: str, host_memory: bool) -> int:
    order = topo_matrix.rank(link)
    # Through host memory a shared uplink is the bottleneck, so PIX and PXB come after NODE.
    swap = {1: 4, 2: 3, 3: 2, 4: 1}
    return swap.get(order, order) if host_memory else order


def _cost(link: str, host_memory: bool) -> float:
    if link.startswith("NV"):
        return 1.0 / max(1, int(link[2:]))
    return float(_rank(link, host_memory) + 1)


def _shared_uplinks(group: list[dict]) -> int:
    ports = [(g.get("pci") or {}).get("root") for g in group]
    return sum(ports.count(p) - 1 for p in set(ports) if p is not None)


def _why(
    facts: dict,
    nodes: dict[str, dict],
    free: list[dict],
    best: list[dict],
    on: list[int],
    worst: str | None,
    ranks: int,
    wanted: list[str] | None,
) -> str:
    unknown = sum(nodes[g["uuid"]]["node"] is None for g in best)
    parts = ["asked for" if wanted else f"{ranks} of {len(free)} free"]
    if unknown:
        parts.append(f"{count(unknown, 'GPU')} on an unknown node")
    if on:
        parts.append(f"node{'s' if len(on) > 1 else ''} {','.join(str(n) for n in on)}")
    if worst is not None:
        parts.append(f"worst link {worst}")
    if len({numa.socket_of(facts, n) for n in on}) > 1 and not wanted:
        per_socket: dict[int, int] = {}
        for gpu in free:
            node = nodes[gpu["uuid"]]["node"]
            if node is not None:
                socket = numa.socket_of(facts, node)
                per_socket[socket] = per_socket.get(socket, 0) + 1
        have = ", ".join(f"socket {s}: {n}" for s, n in sorted(per_socket.items()))
        parts.append(f"no socket has {ranks} ({have})")
    return "; ".join(parts)
