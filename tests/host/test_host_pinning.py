"""CPU lists, and which CPUs and nodes each rank gets."""

from pathlib import Path

import pytest
from exl3_host import cpus, facts, pinning
from exl3_host.errors import HostError
from host_files import (
    GIB,
    HostFiles,
    NodeFiles,
    two_small_nodes,
    two_sockets_one_cpu_offline,
    write_host,
)

NUMACTL = "/usr/bin/numactl"


def read(tmp_path: Path, host: HostFiles, numactl: str | None = NUMACTL) -> dict:
    found = facts.collect(write_host(tmp_path, host))
    found["tools"]["numactl"] = numactl
    return found


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", []),
        ("0", [0]),
        ("0-3", [0, 1, 2, 3]),
        ("0-1,4,6-7\n", [0, 1, 4, 6, 7]),
        ("7,0-1,1", [0, 1, 7]),
        ("0-238,240-255", [*range(239), *range(240, 256)]),
    ],
)
def test_lists_are_read_and_written(text: str, numbers: list[int]) -> None:
    assert cpus.parse_list(text) == numbers
    assert cpus.parse_list(cpus.format_list(numbers)) == numbers


def test_lists_are_written_as_the_kernel_does() -> None:
    assert cpus.format_list([5, 0, 1, 2]) == "0-2,5"
    assert cpus.format_list([0, 1]) == "0-1"


