"""Every tier forced, and the default, against the float64 oracle and its bounds."""

import numpy as np
import pytest
import torch

from exl3_plugin import ops
from tests.gpu import cases, oracle

pytestmark = pytest.mark.usefixtures("gpu")

SHAPES = ((128, 128), (256, 1280), (1024, 128), (4096, 2048), (5120, 1024), (1024, 12288))
LARGE = (17408, 5120)
KINDS = [cases.PLANS[name] for name in ("rows8", "rows8-fast", "dense")]
"""One plan of each arithmetic; the default takes any of them."""


def sweep(layer, k_in, rows, report, dtypes=cases.DTYPES, plans=cases.PLANS, seed=7):
    """All plans over all row counts; one oracle an arithmetic serves them, row by row."""
    for dtype in dtypes:
        x = cases.activations(seed, max(rows), k_in, dtype)
        expected = {}
        for name, plan in plans.items():
            kind = (plan.kernel, plan.form)
            if kind not in expected:
                expected[kind] = layer.expect(x, plan)
            for m in rows:
                y = layer.run(x[:m], plan)
                assert y.shape == (m, layer.n_out) and y.dtype == dtype, (name, m, y.shape)
                case = f"{layer.fields} k={layer.k} {dtype} m={m}"
                # With few inputs the rounding of a rebuilt weight alone reaches its worst case.
                limit = 1.0 if plan.kernel == ops.DENSE else cases.WORST_LIMIT
                report.add(name, case, expected[kind].fractions(y), limit)


@pytest.mark.quick
def test_every_rate(capfd):
    report = cases.Report()
    for index, (codebook, words) in enumerate(cases.RATES):
        layer = cases.make_layer([1, index], 256, [(codebook, words, 256)])
        for name, plan in cases.PLANS.items():
            rows = (3, max(plan.rows, 8) + 1)
            sweep(layer, 256, rows, report, (cases.DTYPES[index % 2],), {name: plan})
    with capfd.disabled():
        report.check("every rate and codebook")


@pytest.mark.quick
def test_every_row_count(capfd):
    report = cases.Report()
    for number, (codebook, words) in enumerate((("mcg", 64), ("mul1", 56))):
        layer = cases.make_layer([2, number], 640, [(codebook, words, 384)])
        sweep(layer, 640, cases.ROWS, report)
    with capfd.disabled():
        report.check("every row count")


@pytest.mark.parametrize("k,n", (*SHAPES, LARGE), ids=lambda v: str(v))
def test_shapes(k, n, capfd):
    report = cases.Report()
    rates = (("mcg", 64), ("mul1", 96), ("3inst", 48))
    for number, (codebook, words) in enumerate(rates[:1] if (k, n) == LARGE else rates):
        layer = cases.make_layer([3, k, n, number], k, [(codebook, words, n)])
        rows = (1, 8, 17, 64, 129, 1000)
        sweep(layer, k, rows, report, cases.DTYPES if number == 0 else cases.DTYPES[:1])
        torch.cuda.empty_cache()
    with capfd.disabled():
        report.check(f"{k} x {n}")


