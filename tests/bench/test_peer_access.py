"""The peer access program on gloo: real ranks, real sums, and the faults it is there to find."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rank_faults
import torch

from bench import allreduce, collective, peer_access, ranks

SIZES = (4096, 1 << 16)


def run(work, world=2, deadline_s=20.0, **arguments):
    with ranks.one_host(world, "gloo") as team:
        return ranks.run(work, team, arguments, deadline_s)


def test_a_good_host(checkout, tmp_path):
    """The program as `exl3ctl peers` calls it, at three ranks, where a ring differs from a pair."""
    command = [sys.executable, str(checkout / "bench" / "peer_access.py"), "--ranks", "3"]
    command += ["--backend", "gloo", "--max-bytes", "1048576", "--json", str(tmp_path / "p.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "p.json").read_text())
    assert report["schema"] == "exl3-peers/1" and report["ranks"] == 3
    pairs = {(one["source"], one["target"]) for one in report["copies"]}
    assert pairs == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert {one["state"] for one in report["copies"]} == {"moves"}
    (row,) = report["collectives"]
    assert row["state"] == "right" and [one["bytes"] for one in row["sizes"]] == [4096, 1 << 20]


def test_a_hang_is_given_up_and_named():
    """And the ranks are gone: they would hold the GPUs of the next test."""
    before = set(os.listdir("/proc"))
    row = peer_access.collected(run(rank_faults.hangs, deadline_s=3, sizes=SIZES), "on", 2, 0)
    assert row["state"] == "hung"
    assert row["detail"] == "rank 0, all-reduce of 4096 bytes, round 1 of 3: no answer"
    for pid in set(os.listdir("/proc")) - before:
        try:
            said = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        assert "multiprocessing.spawn" not in said or f"parent_pid={os.getpid()}" not in said


def test_one_wrong_value_is_found_and_named():
    row = peer_access.collected(run(rank_faults.flips_one_value, sizes=SIZES), "on", 2, 0)
    assert row["state"] == "wrong"
    # (1234 * 7) % 17 is 2, (1234 * 7 + 5) % 17 is 7: their sum is 9, and one more arrived.
    assert row["detail"] == (
        "rank 1, all-reduce of 65536 bytes: 1 of 32768 values are wrong, the first at 1234: "
        "10 instead of 9"
    )


def test_a_rank_that_dies_explains_the_one_that_waits():
    row = peer_access.collected(run(rank_faults.dies, deadline_s=3, sizes=SIZES), "on", 2, 0)
    assert row["state"] == "died" and "rank 0" in row["detail"] and "SIGKILL" in row["detail"]


def test_bytes_that_never_arrive_are_not_taken_for_old_ones():
    (end,) = run(rank_faults.stale_copy, world=1, device="cpu", count=2)
    assert end.state == "done" and all(one["wrong"] for one in end.results)


def test_too_few_gpus_are_refused(checkout):
    if torch.cuda.device_count() > 15:
        pytest.skip("a host with sixteen GPUs can do this")
    command = [sys.executable, str(checkout / "bench" / "peer_access.py"), "--ranks", "16"]
    done = subprocess.run([*command, "--backend", "nccl"], capture_output=True, text=True)
    assert done.returncode == 2 and "16 ranks need 16 GPUs on this host" in done.stderr


@pytest.mark.parametrize("world", [2, 3, 8])
def test_the_expected_sum_is_that_of_all_ranks(world):
    """Counted by hand for the first values of round 1."""
    wanted = [sum((i * 7 + rank * 5 + 3) % 17 for rank in range(world)) for i in range(40)]
    assert collective.expected(40, world, 1, torch.device("cpu")).tolist() == wanted


def test_hosts_share_the_ranks():
    team = peer_access.over_nodes(8, "nccl", 2, 1, "192.0.2.21:29600")
    assert team.local == (4, 5, 6, 7) and team.device_of(5) == "cuda:1"
    assert team.rendezvous == "tcp://192.0.2.21:29600"


def test_bus_bandwidth_is_what_a_ring_sends():
    # Four ranks send six quarters of the buffer over each link: 96 MiB in 1 ms.
    assert allreduce.bus_gb_s(64 << 20, 4, 1000.0) == pytest.approx(96 * 2**20 / 1e-3 / 1e9)
    assert allreduce.calls_in(0.004, 0.0001) == 40 and allreduce.calls_in(0.004, 1.0) == 1


def test_all_reduce_bench(checkout, tmp_path):
    command = [sys.executable, str(checkout / "bench" / "allreduce.py"), "--backend", "gloo"]
    command += ["--max-bytes", "16384", "--json", str(tmp_path / "lines.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    head, *lines = map(json.loads, (tmp_path / "lines.jsonl").read_text().splitlines())
    limit = head["ruler"]["2"]["all at once"]
    assert [one["bytes"] for one in lines] == [4096, 16384]
    for one in lines:
        assert one["share"] == pytest.approx(one["bytes"] / one["us"] / 1e3 / limit)
