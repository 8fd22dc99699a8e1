"""Finds a GPU's memory node by measurement, where neither kernel nor driver tells.

Copying one big buffer does not show the node: PCIe is the bottleneck from either side. So three
figures are taken on every node by bench/node_probe.py, a process bound to that node: the latency of
dependent loads from host memory (an extra socket hop always shows), the bandwidth of all GPUs at
once in both directions (the socket link's limit), and the bandwidth of one GPU alone. This module
starts the probes and decides; it knows no CUDA. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import subprocess
import time
from pathlib import Path
from statistics import median

from . import commands, numa
from .errors import HostError

# Where a store keeps the result.
KEPT = "nodes/measured.json"
REPEATS = 5
# A repeat may be won by the wrong node once in five.
WINS = 0.8
MIN_GAP = 0.10
WEIGHTS = {"latency_ns": 0.5, "loaded_gbs": 0.4, "alone_gbs": 0.1}
# A node that is nearly full would hand the probe memory of its neighbour.
LEAST_FREE_BYTES = 2 << 30
LOCAL_PAGES = 0.99
START_TIMEOUT_S = 90.0
REPEAT_TIMEOUT_S = 30.0


def run(
    facts: dict,
    python: str,
    probe: str | Path,
    repeats: int = REPEATS,
    seconds: float = 0.5,
    seed: int = 0,
    least_free_bytes: int = LEAST_FREE_BYTES,
    runner: commands.Runner = commands.run_here,
) -> dict:
    """Measure every GPU on every CPU node; the samples for `decide`.

    {"samples": {uuid: {node: [sample]}}, "dropped": [text]}. A sample is {"latency_ns",
    "alone_gbs", "loaded_gbs"} of one repeat. One bound process per node stays up; repeats go round
    the nodes in a shuffled order, so that clocks and neighbours disturb all nodes alike.
    Raises HostError where GPUs are in use, or a probe fails or hangs.
    """
    _refuse_busy(runner)
    nodes, dropped = candidates(facts, least_free_bytes)
    if not nodes:
        raise HostError("No node has CPUs and enough free memory.", "; ".join(dropped))
    probes: dict[int, subprocess.Popen] = {}
    samples: dict[str, dict[int, list]] = {g["uuid"]: {n: [] for n in nodes} for g in facts["gpus"]}
    order = random.Random(seed)
    try:
        for node in nodes:
            command = [python, str(probe), "--serve", "--node", str(node)]
            command += ["--seconds", str(seconds)]
            probes[node] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            )
        for node in nodes:
            _answer(probes[node], node, START_TIMEOUT_S)
        for _ in range(repeats):
            for node in order.sample(nodes, len(nodes)):
                told = _ask(probes[node], node)
                _keep(told, node, samples, dropped)
    finally:
        for process in probes.values():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
    return {"samples": samples, "dropped": dropped}


def candidates(
    facts: dict, least_free_bytes: int = LEAST_FREE_BYTES
) -> tuple[list[int], list[str]]:
    """Nodes worth measuring, and why the others are not."""
    good, dropped = [], []
    free = {n["id"]: n["available_bytes"] for n in facts["numa"]["nodes"] if n["has_memory"]}
    for node in numa.nodes_with_cpus(facts):
        if node not in free:
            dropped.append(f"node {node} has no memory")
        elif free[node] < least_free_bytes:
            need = f"{least_free_bytes / 2**30:.1f} are needed"
            dropped.append(f"node {node} has {free[node] / 2**30:.1f} GiB free, {need}")
        else:
            good.append(node)
    return good, dropped


def decide(facts: dict, samples: dict, min_gap: float = MIN_GAP) -> dict[str, dict]:
    """{uuid: {"node", "nodes", "gap", "min_gap", "why", "figures"}} for numa.decide.

    The rule: the best node wins at least four of five repeats by its score, its median latency or
    loaded bandwidth is better than the next node's by `min_gap`, and the repeats scatter (median
    absolute deviation) by less than a third of that gap. Otherwise nodes of one socket are taken
    together and compared with the other sockets; where that holds `nodes` is the socket's nodes.
    Otherwise nothing is known.
    """
    out = {}
    for uuid, per_node in samples.items():
        known = {int(n): s for n, s in per_node.items() if s}
        answer = _compare({(n,): s for n, s in known.items()}, min_gap)
        if answer["nodes"] is None:
            merged = _by_socket(facts, known)
            if 1 < len(merged) < len(known):
                wider = _compare(merged, min_gap)
                answer = wider if wider["nodes"] is not None else answer
        nodes = list(answer["nodes"] or [])
        figures = {
            str(n): {k: round(median(x[k] for x in s), 1) for k in WEIGHTS}
            for n, s in sorted(known.items())
        }
        out[uuid] = {
            "node": nodes[0] if len(nodes) == 1 else None,
            "nodes": nodes,
            "gap": answer["gap"],
            "min_gap": min_gap,
            "why": answer["why"],
            "figures": figures,
        }
    return out


def cache_key(facts: dict) -> dict:
    """What a measurement depends on; a change of any of it makes the result stale."""
    board = facts.get("board") or {}
    return {
        "board": [board.get("vendor"), board.get("name"), board.get("firmware")],
        "kernel": facts["os"]["kernel"],
        "driver": sorted({g["driver"] or "" for g in facts["gpus"]}),
        "gpus": sorted([g["uuid"], g["bus_id"]] for g in facts["gpus"]),
        "nodes": len(numa.nodes_with_cpus(facts)),
    }


def load(path: Path, facts: dict) -> dict | None:
    """The kept result of `save`, or None where there is none for this very host."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = isinstance(kept, dict) and kept.get("key") == json.loads(json.dumps(cache_key(facts)))
    return kept["measured"] if same else None


