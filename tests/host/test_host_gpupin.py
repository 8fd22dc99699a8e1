"""Pins of GPU servers: modes, memory, sizes, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from exl3_host import gpupin
from exl3_host.errors import HostError
from gpu_host import look, ok, query, uuid
from known_hosts import known_host
from test_host_gpus import two_cards

from exl3_host import cpus as cpu_lists  # isort: skip
from exl3_host import gpus as gpu_facts  # isort: skip


@pytest.fixture(scope="module")
def epyc(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Eight cards on two sockets of 64 cores, CPU 239 offline."""
    found = look(tmp_path_factory.mktemp("f01"), known_host("f01"))
    found["tools"]["numactl"] = "/usr/bin/numactl"
    return found


def test_a_native_server_is_bound_by_numactl(epyc: dict) -> None:
    pin = gpupin.decide_gpus(epyc, 4, runtime="native")
    assert pin.mode == "container"
    assert pin.numactl == (
        "/usr/bin/numactl",
        "--physcpubind=2-63,130-191",
        "--membind=0",
    )
    over_both = gpupin.decide_gpus(epyc, 8, runtime="native", smt="drop", reserve=4)
    # vLLM binds its workers to whole nodes itself, so nothing can be kept back without a cpuset.
    assert (over_both.mode, over_both.cpus) == ("per_rank", "0-238,240-255")
    assert over_both.numactl == ("/usr/bin/numactl", "--physcpubind=0-238,240-255")


def test_without_numactl_a_native_server_is_not_pinned(tmp_path: Path) -> None:
    found = look(tmp_path, known_host("f20"))
    pin = gpupin.decide_gpus(found, 4, runtime="native")
    assert (pin.mode, pin.reason.split(". ", 1)[1]) == (
        "none",
        "numactl is not installed, so nothing can be pinned",
    )
    with pytest.raises(HostError, match=r"'per_rank' is not possible: numactl is not installed"):
        gpupin.decide_gpus(found, 4, mode="per_rank", runtime="native")


def test_smt_and_reserve(epyc: dict) -> None:
    assert gpupin.decide_gpus(epyc, 4, smt="drop").cpus == "2-63"
    assert gpupin.decide_gpus(epyc, 4, reserve=0).cpus == "0-63,128-191"
    assert gpupin.decide_gpus(epyc, 4, reserve=8, smt="drop").cpus == "8-63"
    # Core 111 of node 1 has lost its sibling 239; the core itself stays.
    pin = gpupin.decide_gpus(epyc, 4, wanted=[uuid(i) for i in (4, 5, 6, 7)])
    assert pin.cpus == "66-127,194-238,240-255"


def test_a_mode_that_is_asked_for(epyc: dict) -> None:
    assert gpupin.decide_gpus(epyc, 4, mode="none").mode == "none"
    forced = gpupin.decide_gpus(epyc, 4, mode="per_rank")
    assert forced.args["numa-bind-nodes"] == [0, 0, 0, 0]
    wide = gpupin.decide_gpus(epyc, 8, mode="container")
    assert (wide.mode, wide.mems, wide.args) == ("container", "0-1", {})
    with pytest.raises(HostError, match="Pinning 'hard' is not known"):
        gpupin.decide_gpus(epyc, 4, mode="hard")


def test_sockets_without_peer_access_are_warned_about(epyc: dict) -> None:
    pin = gpupin.decide_gpus(epyc, 8, peer_access=False)
    assert "one instance per socket" in pin.warnings[0]
    assert gpupin.decide_gpus(epyc, 8, peer_access=True).warnings == ()


def test_coherent_gpus_never_lose_memory_nodes(tmp_path: Path) -> None:
    found = look(tmp_path, known_host("f12"))
    for mode in ("auto", "container", "per_rank"):
        pin = gpupin.decide_gpus(found, 4, mode=mode)
        assert (pin.mode, pin.mems, pin.args) == ("container", None, {})
    assert "not used on coherent GPUs" in pin.warnings[0]
    native = {**found, "tools": {**found["tools"], "numactl": "/usr/bin/numactl"}}
    pin = gpupin.decide_gpus(native, 4, runtime="native")
    assert pin.numactl == ("/usr/bin/numactl", "--physcpubind=2-71,74-143")


def test_a_node_that_may_run_full_is_not_bound(epyc: dict) -> None:
    # A node has 256 GiB, 80 % are 204.8; 8 are slack.
    assert gpupin.decide_gpus(epyc, 4, shm_gib=32, rank_gib=41).mems == "0"
    pin = gpupin.decide_gpus(epyc, 4, shm_gib=32, rank_gib=42)
    assert (pin.mode, pin.mems) == ("container", None)
    # Ranks that are bound by vLLM are bound hard, whatever is planned: that is said.
    assert "memory may run short" in gpupin.decide_gpus(epyc, 8, rank_gib=60).warnings[0]


