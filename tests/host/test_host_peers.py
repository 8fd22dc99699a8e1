"""The verdict on peer access, what is set because of it, and when a report still counts."""

import copy
import json

import pytest
from exl3_host import nccl, peers
from exl3_host.errors import HostError


def report(ranks=2, **changes) -> dict:
    """A report of a good host with `ranks` cards, as bench/peer_access.py writes it."""
    devices = [
        {"index": i, "name": "NVIDIA RTX PRO 6000", "pci": f"0000:{i + 1:02x}:00.0"}
        for i in range(ranks)
    ]
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    good = {"ranks": ranks, "wall_s": 9.0, "state": "right", "detail": None}
    sizes = [{"bytes": 64 << 20, "us": 2800.0, "bus_gb_s": 24.0}]
    made = {
        "schema": "exl3-peers/1",
        "ranks": ranks,
        "backend": "nccl",
        "torch": "2.11.0+cu130",
        "nccl": "2.28.9",
        "driver": "580.126.09",
        "devices": devices,
        "copies": [
            {"source": a, "target": b, "granted": True, "bytes": 64 << 20, "gb_s": 50.0,
             "state": "moves", "detail": None}
            for a, b in pairs
        ],
        "collectives": [
            {**good, "peer_access": "on", "sizes": sizes},
            {**good, "peer_access": "off", "sizes": sizes},
        ],
    }  # fmt: skip
    return {**made, **changes}


def with_collective(state: str, detail: str, peer: str = "on", ranks: int = 2) -> dict:
    made = report(ranks)
    for one in made["collectives"]:
        if one["peer_access"] == peer:
            one.update(state=state, detail=detail, sizes=[])
    return made


def settings_of(verdict) -> dict:
    return {one.name: one.value for one in nccl.for_peers(verdict)}


ALL_OFF = {
    "NCCL_P2P_DISABLE": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "0",
    "disable-custom-all-reduce": True,
    "compilation-config": {"pass_config": {"fuse_allreduce_rms": False}},
}


def test_a_proved_pair_uses_everything():
    verdict = peers.decide(report(), 2)
    assert (verdict.verdict, verdict.custom_all_reduce) == ("use", True)
    assert verdict.layers == {"granted": "yes", "moves": "yes", "collects": "yes"}
    assert "24.0 GB/s" in verdict.reason and settings_of(verdict) == {}


def test_the_first_all_reduce_hangs_at_two_ranks_and_not_at_four():
    """rtx6kpro#15, TensorSharp#114, nccl#1999, vllm#51513: granted, and spinning for ever."""
    hung = with_collective("hung", "rank 0, all-reduce of 4096 bytes, round 1 of 3: no answer")
    verdict = peers.decide(hung, 2)
    assert verdict.verdict == "veto" and verdict.layers["collects"] == "no"
    assert "the all-reduce of 2 ranks was hung (rank 0, all-reduce of 4096" in verdict.reason
    assert "IOMMU" in verdict.warnings[0] and "BAR1" in verdict.warnings[0]
    assert settings_of(verdict) == ALL_OFF
    assert peers.decide(report(4), 4, full_mesh=False).verdict == "use"


def test_a_test_at_four_ranks_proves_nothing_at_two():
    verdict = peers.decide(report(4), 2)
    assert verdict.verdict == "veto"
    assert verdict.reason == "nothing is proved at 2 ranks: the test ran with 4"


def test_wrong_bytes_are_a_veto_too():
    """club-3090#922: wrong tokens, no crash."""
    made = report()
    made["copies"][1].update(state="wrong", detail="7 of 16777216 values are wrong")
    verdict = peers.decide(made, 2)
    assert verdict.verdict == "veto" and verdict.layers["moves"] == "no"
    assert "the copy from device 1 to device 0 was wrong (7 of 16777216" in verdict.reason
    made = with_collective("wrong", "rank 1, all-reduce of 4096 bytes: 1 of 2048 values are wrong")
    assert settings_of(peers.decide(made, 2)) == ALL_OFF


def test_a_copy_that_never_ends():
    made = report()
    made["copies"] = [{"state": "hung", "detail": "copy from device 0 to device 1: no answer"}]
    verdict = peers.decide(made, 2)
    assert verdict.verdict == "veto" and "copy from device 0 to device 1" in verdict.reason