def save(path: Path, facts: dict, measured: dict) -> None:
    """Keep a result with its key, replaced as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    body = {"schema": "exl3-nodes/1", "key": cache_key(facts), "measured": measured}
    draft.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def _compare(sets: dict[tuple[int, ...], list[dict]], min_gap: float) -> dict:
    """The best of several sets of nodes by the rule of `decide`; nodes is None where none is."""
    name = {s: f"node {','.join(str(n) for n in s)}" for s in sets}
    if len(sets) < 2:
        return {"nodes": None, "gap": 0.0, "why": "fewer than two nodes could be measured"}
    rounds = min(len(s) for s in sets.values())
    if rounds < 3:
        return {"nodes": None, "gap": 0.0, "why": f"only {rounds} repeats are usable"}
    wins: dict[tuple[int, ...], int] = dict.fromkeys(sets, 0)
    for i in range(rounds):
        scores = _scores({s: samples[i] for s, samples in sets.items()})
        wins[min(scores, key=lambda s: scores[s])] += 1
    medians = {s: {k: median(x[k] for x in v) for k in WEIGHTS} for s, v in sets.items()}
    scores = _scores(medians)
    best, other = sorted(scores, key=lambda s: scores[s])[:2]
    gaps = {
        "latency": _gap(medians, sets, best, other, "latency_ns"),
        "loaded bandwidth": _gap(medians, sets, best, other, "loaded_gbs"),
    }
    what, (gap, scatter) = max(gaps.items(), key=lambda item: item[1][0])
    said = f"{name[best]} has {gap:.0%} better {what} than {name[other]}"
    if wins[best] < WINS * rounds:
        why = f"{name[best]} wins only {wins[best]} of {rounds} repeats"
    elif gap < min_gap:
        why = f"{said}, less than the {min_gap:.0%} that tell nodes apart"
    elif scatter >= gap / 3:
        why = f"{said}, but repeats scatter by {scatter:.0%}"
    else:
        return {"nodes": best, "gap": gap, "why": f"{said}, {wins[best]} of {rounds} repeats"}
    return {"nodes": None, "gap": gap, "why": why}


def _scores(figures: dict[tuple[int, ...], dict]) -> dict[tuple[int, ...], float]:
    """Weighted cost relative to the best set of each figure: 1 is best in everything."""
    least = min(f["latency_ns"] for f in figures.values())
    most = {k: max(f[k] for f in figures.values()) for k in ("loaded_gbs", "alone_gbs")}
    return {
        s: WEIGHTS["latency_ns"] * f["latency_ns"] / least
        + sum(WEIGHTS[k] * most[k] / f[k] for k in most)
        for s, f in figures.items()
    }


def _gap(medians: dict, sets: dict, best: tuple, other: tuple, key: str) -> tuple[float, float]:
    """By how much best beats other, and how far the repeats of both scatter; shares of the best."""
    good, bad = medians[best][key], medians[other][key]
    gap = bad / good - 1 if key == "latency_ns" else good / bad - 1
    scatter = max(
        median(abs(x[key] - medians[s][key]) for x in sets[s]) / medians[s][key]
        for s in (best, other)
    )
    return gap, scatter


def _by_socket(facts: dict, known: dict[int, list[dict]]) -> dict[tuple[int, ...], list[dict]]:
    """Samples of each socket's nodes, averaged repeat by repeat."""
    out = {}
    for nodes in numa.sockets(facts).values():
        inside = [n for n in nodes if n in known]
        if inside:
            rounds = min(len(known[n]) for n in inside)
            out[tuple(inside)] = [
                {k: median(known[n][i][k] for n in inside) for k in WEIGHTS} for i in range(rounds)
            ]
    return out


def _refuse_busy(runner: commands.Runner) -> None:
    """Another process's copies would be measured as ours."""
    question = ["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    answer = runner(question)
    users = [line.strip() for line in answer.out.splitlines() if line[:1].isdigit()]
    if answer.ok and users:
        raise HostError(
            f"The GPUs are in use by {'; '.join(users)}.", "Measure while no server runs."
        )


def _ask(process: subprocess.Popen, node: int) -> dict:
    assert process.stdin is not None
    try:
        process.stdin.write("measure\n")
        process.stdin.flush()
    except OSError:
        pass
    return _answer(process, node, REPEAT_TIMEOUT_S)


def _answer(process: subprocess.Popen, node: int, timeout_s: float) -> dict:
    """The next JSON line of a probe."""
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([process.stdout], [], [], left)
        line = process.stdout.readline() if ready else ""
        if ready and not line:
            raise HostError(
                f"The probe on node {node} ended with exit status {process.wait()}.",
                "Its messages stand above; are the GPUs free, and does torch see them?",
            )
        if line.startswith("{"):
            return json.loads(line)
    raise HostError(
        f"The probe on node {node} gave no answer within {timeout_s:g} s.",
        "Are the GPUs busy, or does another process hold them?",
    )


def _keep(told: dict, node: int, samples: dict, dropped: list[str]) -> None:
    for entry in told["gpus"]:
        if entry["uuid"] not in samples:
            continue
        pages = {int(n): size for n, size in entry["pages"].items()}
        local = pages.get(node, 0) / max(1, sum(pages.values()))
        if local < LOCAL_PAGES and len(samples[entry["uuid"]]) > 1:
            found = f"{local:.0%} of the probe's pages lie there" if pages else "pages are not told"
            text = f"node {node}: {found}; binding was blocked"
            if text not in dropped:
                dropped.append(text)
            continue
        samples[entry["uuid"]][node].append({k: entry[k] for k in WEIGHTS})