def test_a_small_node_is_not_bound(tmp_path: Path) -> None:
    found = look(tmp_path, two_cards(default_mib=16384))
    pin = gpupin.decide_gpus(found, 1, shm_gib=10)
    assert (pin.mode, pin.mems) == ("container", None)
    assert "14.0 GiB of host memory are needed and node 0 has 16.0 GiB" in pin.reason
    assert gpupin.decide_gpus(found, 1, shm_gib=1).mems == "0"


def test_the_cgroup_and_the_affinity_limit_the_pin(tmp_path: Path) -> None:
    found = look(tmp_path / "a", two_cards(cpus_allowed="4-31"))
    assert gpupin.decide_gpus(found, 1, reserve=0).cpus == "4-15"
    found = look(tmp_path / "b", two_cards(mems_allowed="1"))
    pin = gpupin.decide_gpus(found, 1)
    assert pin.mode == "none"
    assert "node 0 is where the GPUs are, but it offers this process no CPUs" in pin.reason


def test_too_few_cpus_are_not_pinned(tmp_path: Path) -> None:
    found = look(tmp_path, two_cards(nodes={0: "0-3", 1: "4-7"}))
    pin = gpupin.decide_gpus(found, 1)
    assert pin.mode == "none"
    assert "node 0 leaves 4 CPUs (0-3), and 1 ranks need 6" in pin.reason
    with pytest.raises(HostError, match="'container' is not possible: node 0 leaves 4 CPUs"):
        gpupin.decide_gpus(found, 1, mode="container")


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"tp": 9}, r"Tensor parallelism 9 needs 9 GPUs; 8 of 8 are free"),
        (
            {"tp": 6, "taken": (uuid(0), uuid(1), uuid(2))},
            r"needs 6 GPUs; 5 of 8 are free \(3 claimed by other instances\)",
        ),
        ({"tp": 1, "wanted": ["GPU-77"]}, r"GPU GPU-77 is not in this host"),
        (
            {"tp": 1, "wanted": [uuid(1)[:12]]},
            r"is not in this host.\nName GPUs by their full UUID",
        ),
        ({"tp": 1, "wanted": ["MIG-1"]}, r"MIG-1 is a part of a GPU in MIG mode"),
        (
            {"tp": 1, "wanted": [uuid(1)], "taken": (uuid(1),)},
            r"is already claimed by another instance",
        ),
    ],
)
def test_gpus_that_are_not_to_be_had(epyc: dict, wish: dict, message: str) -> None:
    with pytest.raises(HostError, match=message):
        gpupin.decide_gpus(epyc, **wish)


def test_mixed_gpus_and_mig(tmp_path: Path) -> None:
    mixed = look(tmp_path / "a", two_cards(names=["NVIDIA A", "NVIDIA B"]))
    with pytest.raises(HostError, match="of different kinds: 1 x NVIDIA A, 1 x NVIDIA B"):
        gpupin.decide_gpus(mixed, 2)
    state = query(("index", *gpu_facts.STATE))
    rows = ok("0, Enabled, 400.00, 16, 16, 0, Enabled\n1, Disabled, 400.00, 16, 16, 0, Enabled\n")
    split = look(tmp_path / "b", two_cards(answers={state: rows, "nvidia-smi -L": ok("")}))
    with pytest.raises(HostError, match=r"1 of 2 are free \(1 in MIG mode"):
        gpupin.decide_gpus(split, 2)
    assert gpupin.decide_gpus(split, 1).gpus == (uuid(1),)


def test_a_measured_socket_is_pinned_as_a_socket(tmp_path: Path) -> None:
    found = look(tmp_path, known_host("f14"))
    socket = {"nodes": [4, 5, 6, 7], "gap": 0.3, "min_gap": 0.1, "why": "measured"}
    pin = gpupin.decide_gpus(found, 1, wanted=[uuid(6)], measured={uuid(6): socket})
    assert (pin.mode, pin.mems) == ("container", "4-7")
    # 16 cores with siblings on each of four nodes, one core of each reserved.
    assert len(cpu_lists.parse_list(pin.cpus)) == 4 * 15 * 2
    with pytest.raises(HostError, match="needs one node per GPU"):
        gpupin.decide_gpus(found, 1, mode="per_rank", wanted=[uuid(6)], measured={uuid(6): socket})


def test_unknown_is_refused_where_a_pin_is_asked_for(tmp_path: Path) -> None:
    found = look(tmp_path, known_host("f06"))
    pin = gpupin.decide_gpus(found, 4)
    assert "hides the sockets" in pin.reason
    assert "gpu_nodes" in pin.warnings[0]
    with pytest.raises(HostError, match="'container' is not possible: GPU 0: topo names 2 nodes"):
        gpupin.decide_gpus(found, 4, mode="container")


def test_a_pin_is_json(epyc: dict) -> None:
    import json

    body = gpupin.decide_gpus(epyc, 8).as_dict()
    assert json.loads(json.dumps(body)) == body
    assert body["nodes"] == [0, 1] and body["ranks"] == [0, 0, 0, 0, 1, 1, 1, 1]
