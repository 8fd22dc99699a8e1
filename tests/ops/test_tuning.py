"""Calibration profiles: what is in a file, whether it fits this process, what it decides."""

import json
import logging

import pytest
import torch

from exl3_plugin import devices, env, ops, tuning
from exl3_plugin.experts import ExpertPlan

FACTS = devices.DeviceFacts(
    name="NVIDIA H200",
    compute_capability="9.0",
    sms=132,
    l2_bytes=60 << 20,
    shared_bytes=232448,
    memory_bytes=141 << 30,
    power_limit_w=700,
    driver="580.159.04",
    cuda_runtime="13.0",
    torch="2.11.0+cu130",
)
KEY = tuning.key_of(FACTS, "5f" * 32)
FAST8 = ops.Plan(ops.GEMM, 8, ops.FAST, 132)
GEMM64 = ops.Plan(ops.GEMM, 64, ops.EXACT, 0)
DENSE = ops.Plan(ops.DENSE, 0, ops.EXACT, 0)


def profile(overrides=(), **changes):
    key = KEY.model_copy(update=changes)
    reading = tuning.Measurement(
        k=5120,
        n=12288,
        half_bits=8,
        family=0,
        m=1,
        plan=FAST8,
        us=16.4,
        spread=0.01,
        default=False,
        chosen=True,
    )
    return tuning.Profile(
        key=key,
        created="2026-11-30T12:00:00+00:00",
        read_gb_s=4292.1,
        seconds=120.5,
        overrides=list(overrides),
        measurements=[reading],
    )


def override(m_upto, plan=DENSE, **fields):
    return tuning.Override(m_upto=m_upto, **plan._asdict(), **fields)


def test_a_file_comes_back_as_it_was(tmp_path):
    path = tmp_path / "profile.json"
    for overrides in ([], [override(16, FAST8, k=5120, n=12288, half_bits=8, family=0)]):
        written = profile(overrides)
        written.write(path)
        assert tuning.load_profile(path) == written
        assert json.loads(path.read_text())["key"]["driver_major"] == 580
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_the_table_has_the_order_of_the_operator():
    rows = [override(16, FAST8, k=5120, n=12288, half_bits=8, family=1), override(99)]
    assert profile(rows).table() == [
        *(5120, 12288, 8, 1, 16, 0, 8, 1, 132),
        *(0, 0, 0, -1, 99, 1, 0, 0, 0),
    ]


def test_the_first_row_that_fits_wins():
    rows = [
        override(8, FAST8, k=5120, n=12288, half_bits=8, family=0),
        override(64, GEMM64, half_bits=8),
        override(64, DENSE, family=1),
    ]
    find = profile(rows).find
    assert find(8, 5120, 12288, 8, 0) == FAST8
    assert find(9, 5120, 12288, 8, 0) == GEMM64
    assert find(8, 5120, 12288, 8, 1) == GEMM64
    assert find(8, 5120, 12288, 12, 1) == DENSE
    assert find(8, 5120, 12288, 12, 0) is None
    assert find(65, 5120, 12288, 8, 0) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"m_upto": 0},
        {"kernel": 2},
        {"kernel": 0, "rows": 12},
        {"kernel": 0, "rows": 32, "form": 1},
        {"kernel": 1, "form": 1},
        {"family": 2},
        {"half_bits": 17},
        {"blocks": -1},
        {"splits": 3},
    ],
)
def test_rows_that_are_no_plan_are_refused(fields):
    with pytest.raises(ValueError):
        tuning.Override(**{"m_upto": 8, "kernel": 1, **fields})


@pytest.mark.parametrize(
    "field, found",
    [
        ("device_name", "NVIDIA H100"),
        ("compute_capability", "12.0"),
        ("sms", 114),
        ("power_limit_w", 500),
        ("power_limit_w", None),
        ("driver_major", 590),
        ("cuda_runtime", "12.9"),
        ("plugin_version", "9.9"),
        ("source_hash", "00" * 32),
    ],
)
def test_a_stale_profile_is_refused_with_what_differs(field, found):
    here = KEY.model_copy(update={field: found})
    assert tuning.match(profile(), here) == [tuning.Difference(field, found, getattr(KEY, field))]
    with pytest.raises(tuning.ProfileError) as error:
        tuning.require_match(profile(), here, "p.json")
    text = str(error.value)
    assert f"{field} is {'unknown' if found is None else str(found)[:16]}" in text
    assert f"the profile has {str(getattr(KEY, field))[:16]}" in text
    assert "bench/calibrate.py --out p.json" in text


def test_a_profile_of_this_device_passes():
    assert tuning.match(profile(), KEY) == []
    tuning.require_match(profile(), KEY, "p.json")


def test_all_that_differs_is_named():
    with pytest.raises(tuning.ProfileError, match=r"sms is 1, .*; driver_major is 2, "):
        tuning.require_match(profile(), KEY.model_copy(update={"sms": 1, "driver_major": 2}), "p")


def test_files_that_are_no_profile(tmp_path):
    path = tmp_path / "p.json"
    with pytest.raises(tuning.ProfileError, match="No such file"):
        tuning.load_profile(path)
    path.write_text("not json")
    with pytest.raises(tuning.ProfileError, match=r"run bench/calibrate\.py"):
        tuning.load_profile(path)
    data = profile().model_dump(mode="json")
    for change, place in (
        ({"version": 1}, "is of version 1, this plugin reads version 2: measure again"),
        ({"version": 3}, "is of version 3, this plugin reads version 2: measure again"),
        ({"key": {**data["key"], "sms": "many"}}, r"key\.sms"),
        ({"overrides": [{"m_upto": 8, "kernel": 0, "rows": 3}]}, r"overrides\.0"),
        ({"more": 1}, "more"),
    ):
        path.write_text(json.dumps({**data, **change}))
        with pytest.raises(tuning.ProfileError, match=place):
            tuning.load_profile(path)


