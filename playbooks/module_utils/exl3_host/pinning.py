"""Which CPUs and memory nodes a server on a CPU host gets, with the reason.

Every `if` about the shape of a host stands here. The rules, first match wins:

    pinning asked to be none          no binding, threads counted but not placed
    one memory node                   threads placed, nothing to choose for memory
    every node is used                threads placed per rank, memory follows each rank
    some nodes of several, numactl    numactl binds CPUs and memory of the chosen nodes
    some nodes of several, no numactl threads placed; memory follows by first touch
"""

from __future__ import annotations

from dataclasses import dataclass

from . import cpus as cpu_lists
from .errors import HostError

GIB = 2**30

# A node filled further than this by one server leaves no room for the host and the file cache.
NODE_SHARE = 0.8


@dataclass(frozen=True)
class Pin:
    """Where a server runs.

    cpus and mems are kernel lists: what every process of the server may use. Under numactl the
    proof is Cpus_allowed_list for cpus; memory is a policy there, which numa_maps shows and
    Mems_allowed_list does not. threads holds one list per rank: where its compute threads sit.
    numactl is the argv prefix, empty when it is not used.
    """

    mode: str
    cpus: str
    mems: str | None
    threads: tuple[str, ...]
    nodes: tuple[int, ...]
    numactl: tuple[str, ...]
    reason: str
    threads_reason: str

    @property
    def omp_bind(self) -> str:
        """The value of VLLM_CPU_OMP_THREADS_BIND: one list per rank, or `nobind`."""
        return "|".join(self.threads) if self.threads else "nobind"


def decide(
    facts: dict,
    tp: int,
    mode: str = "auto",
    smt: str = "drop",
    reserve: int | None = None,
    rank_gib: float = 0.0,
) -> Pin:
    """Choose CPUs and nodes for `tp` ranks of about `rank_gib` GiB each.

    Raises HostError where the host has fewer usable cores than ranks.
    """
    nodes = cpu_lists.cpu_nodes(facts)
    every_cpu = sorted(c for cpus in nodes.values() for c in cpus)
    core_count = len(cpu_lists.cores(facts, every_cpu))
    if core_count < tp:
        raise HostError(
            f"Tensor parallelism {tp} needs at least {tp} cores; {core_count} are usable here "
            f"(CPUs {cpu_lists.format_list(every_cpu) or 'none'}).",
            f"Use a profile with tp: {core_count or 1}, or allow more CPUs.",
        )
    mems = cpu_lists.format_list(nodes) if facts["numa"]["nodes"] else None
    all_cpus = cpu_lists.format_list(every_cpu)
    if mode == "none":
        return Pin(
            "none", all_cpus, mems, (), (), (), "pinning is switched off", "no thread is placed"
        )
    chosen = _choose_nodes(nodes, facts, tp)
    placed = _place(facts, nodes, chosen, tp, smt, reserve)
    threads = tuple(cpu_lists.format_list(rank_cpus) for _node, rank_cpus in placed)
    rank_nodes = tuple(node for node, _cpus in placed)
    why_threads = _threads_reason(facts, placed, nodes, smt, reserve)
    common = {"threads": threads, "nodes": rank_nodes, "threads_reason": why_threads}
    if len(nodes) == 1:
        reason = "one memory node, nothing to choose"
        return Pin("none", all_cpus, mems, numactl=(), reason=reason, **common)
    if len(chosen) == len(nodes):
        reason = f"all {len(nodes)} memory nodes are used; each rank stays on its own"
        return Pin("none", all_cpus, mems, numactl=(), reason=reason, **common)
    node_list = cpu_lists.format_list(chosen)
    node_cpus = cpu_lists.format_list(c for n in chosen for c in nodes[n])
    tool = facts["tools"].get("numactl")
    if not tool:
        reason = (
            f"node {node_list} of {len(nodes)} is chosen, but numactl is not installed: "
            "threads are placed there, memory follows by first touch"
        )
        return Pin("none", all_cpus, mems, numactl=(), reason=reason, **common)
    policy, why_policy = _memory_policy(facts, chosen, node_list, rank_nodes, rank_gib)
    return Pin(
        "container",
        node_cpus,
        node_list if policy.startswith("--membind") else mems,
        numactl=(str(tool), f"--physcpubind={node_cpus}", policy),
        reason=f"node {node_list} of {len(nodes)}: most cores, then most memory; {why_policy}",
        **common,
    )


