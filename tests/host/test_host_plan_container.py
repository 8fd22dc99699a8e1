"""Plans for containers on a CPU host: what is decided, what is refused, what stays the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from exl3_host import containers, plan, seccomp
from exl3_host.errors import HostError
from exl3_host.instance import Instance
from exl3_host.recipe import LoadedRecipe, parse_recipe

DIGEST = "sha256:" + "ab" * 32
RECIPE = """\
schema: exl3-recipe/1
name: boxed
model: {path: /srv/models/tiny}
profiles:
  cpu:
    match: {device: cpu}
    parallel: {tp: TP}
    memory: {max_model_len: 1024, kv_cache_gib: 1}
IMAGE
health:
  ready_timeout_s: 300
  smoke: {prompt: "2+2=", max_tokens: 4}
"""
IMAGE = f'image: {{name: exl3-fleet, digests: {{linux/amd64: "{DIGEST}"}}}}'


@pytest.fixture
def facts(checkout: Path) -> dict:
    return json.loads((checkout / "tests/host/data/facts-two-cores.json").read_text())


def made(facts: dict, tp: int = 1, recipe_image: str = IMAGE, **changes) -> dict:
    text = RECIPE.replace("TP", str(tp)).replace("IMAGE", recipe_image)
    loaded = LoadedRecipe(parse_recipe(text, "boxed.yaml", "boxed"), Path("boxed.yaml"), "0" * 64)
    settings = {"runtime": "docker", **changes}
    return plan.make_plan(loaded, facts, Instance("boxed", "/store", "/venv", **settings))


def test_the_body_that_the_engine_gets(facts):
    one = made(facts)
    body = containers.body(one, containers.Folders("/store/jit/abab", "/run/secrets"), 60)
    assert body["Image"] == f"exl3-fleet@{DIGEST}"
    assert body["Cmd"][:3] == ["vllm", "serve", "/models/tiny"]
    assert body["User"] == "2000:0" and body["StopTimeout"] == 60
    assert body["Healthcheck"] == {"StartPeriod": 300 * 10**9}
    host = body["HostConfig"]
    assert host["ShmSize"] == 1 << 30 and host["NetworkMode"] == "host"
    mounts = {one["Target"]: (one["Source"], one["ReadOnly"]) for one in host["Mounts"]}
    assert mounts == {
        "/models/tiny": ("/srv/models/tiny", True),
        "/cache": ("/store/jit/abab", False),
    }
    env = dict(entry.split("=", 1) for entry in body["Env"])
    assert env["HF_HUB_OFFLINE"] == "1" and env["VLLM_CACHE_ROOT"] == "/cache/vllm"
    assert not {"HF_TOKEN", "VLLM_API_KEY", "CUDA_VISIBLE_DEVICES"} & set(env)
    assert "DeviceRequests" not in host and "CpusetCpus" not in host


def test_behind_a_bridge_the_engine_publishes_the_port(facts):
    one = made(facts, container_network="bridge")
    argv = one["serve"]["argv"]
    assert argv[argv.index("--host") + 1] == "0.0.0.0"
    host = containers.body(one, containers.Folders("/c", "/s"), 60)["HostConfig"]
    assert host["PortBindings"] == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": "8000"}]}
    other = containers.on_another_port({"HostConfig": host, "Cmd": argv}, 9123)
    assert other["HostConfig"]["PortBindings"]["8000/tcp"][0]["HostPort"] == "9123"
    assert host["PortBindings"]["8000/tcp"][0]["HostPort"] == "8000", "the original is untouched"


def test_more_ranks_get_more_shared_memory_and_none_more_than_half_the_host(facts):
    assert made(facts, tp=2)["container"]["shm_gib"] == 4
    small = {**facts, "memory": {**facts["memory"], "total_bytes": 6 * 2**30}}
    with pytest.raises(HostError, match=r"shm_gib 4 is more than half of this host's 6\.0 GiB"):
        made(small, tp=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": "exl3-fleet:latest"}, "is not pinned: a tag moves"),
        ({"image": "exl3-fleet"}, "is not pinned"),
        ({"image": "exl3-fleet@sha256:1234"}, "is not pinned"),
        ({"runtime": "podman"}, "Runtime 'podman' is not known"),
        ({"container_network": "overlay"}, "network 'overlay' is not known"),
    ],
)
def test_what_is_refused(facts, changes, message):
    with pytest.raises(HostError, match=re.escape(message)):
        made(facts, **changes)


def test_a_recipe_without_an_image_for_this_host_is_refused(facts):
    with pytest.raises(HostError, match="names no image, and the runtime is docker"):
        made(facts, recipe_image="")
    with pytest.raises(HostError, match="no image for linux/arm64"):
        made({**facts, "arch": "aarch64"})
    with pytest.raises(HostError, match="There are no images for riscv64"):
        made({**facts, "arch": "riscv64"})


def test_instance_before_recipe_before_inventory(facts):
    assert made(facts, runtime=None)["runtime"] == "native"
    assert made(facts, runtime=None, default_runtime="docker")["runtime"] == "docker"
    asked = IMAGE + "\nruntime: docker"
    assert made(facts, recipe_image=asked, runtime=None)["runtime"] == "docker"
    assert made(facts, recipe_image=asked, runtime="native")["runtime"] == "native"


def test_the_hash_follows_what_runs_and_nothing_else(facts):
    base = made(facts)["config_hash"]
    assert made(facts)["config_hash"] == base
    assert made(facts, release="another venv")["config_hash"] == base
    assert made(facts, freed_gib=2.0)["config_hash"] == base
    for changes in (
        {"container_user": "1000:1000"},
        {"container_network": "bridge"},
        {"image": "exl3-fleet@sha256:" + "cd" * 32},
        {"port": 8001},
    ):
        assert made(facts, **changes)["config_hash"] != base, changes


def test_users_by_name_are_refused():
    with pytest.raises(HostError, match="exl3_container_user is 'exl3'"):
        containers._ids("exl3")


def test_the_filter_lets_memory_policy_pass_and_no_new_namespace():
    rules = seccomp.profile("linux/amd64")["syscalls"]
    allowed = {name for rule in rules for name in rule["names"] if rule["action"].endswith("ALLOW")}
    assert set(seccomp.MEMPOLICY) <= allowed
    kernel = {"mount", "bpf", "unshare", "setns", "keyctl", "init_module", "kexec_load", "reboot"}
    kernel |= {"userfaultfd", "io_uring_setup", "perf_event_open", "open_by_handle_at", "chroot"}
    assert not kernel & allowed
    (clone,) = [rule for rule in rules if rule["names"] == ["clone"]]
    # CLONE_NEWUSER is 0x10000000, CLONE_NEWNS 0x00020000, CLONE_NEWNET 0x40000000.
    for flag in (0x10000000, 0x00020000, 0x40000000):
        assert clone["args"][0]["value"] & flag and clone["args"][0]["valueTwo"] == 0
