"""Which CPUs and memory nodes a server on GPUs gets, with the reason.

Every `if` about the shape of a GPU host stands here. The rules, first match wins:

    pinning asked to be none           nothing is restricted
    a GPU's node is unknown            nothing is restricted; says how to find out
    one node has CPUs                  nothing to choose (a single socket, a GB10)
    coherent GPUs (GH200, GB200)       CPUs of the sockets; memory never, GPUs' memory is nodes
    all GPUs on one node               container: that node's CPUs and memory
    all on one socket, several nodes   container: the socket's CPUs and memory
    GPUs on several sockets            per rank: each worker on its GPU's node
    too few CPUs would be left         nothing is restricted

CPUs come from the nodes' own lists, met with what is online, allowed and not isolated; never from
the CPU column of `nvidia-smi topo -m`, which stops at the first offline CPU. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from . import choice, numa
from . import cpus as cpu_lists
from .errors import HostError
from .pinning import GIB, NODE_SHARE

MODES = ("auto", "none", "container", "per_rank")
# A worker and the thread that moves its data; engine core, API server, tokenizer and metrics.
CPUS_PER_RANK = 2
CPUS_PER_SERVER = 4
# Beside shared segments each rank keeps staging buffers in host memory; the node keeps some slack.
RANK_HOST_GIB = 2.0
NODE_SLACK_GIB = 8.0


@dataclass(frozen=True)
class GpuPin:
    """Where a server on GPUs runs. `as_dict` is the plan's `pin`.

    cpus and mems are kernel lists: a container's cpuset (mode none: what the host allows anyway);
    mems is None where memory is not restricted. gpus are UUIDs in PCI order, ranks the node of each
    in that order (None where unknown). numactl is the argv prefix of a server without a container.
    args and env go to `vllm serve`.
    """

    mode: str
    cpus: str
    mems: str | None
    gpus: tuple[str, ...]
    ranks: tuple[int | None, ...]
    reason: str
    cpus_reason: str = "every CPU that the host allows"
    numactl: tuple[str, ...] = ()
    args: dict = field(default_factory=dict)
    env: dict = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict:
        """The plan's `pin`, JSON types only."""
        return {
            "mode": self.mode,
            "cpus": self.cpus,
            "mems": self.mems,
            "threads": [],
            "nodes": sorted({n for n in self.ranks if n is not None}),
            "numactl": list(self.numactl),
            "reason": self.reason,
            "cpus_reason": self.cpus_reason,
            "gpus": list(self.gpus),
            "ranks": list(self.ranks),
            "args": dict(self.args),
            "env": dict(self.env),
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class _Wish:
    mode: str
    smt: str
    reserve: int | None
    rank_gib: float
    shm_gib: float
    runtime: str
    peer_access: bool | None


def decide_gpus(
    facts: dict,
    tp: int,
    mode: str = "auto",
    smt: str = "keep",
    reserve: int | None = None,
    rank_gib: float = RANK_HOST_GIB,
    shm_gib: float = 0.0,
    manual: dict | None = None,
    measured: dict | None = None,
    wanted: list[str] | None = None,
    taken: tuple[str, ...] = (),
    peer_access: bool | None = None,
    runtime: str = "docker",
) -> GpuPin:
    """Choose GPUs for `tp` ranks, then CPUs and memory nodes for the server.

    rank_gib is host memory per rank, shm_gib the size of /dev/shm. manual and measured: see
    numa.decide; wanted, taken: see choice.choose. peer_access is the verdict of the
    peer test, None before it. Raises HostError for GPUs that are not there or not free, and where a
    mode that was asked for by name is not possible.
    """
    if mode not in MODES:
        raise HostError(f"Pinning '{mode}' is not known.", f"Use one of {', '.join(MODES)}.")
    nodes = numa.decide(facts, manual, measured)
    chosen = choice.choose(facts, nodes, tp, wanted, taken, host_memory=peer_access is False)
    answers = {n["uuid"]: n for n in nodes}
    mine = [answers[g["uuid"]] for g in chosen["gpus"]]
    wish = _Wish(mode, smt, reserve, rank_gib, shm_gib, runtime, peer_access)
    pin = _pin(facts, chosen, mine, wish)
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **pin.env}
    reason = f"GPUs: {chosen['why']}. {pin.reason}"
    return GpuPin(**{**pin.__dict__, "env": env, "reason": reason})


