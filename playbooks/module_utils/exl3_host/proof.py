"""Proves that a running server keeps to its pin: allowed CPUs and nodes of every thread, and on
which nodes its pages lie.

Reads /proc and /sys only; of other users' processes the page counts need root. A check that cannot
be read is "unknown", never "ok". Segments that lie wrong stay wrong when a process is bound later
(the kernel moves what a cpuset's own process maps, at best), so the fix is always a restart.
Standard library only.
"""

from __future__ import annotations

import re
from pathlib import Path

from . import cpus as cpu_lists
from . import procs
from .pci import read

# Share of pages on the planned nodes below which memory counts as misplaced.
LOCAL_SHARE = 0.95
# A few pages of the loader and the kernel's own choice say nothing about a policy.
LEAST_BYTES = 8 << 20
RESTART = "Restart the server: memory that is placed already stays where it is."

_SHARED = ("/dev/shm/", "/memfd:", "/dev/zero", "/SYSV", "/run/shm/")


def prove(
    pin: dict, pid: int, root: str | Path = "/", shmem_before: dict[int, int] | None = None
) -> dict:
    """Hold a process tree against a plan's `pin` (of CPUs or of GPUs).

    {"ok", "pid", "checks": [{"id", "status", "found", "expected", "fix"}], "processes": [...],
    "shmem_by_node"}.
    `ok` is true when no check failed; `status` is ok, failed or unknown. The checks: `processes`
    (there are some), `cpus` (no thread may run outside pin.cpus), `cpuset` (a container's first
    process may use all of them), `mems`, `ranks-nodeN` (per-rank mode: as many processes as ranks
    are bound to that node) and `pages-nodeN` (their memory is there), `pages-anonymous` and
    `pages-shared` (all memory is on the planned nodes); with `shmem_before`, what shmem_by_node
    said before the start, also `shmem`, which needs no right to read numa_maps.
    """
    root = Path(root)
    pids = procs.tree(pid, str(root / "proc"))
    people = [_process(root, p) for p in pids]
    people = [p for p in people if p["threads"]]
    checks: list[dict] = []
    if not people:
        checks.append(
            _check("processes", "failed", f"no process {pid}", "a running server", "Start it.")
        )
    else:
        online = set(_list(read(root / "sys/devices/system/cpu/online")))
        nodes = set(_list(read(root / "sys/devices/system/node/online"))) or {0}
        checks.append(_check("processes", "ok", f"{len(people)} processes", "a running server"))
        checks += _cpu_checks(pin, people, online)
        checks += _mem_checks(pin, people, nodes)
        checks += _rank_checks(root, pin, people, online)
        checks += _page_checks(pin, people)
    shmem = shmem_by_node(root)
    if shmem_before is not None and pin["mode"] != "none" and pin["mems"]:
        checks.append(shmem_check(pin, shmem_before, shmem))
    return {
        "ok": all(c["status"] != "failed" for c in checks),
        "pid": pid,
        "checks": checks,
        "processes": [
            {k: v for k, v in p.items() if k != "threads"} | {"threads": len(p["threads"])}
            for p in people
        ],
        "shmem_by_node": shmem,
    }


def pages(text: str) -> dict:
    """Bytes per node in a numa_maps text: {"anonymous", "shared", "files", "policies"}.

    `shared` is {segment: {node: bytes}} over /dev/shm, memfd and System V segments; `files` counts
    page cache, which lies where its first reader ran and can be dropped. `policies` are those other
    than `default`.
    """
    out: dict = {"anonymous": {}, "shared": {}, "files": {}, "policies": []}
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2:
            continue
        policy = words[1]
        if policy != "default" and policy not in out["policies"]:
            out["policies"].append(policy)
        size = re.search(r"kernelpagesize_kB=(\d+)", line)
        page = int(size.group(1)) * 1024 if size else 4096
        file = next((w[5:] for w in words if w.startswith("file=")), None)
        if file is None:
            counts = out["anonymous"]
        elif file.startswith(_SHARED):
            counts = out["shared"].setdefault(file, {})
        else:
            counts = out["files"]
        for node, number in re.findall(r"\bN(\d+)=(\d+)", line):
            counts[int(node)] = counts.get(int(node), 0) + int(number) * page
    return out


