"""The host logic on a live two-socket kernel: what it sees, decides, pins and proves there."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import gpu_host
import guest_image
import pytest
from gpu_host import PciDevice

UNKNOWN = 2  # the GPU whose firmware says nothing
MIB = 1 << 20


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What guest_script.py found; the guest boots once for all tests."""
    why = guest_image.missing()
    if why is not None:
        message = f"NO GUEST: {why}; facts, pins and proofs are NOT tried on a two-socket kernel"
        warnings.warn(message, stacklevel=2)
        pytest.skip(message)
    return guest_image.run(tmp_path_factory.mktemp("guest"))


def status(proof: dict) -> dict[str, str]:
    return {name: check[0] for name, check in proof["checks"].items()}


def failed(proof: dict) -> set[str]:
    return {name for name, told in status(proof).items() if told == "failed"}


def test_facts_of_the_live_kernel(guest: dict) -> None:
    print(f"guest: {guest['seconds']:.0f} s of its own time")
    found = guest["facts"]
    cpus = found["cpus"]
    assert (cpus["online"], cpus["offline"]) == ("0-2,4-15", "3")
    assert (cpus["packages"], cpus["cores"], cpus["threads_per_core"]) == (2, 8, 2)
    assert "2" in cpus["siblings"], "CPU 2 has lost its sibling"
    seen = [
        (n["id"], n["cpus"], n["packages"], n["has_cpu"], n["has_memory"], n["distances"])
        for n in found["numa"]["nodes"]
    ]
    assert seen == [
        (0, "0-2,4-7", [0], True, True, [10, 32, 40]),
        (1, "8-15", [1], True, True, [32, 10, 40]),
        (2, "", [], False, True, [40, 40, 10]),
    ]
    devices = [g["pci"] for g in found["gpus"]]
    assert [d["numa_node"] for d in devices] == [0, 1, None]
    assert [d["root"] for d in devices] == ["pci0000:40", "pci0000:80", "pci0000:c0"]
    assert [b["address"] for b in devices[0]["bridges"]] == ["0000:40:00.0"]
    assert devices[1]["root_cpus"] == "8-15"


def test_the_generator_makes_what_the_kernel_makes(guest: dict, tmp_path: Path) -> None:
    """tests/host builds trees of hosts; here is the same host from both."""
    described = gpu_host.GpuHost(
        nodes={0: "0-2,4-7", 1: "8-15", 2: ""},
        sockets={0: 0, 1: 1},
        devices=[
            PciDevice("0000:41:00.0", "pci0000:40", ["0000:40:00.0"], 0, root_cpus="0-7"),
            PciDevice("0000:81:00.0", "pci0000:80", ["0000:80:00.0"], 1, root_cpus="8-15"),
            PciDevice("0000:c1:00.0", "pci0000:c0", ["0000:c0:00.0"]),
        ],
        names=["NVIDIA Test"] * 3,
        smt_adjacent=True,
        offline="3",
    )
    made = json.loads(json.dumps(gpu_host.look(tmp_path, described)))
    live = guest["facts"]
    for key in ("online", "offline", "isolated", "packages", "cores", "siblings"):
        assert made["cpus"][key] == live["cpus"][key], key
    for mine, theirs in zip(made["numa"]["nodes"], live["numa"]["nodes"]):
        for key in ("id", "cpus", "packages", "has_cpu", "has_memory"):
            assert mine[key] == theirs[key], key
    for mine, theirs in zip(made["gpus"], live["gpus"]):
        for key in ("address", "numa_node", "bridges", "root"):
            assert mine["pci"][key] == theirs["pci"][key], key


def test_node_of_each_gpu(guest: dict) -> None:
    told = [(n["node"], n["source"], n["confidence"]) for n in guest["nodes"]]
    assert told == [(0, "sysfs", "high"), (1, "sysfs", "high"), (None, "unknown", "none")]
    assert "numa_node is -1" in guest["nodes"][UNKNOWN]["why"]


