"""The checker checked, on any machine: the torch oracle against numpy, and planted faults.

`simulate` is a kernel in torch: fp32 transforms, fp16 image, fp16 weights, fp32 sums. Honest, it
has to pass both bounds; with any one fault planted it has to break the statistical one.
"""

import numpy as np
import pytest
import torch

from exl3_plugin import format as exl3
from exl3_plugin import ops
from tests.gpu import cases, oracle
from tests.ops.linear_cases import random_shard

EXACT, FAST, DENSE = cases.PLANS["rows8"], cases.PLANS["rows8-fast"], cases.PLANS["dense"]


@pytest.mark.parametrize("codebook,words", cases.RATES)
def test_decoder_equals_numpy(codebook, words):
    trellis = random_shard(np.random.default_rng(words), 128, 256, codebook, words).trellis
    expected = exl3.unpack_states(trellis)
    assert np.array_equal(oracle.states(torch.from_numpy(trellis)).numpy(), expected)
    weights = oracle.Weights(torch.from_numpy(trellis), torch.ones(128), torch.ones(256), codebook)
    inner = exl3.decode_inner(trellis, codebook).astype(np.float64)
    assert np.array_equal(weights.exact.numpy(), inner)


@pytest.mark.parametrize("codebook", exl3.CODEBOOKS)
def test_codebook_values(codebook):
    value, unrounded, summed = oracle.codebook_values(codebook)
    assert np.array_equal(value.numpy(), exl3.codebook(codebook).astype(np.float64))
    rounding = (value - unrounded).abs()
    assert rounding.max() > 0 and (rounding <= 2.0**-11 * unrounded.abs()).all()
    assert (summed >= unrounded.abs()).all()


def test_rounding():
    x = torch.randn(4096, dtype=torch.float64) * torch.logspace(-9, 4, 4096, dtype=torch.float64)
    for dtype in cases.DTYPES:
        # A float32 has few enough digits for one rounding, whatever path torch takes.
        single = x.float()
        assert torch.equal(oracle.rounded(single.double(), dtype), single.to(dtype).double())


def test_step():
    found = [0.0, 1.0, 1.99, -2.0, 2.0**-14, 2.0**-20, 65504.0]
    half = oracle.step(torch.tensor(found, dtype=torch.float64), torch.float16)
    assert half.tolist() == [2.0**-24, 2.0**-10, 2.0**-10, 2.0**-9, 2.0**-24, 2.0**-24, 32.0]
    wide = oracle.step(torch.tensor(found, dtype=torch.float64), torch.bfloat16)
    assert wide.tolist() == [2.0**-133, 2.0**-7, 2.0**-7, 2.0**-6, 2.0**-21, 2.0**-27, 256.0]


def test_truth_equals_numpy():
    layer = cases.make_layer(
        1, 384, [("mul1", 56, 256, 100, 90), ("3inst", 32, 128)], "cpu", torch.float32, 64
    )
    x = cases.activations(2, 5, 300, torch.bfloat16, "cpu")
    wide = np.zeros((5, 384))
    wide[:, 64:364] = x.double().numpy()
    expected = np.concatenate(
        [
            exl3.linear(wide, s.trellis, s.suh, s.svh, s.codebook)[:, s.n_begin :][:, : s.n_out]
            for s in layer.shards
        ],
        axis=1,
    )
    expected += layer.bias.double().numpy()
    for plan in (EXACT, FAST, DENSE):
        found = layer.expect(x, plan)
        np.testing.assert_allclose(found.truth.numpy(), expected, rtol=1e-11, atol=1e-11)
        assert (found.modelled - found.truth).norm() <= 1e-3 * found.truth.norm()