def test_both_or_none():
    """vllm#33041, vllm#30317: custom all-reduce uses peer access whatever NCCL is told."""
    for verdict in (
        peers.decide(report(), 2, wanted="disable"),
        peers.decide(None, 2),
        peers.decide(with_collective("failed", "x"), 2),
    ):
        assert settings_of(verdict) == ALL_OFF
        assert not verdict.custom_all_reduce


def test_no_grant_needs_no_warning():
    made = report()
    for one in made["copies"]:
        one["granted"] = False
    verdict = peers.decide(made, 2)
    assert verdict.verdict == "veto" and verdict.warnings == ()
    assert "the driver grants none" in verdict.reason


def test_a_host_whose_fallback_fails_is_refused():
    broken = with_collective("hung", "rank 1, set up the process group: no answer", peer="off")
    with pytest.raises(HostError, match="fails even without peer access: hung") as raised:
        peers.decide(broken, 2)
    assert "/dev/shm" in raised.value.fix and "Xid" in raised.value.fix


@pytest.mark.parametrize(
    ("ranks", "mesh", "custom", "why"),
    [
        (2, None, True, "peer access is proved"),
        (4, True, True, "NVLink joins all pairs"),
        (4, False, False, "beyond two ranks it needs NVLink between all pairs of the 4 GPUs"),
        (4, None, False, "nobody knows whether NVLink joins"),
        (3, True, False, "for 2, 4, 6, 8 ranks, not for 3"),
    ],
)
def test_vllms_own_all_reduce(ranks, mesh, custom, why):
    verdict = peers.decide(report(ranks), ranks, full_mesh=mesh)
    assert verdict.verdict == "use" and verdict.custom_all_reduce == custom
    assert why in verdict.custom_reason
    assert settings_of(verdict) == ({} if custom else {"disable-custom-all-reduce": True})


def test_forced_and_alone():
    verdict = peers.decide(None, 2, wanted="force")
    assert verdict.verdict == "use" and "used unproved" in verdict.warnings[0]
    assert peers.decide(None, 1).verdict == "alone" and settings_of(peers.decide(None, 1)) == {}
    with pytest.raises(HostError, match="peer_access 'off' is not known"):
        peers.decide(None, 2, wanted="off")


def test_other_cards_than_those_tested():
    verdict = peers.decide(report(), 2, devices=["0000:01:00.0", "0000:81:00.0"])
    assert verdict.verdict == "veto" and "the test ran on 0000:01:00.0, 0000:02:00.0" in (
        verdict.reason
    )


def test_reports_are_kept_by_driver_nccl_and_cards(tmp_path):
    made = report()
    peers.keep(tmp_path, made)
    identity = {key: made[key] for key in ("ranks", "backend", "driver", "nccl", "devices")}
    assert peers.cached(tmp_path, identity) == made
    others = [
        {"driver": "590.44.01"},
        {"nccl": "2.29.0"},
        {"ranks": 4},
        {"devices": made["devices"][:1]},
        {"devices": [made["devices"][0], {**made["devices"][1], "pci": "0000:c1:00.0"}]},
    ]
    for other in others:
        assert peers.cached(tmp_path, {**identity, **other}) is None, other
    moved = copy.deepcopy(identity)
    moved["devices"].reverse()
    assert peers.cached(tmp_path, moved) == made, "the order of enumeration proves nothing"
    (kept,) = (tmp_path / "peers").glob("*.json")
    kept.write_text("{")
    assert peers.cached(tmp_path, identity) is None


def test_measured_once(tmp_path):
    asked = []

    def run(arguments):
        asked.append(arguments)
        return report()

    assert peers.look(run, tmp_path, 2) == (report(), False)
    assert peers.look(run, tmp_path, 2) == (report(), True)
    assert peers.look(run, tmp_path, 2, again=True) == (report(), False)
    assert [one[-1] for one in asked] == ["--identity", "2"] + ["--identity"] * 2 + ["2"]


def test_full_gpus_prove_nothing(tmp_path):
    """A server beside the test leaves no memory; that is no verdict, and is not kept."""
    full = with_collective("failed", "rank 1, x: torch.OutOfMemoryError: CUDA out of memory.")
    with pytest.raises(HostError, match="cannot be tested while the GPUs are full"):
        peers.look(lambda arguments: full, tmp_path, 2)
    assert not (tmp_path / "peers").exists()


