"""Captured hosts: what `topo -m` says, which node each GPU is on, which GPUs and CPUs are taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from exl3_host import choice, gpupin, numa, topo_matrix, topology
from gpu_host import DATA, GpuHost, PciDevice, look, uuid
from known_hosts import F01_MINORS, HOSTS, known_host

TOPO = sorted(p.stem for p in (DATA / "topo").glob("f*.txt"))


def read(name: str, online: str | None = None) -> dict:
    return topo_matrix.parse((DATA / "topo" / f"{name}.txt").read_text(), online)


def test_every_capture_is_a_known_host() -> None:
    assert sorted(HOSTS) == TOPO
    assert len(TOPO) == 18


@pytest.mark.parametrize("name", TOPO)
def test_nodes_printed_by_a_capture(name: str) -> None:
    known = HOSTS[name]
    table = read(name)
    assert topo_matrix.gpu_numbers(table) == list(range(known.gpus))
    rows = table["rows"]
    found = [rows.get(f"GPU{i}", {}).get("nodes") for i in range(known.gpus)]
    assert found == [[n] if isinstance(n, int) else n for n in known.printed]
    assert len(table["warnings"]) == known.warnings


def test_links_of_captures() -> None:
    f01, f15 = read("f01"), read("f15")
    assert f01["rows"]["GPU0"]["links"] == {
        "GPU0": "X", "GPU1": "PIX", "GPU2": "NODE", "GPU3": "NODE",
        "GPU4": "SYS", "GPU5": "SYS", "GPU6": "SYS", "GPU7": "SYS",
    }  # fmt: skip
    assert f15["devices"][8:] == [f"NIC{i}" for i in range(12)], "NIC8NIC9 is two names"
    assert [f15["rows"]["GPU5"]["links"][f"NIC{i}"] for i in range(6, 12)] == [
        "NODE", "NODE", "NODE", "PXB", "NODE", "NODE",
    ]  # fmt: skip
    assert read("f18")["devices"][4:] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert read("f02")["nics"] == {"NIC0": "rocep49s0"}
    assert read("f03")["nics"]["NIC3"] == "roceP2p1s0f1"
    assert [read("f12")["rows"][f"GPU{i}"]["memory_node"] for i in range(4)] == [2, 10, 18, 26]
    assert read("f14")["missing"] == ["GPU6", "GPU7"]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("f01", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("f05", [[0], [1], [2], [3], [4], [5], [6], [7]]),
        ("f06", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("f13", [[0, 1, 2], [3, 4, 5]]),
        ("f17", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_groups_worth_measuring(name: str, groups: list) -> None:
    assert topo_matrix.groups(read(name)) == groups


def test_damaged_tables_give_unknown_and_say_so() -> None:
    whole = (DATA / "topo" / "f20.txt").read_text()
    fused = whole.replace("48-95,144-191   1  ", "48-95,144-1911  ")
    table = topo_matrix.parse(fused)
    assert [table["rows"][f"GPU{i}"]["nodes"] for i in (0, 4)] == [[0], None]
    assert "row GPU4: 2 affinity cells for 3 columns" in table["warnings"]
    too_big = whole.replace("48-95,144-191 ", "48-95,144-1911")
    table = topo_matrix.parse(too_big, online="0-191")
    assert table["rows"]["GPU7"]["nodes"] is None
    assert "names CPUs that do not exist" in table["warnings"][0]
    short = whole.replace("GPU3    NV18    NV18", "GPU3    NV18    ")
    table = topo_matrix.parse(short)
    assert table["rows"]["GPU3"]["links"] == {}
    assert table["warnings"] == ["row GPU3 has not 8 links"]
    assert topo_matrix.link_between(table, 3, 0) == "NV18", "the other row still tells"
    long = topo_matrix.parse(whole.replace("GPU2    NV18", "GPU2    NV18    NV18"))
    assert long["warnings"] == ["row GPU2 has not 8 links"]
    glued = whole.replace("0               N/A", "0N/A")
    assert topo_matrix.parse(glued)["rows"]["GPU0"]["nodes"] == [0]
    half_lost = "[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity[0m\r\nGPU0\t X \tPHB\t0-3\t0\r\n"
    table = topo_matrix.parse(half_lost)
    assert (table["rows"]["GPU0"]["nodes"], table["missing"]) == ([0], ["GPU1"])
    for nothing in ("", "NVIDIA-SMI has failed", "GPU0  X  0-3"):
        assert topo_matrix.parse(nothing)["warnings"] == ["no line of the table begins with GPU0"]


def test_grants_between_peers() -> None:
    text = " \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tOK\tX\t\n\nLegend:\n\n  X    = Self\n"
    assert topo_matrix.parse_p2p(text) == {"GPU0": {"GPU1": "GNS"}, "GPU1": {"GPU0": "OK"}}
    assert topo_matrix.parse_p2p("no GPU here") == {}


@pytest.mark.parametrize("name", TOPO)
def test_node_of_each_gpu_where_firmware_is_silent(name: str, tmp_path: Path) -> None:
    known = HOSTS[name]
    found = look(tmp_path, known_host(name))
    answers = numa.decide(found)
    assert [a["node"] for a in answers] == known.decided
    assert answers[0]["source"] == known.source
    for answer in answers:
        if answer["node"] is None:
            assert "gpu_nodes" in answer["fix"] and answer["uuid"] in answer["fix"]


@pytest.mark.parametrize(("name", "tp"), [(n, t) for n in TOPO for t in HOSTS[n].tp])
def test_gpus_and_cpus_of_each_host(name: str, tp: int, tmp_path: Path) -> None:
    gpus, worst, mode, cpus, mems = HOSTS[name].tp[tp]
    found = look(tmp_path, known_host(name))
    chosen = choice.choose(found, numa.decide(found), tp)
    assert [g["index"] for g in chosen["gpus"]] == gpus
    assert chosen["worst_link"] == worst
    pin = gpupin.decide_gpus(found, tp)
    assert (pin.mode, pin.cpus, pin.mems) == (mode, cpus, mems), pin.reason
    assert pin.gpus == tuple(uuid(i) for i in gpus)
    if mode == "per_rank":
        assert pin.args == {"numa-bind": True, "numa-bind-nodes": list(pin.ranks)}
        assert pin.ranks == tuple(HOSTS[name].decided[i] for i in gpus)
        assert pin.env["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    else:
        assert pin.args == {}
    assert pin.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_host_whose_numbers_differ(tmp_path: Path) -> None:
    found = look(tmp_path, known_host("f01"))
    assert [g["minor"] for g in found["gpus"]] == [*F01_MINORS, None, None]
    assert found["cpus"]["offline"] == "239"
    # The matrix prints 192-238 for node 1: what lies behind the offline CPU is not lost.
    assert found["topology"]["matrix"]["rows"]["GPU4"]["cpus"] == "64-127,192-238"
    assert "240-255" in gpupin.decide_gpus(found, 8).cpus


def test_a_spark(tmp_path: Path) -> None:
    found = look(tmp_path, known_host("f03"))
    (gpu,) = found["gpus"]
    assert (gpu["bus_id"], gpu["memory_bytes"], gpu["coherent"]) == ("000f:01:00.0", None, True)
    assert gpu["pci"]["root"] == "pci000f:00"
    answer = topology.describe(found)
    assert answer["pins"][0]["reason"].endswith("only one node has CPUs, nothing to choose")


def test_host_memory_turns_the_preference_of_links_round(tmp_path: Path) -> None:
    found = look(tmp_path, known_host("f01"))
    nodes = numa.decide(found)
    direct = choice.choose(found, nodes, 2)
    through_host = choice.choose(found, nodes, 2, host_memory=True)
    assert [g["index"] for g in direct["gpus"]] == [0, 1]
    assert [g["index"] for g in through_host["gpus"]] == [0, 2], "not two cards of one uplink"
    assert through_host["nodes"] == [0]


def test_an_uneven_host_says_that_no_socket_is_enough(tmp_path: Path) -> None:
    found = look(tmp_path, known_host("f13"))
    chosen = choice.choose(found, numa.decide(found), 4)
    assert "no socket has 4 (socket 0: 3, socket 1: 3)" in chosen["why"]


def sysfs_host(nodes: dict[int, str], sockets: dict[int, int], on: list[int], name: str) -> GpuHost:
    """Cards whose nodes the firmware tells, every pair joined alike."""
    count = len(on)
    header = "\t" + "\t".join(f"GPU{i}" for i in range(count)) + "\n"
    rows = [
        f"GPU{i}\t" + "\t".join("X" if i == j else "NV12" for j in range(count))
        for i in range(count)
    ]
    devices = [
        PciDevice(f"0000:{16 + 16 * i:02x}:00.0", f"pci0000:{15 + 16 * i:02x}", [], node)
        for i, node in enumerate(on)
    ]
    topo = header + "\n".join(rows) + "\n"
    return GpuHost(nodes, sockets, devices, [name] * count, topo=topo)


EIGHT_NODES = {n: f"{16 * n}-{16 * n + 15}" for n in range(8)}
FOUR_A_SOCKET = {n: n // 4 for n in range(8)}


def test_eight_nodes_whose_cards_count_backwards(tmp_path: Path) -> None:
    """A100 hosts with four nodes a socket: cards 0 to 7 sit on nodes 3,2,1,0,7,6,5,4."""
    on = [3, 2, 1, 0, 7, 6, 5, 4]
    host = sysfs_host(EIGHT_NODES, FOUR_A_SOCKET, on, "NVIDIA A100")
    found = look(tmp_path, host)
    assert [a["node"] for a in numa.decide(found)] == on
    four = gpupin.decide_gpus(found, 4)
    assert (four.mode, four.mems, four.ranks) == ("container", "0-3", (3, 2, 1, 0))
    # One core of each node is reserved.
    assert four.cpus == "1-15,17-31,33-47,49-63"
    assert gpupin.decide_gpus(found, 8).args["numa-bind-nodes"] == on
    other = gpupin.decide_gpus(found, 4, taken=(uuid(0),))
    assert other.gpus == tuple(uuid(i) for i in (4, 5, 6, 7)), "whole on the other socket"


def test_four_cards_on_every_second_node(tmp_path: Path) -> None:
    """Dell XE8545: four cards on nodes 1, 3, 5 and 7."""
    host = sysfs_host(EIGHT_NODES, FOUR_A_SOCKET, [1, 3, 5, 7], "NVIDIA A100")
    found = look(tmp_path, host)
    two = gpupin.decide_gpus(found, 2)
    assert (two.mode, two.mems, two.gpus) == ("container", "0-3", (uuid(0), uuid(1)))
    four = gpupin.decide_gpus(found, 4)
    assert (four.mode, four.mems) == ("per_rank", "1,3,5,7")
    assert four.args["numa-bind-nodes"] == [1, 3, 5, 7]


def test_cpus_that_go_round_the_sockets(tmp_path: Path) -> None:
    """Four-socket Xeons number their CPUs 0,4,8,... and 1,5,9,...: no range is right."""
    nodes = {n: ",".join(str(c) for c in range(n, 64, 4)) for n in range(4)}
    found = look(tmp_path, sysfs_host(nodes, {n: n for n in range(4)}, [2, 2], "NVIDIA L40S"))
    pin = gpupin.decide_gpus(found, 2)
    assert pin.cpus == "6,10,14,18,22,26,30,34,38,42,46,50,54,58,62"
    assert pin.mems == "2"


def test_nine_nodes_of_which_one_has_cpus(tmp_path: Path) -> None:
    """GH200: node 0 has the CPUs, the others are the GPU's memory or empty."""
    nodes = {0: "0-71"} | dict.fromkeys(range(1, 9), "")
    found = look(tmp_path, sysfs_host(nodes, {0: 0}, [0], "NVIDIA GH200 480GB"))
    pin = gpupin.decide_gpus(found, 1)
    assert (pin.mode, pin.cpus) == ("none", "0-71")
    assert found["gpus"][0]["coherent"]
    assert numa.decide(found)[0]["source"] == "trivial"
