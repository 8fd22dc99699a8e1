"""`exl3::moe` on the CPU against float64 truth, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from exl3_plugin import experts, ops
from exl3_plugin.experts import Activation, Kind
from tests.moe import moe_cases as cases
from tests.moe import moe_oracle as oracle

MCG4 = Kind("mcg", 64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", autouse=True)
def library():
    ops.load()


def check(layer, x, weights, ids, *, cut=None, n_out=None, **options):
    """Run and compare; returns the result."""
    packed = experts.pack(layer, "cpu", cut, n_out)
    got = packed.run(x, weights, ids, **options)
    expected = oracle.Layer(layer, "cpu", cut, n_out).expect(x, weights, ids, **options)
    assert got.dtype == x.dtype and got.shape == expected.total.value.shape
    statistical, worst = expected.fractions(got)
    assert statistical <= 1 and worst <= 0.5, (statistical, worst)
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_an_expert(dtype):
    """Experts with 0, 1, 7, 8, 9 and 33 rows, duplicates of a token among them, holes between."""
    layer = cases.layer(1, 6, 256, 128, 384, MCG4)
    weights, ids = cases.counted(2, [0, 1, 7, 8, 9, 33], 3)
    assert (ids == -1).any()
    x = cases.activations(3, len(ids), 256, dtype)
    got = check(layer, x, weights, ids)
    assert torch.equal(got, experts.pack(layer).run(x, weights, ids.long()))


def test_the_bound_notices_small_faults():
    """A bound that let these pass would prove nothing: the oracle of another layer or routing."""
    layer = cases.layer(4, 4, 256, 128, 256, MCG4)
    weights, ids = cases.routing(5, 9, 2, 4)
    x = cases.activations(6, 9, 256, torch.float32)
    expected = oracle.Layer(layer).expect(x, weights, ids)
    packed = experts.pack(layer)
    assert expected.fractions(packed.run(x, weights, ids))[0] <= 1
    swapped = packed.run(x, weights, ids.flip(1))
    assert expected.fractions(swapped)[0] > 100
    assert expected.fractions(packed.run(x, weights * (1 + 2.0**-14), ids))[0] > 1
    packed.w2_svh[int(ids[0, 0])] *= 1.001
    assert expected.fractions(packed.run(x, weights, ids))[0] > 10
    packed = experts.pack(layer)
    packed.w13_trellis[17] ^= 1  # one bit of one expert's gate
    every = torch.arange(4, dtype=torch.int32).repeat(9, 1)
    expected = oracle.Layer(layer).expect(x, weights.repeat(1, 2), every)
    assert expected.fractions(packed.run(x, weights.repeat(1, 2), every))[0] > 10


def test_every_rate_in_one_layer():
    """Each expert and projection of another rate: all 27 pairs of codebook and bits."""
    rates = cases.RATES

    def kinds(expert, projection):
        return rates[(3 * expert + projection) % len(rates)]

    layer = cases.layer(7, 9, 128, 256, 128, kinds)
    packed = experts.pack(layer)
    assert len(packed.kinds) == 3 * len(rates) and packed.sizes[3] == 0
    weights, ids = cases.routing(8, 11, 4, 9)
    for dtype in DTYPES:
        check(layer, cases.activations(9, 11, 128, dtype), weights, ids)


@pytest.mark.parametrize("count,slots", [(8, 1), (64, 8), (288, 8), (512, 16)])
def test_many_experts(count, slots):
    layer = cases.layer([10, count], count, 128, 128, 128, Kind("mul1", 32))
    weights, ids = cases.routing(11, 13, slots, count)
    check(layer, cases.activations(12, 13, 128, torch.bfloat16), weights, ids)


def test_expert_maps_split_the_sum():
    """Each of three ranks returns its experts' part, and the parts are the whole."""
    layer = cases.layer(13, 12, 256, 128, 256, MCG4)
    weights, ids = cases.routing(14, 20, 4, 12)
    ids[3, 1] = ids[7, 0] = -1
    x = cases.activations(15, 20, 256, torch.float32)
    whole = experts.pack(layer).run(x, weights, ids)
    total = torch.zeros_like(whole)
    for rank in range(3):
        mine = [e for e in range(12) if e % 3 == rank]
        places = torch.full((12,), -1, dtype=torch.int32)
        places[mine] = torch.arange(4, dtype=torch.int32)
        total += check([layer[e] for e in mine], x, weights, ids, expert_map=places)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)


def test_nothing_routed_here_is_zero():
    layer = cases.layer(16, 4, 128, 128, 128, MCG4)
    x = cases.activations(17, 5, 128, torch.bfloat16)
    x[2] = float("nan")
    weights = torch.full((5, 2), float("nan"))
    none = torch.full((5, 2), -1, dtype=torch.int32)
    packed = experts.pack(layer)
    assert torch.equal(packed.run(x, weights, none), torch.zeros(5, 128, dtype=x.dtype))
    elsewhere = torch.full((8,), -1, dtype=torch.int32)
    ids = torch.arange(5, dtype=torch.int32)[:, None].expand(5, 2)
    assert not packed.run(x, weights, ids, elsewhere).any()
    assert packed.run(x[:0], weights[:0], none[:0]).shape == (0, 128)


@pytest.mark.parametrize("slots", [1, 3])
def test_router_weight_on_the_input(slots):
    layer = cases.layer(18, 5, 128, 256, 128, MCG4)
    weights, ids = cases.routing(19, 17, slots, 5)
    x = cases.activations(20, 17, 128, torch.float32)
    on_input = check(layer, x, weights, ids, weight_on_input=True)
    assert not torch.allclose(on_input, experts.pack(layer).run(x, weights, ids), rtol=0.1)