def _pin(facts: dict, chosen: dict, mine: list[dict], wish: _Wish) -> GpuPin:
    known = numa.nodes_with_cpus(facts)
    free = _none(facts, chosen, mine)
    if wish.mode == "none":
        return free("pinning is switched off")
    spread = _spread(facts, mine)
    if spread is None:
        lost = next(a for a in mine if not a["nodes"])
        why = f"GPU {lost['index']}: {lost['why']}, so nothing is pinned"
        return _refuse_or(free(why, (lost["fix"],)), wish, why, lost["fix"])
    if len(known) == 1:
        return free("only one node has CPUs, nothing to choose")
    coherent = [g for g in chosen["gpus"] if g["coherent"]]
    on, whole_sockets = spread
    sockets = sorted({numa.socket_of(facts, n) for n in on})
    # A rank binds its memory hard (numactl --membind), which coherent GPUs do not survive.
    several = len(sockets) > 1 and not coherent
    per_rank = wish.mode == "per_rank" or (wish.mode == "auto" and several)
    if coherent:
        per_rank = False
        whole_sockets = True
    elif per_rank and any(a["node"] is None for a in mine):
        why = "per-rank pinning needs one node per GPU; the measurement only told the socket"
        return _refuse_or(free(why), wish, why, "Use pinning: container.")
    if whole_sockets:
        on = sorted(n for s in sockets for n in numa.sockets(facts)[s])
    permitted = cpu_lists.cpu_nodes(facts)
    outside = [n for n in on if n not in permitted]
    if outside:
        why = (
            f"node {cpu_lists.format_list(outside)} is where the GPUs are, but it offers this "
            "process no CPUs and memory (cgroup, affinity, or a node without memory)"
        )
        return _refuse_or(free(why), wish, why, "Run the tool on the host, or widen the cpuset.")
    smt, reserve = wish.smt, wish.reserve
    if per_rank and wish.runtime == "native":
        # vLLM binds its workers to whole nodes; only a cpuset could keep CPUs back.
        smt, reserve = "keep", 0
    cpus, why_cpus = _cpuset(facts, permitted, on, smt, reserve)
    need = CPUS_PER_RANK * len(mine) + CPUS_PER_SERVER
    if len(cpus) < need:
        why = (
            f"node {cpu_lists.format_list(on)} leaves {len(cpus)} CPUs "
            f"({cpu_lists.format_list(cpus) or 'none'}), and {len(mine)} ranks need {need}"
        )
        fix = "Reserve fewer cores, keep SMT siblings, or use pinning: none."
        return _refuse_or(free(why), wish, why, fix)
    return _build(facts, chosen, mine, wish, on, sockets, cpus, why_cpus, per_rank, bool(coherent))


def _build(
    facts: dict,
    chosen: dict,
    mine: list[dict],
    wish: _Wish,
    on: list[int],
    sockets: list[int],
    cpus: list[int],
    why_cpus: str,
    per_rank: bool,
    coherent: bool,
) -> GpuPin:
    warnings: list[str] = []
    node_list = cpu_lists.format_list(on)
    cpu_text = cpu_lists.format_list(cpus)
    mems: str | None = node_list
    ranks = tuple(a["node"] for a in mine)
    if coherent:
        mems = None
        reason = (
            f"CPUs of node {node_list}; memory is left free, since the GPUs' own memory is made of "
            "nodes that a restriction would take away"
        )
        if wish.mode == "per_rank":
            warnings.append("per-rank pinning binds memory and is not used on coherent GPUs")
    elif per_rank:
        reason = f"the GPUs are on nodes {node_list}: each rank is bound to its own"
        if wish.peer_access is False and len(sockets) > 1:
            warnings.append(
                "GPUs on several sockets without peer access: all traffic crosses the socket link. "
                "Prefer GPUs of one socket, or one instance per socket."
            )
    elif len(on) == 1:
        reason = f"all GPUs are on node {node_list}"
    elif len(sockets) == 1:
        reason = f"all GPUs are on socket {sockets[0]}, nodes {node_list}"
    else:
        reason = f"CPUs and memory of nodes {node_list}, as asked for"
    tight = None if mems is None else _tight(facts, on, len(mine), wish)
    if tight is not None and not per_rank:
        mems = None
        reason += f"; memory is not bound: {tight}"
    elif tight is not None:
        warnings.append(f"memory may run short: {tight}")
    args: dict = {}
    env: dict = {}
    if per_rank:
        args = {"numa-bind": True, "numa-bind-nodes": list(ranks)}
        env = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    numactl: tuple[str, ...] = ()
    mode = "per_rank" if per_rank else "container"
    if wish.runtime == "native":
        tool = facts["tools"].get("numactl")
        if not tool:
            why = "numactl is not installed, so nothing can be pinned"
            return _refuse_or(
                _none(facts, chosen, mine)(why), wish, why, "Install the package numactl."
            )
        numactl = (str(tool), f"--physcpubind={cpu_text}")
        # With per_rank this binds the API server; each worker's memory is bound by vLLM.
        if mems is not None and not per_rank:
            numactl += (f"--membind={mems}",)
    return GpuPin(
        mode=mode,
        cpus=cpu_text,
        mems=mems,
        gpus=tuple(g["uuid"] for g in chosen["gpus"]),
        ranks=ranks,
        reason=reason,
        cpus_reason=why_cpus,
        numactl=numactl,
        args=args,
        env=env,
        warnings=tuple(warnings),
    )