FAULTS = {
    "two lanes swapped": "weights",
    "halves of a fragment swapped": "weights",
    "one window shifted by a bit": "weights",
    "one weight wrong": "weights",
    "last k tile left out": "weights",
    "weights not rounded": "weights",
    "neighbouring tiles swapped": "weights",
    "suh off by one": "suh",
    "svh off by one": "svh",
    "a row taken from its neighbour": "x",
    "x rounded to bfloat16": "x",
    "image rounded to bfloat16": "image",
    "image truncated": "image",
    "one value of x left out": "x",
    "sums of 128 inputs rounded to fp16": "sums",
    "a butterfly level left out": "z",
    "one butterfly sign wrong": "z",
    "result rounded through bfloat16": "y",
    "result truncated": "y",
    "bias left out": "y",
}


def plant(fault, stage, value, layer, bias=None):
    """`value` of this stage of `simulate`, with the fault where it belongs there."""
    if FAULTS.get(fault) != stage:
        return value
    value = value.clone()
    if fault == "two lanes swapped":
        tile = value[32:48, 16:32]
        tile[0:2, 0], tile[2:4, 0] = tile[2:4, 0].clone(), tile[0:2, 0].clone()
    elif fault == "halves of a fragment swapped":
        value[:8, :16], value[8:16, :16] = value[8:16, :16].clone(), value[:8, :16].clone()
    elif fault == "one window shifted by a bit":
        states = oracle.states(torch.from_numpy(layer.shards[0].trellis)).long()
        states[..., 3::8] >>= 1
        value = oracle.place(oracle.codebook_values(layer.shards[0].codebook)[0][states])
    elif fault == "one weight wrong":
        value[100, 77] += 0.5
    elif fault == "last k tile left out":
        value[-16:] = 0
    elif fault == "weights not rounded":
        value = layer.weights[0].unrounded
    elif fault == "neighbouring tiles swapped":
        value[:16, :16], value[:16, 16:32] = value[:16, 16:32].clone(), value[:16, :16].clone()
    elif fault in ("suh off by one", "svh off by one"):
        value = value.roll(1)
    elif fault == "a row taken from its neighbour":
        value[3] = value[4]
    elif fault in ("x rounded to bfloat16", "image rounded to bfloat16"):
        value = value.bfloat16().to(value.dtype)
    elif fault in ("image truncated", "result truncated"):
        full = value.double()
        value = (full - full.sign() * oracle.step(full, torch.float16) / 2).to(value.dtype)
    elif fault == "one value of x left out":
        value[:, 200] = 0
    elif fault == "sums of 128 inputs rounded to fp16":
        value = value.half().float()
    elif fault == "a butterfly level left out":
        value[:, 1:128:2] = value[:, 0:128:2]
    elif fault == "one butterfly sign wrong":
        value[:, 5] = -value[:, 5]
    elif fault == "result rounded through bfloat16":
        value = value.bfloat16().float()
    elif fault == "bias left out":
        value = value - bias
    return value


def butterflies(x, scale=1 / oracle.ROOT):
    """Seven levels in fp32."""
    shape = x.shape
    for level in range(7):
        pairs = x.reshape(shape[0], -1, 2, 1 << level)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack((a + b, a - b), dim=2)
    return x.reshape(shape) * torch.tensor(scale, dtype=torch.float32)


def simulate(layer, x, plan, fault=None):
    """One unfused layer the way a kernel computes it, rows independent of each other."""
    fast = plan.form == ops.FAST
    weights = layer.weights[0]
    inner = (weights.unrounded if fast else weights.exact).double()
    inner = plant(fault, "weights", inner, layer).float()
    suh = plant(fault, "suh", layer.suh[0].float(), layer)
    svh = plant(fault, "svh", layer.svh.float(), layer)
    x = plant(fault, "x", x, layer)
    ratio = oracle.IMAGE_SCALE
    image = butterflies(x.float() * suh, ratio)
    image = plant(fault, "image", image, layer).half().float() / (ratio * oracle.ROOT)
    z = torch.zeros(len(x), inner.shape[1])
    for begin in range(0, layer.k, 128):
        part = image[:, begin : begin + 128] @ inner[begin : begin + 128]
        z = z + plant(fault, "sums", part, layer)
    z = plant(fault, "z", z, layer)
    bias = layer.bias.float()
    y = butterflies(z) * svh + bias
    return plant(fault, "y", y, layer, bias).to(x.dtype)


