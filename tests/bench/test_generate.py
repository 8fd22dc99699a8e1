"""Banks of random layers, and whether the proof of a point notices what it must."""

import numpy as np
import pytest
import torch

from bench import generate
from exl3_plugin import format as exl3
from exl3_plugin import ops

PLAN = ops.Plan(ops.GEMM, 16, ops.EXACT, 0)
K, N = 256, 384


def bank(codebook="mcg", bits=4.0, copies=3):
    return generate.random_bank(K, N, bits, codebook, copies, "cpu", seed=7)


def kernel_result(made, copy, x):
    """The layer as the format's numpy module computes it, rounded to x's type once."""
    arrays = (made.trellis[copy].numpy(), made.suh[copy].numpy(), made.svh[copy].numpy())
    return torch.from_numpy(exl3.linear(x.double().numpy(), *arrays, made.codebook)).to(x.dtype)


@pytest.mark.parametrize("codebook, bits", [("mcg", 4), ("3inst", 3), ("mul1", 2.5), ("mul1", 8)])
def test_truth_is_the_format(codebook, bits):
    made = bank(codebook, bits)
    assert made.copy_bytes == generate.weight_bytes(K, N, bits)
    x = torch.randn(5, K, dtype=torch.bfloat16)
    for copy in (0, 2):
        truth = generate.Truth(made, copy, blocks=2, seed=copy)
        arrays = (made.trellis[copy].numpy(), made.suh[copy].numpy(), made.svh[copy].numpy())
        wanted = exl3.linear(x.double().numpy(), *arrays, codebook)[:, truth.columns.numpy()]
        found = truth.expect(x, PLAN).truth.numpy()
        assert len(truth.columns) == 256
        assert np.abs(found - wanted).max() <= 1e-12 * np.abs(wanted).max()


def test_copies_differ_and_the_shard_list_describes_them():
    made = bank()
    words = made.trellis.view(3, -1)
    assert (words[0] != words[1]).float().mean() > 0.99
    assert made.shards == [1, 64, N, 0, N]
    assert torch.equal(made.strips[2], ops.to_strips(made.trellis[2]))
    assert (made.suh[0] != made.suh[1]).any() and made.suh.abs().max() < 0.1


def test_layers_that_do_not_exist_are_refused():
    with pytest.raises(exl3.FormatError, match="only with mul1"):
        generate.random_bank(K, N, 2.5, "mcg", 1, "cpu")
    with pytest.raises(exl3.FormatError, match="blocks of 128"):
        generate.random_bank(K, 200, 4, "mcg", 1, "cpu")


def test_a_right_result_passes_for_every_copy():
    made = bank()
    x = torch.randn(70, K, dtype=torch.bfloat16)
    for copy in range(made.copies):
        truth = generate.Truth(made, copy)
        verdict = generate.verify(kernel_result(made, copy, x), x, truth, PLAN)
        assert verdict.finite and verdict.passes(2.5e-3)
        assert 1e-4 < verdict.relative < 2.5e-3, "bfloat16 rounding alone"


def fault_in_a_column(y, column):
    y[:, column] *= 1.02
    return y


FAULTS = {
    "another copy": lambda made, truth, x: kernel_result(made, 1, x),
    "rows exchanged": lambda made, truth, x: kernel_result(made, 0, x).flip(0),
    "a column off by 2 %": lambda made, truth, x: fault_in_a_column(
        kernel_result(made, 0, x), int(truth.columns[3])
    ),
    "not a number in an unchecked row": lambda made, truth, x: kernel_result(made, 0, x).index_put(
        (torch.tensor([150]), torch.tensor([5])), torch.tensor(float("nan")).bfloat16()
    ),
    "nothing written": lambda made, truth, x: torch.zeros(200, N, dtype=x.dtype),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_result_does_not_pass(name):
    made = bank()
    truth = generate.Truth(made, 0)
    x = torch.randn(200, K, dtype=torch.bfloat16)
    verdict = generate.verify(FAULTS[name](made, truth, x), x, truth, PLAN)
    assert not verdict.passes(2.5e-3)


@pytest.mark.parametrize("m", [1, 2, 64, 65, 66, 8192])
def test_sampled_rows(m):
    rows = generate.sample_rows(m)
    assert len(rows) == len(set(rows.tolist())) == min(m, 64)
    assert rows[0] == 0 and rows[-1] == m - 1
    assert (np.diff(rows) > 0).all()