def _none(facts: dict, chosen: dict, mine: list[dict]):
    """Makes the pin that restricts nothing, for a reason."""

    def make(reason: str, warnings: tuple[str, ...] = ()) -> GpuPin:
        mems = facts["numa"].get("allowed")
        return GpuPin(
            mode="none",
            cpus=cpu_lists.format_list(cpu_lists.usable(facts)),
            mems=mems,
            gpus=tuple(g["uuid"] for g in chosen["gpus"]),
            ranks=tuple(a["node"] for a in mine),
            reason=reason,
            warnings=tuple(w for w in warnings if w),
        )

    return make


def _refuse_or(pin: GpuPin, wish: _Wish, why: str, fix: str) -> GpuPin:
    """A mode chosen by us falls back to none; one that was asked for by name is refused."""
    if wish.mode in ("container", "per_rank"):
        raise HostError(f"Pinning '{wish.mode}' is not possible: {why}.", fix)
    return pin


def _spread(facts: dict, mine: list[dict]) -> tuple[list[int], bool] | None:
    """Nodes of the chosen GPUs, and whether whole sockets have to be taken; None if unknown."""
    if any(not a["nodes"] for a in mine):
        return None
    on = sorted({n for a in mine for n in a["nodes"]})
    one_socket = len({numa.socket_of(facts, n) for n in on}) == 1
    return on, any(a["node"] is None for a in mine) or (one_socket and len(on) > 1)


def _cpuset(
    facts: dict,
    permitted: dict[int, list[int]],
    on: list[int],
    smt: str,
    reserve: int | None,
) -> tuple[list[int], str]:
    """CPUs of the nodes without the first cores of each, and the reason in words."""
    out: list[int] = []
    kept = 0
    for node in on:
        groups = cpu_lists.cores(facts, permitted[node])
        keep = cpu_lists.reserve_for(len(groups)) if reserve is None else reserve
        keep = min(keep, len(groups))
        kept += keep
        for group in groups[keep:]:
            out += group if smt == "keep" else group[:1]
    siblings = "with SMT siblings" if smt == "keep" else "one thread per core"
    if facts["cpus"]["threads_per_core"] == 1:
        siblings = "one thread per core"
    left = f"{kept} left to the host" if kept else "none left to the host"
    return sorted(out), f"cores of node {cpu_lists.format_list(on)}, {siblings}, {left}"


def _tight(facts: dict, on: list[int], ranks: int, wish: _Wish) -> str | None:
    """Why binding memory to these nodes risks the OOM killer although other nodes have room.

    Sizes of nodes count, not what is free: a running server would change its own next plan.
    """
    total = {n["id"]: n["total_bytes"] / GIB for n in facts["numa"]["nodes"]}
    have = sum(total.get(n, 0.0) for n in on)
    need = wish.shm_gib + ranks * wish.rank_gib + min(NODE_SLACK_GIB, have / 8)
    if need <= NODE_SHARE * have:
        return None
    return (
        f"{need:.1f} GiB of host memory are needed and node {cpu_lists.format_list(on)} has "
        f"{have:.1f} GiB"
    )