def make(codebook, words, k=256, n=256):
    return cases.make_layer([3, words], k, [(codebook, words, n)], "cpu", torch.float32)


@pytest.mark.parametrize(
    "codebook,words", [("mcg", 64), ("3inst", 48), ("mul1", 40), ("mul1", 128)]
)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("plan", [EXACT, FAST], ids=["exact", "fast"])
def test_an_honest_kernel_passes(codebook, words, dtype, plan):
    for k in (128, 2048):
        layer = make(codebook, words, k)
        x = cases.activations(4, 65, k, dtype, "cpu")
        statistical, worst = layer.expect(x, plan).fractions(simulate(layer, x, plan))
        assert 0.005 < statistical <= 1 and worst <= cases.WORST_LIMIT, (k, statistical, worst)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_breaks_the_bound(fault):
    layer = make("mcg", 64, 512)
    x = cases.activations(5, 65, 512, torch.float16, "cpu")
    statistical, _ = layer.expect(x, EXACT).fractions(simulate(layer, x, EXACT, fault))
    assert statistical > 1.5, f"{fault}: {statistical:.3f} of the bound"


def test_the_rounded_weight_is_no_fast_form():
    """A fast form is held to the weights it declares."""
    layer = make("mul1", 64, 512)
    x = cases.activations(6, 65, 512, torch.float16, "cpu")
    statistical, worst = layer.expect(x, FAST).fractions(simulate(layer, x, EXACT))
    assert statistical > 1.5 and worst <= cases.WORST_LIMIT


def test_dense_route():
    """The rebuilt weight passes as a kernel would make it; a wrong element of it does not."""
    for dtype in cases.DTYPES:
        layer = make("mcg", 64, 512)
        weights = layer.weights[0]
        half_way = butterflies(weights.exact.float().T.contiguous()).half().float()
        weight = butterflies(half_way.T.contiguous()) * layer.suh[0].float()[:, None]
        weight = (weight * layer.svh.float()).to(dtype)
        statistical, worst = oracle.dense_weight(weights, dtype).fractions(weight)
        assert statistical <= 1 and worst <= 1
        x = cases.activations(7, 65, 512, dtype, "cpu")
        expected = layer.expect(x, DENSE)
        product = lambda w: ((x.float() @ w.float()) + layer.bias).to(dtype)  # noqa: B023, E731
        statistical, worst = expected.fractions(product(weight))
        assert 0.01 < statistical <= 1 and worst <= cases.WORST_LIMIT, (statistical, worst)
        weight[300:316] = weight[316:332].clone()
        assert expected.fractions(product(weight))[0] > 1.5
        assert oracle.dense_weight(weights, dtype).fractions(weight)[0] > 1.5


def test_nan_is_never_within_a_bound():
    layer = make("mcg", 64)
    x = cases.activations(8, 3, 256, torch.float16, "cpu")
    y = simulate(layer, x, EXACT)
    y[1, 7] = float("nan")
    assert layer.expect(x, EXACT).fractions(y) == (float("inf"), float("inf"))


def test_report_fails_where_a_case_breaks_a_bound():
    report = cases.Report()
    with pytest.raises(AssertionError, match="nothing was checked"):
        report.check("empty")
    report.add("a", "good", (0.9, 0.4))
    report.check("good")
    for fractions in ((1.1, 0.1), (0.1, 0.6), (float("nan"), 0.0)):
        report.broken.clear()
        report.add("a", "bad case", fractions)
        with pytest.raises(AssertionError, match="bad case"):
            report.check("bad")