def _choose_nodes(nodes: dict[int, list[int]], facts: dict, tp: int) -> list[int]:
    """The nodes to use, ascending: as many as there are ranks, those with the most cores first.

    Then the most memory, then the highest number, since node 0 usually serves the host's
    interrupts. Free memory plays no part: a running server would push its own next plan elsewhere.
    """
    total = {n["id"]: n["total_bytes"] for n in facts["numa"]["nodes"]}
    ranked = sorted(
        nodes,
        key=lambda n: (-len(cpu_lists.cores(facts, nodes[n])), -total.get(n, 0), -n),
    )
    return sorted(ranked[: min(tp, len(ranked))])


def _place(
    facts: dict,
    nodes: dict[int, list[int]],
    chosen: list[int],
    tp: int,
    smt: str,
    reserve: int | None,
) -> list[tuple[int, list[int]]]:
    """(node, CPUs) of every rank, in rank order. Ranks of one node share its cores evenly."""
    per_node, extra = divmod(tp, len(chosen))
    out: list[tuple[int, list[int]]] = []
    for index, node in enumerate(chosen):
        ranks = per_node + (1 if index < extra else 0)
        node_cores = cpu_lists.cores(facts, nodes[node])
        keep = _reserved(len(node_cores), ranks, reserve)
        if len(node_cores) < ranks:
            raise HostError(
                f"Memory node {node} has {len(node_cores)} usable cores for {ranks} ranks.",
                "Use a profile with a smaller tp.",
            )
        for group in cpu_lists.split(node_cores[keep:], ranks):
            cpus = [c for core in group for c in (core if smt == "keep" else core[:1])]
            out.append((node, cpus))
    return out


def _reserved(core_count: int, ranks: int, wanted: int | None) -> int:
    """Cores of a node that no rank computes on; every rank keeps at least one."""
    keep = cpu_lists.reserve_for(core_count) if wanted is None else wanted
    return max(0, min(keep, core_count - ranks))


def _threads_reason(
    facts: dict,
    placed: list[tuple[int, list[int]]],
    nodes: dict[int, list[int]],
    smt: str,
    reserve: int | None,
) -> str:
    used = sorted({node for node, _cpus in placed})
    kept = sum(
        _reserved(len(cpu_lists.cores(facts, nodes[n])), [p[0] for p in placed].count(n), reserve)
        for n in used
    )
    threads = facts["cpus"]["threads_per_core"]
    parts = []
    if threads > 1:
        parts.append("one thread per core" if smt == "drop" else f"{threads} threads per core")
    else:
        parts.append("every usable core")
    if kept:
        parts.append(f"the first {kept} left to the API server and the host")
    else:
        parts.append("none reserved (vLLM's own choice would leave one idle)")
    return ", ".join(parts)


def _memory_policy(
    facts: dict, chosen: list[int], node_list: str, rank_nodes: tuple[int, ...], rank_gib: float
) -> tuple[str, str]:
    """`--membind` where the ranks fit on their nodes, else a preference.

    A hard bind on a node that runs full ends in the OOM killer although another node has room.
    """
    total = {n["id"]: n["total_bytes"] / GIB for n in facts["numa"]["nodes"]}
    limit = {n: NODE_SHARE * total.get(n, 0) for n in chosen}
    tight = [n for n in chosen if rank_gib * rank_nodes.count(n) > limit[n]]
    if not tight:
        return f"--membind={node_list}", "memory is bound there"
    why = f"the server needs more than {NODE_SHARE:.0%} of node {tight[0]}, so memory is"
    if len(chosen) == 1:
        return f"--preferred={node_list}", f"{why} only preferred there"
    return f"--interleave={node_list}", f"{why} interleaved"
