"""Who is believed about the node of a GPU, and what a measurement must show to be believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exl3_host import measure, numa
from exl3_host.errors import HostError
from gpu_host import GpuHost, PciDevice, look, ok, uuid
from known_hosts import HOSTS, known_host


def host(**changes: object) -> GpuHost:
    """One card on two sockets; by default nobody knows where."""
    device = {k: changes.pop(k) for k in list(changes) if k in PciDevice.__dataclass_fields__}
    one = GpuHost(
        nodes={0: "0-15", 1: "16-31"},
        sockets={0: 0, 1: 1},
        devices=[PciDevice("0000:81:00.0", "pci0000:80", ["0000:80:01.0"], **device)],
        names=["NVIDIA RTX PRO 6000 Blackwell"],
    )
    for name, value in changes.items():
        setattr(one, name, value)
    return one


def topo(node: str) -> str:
    return f"\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-31\t{node}\t\tN/A\n"


def nvml(nodes: list[int]) -> dict[str, dict]:
    return {"nvml": ok(json.dumps([{"uuid": uuid(0), "nodes": nodes, "memory_node": None}]))}


def decide(tmp_path: Path, given: GpuHost, **more: object) -> dict:
    (answer,) = numa.decide(look(tmp_path, given), **more)
    return answer


@pytest.mark.parametrize(
    ("given", "node", "source", "confidence"),
    [
        ({"numa": 1}, 1, "sysfs", "high"),
        ({"answers": nvml([1])}, 1, "nvml", "high"),
        ({"topo": topo("1")}, 1, "topo", "high"),
        ({"topo": topo("1,5-7")}, 1, "topo", "high"),
        ({"bridge_numa": [1]}, 1, "bridge", "medium"),
        ({"root_cpus": "16-31"}, 1, "bridge", "medium"),
        # All CPUs near the root bus say nothing, nor does a part of one node.
        ({"root_cpus": "0-31"}, None, "unknown", "none"),
        ({"root_cpus": "16-23"}, None, "unknown", "none"),
        ({"firmware_path": "\\_SB_.S1D2"}, None, "unknown", "none"),
        ({"answers": nvml([0, 1])}, None, "unknown", "none"),
        ({"topo": topo("0-1")}, None, "unknown", "none"),
        ({}, None, "unknown", "none"),
    ],
)
def test_each_source_alone(
    tmp_path: Path, given: dict, node: int | None, source: str, confidence: str
) -> None:
    answer = decide(tmp_path, host(**given))
    assert (answer["node"], answer["source"], answer["confidence"]) == (node, source, confidence)


def test_the_order_of_sources_that_agree(tmp_path: Path) -> None:
    given = host(numa=1, topo=topo("1"), answers=nvml([1]), root_cpus="16-31")
    answer = decide(tmp_path, given)
    assert answer["source"] == "sysfs"
    assert [s["source"] for s in answer["sources"]] == ["sysfs", "nvml", "topo", "bridge"]
    assert not answer["conflict"]


def test_hints_are_told_and_not_believed(tmp_path: Path) -> None:
    given = host(firmware_path="\\_SB_.S1D2")
    card = PciDevice("0000:82:00.0", "pci0000:80", [], 1, kind="0x020000", vendor="0x15b3")
    given.devices.append(card)
    answer = decide(tmp_path, given)
    assert answer["node"] is None
    hints = [s for s in answer["sources"] if s["source"] == "hint"]
    assert [h["nodes"] for h in hints] == [[1], [1]]
    assert "other devices of pci0000:80" in hints[1]["note"]


def test_sources_that_disagree_are_a_conflict(tmp_path: Path) -> None:
    answer = decide(tmp_path, host(numa=0, bridge_numa=[-1], answers=nvml([1])))
    assert (answer["node"], answer["source"], answer["conflict"]) == (None, "conflict", True)
    assert answer["why"] == "sources disagree: sysfs says 0, nvml says 1"
    assert "--measure" in answer["fix"]


def probe(node: int, gap: float) -> dict:
    return {uuid(0): {"node": node, "nodes": [node], "gap": gap, "min_gap": 0.1, "why": "told"}}


def test_a_measurement_settles_a_conflict(tmp_path: Path) -> None:
    given = host(bridge_numa=[0], answers=nvml([1]))
    answer = decide(tmp_path, given, measured=probe(1, 0.12))
    assert (answer["node"], answer["source"]) == (1, "measured")


@pytest.mark.parametrize(("gap", "node"), [(0.19, None), (0.21, 1)])
def test_against_firmware_a_measurement_has_to_be_twice_as_clear(
    tmp_path: Path, gap: float, node: int | None
) -> None:
    answer = decide(tmp_path, host(numa=0), measured=probe(1, gap))
    assert answer["node"] == node
    assert "firmware bug" in answer["why"]


def test_the_inventory_wins_over_everything(tmp_path: Path) -> None:
    answer = decide(tmp_path, host(numa=0), manual={uuid(0): 1})
    assert (answer["node"], answer["source"], answer["confidence"]) == (1, "manual", "certain")
    by_address = decide(tmp_path / "b", host(), manual={"0000:81:00.0": "0"})
    assert by_address["node"] == 0


@pytest.mark.parametrize(
    ("manual", "message"),
    [
        ({"GPU-9": 0}, r"names the GPU GPU-9, which this host does not have"),
        ({uuid(0): 7}, r"on node 7; nodes with CPUs here are 0-1"),
        ({uuid(0): "-1"}, r"on node -1"),
        ({uuid(0): True}, r"on node True"),
    ],
)
def test_a_wrong_map_is_refused(tmp_path: Path, manual: dict, message: str) -> None:
    with pytest.raises(HostError, match=message):
        decide(tmp_path, host(), manual=manual)


def test_a_container_that_hides_the_device(tmp_path: Path) -> None:
    given = host()
    found = look(tmp_path, given)
    found["gpus"][0]["pci"] = None
    (answer,) = numa.decide(found)
    assert answer["why"].startswith("0000:81:00.0 is not in this host's sysfs")


def test_nodes_without_cpus_are_the_gpus_own_memory(tmp_path: Path) -> None:
    given = host(nodes={0: "0-15", 1: "16-31", 2: ""}, numa=2)
    answer = decide(tmp_path, given)
    assert answer["node"] is None
    assert "names a node without CPUs" in answer["why"]


def test_unknown_says_what_to_write_into_the_inventory(tmp_path: Path) -> None:
    answer = decide(tmp_path, host())
    assert answer["fix"] == (
        "Measure it (exl3ctl topology --measure), or tell it in the inventory: "
        f"gpu_nodes: {{{uuid(0)}: NODE}} with NODE one of 0-1"
    )


def repeats(latency: list[float], loaded: list[float] | None = None) -> list[dict]:
    rates = loaded or [40.0] * len(latency)
    return [
        {"latency_ns": lat, "loaded_gbs": rate, "alone_gbs": 25.0}
        for lat, rate in zip(latency, rates)
    ]


def told(tmp_path: Path, samples: dict, name: str = "") -> dict:
    found = look(tmp_path, known_host(name) if name else host())
    return measure.decide(found, {uuid(0): samples})[uuid(0)]


# Figures as an EPYC host with two sockets gives them: one hop costs 300 ns of 900.
NEAR, FAR = [905.0, 900.0, 910.0, 898.0, 902.0], [1210.0, 1200.0, 1195.0, 1205.0, 1201.0]


def test_latency_tells_the_node(tmp_path: Path) -> None:
    answer = told(tmp_path, {0: repeats(FAR), 1: repeats(NEAR)})
    assert (answer["node"], answer["nodes"]) == (1, [1])
    assert answer["gap"] == pytest.approx(1201 / 902 - 1)
    assert answer["why"] == "node 1 has 33% better latency than node 0, 5 of 5 repeats"


def test_bandwidth_under_load_tells_it_where_latency_does_not(tmp_path: Path) -> None:
    flat = [900.0] * 5
    samples = {0: repeats(flat, [52.0] * 5), 1: repeats(flat, [39.0] * 5)}
    answer = told(tmp_path, samples)
    assert answer["node"] == 0
    assert "better loaded bandwidth" in answer["why"]


@pytest.mark.parametrize(
    ("near", "far", "why"),
    [
        ([900.0] * 5, [950.0] * 5, "less than the 10% that tell nodes apart"),
        ([900, 1300, 910, 1310, 900], [1200, 905, 1200, 900, 1200], "wins only 3 of 5 repeats"),
        ([900, 980, 820, 990, 810], [1010, 1100, 1005, 1090, 1000], "repeats scatter by"),
        ([900.0] * 2, [1200.0] * 2, "only 2 repeats are usable"),
    ],
)
def test_what_is_not_clear_stays_unknown(
    tmp_path: Path, near: list[float], far: list[float], why: str
) -> None:
    answer = told(tmp_path, {0: repeats(near), 1: repeats(far)})
    assert answer["node"] is None and answer["nodes"] == []
    assert why in answer["why"]


def test_four_nodes_of_a_socket_that_tie_are_the_socket(tmp_path: Path) -> None:
    samples = {n: repeats([900.0 + n] * 5) for n in range(4)}
    samples |= {n: repeats([1200.0 + n] * 5) for n in range(4, 8)}
    answer = told(tmp_path, samples, "f14")
    assert (answer["node"], answer["nodes"]) == (None, [0, 1, 2, 3])
    # Medians 901.5 and 1205.5 ns.
    assert "node 0,1,2,3 has 34% better latency than node 4,5,6,7" in answer["why"]


def test_samples_of_a_file_have_text_as_node_numbers(tmp_path: Path) -> None:
    samples = json.loads(json.dumps({0: repeats(FAR), 1: repeats(NEAR)}))
    assert told(tmp_path, samples)["node"] == 1


def test_a_result_is_kept_for_this_very_host(tmp_path: Path) -> None:
    found = look(tmp_path / "host", known_host("f01"))
    file = tmp_path / "topology" / "gpu-nodes.json"
    assert measure.load(file, found) is None
    measure.save(file, found, probe(1, 0.3))
    assert measure.load(file, found) == probe(1, 0.3)
    changes = {"driver": "590.1", "bus_id": "0000:99:00.0"}
    for key, value in changes.items():
        other = json.loads(json.dumps(found))
        other["gpus"][0][key] = value
        assert measure.load(file, other) is None, f"a changed {key} makes it stale"
    other = json.loads(json.dumps(found))
    other["board"]["firmware"] = "2.0"
    assert measure.load(file, other) is None
    file.write_text("{")
    assert measure.load(file, found) is None


def test_nodes_that_are_nearly_full_are_not_measured(tmp_path: Path) -> None:
    given = host(nodes={0: "0-15", 1: "16-31", 2: ""}, node_mib={1: 1024})
    good, dropped = measure.candidates(look(tmp_path, given))
    assert good == [0]
    assert dropped == ["node 1 has 0.9 GiB free, 2.0 are needed"]


def test_sockets_of_known_hosts(tmp_path: Path) -> None:
    found = look(tmp_path, known_host("f14"))
    assert numa.sockets(found) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
    assert len(HOSTS["f14"].cpus) == 8