def shmem_by_node(root: str | Path = "/") -> dict[int, int]:
    """Bytes of shared memory and tmpfs on each node, `Shmem` of nodeN/meminfo."""
    base = Path(root) / "sys/devices/system/node"
    out = {}
    for node in _list(read(base / "online")):
        match = re.search(r"Shmem:\s+(\d+) kB", read(base / f"node{node}/meminfo") or "")
        if match:
            out[node] = int(match.group(1)) * 1024
    return out


def shmem_check(pin: dict, before: dict[int, int], after: dict[int, int]) -> dict:
    """Where shared memory grew between two `shmem_by_node`, where numa_maps cannot be read."""
    grown = {n: after[n] - before.get(n, 0) for n in after if after[n] > before.get(n, 0)}
    return _share_check("shmem", grown, _list(pin.get("mems")), "shared memory that was added")


def _process(root: Path, pid: int) -> dict:
    base = root / f"proc/{pid}"
    threads = []
    try:
        numbers = sorted(int(p.name) for p in (base / "task").iterdir())
    except OSError:
        numbers = []
    for number in numbers:
        status = read(base / f"task/{number}/status")
        if status is not None:
            threads.append(
                {
                    "tid": number,
                    "cpus": _status(status, "Cpus_allowed_list"),
                    "mems": _status(status, "Mems_allowed_list"),
                }
            )
    text = read(base / "numa_maps")
    return {
        "pid": pid,
        "command": procs.command_line(pid, str(root / "proc")),
        "cpus": threads[0]["cpus"] if threads else None,
        "mems": threads[0]["mems"] if threads else None,
        "pages": pages(text) if text else None,
        "threads": threads,
    }


def _cpu_checks(pin: dict, people: list[dict], online: set[int]) -> list[dict]:
    """The raw lists can name CPUs that do not exist, so they are met with what is online."""
    planned = set(_list(pin["cpus"])) & online
    expected = f"CPUs {pin['cpus']}"
    if pin["mode"] == "none":
        return [_check("cpus", "ok", "not restricted", "no pinning")]
    outside = []
    for process in people:
        for thread in process["threads"]:
            extra = (set(_list(thread["cpus"])) & online) - planned
            if extra:
                who = f"pid {process['pid']} thread {thread['tid']} ({process['command']})"
                outside.append(f"{who} may run on {cpu_lists.format_list(extra)}")
    if outside:
        more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        return [_check("cpus", "failed", outside[0] + more, expected, RESTART)]
    count = sum(len(p["threads"]) for p in people)
    checks = [_check("cpus", "ok", f"{count} threads inside", expected)]
    if pin["mode"] == "container":
        first = set(_list(people[0]["cpus"])) & online
        absent = set(_list(pin["cpus"])) - online
        if absent:
            found = f"CPUs {cpu_lists.format_list(absent)} are offline"
            checks.append(
                _check("cpuset", "failed", found, expected, "Bring them online or plan again.")
            )
        elif first != planned:
            found = f"pid {people[0]['pid']} has {cpu_lists.format_list(first) or 'none'}"
            checks.append(_check("cpuset", "failed", found, expected, RESTART))
        else:
            checks.append(_check("cpuset", "ok", f"CPUs {cpu_lists.format_list(first)}", expected))
    return checks


def _mem_checks(pin: dict, people: list[dict], nodes: set[int]) -> list[dict]:
    """Mems_allowed_list is a cpuset's. numactl leaves it alone and sets a policy instead."""
    planned = set(_list(pin["mems"])) & nodes
    if pin["mode"] == "none" or pin["mems"] is None or not planned:
        return [_check("mems", "ok", "not restricted", "no restriction of memory")]
    expected = f"nodes {pin['mems']}"
    if pin["numactl"]:
        policies = sorted({w for p in people if p["pages"] for w in p["pages"]["policies"]})
        if all(p["pages"] is None for p in people):
            return [_check("mems", "unknown", "numa_maps cannot be read", expected, "Run as root.")]
        wanted = next((w for w in pin["numactl"] if w.startswith("--membind=")), None)
        if wanted is not None and f"bind:{wanted.partition('=')[2]}" not in policies:
            found = f"policies {', '.join(policies) or 'default only'}"
            return [_check("mems", "failed", found, f"bind:{pin['mems']}", RESTART)]
        return [_check("mems", "ok", f"policies {', '.join(policies)}", expected)]
    if planned == nodes:
        return [_check("mems", "ok", "every node is planned", expected)]
    for process in people:
        extra = (set(_list(process["mems"])) & nodes) - planned
        if extra:
            found = f"pid {process['pid']} may allocate on {cpu_lists.format_list(extra)}"
            return [_check("mems", "failed", found, expected, RESTART)]
    return [_check("mems", "ok", f"{len(people)} processes inside", expected)]


