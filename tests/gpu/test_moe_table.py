"""Routed experts by measured choices: the table brings about what it says, and what is right."""

import pytest
import torch

from bench import calibrate_experts, moe_bank
from exl3_plugin import ops, tuning
from exl3_plugin.experts import ExpertSizes, Kind, plan
from tests.gpu import moe_layers as moe
from tests.gpu.cases import same_bits

pytestmark = pytest.mark.usefixtures("gpu")

COUNT, SLOTS, K, INNER = 24, 4, 1024, 384
SIZES = ExpertSizes(COUNT, COUNT, SLOTS, K, INNER)
FIELDS = {**SIZES._asdict(), "half_bits": 8, "family": 0}


@pytest.fixture(scope="module")
def layer():
    return moe.make(51, COUNT, K, INNER, K)


@pytest.fixture
def table():
    """`exl3::set_moe_table` with rows of keywords; empty afterwards."""

    def apply(*rows):
        numbers = [n for row in rows for n in tuning.ExpertOverride(**row).numbers()]
        torch.ops.exl3.set_moe_table(numbers)
        return numbers

    yield apply
    torch.ops.exl3.set_moe_table([])


def batch(m, dtype=torch.bfloat16):
    weights, ids = moe.routed([52, m], m, SLOTS, COUNT)
    return moe.rows([53, m], m, K, dtype), weights, ids


def runs_here(numbers, m, wanted):
    """Whether the kernels' own choice takes the row on this card."""
    found = plan(ops.cuda_device(), m, SIZES, 4.0, "mcg", table=numbers)
    return found[:2] == (wanted[0], wanted[1])


@pytest.mark.quick
@pytest.mark.parametrize("name", moe.PLANS)
@pytest.mark.parametrize("m", [1, 8, 70])
def test_each_row_gives_what_the_forced_plan_gives(name, m, layer, table):
    """Bit for bit, and within the bounds of float64 truth."""
    wanted, given = moe.PLANS[name], batch(m)
    numbers = table({**FIELDS, "tokens_upto": m, "rows": wanted[0], "form": wanted[1]})
    got = layer.run(*given)
    if not runs_here(numbers, m, wanted):
        table()
        assert same_bits(got, layer.run(*given)), "a row that cannot serve leaves it to the rule"
        return
    assert same_bits(got, layer.run(*given, plan=wanted))
    statistical, worst = layer.expect(*given, *moe_bank.form_of(wanted)).fractions(got)
    assert statistical <= 1 and worst <= 0.5


@pytest.mark.quick
def test_rows_are_looked_up_and_options_stay(layer, table, options):
    """The first row that matches wins; `exact` and batch invariance are stronger."""
    x, weights, ids = given = batch(16)
    forced = {name: layer.run(*given, plan=moe.PLANS[name]) for name in ("rows8", "rows8-fast")}
    assert not same_bits(forced["rows8"], forced["rows8-fast"])
    default = layer.run(*given)
    fast, exact = ({"rows": 8, "form": form} for form in (1, 0))
    table({**FIELDS, "tokens_upto": 15, **exact}, {**FIELDS, "tokens_upto": 16, **fast})
    assert same_bits(layer.run(*given), forced["rows8-fast"])
    eight = x[:15], weights[:15], ids[:15]
    assert same_bits(layer.run(*eight), layer.run(*eight, plan=moe.PLANS["rows8"]))
    for field in ("k", "inner", "experts", "global_experts"):
        table({**FIELDS, field: 128, "tokens_upto": 16, "rows": 64})
        assert same_bits(layer.run(*given), default), field
    table({"tokens_upto": 16, **fast})
    options(exact=True)
    assert same_bits(layer.run(*given), forced["rows8"])
    options(batch_invariant=True)
    invariant = layer.run(*given)
    table()
    assert same_bits(layer.run(*given), invariant)
    options()
    assert same_bits(layer.run(*given), default)


@pytest.mark.quick
def test_routes_give_way_where_they_cannot_serve(table):
    """Several kinds of weights, float16 tokens."""
    kinds = (Kind("mcg", 64), Kind("mul1", 40), Kind("3inst", 48))
    mixed = moe.make(54, 8, 256, 128, 256, lambda e, p: kinds[(e + p) % 3])
    plain = moe.make(55, 8, 256, 128, 256)
    weights, ids = moe.routed(56, 8, 2, 8)
    for rows, form, layer, dtype in (
        (1, 0, mixed, torch.bfloat16),
        (256, 0, mixed, torch.bfloat16),
        (256, 1, plain, torch.float16),
    ):
        x = moe.rows(57, 8, 256, dtype)
        before = layer.run(x, weights, ids)
        table({"tokens_upto": 8, "rows": rows, "form": form})
        assert same_bits(layer.run(x, weights, ids), before), rows
        table()


@pytest.mark.quick
def test_a_captured_call_keeps_the_plan_it_was_captured_with(layer, table):
    given = batch(8)
    layer.run(*given)
    table({**FIELDS, "tokens_upto": 8, "rows": 16})
    wanted = layer.run(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layer.run(*given)
    table()
    graph.replay()
    assert same_bits(got, wanted)


@pytest.mark.quick
def test_refused():
    for numbers, reason in (
        ([1, 2, 3], r"3 numbers, expected 11 for each row"),
        ([0] * 6 + [-1, 16, 24, 0, 0], r"exl3::set_moe_table: row 0: plan \(24, 0, 0\) is none"),
        ([0] * 6 + [-1, 16, 16, 1, 0], r"form 1 with 1 to 8 and 256 alone"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            torch.ops.exl3.set_moe_table(numbers)


@pytest.mark.quick
@pytest.mark.parametrize("experts", [8, 3], ids=["all experts", "a rank's experts"])
def test_calibration_of_a_small_layer(experts, monkeypatch):
    """End to end on one layer: every plan proven, one chosen, rows that a profile takes."""
    monkeypatch.setattr(calibrate_experts, "LAYER_BYTES", 1 << 20)
    layer = calibrate_experts.ExpertLayer(ExpertSizes(experts, 8, 2, 256, 128), 4.0, "mcg")
    calibration = calibrate_experts.Calibration(1e9, ops.cuda_device())
    seen = []
    with torch.cuda.stream(torch.cuda.Stream()):
        measured = calibration.layer(layer, (1, 12, 300), lambda: seen.append(1))
        torch.cuda.synchronize()
    assert len(seen) == 3 and not calibration.failures
    for tokens in (1, 12, 300):
        items = [item for item in measured if item["tokens"] == tokens]
        default = plan(ops.cuda_device(), tokens, layer.sizes, 4.0, "mcg")
        assert [item["plan"] for item in items if item["default"]] == [list(default)]
        assert sum(item["chosen"] for item in items) == 1 and len(items) > 2
    for item in measured:
        tuning.ExpertMeasurement(**item)
    for row in calibrate_experts.overrides(measured):
        assert tuple(row.plan) in {tuple(item["plan"]) for item in measured}