ACTIVATIONS = (
    Activation(),
    Activation(limit=0.5),
    Activation("swiglu", 1.702, 1.0, 0.7),
    Activation("gelu"),
    Activation("gelu_tanh", limit=1.0),
)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation):
    layer = cases.layer(21, 4, 256, 128, 128, MCG4)
    weights, ids = cases.routing(22, 12, 2, 4)
    for dtype in (torch.float32, torch.bfloat16):
        x = 3 * cases.activations(23, 12, 256, dtype)
        check(layer, x, weights, ids, activation=activation)


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_a_cut_inside_blocks_is_exact(ranks):
    """The columns between the products dealt to ranks; the hidden size is not whole blocks either.

    A rank holds every block that its columns touch, as the loader gives it to it.
    """
    layer = cases.layer(24, 4, 256, 384, 256, Kind("mul1", 40))
    weights, ids = cases.routing(25, 10, 2, 4)
    x = cases.activations(26, 10, 200, torch.float32)
    whole = check(layer, x, weights, ids, n_out=200)
    size = 384 // ranks
    parts = [check(layer, x, weights, ids, cut=(r * size, size), n_out=200) for r in range(ranks)]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=2e-5)


def test_a_row_does_not_depend_on_the_others():
    layer = cases.layer(27, 6, 256, 128, 256, MCG4)
    weights, ids = cases.routing(28, 600, 3, 6)  # more than one chunk of tokens
    x = cases.activations(29, 600, 256, torch.float32)
    packed = experts.pack(layer)
    whole = packed.run(x, weights, ids)
    for row in (0, 1, 511, 512, 599):
        one = slice(row, row + 1)
        assert torch.equal(packed.run(x[one], weights[one], ids[one]), whole[one])
    order = torch.from_numpy(np.random.default_rng(0).permutation(600))
    assert torch.equal(packed.run(x[order], weights[order], ids[order]), whole[order])


def test_rows_lie_where_they_lie():
    layer = cases.layer(30, 3, 128, 128, 128, MCG4)
    weights, ids = cases.routing(31, 6, 2, 3)
    wide = torch.full((6, 300), math.nan)
    wide[:, 50:178] = cases.activations(32, 6, 128, torch.float32)
    packed = experts.pack(layer)
    plain = packed.run(wide[:, 50:178].contiguous(), weights, ids)
    assert torch.equal(packed.run(wide[:, 50:178], weights, ids), plain)
    assert torch.equal(packed.run(wide[:, 50:178].t().contiguous().t(), weights, ids), plain)


def refusals():
    """What is wrong with each: a change of the arguments, and what the error says."""
    yield "topk_ids holds expert 9 of 3", {"ids": torch.full((4, 2), 9, dtype=torch.int32)}
    yield "17 experts a token", {
        "ids": torch.zeros(4, 17, dtype=torch.int32), "weights": torch.zeros(4, 17),
    }  # fmt: skip
    yield "topk_weights has scalar type", {"weights": torch.zeros(4, 2).double()}
    yield "x must be float32", {"x": torch.zeros(4, 128, dtype=torch.float64)}
    yield "x has 129 columns", {"x": torch.zeros(4, 129)}
    yield "sends expert 1 to place 7", {"expert_map": torch.tensor([0, 7, 2], dtype=torch.int32)}


@pytest.mark.parametrize("reason,change", refusals(), ids=lambda v: v if isinstance(v, str) else "")
def test_refused(reason, change):
    layer = cases.layer(33, 3, 128, 128, 128, MCG4)
    arguments = {
        "x": torch.zeros(4, 128),
        "weights": torch.ones(4, 2),
        "ids": torch.ones(4, 2, dtype=torch.int32),
    }
    with pytest.raises(RuntimeError, match=reason):
        experts.pack(layer).run(**arguments | change)


def test_refused_layers():
    layer = cases.layer(34, 2, 128, 128, 128, MCG4)
    x, ids = torch.zeros(1, 128), torch.zeros(1, 1, dtype=torch.int32)
    packed = experts.pack(layer)

    def run(**change):
        changed = experts.Experts(**vars(packed) | change)
        return changed.run(x, torch.ones(1, 1), ids)

    with pytest.raises(RuntimeError, match="legal are 16 times"):
        run(kinds=[1, 56, 7])
    with pytest.raises(RuntimeError, match="do not lie inside the trellis"):
        run(table=packed.table + torch.tensor([1, 0]))
    with pytest.raises(RuntimeError, match="513 experts on one device, expected 1 to 512"):
        run(
            w13_suh=packed.w13_suh[:1].expand(513, 2, 128).contiguous(),
            w13_svh=packed.w13_svh[:1].expand(513, 2, 128).contiguous(),
            w2_suh=packed.w2_suh[:1].expand(513, 128).contiguous(),
            w2_svh=packed.w2_svh[:1].expand(513, 128).contiguous(),
            table=packed.table[:, :1].expand(3, 513, 2).contiguous(),
        )


def test_the_operator_traces():
    layer = cases.layer(35, 3, 128, 128, 256, MCG4)
    packed = experts.pack(layer, n_out=200)
    weights, ids = cases.routing(36, 5, 2, 3)
    x = cases.activations(37, 5, 128, torch.float32)
    arguments = (
        x, weights, ids, None, packed.w13_trellis, packed.w13_suh, packed.w13_svh,
        packed.w2_trellis, packed.w2_suh, packed.w2_svh, packed.table, packed.kinds, packed.sizes,
        *Activation().arguments, False,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.exl3.moe.default, arguments)
