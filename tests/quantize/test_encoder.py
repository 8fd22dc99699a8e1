"""The trellis search: valid walks, exact minima, the published quality, and clear refusals."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from exl3_plugin import format, ops

RATES = [
    (bits, codebook)
    for codebook in format.CODEBOOKS
    for bits in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
    if bits == int(bits) or codebook == "mul1"
]


@pytest.fixture(scope="module", autouse=True)
def library():
    ops.load()


@pytest.fixture(scope="module")
def bench(checkout):
    """bench/encode.py, which holds the reference table and measures against it."""
    spec = importlib.util.spec_from_file_location("bench_encode", checkout / "bench" / "encode.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def gaussian(count, seed=0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((count, 256), dtype=np.float32))


def encode(tiles, bits, codebook):
    words = format.words_from_bits(bits)
    return torch.ops.exl3.encode_tiles(tiles, words, format.CODEBOOKS.index(codebook))


def step_bits(bits):
    """Bits that each of the 256 steps adds: whole rates alike, half rates alternating."""
    added = np.full(256, int(bits))
    added[1::2] += bits != int(bits)
    return added


def viterbi(x, values, added, start, node=None):
    """Cheapest walk over one tile in float64, textbook form with back pointers.

    Runs once around from step `start`. `node` is where it begins and ends; None: anywhere.
    Returns the states in ring order and the cost.
    """
    order = [(start + taken) % 256 for taken in range(256)]
    cost = np.zeros(65536 >> added[start])
    if node is not None:
        cost[:] = np.inf
        cost[node] = 0
    back = []
    for taken, step in enumerate(order):
        leaving = added[order[(taken + 1) % 256]]
        by_state = np.repeat(cost, 1 << added[step]) + (values - x[step]) ** 2
        by_branch = by_state.reshape(1 << leaving, 65536 >> leaving)
        back.append(by_branch.argmin(0).astype(np.uint8))
        cost = by_branch.min(0)
    end = int(cost.argmin()) if node is None else node
    total, states, at = cost[end], np.zeros(256, np.uint16), end
    for taken in range(255, -1, -1):
        step, leaving = order[taken], added[order[(taken + 1) % 256]]
        state = int(back[taken][at]) << (16 - leaving) | at
        states[step] = state
        at = state >> added[step]
    return states, total


@pytest.mark.parametrize(("bits", "codebook"), RATES)
def test_packed_tiles_decode_to_the_returned_values(bits, codebook):
    tiles = gaussian(5, seed=int(2 * bits))
    packed, values = encode(tiles, bits, codebook)
    assert packed.dtype == torch.int16 and packed.shape == (5, format.words_from_bits(bits))
    states = format.unpack_states(packed.numpy())
    decoded = format.codebook(codebook)[states].astype(np.float32)
    np.testing.assert_array_equal(values.numpy(), decoded)
    # Better than the trivial code that stores zeros, so values belong to these tiles.
    assert (values - tiles).square().mean() < 0.6 * tiles.square().mean()


@pytest.mark.parametrize(
    ("bits", "codebook"), [(1.5, "mul1"), (2, "mcg"), (4, "mul1"), (6, "3inst")]
)
def test_walks_are_the_cheapest_there_are(bits, codebook):
    added = step_bits(bits)
    values = format.codebook(codebook).astype(np.float64)
    tiles = gaussian(3, seed=3)
    tiles[2] *= 3  # many values beyond the codebook's range
    packed, _ = encode(tiles, bits, codebook)
    for tile, states in zip(tiles.double().numpy(), format.unpack_states(packed.numpy())):
        cost = ((values[states] - tile) ** 2).sum()
        free, _ = viterbi(tile, values, added, 128)
        seam = int(free[0]) >> added[0]
        assert int(states[0]) >> added[0] == seam
        _, cheapest = viterbi(tile, values, added, 0, seam)
        # Costs are sums of 256 fp32 numbers; a choice between walks nearer than that is free.
        assert cheapest * (1 - 1e-12) <= cost <= cheapest * (1 + 1e-5)


def test_error_matches_the_reference_table(bench):
    # The table's own tiles are unknown, so both means carry sampling noise. One tile's error
    # spreads by 9 to 15 % (fewer than 256 independent terms of a chi-square), hence about 1 % for
    # the mean of 128 tiles and 0.4 % for the table's 1024. Limits: 2 % and four standard errors.
    tiles = gaussian(128, seed=1)
    for reference in bench.REFERENCES:
        errors = bench.tile_errors(tiles, reference)
        spread = errors.std(ddof=1) * (1 / 128 + 1 / 1024) ** 0.5
        off = errors.mean() - reference.mse
        assert abs(off) < 0.02 * reference.mse + 4 * spread, reference
        assert errors.mean() > 4.0**-reference.bits  # no code beats the rate-distortion bound


def test_every_rate_is_in_the_table(bench):
    assert {(r.bits, r.codebook) for r in bench.REFERENCES} == set(RATES)


@pytest.mark.parametrize("bits", [1, 2.5, 4])
def test_a_tile_does_not_depend_on_its_neighbours(bits):
    tiles = gaussian(11, seed=2)
    packed, values = encode(tiles, bits, "mul1")
    for count in (1, 2, 3, 6):
        part_packed, part_values = encode(tiles[4 : 4 + count], bits, "mul1")
        assert torch.equal(part_packed, packed[4 : 4 + count])
        assert torch.equal(part_values, values[4 : 4 + count])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(encode(tiles, bits, "mul1")[0], packed)
    finally:
        torch.set_num_threads(threads)


def test_no_tiles_and_strided_tiles():
    packed, values = encode(torch.empty(0, 256), 3, "mcg")
    assert packed.shape == (0, 48) and values.shape == (0, 256)
    wide = gaussian(6, seed=4)
    assert torch.equal(encode(wide[::2], 3, "mcg")[0], encode(wide[::2].contiguous(), 3, "mcg")[0])


def test_values_on_the_trellis_are_found_again():
    # A tile that is itself a decoded walk costs nothing, so the search has to return its values.
    rng = np.random.default_rng(5)
    for bits, codebook in ((2, "3inst"), (3.5, "mul1"), (5, "mcg")):
        words = format.words_from_bits(bits)
        trellis = rng.integers(-(2**15), 2**15, (4, words), dtype=np.int16)
        exact = format.codebook(codebook)[format.unpack_states(trellis)].astype(np.float32)
        _, values = encode(torch.from_numpy(exact), bits, codebook)
        np.testing.assert_array_equal(values.numpy(), exact)


def test_extreme_tiles_stay_valid():
    tiles = torch.stack([torch.zeros(256), torch.full((256,), 65504.0), torch.full((256,), -50.0)])
    packed, values = encode(tiles, 4, "mul1")
    decoded = format.codebook("mul1")[format.unpack_states(packed.numpy())].astype(np.float32)
    np.testing.assert_array_equal(values.numpy(), decoded)
    assert values[0].square().mean() < 0.01 and values[1].mean() > 2 and values[2].mean() < -2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e6])
def test_values_that_are_not_weights_are_refused(bad):
    tiles = gaussian(3)
    tiles[1, 17] = bad
    with pytest.raises(ValueError, match=r"tile 1 .* at ring position 17, expected finite"):
        encode(tiles, 4, "mul1")


@pytest.mark.parametrize(
    ("tiles", "words", "codebook", "message"),
    [
        (torch.zeros(2, 255), 64, 2, r"shape \[2, 255\], expected \[T, 256\]"),
        (torch.zeros(256), 64, 2, r"shape \[256\], expected \[T, 256\]"),
        (torch.zeros(2, 256, dtype=torch.float16), 64, 2, "must be float32"),
        (torch.zeros(2, 256), 60, 2, r"60 words per tile: expected 16 \* bits"),
        (torch.zeros(2, 256), 0, 2, "0 words per tile"),
        (torch.zeros(2, 256), 144, 2, "144 words per tile"),
        (
            torch.zeros(2, 256),
            40,
            1,
            r"half rate.* only with codebook 2 .* found codebook 1",
        ),
        (torch.zeros(2, 256), 64, 3, "codebook 3: expected 0"),
        (torch.zeros(2, 256), 64, -1, "codebook -1: expected 0"),
    ],
)
def test_wrong_arguments_are_refused(tiles, words, codebook, message):
    with pytest.raises(ValueError, match=message):
        torch.ops.exl3.encode_tiles(tiles, words, codebook)


ISA_SCRIPT = """
import sys, numpy, torch
from exl3_plugin import ops
ops.load()
tiles = torch.from_numpy(numpy.load(sys.argv[1]))
results = {}
for words, codebook in ((16, 0), (24, 2), (32, 1), (40, 2), (48, 2), (64, 2), (128, 1)):
    packed, _ = torch.ops.exl3.encode_tiles(tiles, words, codebook)
    results[f"{words}-{codebook}"] = packed.numpy()
