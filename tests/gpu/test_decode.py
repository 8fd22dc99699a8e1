"""Decoding on the device, bit for bit: every state of every codebook, every rate."""

import numpy as np
import pytest
import torch

from exl3_plugin import format as exl3
from exl3_plugin import ops
from tests.gpu import cases, oracle
from tests.ops.linear_cases import random_shard

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("gpu")]


@pytest.mark.parametrize("codebook,words", cases.RATES)
def test_all_states(codebook, words):
    """Two million random weights of each rate and codebook hold all 65,536 states."""
    rng = np.random.default_rng([words, exl3.CODEBOOKS.index(codebook)])
    trellis = random_shard(rng, 1024, 2048, codebook, words).trellis
    stored = torch.from_numpy(trellis).cuda()
    seen = torch.bincount(oracle.states(stored).flatten(), minlength=1 << 16)
    assert int((seen == 0).sum()) == 0, "the tiles do not hold every state"

    found = ops.reconstruct(stored, codebook)
    assert found.dtype == torch.float16 and found.shape == (1024, 2048)
    expected = torch.from_numpy(exl3.decode_inner(trellis, codebook).view(np.int16)).cuda()
    wrong = (found.view(torch.int16) != expected).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} weights differ, the first at {wrong[0].tolist()}"


def test_strips_on_the_device():
    trellis = torch.randint(-(2**15), 2**15, (24, 40, 56), dtype=torch.int16)
    flat = ops.to_strips(trellis.cuda())
    assert torch.equal(flat.cpu(), ops.to_strips(trellis))
    assert torch.equal(ops.from_strips(flat, 384, 640).cpu(), trellis)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_rebuilt_weight(dtype, capfd):
    """`exl3::dense_weight`: both transforms and both scales, rounded once; shards, cuts, rows."""
    report = cases.Report()
    layers = [cases.make_layer([1, i], 256, [(*rate, 256)]) for i, rate in enumerate(cases.RATES)]
    layers = [(layer, layer.k) for layer in layers]
    specs = [("mcg", 64, 384, 100, 200), ("mul1", 56, 128), ("3inst", 96, 256, 0, 129)]
    for k_begin, k_in in ((70, 300), (0, 251), (4, 250), (128, 384), (511, 1)):
        layers.append((cases.make_layer(2, 512, specs, k_begin=k_begin), k_in))
    layers.append((cases.make_layer(3, 2048, [("mul1", 64, 1024)]), 2048))
    for layer, k_in in layers:
        found = torch.ops.exl3.dense_weight(
            layer.flat,
            layer.suh,
            layer.svh,
            layer.fields,
            layer.k_begin,
            k_in,
            dtype == torch.bfloat16,
        )
        assert found.dtype == dtype and found.shape == (layer.n_out, k_in)
        at = 0
        for shard, weights in zip(layer.shards, layer.weights):
            expected = oracle.dense_weight(weights, dtype)
            expected = expected.columns(shard.n_begin, shard.n_begin + shard.n_out)
            rows = slice(layer.k_begin, layer.k_begin + k_in)
            expected = oracle.Expectation(*(t[rows] for t in vars(expected).values()))
            part = found[at : at + shard.n_out].T
            at += shard.n_out
            case = f"{shard.codebook} {shard.trellis.shape}"
            report.add(str(dtype), case, expected.fractions(part))
    with capfd.disabled():
        report.check("rebuilt weight")
