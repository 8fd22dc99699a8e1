"""Routed experts on the GPU against float64 truth: every tile, form, rate and routing."""

import numpy as np
import pytest
import torch

from bench import moe_bank
from exl3_plugin.experts import SILU, Activation, Kind
from tests.gpu import moe_layers as moe
from tests.moe import moe_cases

pytestmark = pytest.mark.usefixtures("gpu")


def sweep(check, layer, x, weights, ids, case, plans=moe.PLANS, **options):
    """All plans on one input; one oracle a form serves them."""
    expected = {}
    for name, plan in plans.items():
        if not layer.takes(plan, x.dtype, options.get("activation", SILU)):
            continue
        form = moe_bank.form_of(plan)
        if form not in expected:
            expected[form] = layer.expect(x, weights, ids, *form, **options)
        got = layer.run(x, weights, ids, plan, **options)
        assert got.dtype == x.dtype and got.shape == expected[form].total.value.shape
        check.add(name, case, expected[form].fractions(got))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", moe.DTYPES, ids=str)
def test_rows_of_an_expert(dtype, capfd):
    """0, 1, 7, 8, 9, 33 and 130 rows, tokens sent twice to one expert, holes in between."""
    check = moe.Check()
    layer = moe.make(1, 8, 384, 256, 512)
    for slots in (1, 3):
        weights, ids = moe_cases.counted([2, slots], [0, 1, 7, 8, 9, 33, 130, 0], slots)
        x = moe.rows(3, len(ids), 384, dtype)
        sweep(check, layer, x, weights.cuda(), ids.cuda(), f"{slots} slots")
        sweep(check, layer, x, weights.cuda(), ids.cuda().long(), f"{slots} slots, int64")
    with capfd.disabled():
        check.done("rows of an expert")


@pytest.mark.quick
def test_every_rate(capfd):
    """Gate, up and down of one rate, so that gate and up are one product; both families."""
    check = moe.Check()
    for number, kind in enumerate(moe_cases.RATES):
        layer = moe.make([4, number], 4, 256, 256, 128, kind)
        assert layer.packed.sizes[3] == 1
        weights, ids = moe.routed(5, 21, 2, 4)
        x = moe.rows(6, 21, 256, moe.DTYPES[number % 2])
        sweep(check, layer, x, weights, ids, str(kind))
    with capfd.disabled():
        check.done("every rate")


@pytest.mark.quick
def test_every_rate_in_one_layer(capfd):
    """Each projection of each expert of another rate: many products, an activation of its own."""
    check = moe.Check()
    rates = moe_cases.RATES
    layer = moe.make(7, 9, 256, 128, 256, lambda e, p: rates[(3 * e + p) % len(rates)])
    assert layer.packed.sizes[3] == 0 and len(layer.packed.kinds) == 3 * len(rates)
    for m in (1, 30):
        weights, ids = moe.routed([8, m], m, 4, 9)
        sweep(check, layer, moe.rows(9, m, 256), weights, ids, f"{m} rows")
    # Experts differ, but gate and up of each are of one kind.
    layer = moe.make(10, 9, 256, 128, 256, lambda e, p: rates[(2 * e + (p == 2)) % len(rates)])
    assert layer.packed.sizes[3] == 1
    weights, ids = moe.routed(11, 17, 4, 9)
    sweep(check, layer, moe.rows(12, 17, 256), weights, ids, "pairs of many kinds")
    with capfd.disabled():
        check.done("mixed rates")


@pytest.mark.parametrize("count,slots", [(8, 1), (64, 8), (288, 8), (512, 16)])
def test_many_experts(count, slots, capfd):
    check = moe.Check()
    layer = moe.make([13, count], count, 256, 128, 128, Kind("mul1", 48))
    for m in (1, 5, 100):
        weights, ids = moe.routed([14, m], m, slots, count)
        sweep(check, layer, moe.rows(15, m, 256), weights, ids, f"{m} rows",
              moe.PLANS | {"default": None} if m > 5 else moe.PLANS)  # fmt: skip
    with capfd.disabled():
        check.done(f"{count} experts, {slots} a token")


@pytest.mark.parametrize("shape", [(128, 8, 2048, 768), (32, 8, 4096, 2048)], ids=str)
def test_real_shapes(shape, capfd):
    """Those of Qwen3-30B-A3B, and of GLM-5.3-Flash with fewer experts."""
    count, slots, hidden, inner = shape
    check = moe.Check()
    layer = moe.make([16, count], count, hidden, inner, hidden)
    for m in (1, 4, 8, 33, 300):
        weights, ids = moe.routed([17, m], m, slots, count)
        sweep(check, layer, moe.rows(18, m, hidden), weights, ids, f"{m} rows")
    torch.cuda.empty_cache()
    with capfd.disabled():
        check.done(f"{count} x {hidden} x {inner}")


