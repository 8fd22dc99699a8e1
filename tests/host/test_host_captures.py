"""Whole hosts as `exl3ctl topology --save` wrote them; what is right for each, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exl3_host import calibration, capture, facts, gpupin, measure, nccl, numa, peers, topology
from gpu_host import DATA, uuid

# By name: GPUs, their PCI addresses, what the kernel says of their node, the pin for all of them.
HOSTS = {
    # One H200 given to a virtual machine of 16 CPUs and one node.
    "h200-1": (1, ["0000:00:06.0"], [None], ("none", "0-15")),
    # Two of one board; 32 CPUs, one node.
    "h200-2": (2, ["0000:00:06.0", "0000:00:07.0"], [None, None], ("none", "0-31")),
}


def captured(name: str, folder: Path) -> dict:
    body = json.loads((DATA / "hosts" / f"{name}.json").read_text())
    root, runner = capture.unpack(body, folder)
    return {**facts.collect(root, runner=runner), "tools": body["tools"]}


def test_every_capture_has_its_truth() -> None:
    assert {p.stem for p in (DATA / "hosts").glob("*.json")} == set(HOSTS)


@pytest.mark.parametrize("name", sorted(HOSTS))
def test_a_captured_host(name: str, tmp_path: Path) -> None:
    count, addresses, sysfs, (mode, cpus) = HOSTS[name]
    found = captured(name, tmp_path)
    assert found["gpu_errors"] == []
    assert [g["bus_id"] for g in found["gpus"]] == addresses
    assert [g["pci"]["numa_node"] for g in found["gpus"]] == sysfs
    for index, gpu in enumerate(found["gpus"]):
        assert gpu["name"] == "NVIDIA H200" and gpu["compute_capability"] == "9.0"
        assert gpu["memory_bytes"] == 143771 * 2**20
        assert (gpu["uuid"], gpu["driver"]) == (uuid(index), "580.159.04")
        assert gpu["nvml_nodes"] == [0] and gpu["topo_nodes"] == [0]
        assert gpu["pci"]["link"] == {"width": 16, "width_max": 16, "speed": 32, "speed_max": 32}
    answers = numa.decide(found)
    assert [(a["node"], a["source"]) for a in answers] == [(0, "trivial")] * count
    assert not any(a["conflict"] for a in answers)
    pin = gpupin.decide_gpus(found, count)
    assert (pin.mode, pin.cpus) == (mode, cpus)
    picture = topology.describe(found)
    names = [f"GPU{index}" for index in range(count)]
    rows = picture["matrix"]["rows"]
    assert {a: rows[a]["links"] for a in rows} == {
        a: {b: "X" if a == b else "NV18" for b in names} for a in names
    }
    if count > 1:
        granted = {a: {b: "OK" for b in names if a != b} for a in names}
        assert picture["p2p"] == {"r": granted, "w": granted}
    assert picture["warnings"] == ["inside a container (docker), parts of the host are hidden"]


def test_memory_that_came_after_the_boot_is_counted(tmp_path: Path) -> None:
    """The guest has 252 GiB; the files of its node speak of the 8 it booted with."""
    (node,) = captured("h200-2", tmp_path)["numa"]["nodes"]
    assert node["total_bytes"] == 263998500 * 1024
    assert node["available_bytes"] < 8351216 * 1024, "what vLLM counts before it starts on a CPU"


def test_the_peers_of_a_captured_host(tmp_path: Path) -> None:
    """What bench/peer_access.py measured on the two H200s, judged by hand: both ways work."""
    report = json.loads((DATA / "peers-h200-2.json").read_text())
    found = captured("h200-2", tmp_path)
    assert [d["pci"] for d in report["devices"]] == [g["bus_id"] for g in found["gpus"]]
    verdict = peers.decide(report, 2)
    assert verdict.verdict == "use" and verdict.custom_all_reduce and not verdict.warnings
    assert verdict.layers == {"granted": "yes", "moves": "yes", "collects": "yes"}
    assert nccl.for_peers(verdict) == []
    # Two ranks are proved, not four; and other cards are other cards.
    assert peers.decide(report, 4).verdict == "veto"
    # 18 links of 26.6 GB/s: a copy between neighbours cannot be faster than 478 GB/s.
    assert all(300 < copy["gb_s"] < 478 for copy in report["copies"])


def test_one_profile_for_two_cards_of_a_kind(tmp_path: Path) -> None:
    """`exl3ctl calibrate` on that host measured one card, and called the profile so."""
    ((key, gpu),) = calibration.wanted(captured("h200-2", tmp_path), "h200-trial")
    assert gpu["index"] == 0 and calibration.file_of(tmp_path, key).name == (
        "nvidia-h200-29e0a1ba.json"
    )
    assert key == {
        "name": "NVIDIA H200",
        "compute_capability": "9.0",
        "memory_gib": 140,
        "driver_major": "580",
        "software": "h200-trial",
    }


def test_samples_of_one_node_decide_nothing(tmp_path: Path) -> None:
    """Five repeats of an H200: latency in ns, GB/s under load and alone."""
    rows = [
        (1210.1, 94.373, 54.856),
        (1190.0, 96.668, 54.625),
        (1197.8, 97.738, 55.183),
        (1199.5, 97.401, 55.228),
        (1206.4, 96.582, 55.2),
    ]
    names = ("latency_ns", "loaded_gbs", "alone_gbs")
    samples = {uuid(0): {0: [dict(zip(names, row)) for row in rows]}}
    told = measure.decide(captured("h200-1", tmp_path), samples)[uuid(0)]
    assert (told["node"], told["why"]) == (None, "fewer than two nodes could be measured")
    assert told["figures"]["0"] == {"latency_ns": 1199.5, "loaded_gbs": 96.7, "alone_gbs": 55.2}