@pytest.mark.parametrize(
    ("gpus", "runtime", "check", "reason"),
    [
        ([], "native", False, "no GPU"),
        (["GPU-a"], "native", False, "nothing to prove"),
        (["GPU-a", "GPU-b"], "docker", False, "docs/peer-access.md"),
        (["GPU-a", "GPU-b"], "native", True, "would be tested"),
        (["GPU-a", "GPU-b"], "native", False, None),
    ],
)
def test_when_a_deploy_measures(gpus, runtime, check, reason):
    found = peers.not_measured({"pin": {"gpus": gpus}, "runtime": runtime}, check)
    assert found is None if reason is None else reason in found


def test_a_recipe_cannot_undo_a_veto():
    settings = nccl.for_peers(peers.decide(with_collective("hung", "x"), 2))
    env, args, decisions = nccl.apply(
        {"NCCL_DEBUG": "INFO"},
        {"compilation-config": {"mode": 3, "pass_config": {"fuse_allreduce_rms": True}}},
        settings,
    )
    assert env == {"NCCL_DEBUG": "INFO", **{k: v for k, v in ALL_OFF.items() if k.isupper()}}
    assert args["compilation-config"] == {"mode": 3, "pass_config": {"fuse_allreduce_rms": False}}
    assert {one["what"] for one in decisions} == set(ALL_OFF)
    with pytest.raises(HostError, match=r"NCCL_P2P_DISABLE is set to 0 .* has to be 1"):
        nccl.apply({"NCCL_P2P_DISABLE": "0"}, {}, settings)
    with pytest.raises(HostError, match=r"NCCL_SHM_DISABLE=1 .* without peer access"):
        nccl.apply({"NCCL_SHM_DISABLE": "1"}, {}, [])
    with pytest.raises(HostError, match="would undo the pinning"):
        nccl.apply({"NCCL_IGNORE_CPU_AFFINITY": "1"}, {}, [])


def test_every_variable_is_one_that_vllm_reads(checkout):
    """A veto that vLLM does not know is none; asked of the vLLM that is installed."""
    envs = pytest.importorskip("vllm.envs")
    for name in ALL_OFF:
        if name.startswith("VLLM_"):
            assert name in envs.environment_variables, name
    from vllm.config.compilation import PassConfig
    from vllm.engine.arg_utils import EngineArgs

    assert hasattr(PassConfig(), "fuse_allreduce_rms")
    assert hasattr(EngineArgs, "disable_custom_all_reduce")


def test_the_mesh_is_read_from_the_matrix():
    topo_matrix = pytest.importorskip("exl3_host.topo_matrix")
    header = "\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\n"
    meshed = (
        "GPU0\t X \tNV4\tNV4\t0-7\t0\nGPU1\tNV4\t X \tNV4\t0-7\t0\nGPU2\tNV4\tNV4\t X \t0-7\t0\n"
    )
    assert peers.full_mesh(topo_matrix.parse(header + meshed), [0, 1, 2]) is True
    mixed = meshed.replace("GPU2\tNV4", "GPU2\tSYS").replace("X \tNV4\tNV4", "X \tNV4\tSYS")
    table = topo_matrix.parse(header + mixed)
    assert peers.full_mesh(table, [0, 1, 2]) is False
    assert peers.full_mesh(table, [0, 1]) is True
    assert peers.full_mesh(table, [0]) is None


def test_exl3ctl_peers(tmp_path):
    from exl3_host import cli
    from typer.testing import CliRunner

    file = tmp_path / "report.json"
    file.write_text(json.dumps(with_collective("hung", "rank 0, round 1: no answer")))
    runner = CliRunner(env={"COLUMNS": "200"})
    done = runner.invoke(cli.app, ["peers", "--report", str(file)])
    assert done.exit_code == 0 and "peer access at 2 ranks: veto" in done.output
    assert "--disable-custom-all-reduce" in done.output and "NCCL_P2P_DISABLE" in done.output
    done = runner.invoke(cli.app, ["peers", "--report", str(file), "--json"])
    assert json.loads(done.output)["layers"]["collects"] == "no"
    assert not (tmp_path / "peers").exists()
    words = ["peers", "--report", str(file), "--keep", "--store", str(tmp_path)]
    assert runner.invoke(cli.app, words).exit_code == 0
    made = json.loads(file.read_text())
    identity = {key: made[key] for key in ("ranks", "backend", "driver", "nccl", "devices")}
    assert peers.cached(tmp_path, identity) == made
    file.write_text('{"schema": "exl3-facts/1"}')
    done = runner.invoke(cli.app, ["peers", "--report", str(file), "--json"])
    assert done.exit_code == 1 and "no report on peer access" in json.loads(done.output)["error"]
