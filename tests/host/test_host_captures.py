"""Whole hosts as `exl3ctl topology --save` wrote them; what is right for each, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exl3_host import capture, facts, gpupin, measure, numa, topology
from gpu_host import DATA, uuid

# By name: GPUs, their PCI addresses, what the kernel says of their node, the pin for all of them.
HOSTS = {
    # One H200 given to a virtual machine of 16 CPUs and one node.
    "h200-1": (1, ["0000:00:06.0"], [None], ("none", "0-15")),
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
    assert picture["warnings"] == ["inside a container (docker), parts of the host are hidden"]


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
