"""Facts are read from the files of known hosts, and from this one."""

import os
import platform
from pathlib import Path

import pytest
from exl3_host import cpus as cpu_lists
from exl3_host import facts, gpus
from host_files import (
    GIB,
    HostFiles,
    NodeFiles,
    two_small_nodes,
    two_sockets_one_cpu_offline,
    write_host,
)


def test_this_host_agrees_with_the_operating_system(tmp_path: Path) -> None:
    found = facts.collect(store=tmp_path)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found["memory"]["total_bytes"] == pages
    assert 0 < found["memory"]["available_bytes"] <= pages
    assert len(cpu_lists.parse_list(found["cpus"]["online"])) == os.sysconf("SC_NPROCESSORS_ONLN")
    assert set(cpu_lists.parse_list(found["cpus"]["affinity"])) == os.sched_getaffinity(0)
    assert set(cpu_lists.usable(found)) <= os.sched_getaffinity(0)
    assert found["arch"] == platform.machine()
    assert found["os"]["kernel"] == platform.release()
    disk = os.statvfs(tmp_path)
    assert found["disk"]["total_bytes"] == disk.f_frsize * disk.f_blocks


def test_the_disk_of_a_store_that_does_not_exist_yet(tmp_path: Path) -> None:
    found = facts.disk(tmp_path / "not" / "yet")
    assert found["path"] == str(tmp_path / "not" / "yet")
    assert found["total_bytes"] == facts.disk(tmp_path)["total_bytes"]


def test_two_sockets_with_an_offline_cpu(tmp_path: Path) -> None:
    found = facts.collect(write_host(tmp_path, two_sockets_one_cpu_offline()))
    cpus = found["cpus"]
    assert cpus["online"] == "0-238,240-255"
    assert (cpus["packages"], cpus["cores"], cpus["threads_per_core"]) == (2, 128, 2)
    # Core 111 has lost its sibling and still counts as a core.
    assert "111" in cpus["siblings"]
    assert cpus["affinity"] == "0-238,240-255", "the raw list names a CPU that does not exist"
    first, second = found["numa"]["nodes"]
    assert second["cpus"] == "64-127,192-238,240-255"
    assert second["distances"] == [32, 10]
    assert first["total_bytes"] == 773676 * 2**20
    nodes = cpu_lists.cpu_nodes(found)
    assert {n: len(c) for n, c in nodes.items()} == {0: 128, 1: 127}
    assert found["os"] == {"id": "debian", "version": "12", "kernel": "6.1.0-57-amd64"}


def test_facts_of_another_host_hold_nothing_of_this_one(tmp_path: Path) -> None:
    found = facts.collect(write_host(tmp_path, two_small_nodes()))
    assert found["arch"] is None
    assert found["gpus"] == []
    assert all(found["tools"][name] is None for name in facts.TOOLS)
    assert found["tools"]["systemd_running"] is False
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert facts.collect(tmp_path)["tools"]["systemd_running"] is True


def test_available_memory_of_a_node_is_what_vllm_counts(tmp_path: Path) -> None:
    node = NodeFiles("0", 1000, 100, active_file_kb=20, inactive_file_kb=3, reclaimable_kb=4)
    host = HostFiles([0], {0: node}, "0", has_cpu="0", has_memory="0")
    found = facts.collect(write_host(tmp_path, host))
    assert found["numa"]["nodes"][0]["available_bytes"] == 127 * 1024


