"""Which plans are measured, which one is taken, and how a broken-off run goes on."""

import json

import pytest

from bench import calibrate
from bench.calibrate import KEY, Layer, candidates, describe, with_blocks
from bench.choosing import Partial, choose, finalists, gain_lines
from exl3_plugin import ops

SMS, UNITS = 132, 15360
GEMM8 = ops.Plan(ops.GEMM, 8, ops.EXACT, 2 * SMS)
FAST8 = ops.Plan(ops.GEMM, 8, ops.FAST, 2 * SMS)
GEMM128 = ops.Plan(ops.GEMM, 128, ops.EXACT, SMS)
DENSE = ops.Plan(ops.DENSE, 0, ops.EXACT, 0)


@pytest.mark.parametrize("m", calibrate.ROWS)
def test_candidates(m):
    default = ops.Plan(ops.GEMM, 16, ops.EXACT, 7)
    plans = candidates(m, default, SMS, UNITS)
    assert plans[0] == default and len(set(plans)) == len(plans)
    assert any(plan.kernel == ops.GEMM for plan in plans[1:]), "the trellis itself, at any m"
    assert (DENSE in plans) == (m >= 48)
    fast = {plan.rows for plan in plans if plan.form == ops.FAST}
    assert fast == ({1, 8} if m == 1 else {8} if m <= 8 else set())
    assert any(plan.kernel == ops.STREAM for plan in plans) == (m == 1)
    assert len(plans) <= 8, "a point has to stay cheap"


def test_the_built_in_plan_is_not_measured_twice():
    assert candidates(1, FAST8, SMS, UNITS).count(FAST8) == 1
    assert candidates(2048, DENSE, SMS, UNITS) == [DENSE, GEMM128]
    small = candidates(1, FAST8, SMS, 24)
    assert {plan.blocks for plan in small[1:]} == {24}, "no more blocks than units of work"


def test_blocks_are_whole_waves():
    assert [p.blocks for p in with_blocks(GEMM8, SMS, UNITS)] == [SMS, 3 * SMS]
    assert [p.blocks for p in with_blocks(GEMM8, SMS, 200)] == [SMS, 200]
    assert with_blocks(DENSE, SMS, UNITS) == []


def test_doubt_keeps_the_built_in_plan():
    assert choose({GEMM8: 10.0, DENSE: 9.81}, GEMM8) == GEMM8
    assert choose({GEMM8: 10.0, DENSE: 9.79}, GEMM8) == DENSE
    assert choose({GEMM8: 10.0, DENSE: 20.0}, DENSE) == GEMM8
    assert choose({GEMM128: 10.0, DENSE: 10.0}, GEMM8) == GEMM128, "a tie goes to the first"


def test_a_fast_form_has_to_pay():
    assert choose({GEMM8: 10.0, FAST8: 9.6}, GEMM8) == GEMM8
    assert choose({GEMM8: 10.0, FAST8: 9.2}, GEMM8) == FAST8
    assert choose({FAST8: 10.0, GEMM8: 10.2}, FAST8) == GEMM8


def test_what_is_close_is_measured_again():
    times = {GEMM8: 20.0, GEMM128: 10.0, DENSE: 10.5, FAST8: 10.5}
    assert finalists(times, GEMM8) == [GEMM8, GEMM128, DENSE]


def measurement(m, plan, us, default=False, chosen=False):
    base = {"k": 5120, "n": 12288, "half_bits": 8, "family": 0, "m": m, "plan": list(plan)}
    return {**base, "us": us, "spread": 0.01, "default": default, "chosen": chosen}


def test_overrides_take_the_choices_in_order_of_rows():
    measured = [
        measurement(64, DENSE, 5.0, chosen=True),
        measurement(64, GEMM8, 9.0, default=True),
        measurement(8, GEMM8, 4.0, default=True, chosen=True),
        measurement(128, DENSE, 6.0, default=True, chosen=True),
    ]
    rows = calibrate.overrides(measured)
    assert [(row.m_upto, row.plan) for row in rows] == [(8, GEMM8), (64, DENSE)]
    assert calibrate.overrides([]) == []
    lines = gain_lines(measured, (*KEY, "m"), describe)
    assert lines[0] == "1 of 3 points changed"
    assert lines[1].startswith("1.80x  5120x12288 4 bit mcg, 64 rows")


def test_layers_have_the_key_of_the_table():
    assert Layer(5120, 12288, 2.5, "mul1").key == [5120, 12288, 5, 1]
    assert Layer(4096, 2048, 4, "mcg").key == [4096, 2048, 8, 0]


def test_an_interrupted_run_continues(tmp_path):
    path = tmp_path / "profile.json.partial"
    identity = {"key": {"sms": 132}, "rows": [1, 8]}
    first = Partial(path, identity)
    assert not first.resumed
    for n in (128, 256):
        first.add({"layer": [128, n, 8, 0], "measured": []})
    with path.open("a") as out:
        out.write('{"layer": [128, 38')
    again = Partial(path, identity)
    assert again.resumed and set(again.done) == {(128, 128, 8, 0), (128, 256, 8, 0)}
    again.add({"layer": [128, 384, 8, 0], "measured": []})
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 4
    other = Partial(path, {**identity, "key": {"sms": 148}})
    assert not other.resumed and not other.done, "results of another device are worth nothing"
