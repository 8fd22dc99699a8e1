"""The recipe for two DGX Sparks, from the facts of one to the command line of each host."""

import pytest
from exl3_host import nodes, plan
from exl3_host.instance import Instance
from exl3_host.recipe import load_recipe
from gpu_host import look
from known_hosts import known_host

ROCE = [
    {"device": "rocep1s0f1", "state": "4: ACTIVE", "gid_index": 3},
    {"device": "roceP2p1s0f1", "state": "4: ACTIVE", "gid_index": 3},
]


@pytest.fixture
def made(checkout, tmp_path) -> dict:
    """What each Spark plans for itself."""
    spark = {**look(tmp_path / "spark", known_host("f03")), "arch": "aarch64"}
    spark["gpus"][0]["compute_capability"] = "12.1"
    glm = load_recipe(checkout / "recipes" / "glm-5.3-flash-exl3-4bpw.yaml")
    asked = Instance("glm", "/var/lib/exl3", "/opt/exl3/.venv", nodes=2, runtime="native")
    return plan.make_plan(glm, spark, asked)


@pytest.mark.parametrize("rank", [0, 1])
def test_command_line_of_each_host(made, rank):
    link = {"interface": "enp1s0f1np1", "address": f"192.168.100.{rank + 1}", "rdma": ROCE,
            "reason": "enp1s0f1np1 is in 192.168.100.0/24"}  # fmt: skip
    out = nodes.split(made, nodes.Seat(rank, 2, link, "192.168.100.1"))
    argv, env = out["serve"]["argv"], out["serve"]["env"]
    server = argv[argv.index("--") + 1 :]
    assert server[:2] == ["/opt/exl3/.venv/bin/vllm", "serve"]
    wanted = {
        "--tensor-parallel-size": "2",
        "--nnodes": "2",
        "--node-rank": str(rank),
        "--master-addr": "192.168.100.1",
        "--master-port": "29601",
        "--distributed-executor-backend": "mp",
        "--gpu-memory-utilization": "0.75",
    }
    assert {flag: server[server.index(flag) + 1] for flag in wanted} == wanted
    assert ("--headless" in server) == (rank == 1)
    assert "--disable-custom-all-reduce" in server, "it works inside one host alone"
    assert env["VLLM_HOST_IP"] == f"192.168.100.{rank + 1}"
    assert env["NCCL_IB_HCA"] == "=rocep1s0f1,roceP2p1s0f1"
    assert env["NCCL_IB_GID_INDEX"] == "3" and env["NCCL_SOCKET_IFNAME"] == "=enp1s0f1np1"
    assert "NCCL_P2P_DISABLE" not in env, "one GPU a host has no peer there"
    assert [word for word in argv if "ray" in word.lower()] == []
