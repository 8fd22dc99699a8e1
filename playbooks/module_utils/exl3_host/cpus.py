"""CPU lists, and which CPUs each rank of a server gets. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable


def parse_list(text: str) -> list[int]:
    """`0-2,5` as `[0, 1, 2, 5]`, sorted and without repeats.

    The kernel's list format; an empty text is an empty list. Raises ValueError with the text.
    """
    out: set[int] = set()
    for part in text.strip().split(","):
        part = part.strip()
        if not part:
            continue
        first, dash, last = part.partition("-")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError:
            raise ValueError(f"'{text.strip()}' is no CPU list such as 0-3,8") from None
        if high < low:
            raise ValueError(f"'{text.strip()}' is no CPU list: {low} comes after {high}")
        out.update(range(low, high + 1))
    return sorted(out)


def format_list(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2,5`."""
    ordered = sorted(set(numbers))
    parts: list[str] = []
    start = 0
    while start < len(ordered):
        end = start
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        low, high = ordered[start], ordered[end]
        parts.append(str(low) if low == high else f"{low}-{high}")
        start = end + 1
    return ",".join(parts)


def usable(facts: dict) -> list[int]:
    """CPUs that a server started here may run on: online, allowed and not isolated."""
    cpus = facts["cpus"]
    allowed = parse_list(cpus["online"])
    for limit in ("affinity", "cgroup"):
        if cpus.get(limit) is not None:
            inside = set(parse_list(cpus[limit]))
            allowed = [c for c in allowed if c in inside]
    isolated = set(parse_list(cpus.get("isolated") or ""))
    return [c for c in allowed if c not in isolated]


def cores(facts: dict, among: Iterable[int]) -> list[list[int]]:
    """The given CPUs grouped by physical core, in order of their lowest CPU."""
    wanted = set(among)
    core_of = {c: tuple(parse_list(s)) for s in facts["cpus"]["siblings"] for c in parse_list(s)}
    groups: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(wanted):
        groups.setdefault(core_of.get(cpu, (cpu,)), []).append(cpu)
    return sorted(groups.values())


def cpu_nodes(facts: dict) -> dict[int, list[int]]:
    """Memory nodes that have both usable CPUs and memory, each with its usable CPUs.

    A host without node information is one node 0. Nodes without CPUs (GPU or CXL memory) and
    nodes without memory are left out, and so are nodes that the cgroup forbids.
    """
    allowed = usable(facts)
    nodes = facts["numa"]["nodes"]
    if not nodes:
        return {0: allowed}
    mems = facts["numa"].get("allowed")
    permitted = set(parse_list(mems)) if mems is not None else None
    out: dict[int, list[int]] = {}
    for node in nodes:
        here = set(parse_list(node["cpus"]))
        cpus = [c for c in allowed if c in here]
        if cpus and node["has_memory"] and (permitted is None or node["id"] in permitted):
            out[node["id"]] = cpus
    return out


def split(items: list[list[int]], parts: int) -> list[list[list[int]]]:
    """Cores dealt to `parts` ranks in contiguous runs whose lengths differ by at most one."""
    size, extra = divmod(len(items), parts)
    out, start = [], 0
    for index in range(parts):
        end = start + size + (1 if index < extra else 0)
        out.append(items[start:end])
        start = end
    return out


def reserve_for(core_count: int) -> int:
    """Cores of a node left to the API server, the scheduler and the host.

    Below eight cores every core computes: one of two would be half of all compute threads, and the
    API server and the scheduler are idle while a step is computed.
    """
    if core_count < 8:
        return 0
    return 1 if core_count < 32 else 2