numpy.savez(sys.argv[2], **results)
"""


def forced_isa(isa, checkout, folder):
    """Packed tiles as an own process makes them with EXL3_CPU_ISA=isa; None where it cannot."""
    source, result = folder / f"tiles-{isa}.npy", folder / f"{isa}.npz"
    np.save(source, gaussian(5, seed=6).numpy())
    run = subprocess.run(
        [sys.executable, "-c", ISA_SCRIPT, str(source), str(result)],
        env={**os.environ, "EXL3_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=checkout,
        capture_output=True,
        text=True,
    )
    if "cannot run here" in run.stderr:
        return None
    assert run.returncode == 0, run.stderr
    return dict(np.load(result))


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_every_instruction_set_finds_the_same_walks(isa, checkout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("isa")
    results = forced_isa(isa, checkout, folder)
    if results is None:
        pytest.skip(f"this processor has no {isa}")
    tiles = gaussian(5, seed=6)
    for key, packed in results.items():
        words, index = map(int, key.split("-"))
        bits, codebook = format.bits_from_words(words), format.CODEBOOKS[index]
        here, values = encode(tiles, bits, codebook)
        # Both x86 sets do the same operations. Without fused multiply-add a cost may round
        # differently, and a walk of the same cost to fp32 is as good.
        if {isa, ops.cpu_isa()} <= {"avx512", "avx2"}:
            np.testing.assert_array_equal(packed, here.numpy(), err_msg=key)
        states = format.unpack_states(packed)
        decoded = torch.from_numpy(format.codebook(codebook)[states].astype(np.float32))
        cost = (decoded - tiles).double().square().sum(1)
        expected = (values - tiles).double().square().sum(1)
        # Nearly always equal; a tie broken the other way may move the seam to a walk nearby.
        assert (cost < 1.01 * expected).all() and (expected < 1.01 * cost).all(), key
