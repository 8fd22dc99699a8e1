"""The first thing to run on a GPU: decode, the first tier, the default, in a few seconds."""

import pytest
import torch

from exl3_plugin import ops
from tests.gpu import cases

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("gpu")]


@pytest.mark.parametrize("codebook,words", [("mcg", 64), ("mul1", 64), ("3inst", 96)])
def test_a_tile_decodes(codebook, words):
    layer = cases.make_layer(1, 128, [(codebook, words, 128)])
    trellis = torch.from_numpy(layer.shards[0].trellis).cuda()
    found = ops.reconstruct(trellis, codebook).double()
    wrong = found != layer.weights[0].exact
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, first {wrong.nonzero()[0]}"


@pytest.mark.parametrize("name", cases.PLANS)
def test_tier(name, capfd):
    report = cases.Report()
    plan = cases.PLANS[name]
    for k, n in ((128, 128), (256, 384), (2048, 1024)):
        for codebook, words in (("mcg", 64), ("mul1", 64), ("3inst", 96), ("mul1", 40)):
            layer = cases.make_layer([2, k, words], k, [(codebook, words, n)])
            for dtype in cases.DTYPES:
                x = cases.activations(3, 9, k, dtype)
                expected = layer.expect(x, plan)
                for m in (1, 8, 9):
                    y = layer.run(x[:m], plan)
                    assert y.shape == (m, n) and y.dtype == dtype
                    case = f"{k}x{n} {codebook} {words} words {dtype} m={m}"
                    report.add(name, case, expected.fractions(y))
    with capfd.disabled():
        report.check("smoke")


def test_default_dispatch():
    layer = cases.make_layer(4, 512, [("mcg", 64, 512)])
    x = cases.activations(5, 64, 512, torch.bfloat16)
    y = layer.run(x)
    assert y.shape == (64, 512)
    exact = layer.expect(x, cases.PLANS["rows8"]).truth
    assert (y.double() - exact).norm() <= 5e-3 * exact.norm()