@pytest.mark.parametrize("text", ["a", "3-1", "1-", "0x3"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no CPU list"):
        cpus.parse_list(text)


def test_one_node_has_nothing_to_choose(tmp_path: Path) -> None:
    host = HostFiles([0, 1], {0: NodeFiles("0-1", 10**7, 10**7)}, "0-1")
    pin = pinning.decide(read(tmp_path, host), tp=1)
    assert (pin.mode, pin.numactl, pin.cpus, pin.mems) == ("none", (), "0-1", "0")
    assert pin.reason == "one memory node, nothing to choose"
    assert pin.omp_bind == "0-1"


def test_two_ranks_share_the_cores_of_one_node(tmp_path: Path) -> None:
    host = HostFiles(list(range(6)), {0: NodeFiles("0-5", 10**7, 10**7)}, "0-5")
    pin = pinning.decide(read(tmp_path, host), tp=2)
    assert pin.omp_bind == "0-2|3-5"
    assert pin.nodes == (0, 0)


def test_an_odd_core_goes_to_the_first_rank(tmp_path: Path) -> None:
    host = HostFiles(list(range(5)), {0: NodeFiles("0-4", 10**7, 10**7)}, "0-4")
    assert pinning.decide(read(tmp_path, host), tp=2).omp_bind == "0-2|3-4"


def test_one_rank_takes_the_node_that_does_not_serve_interrupts(tmp_path: Path) -> None:
    pin = pinning.decide(read(tmp_path, two_small_nodes()), tp=1, rank_gib=4)
    assert pin.mode == "container"
    assert pin.numactl == (NUMACTL, "--physcpubind=4-7", "--membind=1")
    assert (pin.cpus, pin.mems, pin.omp_bind) == ("4-7", "1", "4-7")


def test_more_cores_win_then_more_memory(tmp_path: Path) -> None:
    host = two_small_nodes()
    host.nodes[0].cpus, host.nodes[1].cpus = "0-4", "5-7"
    assert pinning.decide(read(tmp_path / "cores", host), tp=1).nodes == (0,)
    host = two_small_nodes()
    host.nodes[0].total_kb += 1
    assert pinning.decide(read(tmp_path / "memory", host), tp=1).nodes == (0,)


def test_a_running_server_does_not_move_its_own_next_plan(tmp_path: Path) -> None:
    before = pinning.decide(read(tmp_path / "before", two_small_nodes()), tp=1, rank_gib=4)
    host = two_small_nodes()
    host.nodes[1].free_kb = 1000
    assert pinning.decide(read(tmp_path / "after", host), tp=1, rank_gib=4) == before


def test_a_node_that_may_run_full_is_only_preferred(tmp_path: Path) -> None:
    # 80 % of 16 GiB are 12.8.
    assert (
        "--membind=1"
        in pinning.decide(read(tmp_path / "a", two_small_nodes()), tp=1, rank_gib=12.7).numactl
    )
    pin = pinning.decide(read(tmp_path / "b", two_small_nodes()), tp=1, rank_gib=12.9)
    assert pin.numactl == (NUMACTL, "--physcpubind=4-7", "--preferred=1")
    assert pin.mems == "0-1", "with a preference the other node may be used too"
    assert "needs more than 80% of node 1" in pin.reason


def test_two_ranks_on_two_of_three_nodes(tmp_path: Path) -> None:
    host = two_small_nodes()
    host.nodes[2] = NodeFiles("8-11", 16 * GIB // 1024, 8 * GIB // 1024)
    host.online, host.online_text, host.cpus_allowed = list(range(12)), "0-11", "0-11"
    host.has_cpu = host.has_memory = host.mems_allowed = "0-2"
    pin = pinning.decide(read(tmp_path, host), tp=2, rank_gib=13)
    assert pin.numactl == (NUMACTL, "--physcpubind=4-11", "--interleave=1-2")
    assert pin.omp_bind == "4-7|8-11"


def test_one_rank_per_node_needs_no_numactl(tmp_path: Path) -> None:
    pin = pinning.decide(read(tmp_path, two_small_nodes()), tp=2)
    assert (pin.mode, pin.numactl) == ("none", ())
    assert (pin.omp_bind, pin.nodes) == ("0-3|4-7", (0, 1))
    assert "all 2 memory nodes" in pin.reason


def test_without_numactl_the_threads_are_still_placed(tmp_path: Path) -> None:
    pin = pinning.decide(read(tmp_path, two_small_nodes(), numactl=None), tp=1)
    assert (pin.mode, pin.numactl, pin.omp_bind) == ("none", (), "4-7")
    assert "numactl is not installed" in pin.reason


def test_big_nodes_keep_cores_for_the_host(tmp_path: Path) -> None:
    found = read(tmp_path, two_sockets_one_cpu_offline())
    pin = pinning.decide(found, tp=2, smt="drop")
    # 64 cores per node: the first two stay free, one thread on each of the other 62.
    assert pin.omp_bind == "2-63|66-127"
    kept = pinning.decide(found, tp=2, smt="keep")
    assert kept.omp_bind == "2-63,130-191|66-127,194-238,240-255"
    asked = pinning.decide(found, tp=2, reserve=0)
    assert asked.omp_bind == "0-63|64-127"


def test_switched_off(tmp_path: Path) -> None:
    pin = pinning.decide(read(tmp_path, two_small_nodes()), tp=1, mode="none")
    assert (pin.mode, pin.numactl, pin.threads, pin.omp_bind) == ("none", (), (), "nobind")


def test_more_ranks_than_cores_are_refused(tmp_path: Path) -> None:
    host = two_small_nodes(cpus_allowed="2-3")
    with pytest.raises(HostError, match=r"needs at least 4 cores; 2 are usable here \(CPUs 2-3\)"):
        pinning.decide(read(tmp_path, host), tp=4)


def test_smt_siblings_are_one_core(tmp_path: Path) -> None:
    host = HostFiles(
        [0, 1, 2, 3],
        {0: NodeFiles("0-3", 8 * GIB // 1024, 8 * GIB // 1024)},
        "0-3",
        siblings=lambda c: f"{c % 2},{c % 2 + 2}",
    )
    found = read(tmp_path, host)
    assert pinning.decide(found, tp=1).omp_bind == "0-1"
    assert pinning.decide(found, tp=2, smt="keep").omp_bind == "0,2|1,3"
    with pytest.raises(HostError, match="needs at least 3 cores; 2 are usable"):
        pinning.decide(found, tp=3)