def test_pins(guest: dict) -> None:
    pins = guest["pins"]
    short = {k: (p["mode"], p["cpus"], p["mems"]) for k, p in pins.items()}
    assert short == {
        "node0": ("container", "0-2,4-7", "0"),
        "node1": ("container", "8-15", "1"),
        "both": ("per_rank", "0,2,4,6,8,10,12,14", "0-1"),
        "unknown": ("none", "0-2,4-15", "0-2"),
        "told": ("container", "8-15", "1"),
        "native": ("container", "8-15", "1"),
        "native_both": ("per_rank", "0-2,4-15", "0-1"),
    }
    assert pins["both"]["args"]["numa-bind-nodes"] == [0, 1]
    assert pins["native"]["numactl"][1:] == ["--physcpubind=8-15", "--membind=1"]
    assert "nothing is pinned" in pins["unknown"]["reason"]


def test_the_kernel_takes_the_pins_as_cpusets(guest: dict) -> None:
    groups = guest["groups"]
    assert groups["node0"] == {"cpus": "0-2,4-7", "mems": "0"}
    assert groups["node1"] == {"cpus": "8-15", "mems": "1"}
    # It also takes a CPU that is offline, and drops it silently.
    assert groups["offline"] == {"cpus": "2,4-7", "mems": "0"}
    assert guest["refused"] == {"cpu": "Numerical result out of range", "node": "Invalid argument"}


@pytest.mark.parametrize("name", ["node0", "node1", "ranks", "native", "native_ranks"])
def test_a_pin_that_holds_is_proved(guest: dict, name: str) -> None:
    proof = guest["proofs"][name]
    assert proof["ok"] and set(status(proof).values()) == {"ok"}, proof


@pytest.mark.parametrize(
    ("name", "checks"),
    [
        # Not restricted at all, and restricted to the wrong node.
        ("free", {"cpus", "mems"}),
        ("other", {"cpus", "mems", "pages-anonymous"}),
        # Its own memory is right; the segment it maps was filled on the other node before.
        ("late", {"pages-shared"}),
        # The plan names a CPU that is offline.
        ("offline", {"cpuset"}),
        # vLLM started without numactl binds nothing and says nothing.
        ("ranks_unbound", {"ranks-node0", "ranks-node1"}),
        ("ranks_wrong", {"ranks-node0"}),
        ("native_unbound", {"cpus", "mems"}),
        # One thread of a process that is otherwise in place.
        ("native_stray", {"cpus"}),
        ("gone", {"processes"}),
    ],
)
def test_a_planted_wrong_pin_is_found(guest: dict, name: str, checks: set[str]) -> None:
    proof = guest["proofs"][name]
    assert not proof["ok"]
    found = failed(proof)
    if name in ("free", "native_unbound"):
        # Nobody holds it anywhere, so its pages may be on the right node by chance.
        found.discard("pages-anonymous")
    assert found == checks, proof


def test_shared_memory_grows_where_the_writer_runs(guest: dict) -> None:
    # Each of two workers wrote 16 MiB. A few pages of the guest's own file system, which is shared
    # memory too, come, go, and follow a process that enters a cpuset.
    grown = guest["shmem"]
    assert 12 * MIB <= grown["0"] <= 20 * MIB and 12 * MIB <= grown["1"] <= 20 * MIB
    assert grown["2"] == 0
    assert guest["shmem_checks"]["node1"]["status"] == "ok"
    assert guest["shmem_checks"]["both"]["status"] == "failed"


def test_measurement_binds_its_probes_and_settles_the_unknown(guest: dict) -> None:
    assert guest["measured"]["dropped"] == []
    told = [(n["node"], n["source"]) for n in guest["nodes_measured"]]
    assert told == [(0, "sysfs"), (1, "sysfs"), (1, "measured")]
    # Probes that nobody bound lie on one node: their samples of the other are thrown away.
    blind = guest["measured_unbound"]
    assert blind["dropped"] == ["node 1: 0% of the probe's pages lie there; binding was blocked"]
    assert all(d["node"] is None for d in blind["decided"].values())


def test_a_node_written_to_sysfs_is_read_back(guest: dict) -> None:
    told = guest["nodes_repaired"][UNKNOWN]
    assert (told["node"], told["source"]) == (1, "sysfs")
    assert guest["taint"] == "2048", "the kernel notes a firmware workaround"