def test_fused_layers(capfd):
    """One to four shards: own scales, rates, codebooks; cuts inside blocks; three bias dtypes."""
    report = cases.Report()
    for count in (1, 2, 3, 4):
        for number in range(6):
            rng = np.random.default_rng([4, count, number])
            k = int(rng.choice([128, 384, 1024]))
            specs = []
            for _ in range(count):
                codebook, words = cases.RATES[rng.integers(len(cases.RATES))]
                n = 128 * int(rng.integers(1, 6))
                begin = int(rng.integers(0, n // 2))
                specs.append((codebook, words, n, begin, int(rng.integers(1, n - begin + 1))))
            k_begin = int(rng.choice([0, 64, 100]))
            k_in = int(rng.integers(1, k - k_begin + 1))
            bias = (None, torch.float32, torch.bfloat16, torch.float16)[number % 4]
            layer = cases.make_layer([5, count, number], k, specs, bias=bias, k_begin=k_begin)
            sweep(layer, k_in, (1, 7, 40, 130), report, (cases.DTYPES[number % 2],))
    with capfd.disabled():
        report.check("fused layers")


def test_numbers_of_blocks(capfd):
    """However k is split between blocks."""
    report = cases.Report()
    layer = cases.make_layer(6, 2048, [("mcg", 64, 384), ("mcg", 64, 256)])
    for blocks in (1, 2, 3, 7, 40, 131):
        plans = {
            name: plan._replace(blocks=blocks)
            for name, plan in cases.PLANS.items()
            if plan.kernel == ops.GEMM
        }
        sweep(layer, 2048, (1, 20, 129), report, cases.DTYPES[:1], plans)
    with capfd.disabled():
        report.check("numbers of blocks")


@pytest.mark.parametrize("exact", [False, True])
def test_default(exact, options, capfd):
    options(exact=exact)
    report = cases.Report()
    kinds = [plan for plan in KINDS if not (exact and plan.form == ops.FAST)]
    specs = [
        [("mcg", 64, 1024)],
        [("mul1", 64, 1024)],
        [("mul1", 40, 256), ("3inst", 96, 384, 50, 300), ("mcg", 32, 128)],
    ]
    for number, spec in enumerate(specs):
        layer = cases.make_layer([7, number], 1024, spec, bias=(None, torch.float32)[number % 2])
        for dtype in cases.DTYPES:
            x = cases.activations(8, 1000, 1024, dtype)
            expected = [layer.expect(x, plan) for plan in kinds]
            for m in cases.ROWS:
                y = layer.run(x[:m])
                assert y.shape == (m, layer.n_out) and y.dtype == dtype
                case = f"{spec} {dtype} m={m}"
                report.add("exact" if exact else "any", case, cases.closest(layer, y, expected))
    with capfd.disabled():
        report.check("default dispatch")


def test_a_hundred_thousand_rows(capfd):
    report = cases.Report()
    layer = cases.make_layer(9, 256, [("mcg", 64, 384)])
    x = cases.activations(10, 100_000, 256, torch.bfloat16)
    expected = [layer.expect(x, plan) for plan in KINDS]
    for name, plan in (("default", None), ("rows128", cases.PLANS["rows128"])):
        y = layer.run(x, plan)
        report.add(name, "100,000 rows", cases.closest(layer, y, expected))
    with capfd.disabled():
        report.check("100,000 rows")


def test_dense_is_the_rebuilt_weight_times_x():
    """To fp32 accuracy, so that the route adds nothing to what `dense_weight` was checked for."""
    for dtype in cases.DTYPES:
        layer = cases.make_layer(11, 512, [("mul1", 64, 640), ("mcg", 48, 256, 30, 200)])
        x = cases.activations(12, 300, 512, dtype)
        weight = torch.ops.exl3.dense_weight(
            layer.flat, layer.suh, layer.svh, layer.fields, 0, 512, dtype == torch.bfloat16
        )
        expected = x.double() @ weight.double().T
        size = torch.sqrt(x.double() ** 2 @ weight.double().T ** 2)
        got = layer.run(x, cases.PLANS["dense"]).double()
        limit = oracle.step(expected.abs(), dtype) * 0.5001 + 2.0**-18 * size
        assert ((got - expected).abs() <= limit).all()


@pytest.mark.quick
@pytest.mark.parametrize("name", cases.PLANS)
def test_padded_columns_are_exactly_zero(name):
    layer = cases.make_layer(13, 384, [("mcg", 64, 384), ("mul1", 40, 256)])
    zero = torch.zeros(640, dtype=torch.bool, device="cuda")
    zero[100:129] = zero[250:384] = zero[500:640] = True
    layer.svh[zero] = 0
    for dtype in cases.DTYPES:
        for m in (1, 9, 130):
            y = layer.run(cases.activations(14, m, 384, dtype), cases.PLANS[name])
            assert (y[:, zero] == 0).all()
            assert (y[:, ~zero] != 0).float().mean() > 0.9


@pytest.mark.quick
@pytest.mark.parametrize("name", cases.PLANS)
def test_what_is_not_finite_stays_in_its_row(name):
    layer = cases.make_layer(15, 512, [("mcg", 64, 384), ("mul1", 64, 128)])
    for dtype in cases.DTYPES:
        for m in (3, 16, 70, 200):
            x = cases.activations(16, m, 512, dtype)
            clean = layer.run(x, cases.PLANS[name])
            poisoned = x.clone()
            poisoned[1, 77] = float("nan")
            poisoned[2] = torch.finfo(dtype).max
            y = layer.run(poisoned, cases.PLANS[name])
            others = torch.arange(m, device="cuda")
            others = others[(others != 1) & (others != 2)]
            assert cases.same_bits(y[others], clean[others])
            assert y[1, layer.svh != 0].isnan().all()


@pytest.mark.quick
def test_shapes_and_strides_of_x():
    layer = cases.make_layer(17, 256, [("mcg", 64, 256)])
    x = cases.activations(18, 24, 256, torch.bfloat16)
    for plan in (None, *cases.PLANS.values()):
        flat = layer.run(x, plan)
        assert cases.same_bits(layer.run(x.view(2, 3, 4, 256), plan), flat.view(2, 3, 4, 256))
        strided = x.t().contiguous().t()
        assert cases.same_bits(layer.run(strided, plan), flat)
        wide = torch.full((24, 321), float("nan"), dtype=x.dtype, device="cuda")
        wide[:, 33:289] = x  # rows at odd places, not even four bytes aligned
        if plan is None or plan.kernel == ops.GEMM:
            assert cases.same_bits(layer.run(wide[:, 33:289], plan), flat)
            assert cases.same_bits(layer.run(wide[3:20, 33:289], plan), layer.run(x[3:20], plan))
        else:  # a GEMM library goes by alignment
            torch.testing.assert_close(layer.run(wide[:, 33:289], plan), flat, rtol=0.02, atol=0.05)
        assert layer.run(x[:0].view(0, 2, 256), plan).shape == (0, 2, 256)
    one = layer.run(x[0])
    assert one.shape == (256,) and cases.same_bits(one, layer.run(x[:1])[0])