def _rank_checks(root: Path, pin: dict, people: list[dict], online: set[int]) -> list[dict]:
    """vLLM falls back to no binding without an error, so the bound processes are counted."""
    if pin["mode"] != "per_rank":
        return []
    checks = []
    for node in sorted(set(pin["ranks"])):
        cpus = set(_list(read(root / f"sys/devices/system/node/node{node}/cpulist"))) & online
        bound = [p for p in people if (inside := set(_list(p["cpus"])) & online) and inside <= cpus]
        wanted = pin["ranks"].count(node)
        found = f"{len(bound)} processes bound to node {node}"
        if len(bound) < wanted:
            fix = "numactl must be installed where the server runs, and the four memory-policy "
            fix += f"calls allowed (seccomp profile). {RESTART}"
            checks.append(
                _check(f"ranks-node{node}", "failed", found, f"{wanted} ranks on it", fix)
            )
            continue
        checks.append(_check(f"ranks-node{node}", "ok", found, f"{wanted} ranks on it"))
        local: dict[int, int] = {}
        for process in bound:
            _add(local, (process["pages"] or {}).get("anonymous") or {})
        checks.append(_share_check(f"pages-node{node}", local, [node], "memory of these ranks"))
    return checks


def _page_checks(pin: dict, people: list[dict]) -> list[dict]:
    planned = _list(pin["mems"])
    if pin["mode"] == "none" or not planned:
        return []
    if all(p["pages"] is None for p in people):
        found = "numa_maps cannot be read"
        return [_check("pages", "unknown", found, f"nodes {pin['mems']}", "Run as root.")]
    seen = [p["pages"] for p in people if p["pages"] is not None]
    anonymous: dict[int, int] = {}
    segments: dict[str, dict[int, int]] = {}
    for one in seen:
        _add(anonymous, one["anonymous"])
        for file, counts in one["shared"].items():
            # Every process that maps a segment counts it; the one that touched most of it is right.
            known = segments.setdefault(file, {})
            for node, size in counts.items():
                known[node] = max(known.get(node, 0), size)
    shared: dict[int, int] = {}
    for counts in segments.values():
        _add(shared, counts)
    return [
        _share_check("pages-anonymous", anonymous, planned, "anonymous memory"),
        _share_check("pages-shared", shared, planned, "shared memory"),
    ]


def _add(total: dict[int, int], counts: dict[int, int]) -> None:
    for node, size in counts.items():
        total[node] = total.get(node, 0) + size


def _share_check(name: str, counts: dict[int, int], planned: list[int], what: str) -> dict:
    total = sum(counts.values())
    inside = sum(size for node, size in counts.items() if node in planned)
    where = ", ".join(f"node {n}: {s >> 20} MiB" for n, s in sorted(counts.items())) or "none"
    expected = f"{LOCAL_SHARE:.0%} of {what} on {cpu_lists.format_list(planned)}"
    if total < LEAST_BYTES:
        return _check(name, "ok", f"only {total >> 10} KiB ({where})", expected)
    share = inside / total
    status = "ok" if share >= LOCAL_SHARE else "failed"
    return _check(
        name, status, f"{share:.1%} ({where})", expected, "" if status == "ok" else RESTART
    )


def _check(name: str, status: str, found: str, expected: str, fix: str = "") -> dict:
    return {"id": name, "status": status, "found": found, "expected": expected, "fix": fix}


def _status(text: str, name: str) -> str | None:
    match = re.search(rf"^{name}:\s*(\S*)$", text, re.MULTILINE)
    return match.group(1) if match else None


def _list(text: str | None) -> list[int]:
    return cpu_lists.parse_list(text) if text else []
