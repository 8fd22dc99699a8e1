"""What a start checks and says: the self-test, the load report, plans, and that ranks agree."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from load_cases import load_all
from plugin_models import awkward_llama, awkward_qwen3, exl3_linear
from safetensors import safe_open
from test_shards import run_rank

from exl3_plugin import boot, fused, loading, ops, selftest, tuning
from exl3_plugin import format as exl3
from exl3_plugin.config import Exl3Config
from exl3_plugin.report import describe_plan, plan_of
from exl3_plugin.tuning import Override

TINY = "tiny-llama-mul1-2.5"
SPOILT = "model.layers.0.mlp.gate_up_proj"
RATES = [(c, b) for c in exl3.CODEBOOKS for b in exl3.LEGAL_BITS if c == "mul1" or b == int(b)]


@pytest.fixture(scope="module")
def started(reference_data, tmp_path_factory) -> dict[str, dict]:
    """What vLLM says to every case; `report` is what the plugin wrote."""
    root = tmp_path_factory.mktemp("started")
    tiny = reference_data / "tiny" / TINY
    awkward = awkward_llama().save(root / "model")
    on = {"EXL3_SELF_TEST": "1"}
    cases = {
        "tiny": {"model": tiny, "env": on, "args": {"dtype": "float32"}},
        "half": {"model": tiny, "env": on, "args": {"dtype": "bfloat16"}},
        "awkward": {"model": awkward, "env": on, "args": {"dtype": "float32"}},
        "dummy": {"model": tiny, "env": on, "args": {"load_format": "dummy", "dtype": "float32"}},
        "spoilt": {"model": awkward, "env": on, "spoil": SPOILT},
        "untested": {"model": awkward, "env": {"EXL3_SELF_TEST": "0"}, "spoil": SPOILT},
        "reloaded": {"model": tiny, "reload": True},
        "reloaded_mixed": {"model": awkward_qwen3().save(root / "qwen3"), "reload": True},
        "nowhere": {"model": tiny, "env": {"EXL3_LOAD_REPORT": str(root / "none" / "r.json")}},
    }
    for name, case in cases.items():
        case["env"] = {"EXL3_LOAD_REPORT": str(root / f"{name}.json")} | case.get("env", {})
    results = dict(zip(cases, load_all(list(cases.values()))))
    for name, result in results.items():
        file = root / f"{name}.json"
        result["report"] = json.loads(file.read_text()) if file.exists() else None
    results["files"] = sorted(path.name for path in root.glob("*json*"))
    return results


# The self-test


@pytest.mark.parametrize(("codebook", "bits"), RATES)
def test_the_self_tests_decoder_is_the_formats(codebook, bits):
    rng = np.random.default_rng(int(2 * bits))
    shape = (3, 2, exl3.words_from_bits(bits))
    trellis = rng.integers(-32768, 32768, shape, dtype=np.int16)
    decoded = selftest.decode(torch.from_numpy(trellis), codebook)
    assert (decoded.numpy() == exl3.decode_inner(trellis, codebook)).all()


def test_the_self_tests_transform_is_the_formats():
    x = np.random.default_rng(0).standard_normal((3, 256))
    assert np.allclose(selftest.transform(torch.from_numpy(x)).numpy(), exl3.hadamard(x))


def test_every_kind_of_layer_passes_the_self_test(started):
    for name in ("tiny", "half", "awkward", "dummy"):
        found = started[name]
        assert found["error"] is None, found["error"]
        (line,) = [line for line in found["log"] if "self-test" in line]
        tested = found["report"]["self_test"]
        assert f"EXL3 self-test: {len(tested)} layers" in line
        limit = {"half": 0.02}.get(name, 1e-3)
        assert all(0 < result["worst"] < limit for result in tested), tested


def test_each_kind_of_matrix_is_tested_once(started):
    """In the tiny model both layers have the same shapes; their rates differ here and there."""
    report = started["tiny"]["report"]
    layers: dict[tuple, str] = {}
    for entry in report["modules"]:
        if entry["became"] != "plain":
            kind = (entry["k"], entry["n"], entry["bits"], entry["codebook"])
            layers.setdefault(kind, entry["layer"])
    tested = [result["layer"] for result in report["self_test"]]
    assert sorted(tested) == sorted(set(layers.values()))


def test_one_changed_word_stops_the_start_and_is_named(started):
    error = started["spoilt"]["error"]
    assert error.startswith(f"SelfTestError: EXL3 self-test: {SPOILT} is wrong with 1 rows by the")
    assert "(model.layers.0.mlp.gate_proj)" in error and "EXL3_SELF_TEST=0" in error
    assert started["spoilt"]["report"] is None


def test_the_self_test_can_be_turned_off(started):
    assert started["untested"]["error"] is None
    assert started["untested"]["report"]["self_test"] is None


def self_test(change) -> None:
    """Run the self-test on a fused layer that `change` spoils after its truth is known."""
    rng = np.random.default_rng(4)
    stored = [exl3_linear(rng, 256, n, c, b) for n, c, b in ((256, "mul1", 2.5), (320, "mcg", 4))]
    _, layer = run_rank(stored, [0, 1], np.zeros((1, 256)), sizes=[256, 320], k=256, k_rank=256,
                        rank=0, tp=1)  # fmt: skip
    test = selftest.prepare(layer, "layer", set())
    change(layer)
    selftest.run(layer, test)


def test_the_self_test_passes_where_nothing_was_changed():
    self_test(lambda layer: None)


@pytest.mark.parametrize("change", ["order", "scale", "sign", "not_a_number"])
def test_the_self_test_sees(change):
    def spoil(layer):
        if change == "order":  # the CPU kernels read the stored order
            loading.reorder(layer)
        elif change == "scale":
            layer.suh.data[1, 128:] *= 1.1
        elif change == "sign":
            layer.svh.data[256] *= -1
        else:
            layer.svh.data[3] = float("nan")

    with pytest.raises(selftest.SelfTestError, match="layer is wrong with 1 rows"):
        self_test(spoil)


@pytest.mark.parametrize("fault", ["gate", "norm", "sum"])
def test_the_self_test_sees_what_is_wrong_before_the_layer(monkeypatch, fault):
    """The operators with an activation or a norm inside are tested where they will be used."""
    norm, gate = fused.norm_linear_cpu, fused.gated_linear_cpu
    wrong = {
        "gate": ("gated_linear", lambda x, *rest: gate(x.roll(x.shape[-1] // 2, -1), *rest)),
        "norm": ("norm_linear", lambda x, r, w, e, *rest: norm(x, r, w.roll(1), e, *rest)),
        "sum": ("norm_linear", lambda x, *rest: (norm(x, *rest)[0], x.clone())),
    }
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    ops.load()
    name, operator = wrong[fault]
    monkeypatch.setattr(torch.ops.exl3, name, operator)
    monkeypatch.setenv("EXL3_FUSE", "0")
    self_test(lambda layer: None)
    monkeypatch.setenv("EXL3_FUSE", "1")
    with pytest.raises(selftest.SelfTestError, match=f"exl3::{name}.*EXL3_FUSE"):
        self_test(lambda layer: None)
    monkeypatch.undo()
    monkeypatch.setenv("EXL3_FUSE", "1")
    self_test(lambda layer: None)


# The load report


def test_the_report_accounts_for_every_byte_of_the_checkpoint(started, reference_data):
    report = started["tiny"]["report"]
    stored: dict[str, int] = {}
    with safe_open(reference_data / "tiny" / TINY / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            module, _, suffix = name.rpartition(".")
            if suffix in ("trellis", "suh", "svh"):
                stored[module] = stored.get(module, 0) + file.get_tensor(name).nbytes
    quantised = {e["module"]: e["bytes"] for e in report["modules"] if e["became"] != "plain"}
    assert quantised == stored
    assert report["bytes"]["exl3"] + report["bytes"]["head"] == sum(stored.values())
    assert (report["device"], report["dtype"], report["ranks"]) == ("cpu", "float32", 1)


def test_the_report_tells_rates_padding_and_plain_members(started):
    modules = {entry["module"]: entry for entry in started["awkward"]["report"]["modules"]}
    attention = "model.layers.0.self_attn"
    assert modules["lm_head"]["became"] == "head" and modules["lm_head"]["bits"] == 6
    k = modules[f"{attention}.k_proj"]
    assert (k["layer"], k["became"]) == (f"{attention}.qkv_proj", "exl3")
    assert (k["bits"], k["codebook"], k["k"], k["n"]) == (5, "mcg", 256, 128)
    assert k["padding"] == {"k": 64, "n": 64} and k["plans"] is None
    assert modules[f"{attention}.v_proj"] == {
        "module": f"{attention}.v_proj", "layer": f"{attention}.qkv_proj", "became": "plain",
        "k": 192, "n": 64, "bytes": 192 * 64 * 4,
    }  # fmt: skip
    # Llama does not tell its embedding's name.
    (embedding,) = [e for e in modules.values() if e["layer"] == "VocabParallelEmbedding"]
    assert (embedding["became"], embedding["bytes"]) == ("plain", 384 * 192 * 4)


def test_the_report_is_whole_or_absent(started):
    assert not [name for name in started["files"] if name.endswith(".new")]
    assert "there is no folder" in started["nowhere"]["error"]


def test_a_config_that_was_used_can_be_pickled():
    config = Exl3Config({"bits": 4})
    config.record = lambda: None  # what a record holds cannot be pickled either
    assert pickle.loads(pickle.dumps(config)).record is None


# Kernel order and plans


def test_reloaded_weights_are_the_same_words_in_the_same_place(started):
    assert started["reloaded"]["error"] is None
    assert started["reloaded_mixed"]["error"] is None


def test_reordering_is_undone_by_matrices_and_drops_the_loader():
    rng = np.random.default_rng(5)
    stored = [exl3_linear(rng, 128, n, c, b) for n, c, b in ((256, "mul1", 3.5), (128, "3inst", 2))]
    _, layer = run_rank(stored, [0, 1], np.zeros((1, 128)), sizes=[256, 128], k=128, k_rank=128,
                        rank=0, tp=1)  # fmt: skip
    before, address = layer.trellis.clone(), layer.trellis.data_ptr()
    assert not loading.is_finished(layer)
    loading.reorder(layer)
    assert loading.is_finished(layer) and layer.trellis.data_ptr() == address
    # [k tile, strip, half, tile, word] to [strip, k tile, half, word, tile]
    words = [one.tensors["trellis"].view(np.int32) for one in stored]
    strips = [w.reshape(8, -1, 2, 4, w.shape[-1]).transpose(1, 0, 2, 4, 3).tobytes() for w in words]
    assert layer.trellis.numpy().tobytes() == b"".join(strips)
    for matrix, one in zip(loading.matrices(layer), stored):
        assert (matrix.numpy() == one.tensors["trellis"]).all()
    assert not layer.trellis.equal(before)
    assert not hasattr(layer.trellis, "weight_loader")


def test_a_layers_plan_is_that_of_all_its_columns_and_its_first_rate():
    rng = np.random.default_rng(6)
    stored = [exl3_linear(rng, 128, n, c, b) for n, c, b in ((256, "mul1", 3.5), (128, "3inst", 2))]
    _, layer = run_rank(stored, [0, 1], np.zeros((1, 128)), sizes=[256, 128], k=128, k_rank=128,
                        rank=0, tp=1)  # fmt: skip
    device = ops.Device(90, 132, 232448)
    assert plan_of(layer, 4, device, None) == ops.plan(device, 4, 128, 384, 3.5, "mul1")

    class Profile:
        def find(self, *problem):
            row = Override(k=128, n=384, half_bits=7, family=1, m_upto=8, kernel=0, rows=32,
                           form=0, blocks=5)  # fmt: skip
            return row.plan if row.fits(*problem) else None

    assert plan_of(layer, 8, device, Profile()) == ops.Plan(0, 32, 0, 5)
    assert plan_of(layer, 9, device, Profile()) == ops.plan(device, 9, 128, 384, 3.5, "mul1")


def test_plans_in_words():
    assert describe_plan(ops.Plan(ops.DENSE, 0, 0, 0)) == "dense"
    assert describe_plan(ops.Plan(ops.GEMM, 8, ops.FAST, 264)) == "gemm, 8 rows, fast, 264 blocks"
    assert describe_plan(ops.Plan(ops.GEMM, 64, ops.EXACT, 0)) == "gemm, 64 rows, exact"


# Refusals


def test_float32_is_refused_on_cuda_alone(monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    loading.refuse_dtype("layer", torch.float32, cpu)
    loading.refuse_dtype("layer", torch.bfloat16, gpu)
    with pytest.raises(loading.LoadError, match=r"layer: .* in float32, .*--dtype bfloat16"):
        loading.refuse_dtype("layer", torch.float32, gpu)
    assert torch.float32 in Exl3Config().get_supported_act_dtypes()
    monkeypatch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
    assert Exl3Config().get_supported_act_dtypes() == [torch.bfloat16, torch.float16]


def test_a_gpu_without_kernels_is_refused_before_anything_is_built(monkeypatch):
    monkeypatch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ops.LibraryError, match="built without CUDA"):
        boot.prepare(None)


def test_a_profile_of_another_card_is_refused_with_what_differs(monkeypatch, tmp_path):
    key = tuning.Key(device_name="H200", compute_capability="9.0", sms=132, power_limit_w=700,
                     driver_major=580, cuda_runtime="13.0", plugin_version="0.1.0",
                     source_hash="a")  # fmt: skip
    profile = tuning.Profile(key=key, created="2026-01-01T00:00:00Z", read_gb_s=4000, seconds=1,
                             overrides=[], measurements=[])  # fmt: skip
    profile.write(tmp_path / "profile.json")
    monkeypatch.setenv("EXL3_PROFILE", str(tmp_path / "profile.json"))
    monkeypatch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(ops, "require_cuda", lambda index: None)
    asked = []

    def current_key(index):
        asked.append(index)
        return key.model_copy(update={"power_limit_w": 600})

    monkeypatch.setattr(tuning, "current_key", current_key)
    with pytest.raises(tuning.ProfileError, match="power_limit_w is 600, the profile has 700"):
        boot.prepare(None)
    assert asked == [3]


def test_ranks_with_other_plans_for_experts_differ(monkeypatch):
    class Operators:
        def cuda_build_info(self):
            return '{"source_hash": "a"}'

    monkeypatch.setattr(ops, "configure", dict)
    monkeypatch.setattr(torch.ops, "exl3", Operators())
    key = tuning.Key(device_name="H200", compute_capability="9.0", sms=132, power_limit_w=700,
                     driver_major=580, cuda_runtime="13.0", plugin_version="0.1.0",
                     source_hash="a")  # fmt: skip
    profile = tuning.Profile(key=key, created="2026-01-01T00:00:00Z", read_gb_s=4000, seconds=1,
                             overrides=[], measurements=[])  # fmt: skip
    rows = [tuning.ExpertOverride(tokens_upto=8, rows=rows) for rows in (8, 16)]
    mine, theirs = (boot._choices(profile.model_copy(update={"experts": [row]})) for row in rows)
    boot.refuse_disagreement([mine, dict(mine)])
    with pytest.raises(boot.RanksDisagree, match="rank 1 differs from rank 0 in plans of EXL3"):
        boot.refuse_disagreement([mine, theirs])


def test_ranks_that_differ_are_refused():
    same = {"plans of EXL3_PROFILE": "a", "options": {"exact": False}}
    boot.refuse_disagreement([same, dict(same)])
    with pytest.raises(boot.RanksDisagree, match="rank 1 differs from rank 0 in plans of EXL3"):
        boot.refuse_disagreement([same, same | {"plans of EXL3_PROFILE": "b"}])
    with pytest.raises(boot.RanksDisagree, match="rank 1 refused to start: stale"):
        boot.refuse_disagreement([same, {"error": "stale"}])
