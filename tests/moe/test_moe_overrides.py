"""Measured choices for routed experts: which calls they are for, and where they give way."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from exl3_plugin import experts, ops, tuning
from exl3_plugin.experts import ExpertPlan, ExpertSizes

H200 = [90, 132, 232448]
PRO6000 = [120, 188, 101376]
A100 = [80, 108, 166912]
QWEN3 = {"slots": 8, "experts": 128, "global_experts": 128, "k": 2048, "inner": 768}
RANK = {**QWEN3, "experts": 32}
EXACT, BATCH_INVARIANT = 1, 2


@pytest.fixture(scope="module", autouse=True)
def library():
    ops.load()


def row(tokens_upto, rows, form=0, blocks=0, **match):
    return tuning.ExpertOverride(
        tokens_upto=tokens_upto, rows=rows, form=form, blocks=blocks, **match
    ).numbers()


def choose(tokens, table=(), device=H200, shape=QWEN3, options=0, kind=(8, 0), fits=(1, 1, 1)):
    """rows, form, blocks, tokens at once, bytes, by the kernels' own code."""
    sizes = [shape[name] for name in ("slots", "experts", "global_experts", "k", "inner")]
    numbers = [tokens, *sizes, shape["k"], *kind, *fits]
    return torch.ops.exl3.moe_plan(device, numbers, options, list(table))


def test_the_order_of_a_row_is_that_of_the_operator():
    fields = {"k": 2048, "inner": 768, "experts": 32, "global_experts": 128, "slots": 8,
              "half_bits": 8, "family": 0}  # fmt: skip
    assert row(16, 32, 0, 264, **fields) == [2048, 768, 32, 128, 8, 8, 0, 16, 32, 0, 264]
    assert choose(16, row(16, 32, 0, 264, **fields), shape=RANK)[:3] == [32, 0, 264]
    for name, value in fields.items():
        other = row(16, 32, 0, 264, **{**fields, name: value + 128 if name == "k" else value + 1})
        assert choose(16, other, shape=RANK) == choose(16, shape=RANK), name


def test_what_a_row_leaves_open_matches_everything():
    for shape, kind in itertools.product((QWEN3, RANK), ((8, 0), (5, 1))):
        assert choose(64, row(64, 16), shape=shape, kind=kind)[0] == 16
    assert choose(65, row(64, 16)) == choose(65)


def test_the_first_row_that_matches_and_can_serve_wins():
    table = row(8, 2, half_bits=8) + row(8, 16) + row(100, 32)
    assert [choose(m, table)[0] for m in (8, 9, 100)] == [2, 32, 32]
    assert choose(8, table, kind=(6, 0))[0] == 16
    assert choose(8, table, device=A100)[0] == 16, "no route for few tokens there: the next row"
    assert choose(101, table) == choose(101)


def test_batch_invariant_mode_looks_at_no_row():
    for tokens in (1, 100, 8192):
        invariant = choose(tokens, options=BATCH_INVARIANT)
        assert choose(tokens, row(10_000, 8, 1), options=BATCH_INVARIANT) == invariant


def test_exact_takes_the_exact_form_of_a_fast_row():
    for rows, tokens in ((1, 1), (4, 8), (8, 40), (256, 99)):
        assert choose(tokens, row(99, rows, 1))[:2] == [rows, 1]
        assert choose(tokens, row(99, rows, 1), options=EXACT)[:2] == [rows, 0]


@pytest.mark.parametrize(
    "tokens, rows, where",
    [
        (1, 1, {"device": PRO6000}),
        (1, 1, {"fits": (0, 1, 1)}),
        (9, 4, {}),  # 72 pairs of token and slot, one pass takes 64
        (4096, 256, {"device": PRO6000}),
        (4096, 256, {"fits": (1, 0, 1)}),
        (1, 4, {"shape": {**QWEN3, "k": 14336}}),  # inputs beyond shared memory
    ],
)
def test_a_row_that_cannot_serve_leaves_the_call_to_the_rule(tokens, rows, where):
    assert choose(tokens, row(tokens, rows), **where) == choose(tokens, **where)