@pytest.mark.parametrize("exact", [False, True])
def test_default(exact, options, capfd):
    """Dispatch at every size of batch, more than one chunk of tokens among them."""
    options(exact=exact)
    check = moe.Check()
    layer = moe.make(19, 16, 256, 128, 256)
    for m in (1, 2, 3, 7, 8, 9, 16, 17, 40, 100, 333, 1000, 5000):
        weights, ids = moe.routed([20, m], m, 4, 16)
        x = moe.rows(21, m, 256)
        got = layer.run(x, weights, ids)
        forms = [(False, False)] + [(True, False), (False, True)] * (not exact)
        best = min(layer.expect(x, weights, ids, *form).fractions(got) for form in forms)
        check.add("exact" if exact else "any", f"{m} rows", best)
    with capfd.disabled():
        check.done("default dispatch")


@pytest.mark.quick
def test_numbers_of_blocks_and_chunks(capfd):
    """However the work is cut: between gate and up, inside either, in many parts."""
    check = moe.Check()
    layer = moe.make(22, 5, 1024, 256, 512)
    weights, ids = moe.routed(23, 23, 2, 5)
    x = moe.rows(24, 23, 1024)
    for blocks in (1, 2, 3, 5, 7, 13, 40, 131, 1000):
        plans = {name: [*plan[:2], blocks, 0] for name, plan in moe.PLANS.items()}
        sweep(check, layer, x, weights, ids, f"{blocks} blocks", plans)
    for chunk in (1, 5, 22):
        plans = {name: [*plan[:2], 0, chunk] for name, plan in moe.PLANS.items()}
        sweep(check, layer, x, weights, ids, f"{chunk} tokens at once", plans)
    with capfd.disabled():
        check.done("numbers of blocks")


@pytest.mark.quick
def test_expert_maps_and_holes(capfd):
    """Parts of three ranks, with ids that are nobody's, some beyond every table."""
    check = moe.Check()
    count = 12
    weights, ids = moe.routed(25, 50, 3, count)
    ids[3, 1] = ids[7] = -1
    ids[9, 0] = -7
    x = moe.rows(26, 50, 256)
    for rank in range(3):
        layer = moe.make([27, rank], 4, 256, 128, 384)
        places = torch.full((count,), -1, dtype=torch.int32)
        places[rank::3] = torch.arange(4, dtype=torch.int32)
        sweep(check, layer, x, weights, ids, f"rank {rank}", expert_map=places.cuda())
    with capfd.disabled():
        check.done("expert maps")


