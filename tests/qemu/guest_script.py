"""Runs inside the guest: looks at the machine, decides, pins real processes and proves it.

Prints one JSON object. It judges nothing; the test outside does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from exl3_host import commands, facts, gpupin, gpus, measure, numa, proof

HOME = Path("/sys/fs/cgroup")
MIB = 1 << 20
UUIDS = [f"GPU-00000000-0000-0000-0000-{i:012d}" for i in range(3)]
ADDRESSES = ("0000:41:00.0", "0000:81:00.0", "0000:C1:00.0")


def smi() -> commands.Runner:
    """nvidia-smi of this machine: three cards, and a driver that knows as little as the kernel."""
    fields = ",".join(gpus.IDENTITY)
    rows = "".join(
        f"{i}, {UUIDS[i]}, 0000{a}, NVIDIA Test, 12.0, 97887, 580.126.09\n"
        for i, a in enumerate(ADDRESSES)
    )
    line = f"nvidia-smi --query-gpu={fields} --format=csv,noheader,nounits"
    return commands.replay({line: {"rc": 0, "out": rows}})


def start(group: str | None, arguments: list[str], prefix: tuple | list) -> subprocess.Popen:
    """A worker, moved to its cgroup before it runs anything."""

    def enter() -> None:
        if group is not None:
            (HOME / group / "cgroup.procs").write_text(str(os.getpid()))

    process = subprocess.Popen(
        [*prefix, sys.executable, "-S", "/guest/guest_worker.py", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=enter,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise SystemExit(f"worker {arguments} in {group} failed")
    return process


def stop(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def proved(pin: dict, group: str | None, arguments: list[str], prefix: tuple | list = ()) -> dict:
    process = start(group, arguments, prefix)
    try:
        return short(proof.prove(pin, process.pid))
    finally:
        stop(process)


def short(answer: dict) -> dict:
    return {
        "ok": answer["ok"],
        "checks": {c["id"]: [c["status"], c["found"]] for c in answer["checks"]},
    }


def group(name: str, cpus: str, mems: str) -> dict:
    """A cpuset; what the kernel made of it."""
    folder = HOME / name
    folder.mkdir(exist_ok=True)
    (folder / "cpuset.cpus").write_text(cpus)
    (folder / "cpuset.mems").write_text(mems)
    return {
        "cpus": (folder / "cpuset.cpus.effective").read_text().strip(),
        "mems": (folder / "cpuset.mems.effective").read_text().strip(),
    }


def refused(cpus: str, mems: str) -> str | None:
    try:
        group("refused", cpus, mems)
    except OSError as error:
        return os.strerror(error.errno or 0)
    return None


def main() -> None:
    out: dict = {}
    (HOME / "cgroup.subtree_control").write_text("+cpuset")
    found = facts.collect(runner=smi())
    out["facts"] = found
    out["nodes"] = numa.decide(found)

    def pin_of(**wish: object) -> dict:
        return gpupin.decide_gpus(found, rank_gib=0.02, **wish).as_dict()

    pins = {
        "node0": pin_of(tp=1, wanted=[UUIDS[0]]),
        "node1": pin_of(tp=1, wanted=[UUIDS[1]]),
        "both": pin_of(tp=2, wanted=UUIDS[:2], smt="drop", reserve=0),
        "unknown": pin_of(tp=1, wanted=[UUIDS[2]]),
        "told": pin_of(tp=1, wanted=[UUIDS[2]], manual={UUIDS[2]: 1}),
        "native": pin_of(tp=1, wanted=[UUIDS[1]], runtime="native"),
        "native_both": pin_of(tp=2, wanted=UUIDS[:2], runtime="native"),
    }
    out["pins"] = pins
    node0, node1, both = pins["node0"], pins["node1"], pins["both"]
    out["groups"] = {
        "node0": group("node0", node0["cpus"], node0["mems"]),
        "node1": group("node1", node1["cpus"], node1["mems"]),
        "both": group("both", both["cpus"], both["mems"]),
        # CPU 3 is offline: the kernel takes the set and leaves the CPU out without a word.
        "offline": group("offline", "2-7", "0"),
    }
    out["refused"] = {"cpu": refused("99", "0"), "node": refused("0", "7")}
    before = proof.shmem_by_node()
    proofs = {
        "node0": proved(node0, "node0", ["--shm", "/dev/shm/nccl-a"]),
        "node1": proved(node1, "node1", ["--shm", "/dev/shm/nccl-b"]),
    }
    after = proof.shmem_by_node()
    out["shmem"] = {str(n): after[n] - before[n] for n in after}
    out["shmem_checks"] = {
        "node1": proof.shmem_check(node1, dict.fromkeys(after, 0), {0: 0, 1: 16 * MIB, 2: 0}),
        "both": proof.shmem_check(node1, before, after),
    }
    proofs["free"] = proved(node1, None, [])
    proofs["other"] = proved(node1, "node0", [])
    # The segment was filled on node 0 before: a process that is pinned later only maps it.
    proofs["late"] = proved(node1, "node1", ["--shm", "/dev/shm/nccl-a", "--open"])
    proofs["offline"] = proved({**node0, "cpus": "2-7"}, "offline", [])
    proofs["ranks"] = proved(both, "both", ["--ranks", "0,1"])
    proofs["ranks_unbound"] = proved(both, "both", ["--ranks", "-,-"])
    proofs["ranks_wrong"] = proved(both, "both", ["--ranks", "1,1"])
    native = pins["native"]
    proofs["native"] = proved(native, None, [], native["numactl"])
    wide = pins["native_both"]
    proofs["native_ranks"] = proved(wide, None, ["--ranks", "0,1"], wide["numactl"])
    proofs["native_unbound"] = proved(native, None, [])
    proofs["native_stray"] = proved(native, None, ["--stray"], native["numactl"])
    proofs["gone"] = short(proof.prove(node1, 99999))
    out["proofs"] = proofs
    probe = (sys.executable, "/guest/guest_probe.py")
    measured = measure.run(found, *probe, repeats=5, least_free_bytes=64 * MIB)
    decided = measure.decide(found, measured["samples"])
    out["measured"] = {"dropped": measured["dropped"], "decided": decided}
    out["nodes_measured"] = numa.decide(found, measured=decided)
    os.environ["GUEST_PROBE_UNBOUND"] = "1"
    os.sched_setaffinity(0, range(8))
    blind = measure.run(found, *probe, repeats=3, least_free_bytes=64 * MIB)
    out["measured_unbound"] = {
        "dropped": blind["dropped"],
        "decided": measure.decide(found, blind["samples"]),
    }
    Path("/sys/bus/pci/devices/0000:c1:00.0/numa_node").write_text("1")
    out["nodes_repaired"] = numa.decide(facts.collect(runner=smi()))
    out["taint"] = Path("/proc/sys/kernel/tainted").read_text().strip()
    out["seconds"] = float(Path("/proc/uptime").read_text().split()[0])
    print(json.dumps(out), flush=True)


main()