def test_blocks():
    assert choose(100, row(100, 16))[2] == 264, "0: what the card holds at once"
    assert choose(100, row(100, 32))[2] == 132
    assert choose(1, row(1, 1))[2] == 132
    assert choose(100, row(100, 16, blocks=77))[2] == 77
    small = {"slots": 1, "experts": 4, "global_experts": 4, "k": 128, "inner": 128}
    assert choose(1, row(1, 16, blocks=5000), shape=small)[2] == 8, "gate has no more k16 steps"
    assert choose(8192, row(8192, 256, 1, blocks=9))[:3] == [256, 1, 9]
    assert choose(8192, row(8192, 256, blocks=999))[:3] == [256, 0, 132]


def test_bytes_and_chunks_are_those_of_the_choice():
    """What a call takes is bounded whatever a row says, and tiles keep their chunks."""
    for tokens, rows in itertools.product((1, 60, 700, 5000, 40_000), tuning.TILE_ROWS):
        for device in (H200, PRO6000):
            _, _, blocks, chunk, size = choose(tokens, row(tokens, rows, blocks=400), device)
            assert blocks <= 400 and chunk <= 4096 and 0 < size < 3 << 30
    assert choose(5000, row(5000, 64))[3] == 2500


def test_any_table_gives_a_choice_that_is_legal():
    """Random rows on random calls: what was asked for, or what the rule says."""
    pick = random.Random(5)
    asked = 0
    for _ in range(2000):
        shape = {"slots": pick.choice((1, 4, 8, 16)), "k": 128 * pick.randrange(1, 60),
                 "inner": 128 * pick.randrange(1, 30), "global_experts": 512}  # fmt: skip
        shape["experts"] = pick.choice((16, 128, 512))
        tokens, device = pick.randrange(1, 9000), pick.choice((H200, PRO6000, A100))
        rows = pick.choice(tuning.EXPERT_TILE_ROWS)
        form = pick.randrange(2) if rows in tuning.FAST_EXPERT_TILE_ROWS else 0
        fits = tuple(pick.randrange(2) for _ in range(3))
        where = {"device": device, "shape": shape, "fits": fits}
        table = row(tokens, rows, form, pick.choice((0, 1, 132, 500, 65535)))
        found = choose(tokens, table, **where)
        assert found == choose(tokens, **where) or found[:2] == [rows, form]
        asked += found[:2] == [rows, form]
        assert rows not in tuning.TILE_ROWS or found[0] == rows, "tiles serve every call"
        if found[0] in (1, 2, 4):
            assert device is H200 and fits[0]
        if found[0] == 256:
            assert device is H200 and fits[1] and (found[1] == 0 or fits[2])
    assert asked > 800


def test_tables_that_are_none_are_refused():
    good = row(16, 8)
    for position, value in ((8, 24), (8, -1), (9, 2), (10, -1), (10, 1 << 16)):
        bad = [*good]
        bad[position] = value
        with pytest.raises(RuntimeError, match=r"row 1: plan .* is none"):
            choose(1, [*good, *bad])
    with pytest.raises(RuntimeError, match="12 numbers, expected 11 for each row"):
        choose(1, [*good, 1])
    with pytest.raises(RuntimeError, match="shape holds 7 numbers"):
        torch.ops.exl3.moe_plan(H200, [1, 8, 128, 128, 2048, 768, 2048], 0)


def test_the_plan_of_a_layer_in_python():
    sizes = ExpertSizes(experts=128, global_experts=128, slots=8, k=2048, inner=768)
    device = ops.Device(*H200)
    assert experts.plan(device, 1, sizes, 4, "mcg") == ExpertPlan(1, ops.FAST, 132)
    assert experts.plan(device, 1, sizes, 4, "mcg", exact=True) == ExpertPlan(1, ops.EXACT, 132)
    assert experts.plan(device, 1, sizes, 4, "mcg", batch_invariant=True).rows == 32
    table = row(8, 16, half_bits=5, family=1)
    assert experts.plan(device, 1, sizes, 2.5, "mul1", table=table).rows == 16
    assert experts.plan(device, 1, sizes, 3, "mul1", table=table).rows == 1
    assert experts.plan(device, 1, sizes, 2.5, "mcg", table=table).rows == 1