@pytest.mark.quick
@pytest.mark.parametrize("name", [*moe.PLANS, "default"])
def test_nothing_routed_here_is_zero(name):
    layer = moe.make(28, 4, 128, 128, 256)
    x = torch.full((9, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    weights = torch.full((9, 2), float("nan"), device="cuda")
    none = torch.full((9, 2), -1, dtype=torch.int32, device="cuda")
    plan = moe.PLANS.get(name)
    for _ in range(3):
        y = layer.run(x, weights, none, plan)
        assert y.shape == (9, 256) and not y.any()
    elsewhere = torch.full((8,), -1, dtype=torch.int32, device="cuda")
    ids = torch.arange(18, dtype=torch.int32, device="cuda").view(9, 2) % 8
    assert not layer.run(x, weights, ids, plan, elsewhere).any()
    assert layer.run(x[:0], weights[:0], none[:0], plan).shape == (0, 256)


ACTIVATIONS = (
    Activation(limit=0.5),
    Activation("swiglu", 1.702, 1.0, 0.7),
    Activation("gelu"),
    Activation("gelu_tanh", limit=1.0),
)


@pytest.mark.quick
def test_activations_and_weights_on_the_input(capfd):
    check = moe.Check()
    mixed = [Kind("mcg", 64), Kind("mul1", 40), Kind("3inst", 48)]
    for number, kinds in enumerate((moe.MCG4, lambda e, p: mixed[(e + p) % 3])):
        layer = moe.make([29, number], 4, 256, 128, 256, kinds)
        weights, ids = moe.routed(30, 25, 2, 4)
        x = 3 * moe.rows(31, 25, 256)
        for activation in ACTIVATIONS:
            sweep(check, layer, x, weights, ids, str(activation), activation=activation)
        sweep(check, layer, x, weights, ids, "on input", on_input=True)
        sweep(check, layer, x, weights[:, :1], ids[:, :1], "top-1 on input", on_input=True)
    with capfd.disabled():
        check.done("activations")


@pytest.mark.quick
def test_cuts_inside_blocks(capfd):
    """A rank's columns between the products; a hidden size that is no multiple of four."""
    check = moe.Check()
    mixed = [Kind("mcg", 64), Kind("mul1", 40), Kind("3inst", 48)]
    for number, kinds in enumerate((moe.MCG4, lambda e, p: mixed[(e + p) % 3])):
        for begin, size in ((0, 96), (96, 96), (130, 1), (0, 256)):
            layer = moe.make([32, number], 3, 256, 256, 256, kinds, (begin, size), 201)
            weights, ids = moe.routed(33, 20, 2, 3)
            x = moe.rows(34, 20, 250)[:, :201]
            sweep(check, layer, x, weights, ids, f"[{begin}, {begin + size})")
    with capfd.disabled():
        check.done("cuts inside blocks")


@pytest.mark.quick
@pytest.mark.parametrize("name", [*moe.PLANS, "default"])
def test_what_is_not_finite_stays_in_its_token(name):
    layer = moe.make(35, 6, 256, 128, 256)
    plan = moe.PLANS.get(name)
    for m in (4, 70):
        weights, ids = moe.routed([36, m], m, 2, 6)
        x = moe.rows(37, m, 256)
        clean = layer.run(x, weights, ids, plan)
        x[1, 77] = float("nan")
        x[2] = torch.finfo(x.dtype).max
        y = layer.run(x, weights, ids, plan)
        others = torch.tensor([i for i in range(m) if i not in (1, 2)], device="cuda")
        assert torch.equal(y[others].view(torch.int16), clean[others].view(torch.int16))
        assert y[1].isnan().float().mean() > 0.9


def test_refused():
    layer = moe.make(38, 3, 128, 128, 128)
    x = moe.rows(39, 4, 128)
    weights, ids = moe.routed(40, 4, 2, 3)
    good = {"x": x, "weights": weights, "ids": ids}
    bad = [
        ("x has scalar type", {"x": x.float()}),
        ("topk_weights has scalar type", {"weights": weights.double()}),
        ("topk_ids must be on the device", {"ids": ids.cpu()}),
        ("plan \\(24, 0, 0, 0\\) is none", {"plan": [24, 0, 0, 0]}),
        ("form 1 with 1 to 8 and 256 alone", {"plan": [16, 1, 0, 0]}),
        ("bfloat16 for form 1", {"x": x.half(), "plan": [256, 1, 0, 0]}),
        ("17 experts a token", {"ids": ids.repeat(1, 9)[:, :17], "weights": weights.repeat(1, 9)}),
        ("x has 129 columns", {"x": moe.rows(41, 4, 129)}),
    ]
    for reason, change in bad:
        with pytest.raises(RuntimeError, match=reason):
            layer.run(**good | change)
    layer.run(**good)


def test_random_layers(capfd):
    """Sizes, cuts, maps, rates and routings at random."""
    check = moe.Check()
    for number in range(40):
        rng = np.random.default_rng([42, number])
        count, slots = int(rng.integers(1, 20)), int(rng.integers(1, 5))
        slots = min(slots, count)
        k, inner, n = (128 * int(rng.integers(1, 6)) for _ in range(3))
        pool = [moe_cases.RATES[i] for i in rng.integers(0, len(moe_cases.RATES), 3)]
        same = bool(rng.integers(2))
        kinds = pool[0] if same else (lambda e, p, pool=pool: pool[(e * 5 + p * p) % 3])
        begin = int(rng.integers(0, inner))
        cut = (begin, int(rng.integers(1, inner - begin + 1)))
        n_out = int(rng.integers(1, n + 1))
        layer = moe.make([43, number], count, k, inner, n, kinds, cut, n_out)
        m = int(rng.integers(1, 150))
        weights, ids = moe.routed([44, number], m, slots, count)
        ids[torch.from_numpy(rng.random((m, slots)) < 0.2).cuda()] = -1
        x = moe.rows([45, number], m, k, moe.DTYPES[number % 2])
        sweep(check, layer, x, weights, ids, f"case {number}")
    with capfd.disabled():
        check.done("random layers")
