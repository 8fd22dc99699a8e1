"""Calibration profiles: what is in a file, whether it fits this process, what it decides."""

import json
import logging

import pytest
import torch

from exl3_plugin import devices, env, ops, tuning

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