def test_without_a_name_in_the_environment_nothing_happens(monkeypatch):
    monkeypatch.delenv("EXL3_PROFILE", raising=False)
    assert tuning.use_profile() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_named_profile_needs_a_device(monkeypatch, tmp_path, caplog):
    path = tmp_path / "p.json"
    monkeypatch.setenv("EXL3_PROFILE", str(path))
    assert env.get("EXL3_PROFILE") == str(path)
    with pytest.raises(tuning.ProfileError, match="EXL3_PROFILE must name a file"):
        tuning.use_profile()
    profile().write(path)
    with caplog.at_level(logging.WARNING), pytest.raises(ops.LibraryError, match="CUDA"):
        tuning.use_profile()


def choices(text):
    """`8:f 16:F 64:D` as choices: small letter the built-in plan, capital an override."""
    plans = {"f": FAST8, "g": GEMM64, "d": DENSE}
    items = [item.split(":") for item in text.split()]
    return [(int(m), plans[name.lower()], name.islower()) for m, name in items]


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("1:f 8:f 64:g", []),
        ("1:F 8:f 64:g", [(1, FAST8)]),
        ("1:f 8:f 64:D 128:d", [(8, FAST8), (64, DENSE)]),
        ("1:F 8:f 64:G 128:g 256:D 512:d", [(8, FAST8), (128, GEMM64), (256, DENSE)]),
        ("1:G", [(1, GEMM64)]),
        ("", []),
    ],
)
def test_rows_of_a_layer(text, wanted):
    rows = tuning.rows_from(choices(text), 256, 384, 8, 1)
    assert [(row.m_upto, row.plan) for row in rows] == wanted
    made = profile(rows)
    last = wanted[-1][0] if wanted else 0
    for m, plan, _ in choices(text):
        found = made.find(m, 256, 384, 8, 1)
        assert found == (plan if m <= last else None), "each measured point gets its choice"
    assert made.find(1, 256, 384, 8, 0) is None


EXPERTS = {"k": 2048, "inner": 768, "experts": 32, "global_experts": 128, "slots": 8,
           "half_bits": 8, "family": 0}  # fmt: skip


def test_rows_for_experts_are_kept_and_handed_to_the_operator(tmp_path):
    rows = [
        tuning.ExpertOverride(**EXPERTS, tokens_upto=8, rows=4, form=1, blocks=132),
        tuning.ExpertOverride(tokens_upto=4096, rows=256),
    ]
    reading = tuning.ExpertMeasurement(
        **EXPERTS, tokens=8, plan=(4, 1, 132), us=80.8, spread=0.01, default=False, chosen=True
    )
    written = profile().model_copy(update={"experts": rows, "expert_measurements": [reading]})
    written.write(tmp_path / "p.json")
    assert tuning.load_profile(tmp_path / "p.json") == written
    lines = (tmp_path / "p.json").read_text().splitlines()
    assert sum('"tokens_upto"' in line for line in lines) == 2, "one line a row, for diffs"
    assert written.table() == []
    assert written.expert_table() == [
        *(2048, 768, 32, 128, 8, 8, 0, 8, 4, 1, 132),
        *(0, 0, 0, 0, 0, 0, -1, 4096, 256, 0, 0),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens_upto": 0},
        {"rows": 24},
        {"rows": 16, "form": 1},
        {"rows": 0},
        {"blocks": -1},
        {"blocks": 1 << 16},
        {"slots": 17},
        {"family": 2},
        {"chunk": 512},
    ],
)
def test_rows_for_experts_that_are_no_plan_are_refused(fields):
    good = {"tokens_upto": 8, "rows": 8}
    tuning.ExpertOverride(**good)
    with pytest.raises(ValueError):
        tuning.ExpertOverride(**{**good, **fields})


def test_rows_of_a_layer_of_experts():
    few, tiles = ExpertPlan(4, ops.FAST, 132), ExpertPlan(16, ops.EXACT, 264)
    found = [(1, few, True), (8, few, True), (64, tiles, False), (512, tiles, True)]
    rows = tuning.expert_rows_from(found, **EXPERTS)
    assert [(row.tokens_upto, row.plan) for row in rows] == [(8, few), (64, tiles)]
    assert all(row.model_dump().items() >= EXPERTS.items() for row in rows)
    assert tuning.expert_rows_from(found[:2], **EXPERTS) == []


def test_apply_hands_over_both_tables_and_clear_takes_them_back(monkeypatch):
    class Operators:
        def set_plan_table(self, table):
            self.plan = table

        def set_moe_table(self, table):
            self.moe = table

    operators = Operators()
    monkeypatch.setattr(ops, "load", lambda: None)
    monkeypatch.setattr(torch.ops, "exl3", operators)
    rows = [tuning.ExpertOverride(tokens_upto=8, rows=8)]
    tuning.apply(profile([override(16)]).model_copy(update={"experts": rows}))
    assert len(operators.plan) == len(tuning.TABLE_FIELDS)
    assert len(operators.moe) == len(tuning.EXPERT_TABLE_FIELDS)
    tuning.clear()
    assert operators.plan == operators.moe == []