def test_a_node_without_cpus_and_a_node_without_memory(tmp_path: Path) -> None:
    host = two_small_nodes(has_cpu="0-1", has_memory="0,2")
    host.nodes[1] = NodeFiles("4-7", 0, 0)
    host.nodes[2] = NodeFiles("", 96 * GIB // 1024, 90 * GIB // 1024)
    found = facts.collect(write_host(tmp_path, host))
    seen = [(n["id"], n["has_cpu"], n["has_memory"]) for n in found["numa"]["nodes"]]
    assert seen == [(0, True, True), (1, True, False), (2, False, True)]
    assert cpu_lists.cpu_nodes(found) == {0: [0, 1, 2, 3]}


def test_a_host_without_node_information_is_one_node(tmp_path: Path) -> None:
    host = HostFiles([0, 1], {}, "0-1")
    root = write_host(tmp_path, host)
    (root / "sys/devices/system/node/online").unlink()
    found = facts.collect(root)
    assert found["numa"] == {"nodes": [], "allowed": None}
    assert cpu_lists.cpu_nodes(found) == {0: [0, 1]}


def test_affinity_cgroup_and_isolation_all_narrow_the_cpus(tmp_path: Path) -> None:
    host = two_small_nodes(
        isolated="7",
        cpus_allowed="1-7",
        cgroup="0::/pod\n",
        files={
            "sys/fs/cgroup/cgroup.controllers": "cpuset memory",
            "sys/fs/cgroup/pod/cpuset.cpus.effective": "0-2,6-7",
            "sys/fs/cgroup/pod/cpuset.mems.effective": "1",
        },
    )
    found = facts.collect(write_host(tmp_path, host))
    assert found["cpus"]["cgroup"] == "0-2,6-7"
    assert cpu_lists.usable(found) == [1, 2, 6]
    assert found["numa"]["allowed"] == "1"
    assert cpu_lists.cpu_nodes(found) == {1: [6]}, "node 0 may not be used for memory"


def _memory_with(tmp_path: Path, cgroup: str, files: dict[str, str]) -> dict:
    host = two_small_nodes(cgroup=cgroup, files=files)
    return facts.collect(write_host(tmp_path, host))["memory"]


def test_cgroup_v2_limit_without_the_cache_it_can_drop(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/user.slice/app.scope"
    memory = _memory_with(
        tmp_path,
        "0::/user.slice/app.scope\n",
        {
            "sys/fs/cgroup/cgroup.controllers": "memory",
            f"{base}/memory.max": str(8 * GIB),
            f"{base}/memory.current": str(3 * GIB),
            f"{base}/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file 5\n",
        },
    )
    assert memory["cgroup_limit_bytes"] == 8 * GIB
    assert memory["cgroup_used_bytes"] == 2 * GIB
    assert memory["available_bytes"] == 6 * GIB


def test_the_tightest_cgroup_on_the_way_up_counts(tmp_path: Path) -> None:
    memory = _memory_with(
        tmp_path,
        "0::/outer/inner\n",
        {
            "sys/fs/cgroup/cgroup.controllers": "memory",
            "sys/fs/cgroup/outer/memory.max": str(10 * GIB),
            "sys/fs/cgroup/outer/memory.current": str(9 * GIB),
            "sys/fs/cgroup/outer/inner/memory.max": str(4 * GIB),
            "sys/fs/cgroup/outer/inner/memory.current": str(GIB),
        },
    )
    assert memory["cgroup_limit_bytes"] == 10 * GIB
    assert memory["available_bytes"] == GIB


@pytest.mark.parametrize("mounted", [True, False])
def test_cgroup_v1_limit_also_inside_a_container(tmp_path: Path, mounted: bool) -> None:
    # A container sees its own cgroup at the mount's root, under a path that names the host's.
    base = "sys/fs/cgroup/memory" + ("/docker/abc" if mounted else "")
    memory = _memory_with(
        tmp_path,
        "4:memory:/docker/abc\n3:cpuset:/\n1:name=systemd:/\n",
        {
            f"{base}/memory.limit_in_bytes": str(5 * GIB),
            f"{base}/memory.usage_in_bytes": str(2 * GIB),
            f"{base}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
        },
    )
    assert memory["cgroup_limit_bytes"] == 5 * GIB
    assert memory["available_bytes"] == 4 * GIB


def test_a_cgroup_outside_the_namespace_is_not_looked_for(tmp_path: Path) -> None:
    memory = _memory_with(
        tmp_path,
        "0::/../elsewhere\n",
        {
            "sys/fs/cgroup/cgroup.controllers": "memory",
            "sys/fs/elsewhere/memory.max": str(GIB),
            "sys/fs/cgroup/memory.max": str(7 * GIB),
            "sys/fs/cgroup/memory.current": "0",
        },
    )
    assert memory["cgroup_limit_bytes"] == 7 * GIB


@pytest.mark.parametrize("text", ["max", "9223372036854771712"])
def test_no_limit_is_no_limit(tmp_path: Path, text: str) -> None:
    memory = _memory_with(
        tmp_path,
        "0::/\n4:memory:/\n",
        {
            "sys/fs/cgroup/cgroup.controllers": "memory",
            "sys/fs/cgroup/memory.max": text,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": text,
        },
    )
    assert memory["cgroup_limit_bytes"] is None
    assert memory["available_bytes"] == 20 * GIB


def test_arm_features(tmp_path: Path) -> None:
    host = HostFiles([0], {}, "0")
    root = write_host(tmp_path, host)
    (root / "proc/cpuinfo").write_text(
        "processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd asimddp sve sve2 i8mm bf16\n"
    )
    cpus = facts.collect(root)["cpus"]
    assert cpus["flags"] == ["asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"]
    assert cpus["model"] is None


def test_nvidia_smi_rows() -> None:
    # The second row is a GB10: its memory is not told. A line of noise is skipped.
    text = (
        "0, GPU-1b2c, 00000000:06:00.0, NVIDIA RTX PRO 6000, 12.0, 97887, 580.126.09\n"
        "1, GPU-9f, 0000000F:01:00.0, NVIDIA GB10, 12.1, [N/A], 580.95.05\n"
        "No devices were found\n"
    )
    first, second = gpus.parse_identity(text)
    assert first["memory_bytes"] == 97887 * 2**20
    assert first["compute_capability"] == "12.0"
    assert (second["memory_bytes"], second["bus_id"]) == (None, "000f:01:00.0")
