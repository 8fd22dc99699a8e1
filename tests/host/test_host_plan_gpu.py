"""Plans for GPU hosts: real captures of `nvidia-smi topo -m`, expectations written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exl3_host import containers, plan, plan_gpu
from exl3_host.errors import HostError
from exl3_host.instance import Instance
from exl3_host.recipe import load_recipe
from gpu_host import look, uuid
from known_hosts import known_host

GLM = "recipes/glm-5.3-flash-exl3-4bpw.yaml"


@pytest.fixture
def glm(checkout: Path):
    return load_recipe(checkout / GLM)


@pytest.fixture
def eight_cards(tmp_path: Path) -> dict:
    """Two EPYC sockets, 8 RTX PRO 6000, CPU 239 offline; firmware says nothing about nodes."""
    return {**look(tmp_path / "host", known_host("f01")), "arch": "x86_64"}


def instance(**changes) -> Instance:
    return Instance("glm", "/var/lib/exl3", "/opt/exl3/.venv", **changes)


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def report_of(facts: dict, indices: list[int], state: str = "right") -> dict:
    """What the test of peer access prints where all is well, or the all-reduce was `state`."""
    devices = [
        {"index": n, "pci": facts["gpus"][n]["bus_id"], "name": facts["gpus"][n]["name"]}
        for n in indices
    ]
    sizes = [{"bytes": 1 << 20, "us": 90.0, "bus_gb_s": 11.6}]
    row = {"sizes": sizes, "detail": "no answer within 30 s"}
    pairs = [(a, b) for a in indices for b in indices if a != b]
    moved = {"state": "moves", "detail": "", "granted": True, "gbps": 50.0}
    return {
        "schema": "exl3-peers/1",
        "ranks": len(indices),
        "driver": "580.126.09",
        "nccl": "2.28",
        "backend": "nccl",
        "devices": devices,
        "granted": [[True] * len(indices)] * len(indices),
        "copies": [{"from": a, "to": b, **moved} for a, b in pairs],
        "collectives": [
            {"peer_access": "off", **row, "state": "right"},
            {"peer_access": "on", **row, "state": state},
        ],
    }


def test_four_of_eight_cards_in_a_container(glm, eight_cards):
    made = plan.make_plan(glm, eight_cards, instance())
    assert made["profile"] == "rtx_pro_6000_x4" and made["runtime"] == "docker"
    # f01: GPU 0 to 3 are on node 0; two cores per node stay with the host; 2 and 130 are twins.
    box = made["container"]
    assert box["gpus"] == [uuid(n) for n in range(4)] == made["pin"]["gpus"]
    assert (box["cpuset_cpus"], box["cpuset_mems"]) == ("2-63,130-191", "0")
    assert box["shm_gib"] == 16 and box["image"]["platform"] == "linux/amd64"
    argv = made["serve"]["argv"]
    assert argv[:2] == ["vllm", "serve"] and argv[2].startswith("/models/")
    assert option(argv, "--tensor-parallel-size") == "4"
    assert option(argv, "--gpu-memory-utilization") == "0.9"
    assert option(argv, "--kv-cache-dtype") == "auto"
    assert option(argv, "--attention-backend") == "CUSTOM"
    assert "CUDA_VISIBLE_DEVICES" not in made["serve"]["env"]
    body = containers.body(made, containers.Folders("/c", "/s"), 60)
    assert body["HostConfig"]["DeviceRequests"] == [
        {"Driver": "cdi", "DeviceIDs": [f"nvidia.com/gpu={uuid(n)}" for n in range(4)]}
    ]


def test_without_a_proof_peer_access_is_vetoed_for_all(glm, eight_cards):
    made = plan.make_plan(glm, eight_cards, instance())
    assert made["serve"]["env"]["NCCL_P2P_DISABLE"] == "1"
    assert "--disable-custom-all-reduce" in made["serve"]["argv"]
    (why,) = [d["why"] for d in made["decisions"] if d["what"] == "peer_access"]
    assert "no test was run" in why


def test_a_proof_for_these_cards_lifts_the_veto_and_one_for_others_does_not(glm, eight_cards):
    mine = plan_gpu.Known(peer_reports=(report_of(eight_cards, [0, 1, 2, 3]),))
    made = plan.make_plan(glm, eight_cards, instance(), known=mine)
    assert "NCCL_P2P_DISABLE" not in made["serve"]["env"]
    hung = plan_gpu.Known(peer_reports=(report_of(eight_cards, [0, 1, 2, 3], "hung"),))
    made = plan.make_plan(glm, eight_cards, instance(), known=hung)
    assert made["serve"]["env"]["NCCL_P2P_DISABLE"] == "1"
    others = plan_gpu.Known(peer_reports=(report_of(eight_cards, [4, 5, 6, 7]),))
    made = plan.make_plan(glm, eight_cards, instance(), known=others)
    assert made["serve"]["env"]["NCCL_P2P_DISABLE"] == "1"


def test_a_second_instance_gets_the_other_socket(glm, eight_cards):
    first = tuple(uuid(n) for n in range(4))
    made = plan.make_plan(glm, eight_cards, instance(taken_gpus=first))
    assert made["pin"]["gpus"] == [uuid(n) for n in range(4, 8)]
    # CPU 239 is offline: it must not be in the set, whatever nvidia-smi prints.
    assert made["container"]["cpuset_cpus"] == "66-127,194-238,240-255"
    assert made["container"]["cpuset_mems"] == "1"


def test_a_card_claimed_twice_is_refused(glm, eight_cards):
    with pytest.raises(HostError, match=r"(?i)taken|another instance|in use"):
        taken = (uuid(0),)
        wanted = tuple(uuid(n) for n in range(4))
        plan.make_plan(glm, eight_cards, instance(gpus=wanted, taken_gpus=taken))


def test_a_card_that_is_not_there_is_refused(glm, eight_cards):
    with pytest.raises(HostError, match="GPU-ffffffff"):
        strange = ("GPU-ffffffff-0000-0000-0000-000000000000", *(uuid(n) for n in range(3)))
        plan.make_plan(glm, eight_cards, instance(gpus=strange))


def test_natively_the_process_is_told_its_cards_by_number(glm, eight_cards):
    made = plan.make_plan(glm, eight_cards, instance(runtime="native"))
    env = made["serve"]["env"]
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" and env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert made["container"] is None and made["venv"]["vllm"] == "vllm==0.33.0"
    assert made["serve"]["argv"][0] == "/opt/exl3/.venv/bin/vllm"


def test_two_sparks_need_two_hosts(glm, tmp_path):
    spark = {**look(tmp_path / "spark", known_host("f03")), "arch": "aarch64"}
    spark["gpus"][0]["compute_capability"] = "12.1"
    with pytest.raises(HostError, match=r"dgx_spark_x2: is for 2 host\(s\), and 1 serve"):
        plan.make_plan(glm, spark, instance())
    made = plan.make_plan(glm, spark, instance(nodes=2))
    assert made["profile"] == "dgx_spark_x2" and made["container"]["rdma"]
    assert made["container"]["image"]["platform"] == "linux/arm64"
    # Unified memory: nothing is bound.
    assert made["container"]["cpuset_mems"] is None


def test_each_profile_that_was_dropped_says_why(glm, tmp_path):
    small = known_host("f01")
    small.memory = "32607"
    facts = {**look(tmp_path / "host", small), "arch": "x86_64"}
    with pytest.raises(HostError) as caught:
        plan.make_plan(glm, facts, instance())
    said = str(caught.value)
    assert "rtx_pro_6000_x4: needs 4 GPU(s) of compute capability 12.0" in said
    assert "8 with 31.8 GiB, less than 94" in said


def test_the_plan_is_data_and_repeats_itself(glm, eight_cards):
    first, second = (plan.make_plan(glm, eight_cards, instance()) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
