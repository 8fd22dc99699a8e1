"""The numpy oracle against exllamav3's own results and the vectors of the format document."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from format_vectors import (
    CODEBOOK_SHA256,
    CODEBOOK_STATES,
    CODEBOOK_STATISTICS,
    CODEBOOK_VALUES,
    EMBEDDING_RING,
    LAYER,
    RATES,
    TILE_ELEMENTS,
    hex16,
    ramp,
)

from exl3_plugin import format as exl3

HALF_RATES = (1.5, 2.5, 3.5)
CASES = [
    f"{codebook}_{bits}"
    for codebook, rates in (
        ("3inst", (1, 2, 4, 5, 6, 7, 8)),
        ("mcg", (1, 3, 4, 5, 6, 8)),
        ("mul1", (1, 1.5, 2, 2.5, 3, 4, 6, 7, 8)),
    )
    for bits in rates
]
by_rate = pytest.mark.parametrize("vector", RATES, ids=lambda v: f"{v.bits:g}bits")


def sha(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.dtype == expected.dtype == np.float16 and np.array_equal(
        found.view(np.uint16), expected.view(np.uint16)
    )


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    expected = expected.astype(np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.fixture(scope="module")
def corners(checkout: Path):
    return np.load(checkout / "tests" / "fixtures" / "matrices" / "corners.npz")


@pytest.fixture(scope="module")
def matrices(reference_data: Path):
    return np.load(reference_data / "matrices" / "matrices.npz")


@pytest.mark.parametrize("name", exl3.CODEBOOKS)
def test_codebook(name):
    values = exl3.codebook(name)
    assert sha(values) == CODEBOOK_SHA256[name]
    assert np.array_equal(
        values.view(np.uint16)[hex16(CODEBOOK_STATES)], hex16(CODEBOOK_VALUES[name])
    )
    mean, deviation, least, most, distinct = CODEBOOK_STATISTICS[name]
    wide = values.astype(np.float64)
    assert wide.mean() == pytest.approx(mean, abs=1e-6)
    assert wide.std() == pytest.approx(deviation, abs=1e-6)
    assert (wide.min(), wide.max()) == pytest.approx((least, most), abs=5e-5)
    assert len(np.unique(wide)) == distinct


def test_codebook_cannot_be_spoilt_by_a_caller():
    with pytest.raises(ValueError, match="read-only"):
        exl3.codebook("mcg")[0] = 0
    with pytest.raises(exl3.FormatError, match="'mul2' does not exist"):
        exl3.codebook("mul2")


@by_rate
def test_rate_vector(vector):
    tile = vector.packed()
    assert np.array_equal(tile.view(np.uint16)[:4], hex16(vector.words))
    states = exl3.unpack_states(tile, vector.bits)
    assert np.array_equal(states[:4], hex16(vector.states))
    assert states[255] == hex16(vector.last_state)[0]
    assert sha(states)[:16] == vector.states_sha
    for codebook, (elements, digest) in vector.tiles.items():
        decoded = exl3.decode_inner(tile.reshape(1, 1, -1), codebook)
        found = [decoded.view(np.uint16)[row, column] for row, column in TILE_ELEMENTS]
        assert np.array_equal(found, hex16(elements)), codebook
        assert sha(decoded)[:16] == digest, codebook


@pytest.mark.parametrize("codebook", exl3.CODEBOOKS)
def test_layer_vector(codebook):
    digest, weights, outputs = LAYER[codebook]
    trellis = ramp(8 * 8 * 64, 2056).reshape(8, 8, 64)
    i = np.arange(128)
    suh = ((1 + (5 * i) % 7) / 64 * np.where((3 * i) % 5 < 2, -1, 1)).astype(np.float16)
    svh = ((0.5 + (11 * i) % 16 / 16) * np.where((7 * i) % 9 < 4, -1, 1)).astype(np.float16)
    x = ((37 * i) % 64 - 32) / 16
    assert suh[:4].tolist() == [-0.015625, 0.09375, -0.0625, 0.03125]
    assert svh[:4].tolist() == [-0.5, 1.1875, 0.875, -0.5625]
    assert exl3.hadamard(x)[:6] == pytest.approx(
        [-0.353553, -0.353553, -0.707107, 0, 0, -1.414214], abs=1e-6
    )

    assert sha(exl3.decode_inner(trellis, codebook))[:16] == digest
    w = exl3.dense_weight(trellis, suh, svh, codebook)
    assert [w[0, 0], w[0, 1], w[1, 0], w[127, 127]] == pytest.approx(weights, abs=1e-9)
    y = exl3.linear(x, trellis, suh, svh, codebook)
    found = [y[0], y[1], y[127], y.sum(), np.linalg.norm(y)]
    assert found == pytest.approx(outputs, abs=1e-6)
    assert y == pytest.approx(x @ w, abs=1e-12)
    assert exl3.linear(x, trellis, suh, svh, codebook, i) == pytest.approx(y + i, abs=1e-12)


@pytest.mark.parametrize("bits", EMBEDDING_RING)
def test_embedding_ring_vector(bits):
    first, digest, total = EMBEDDING_RING[bits]
    ring = np.concatenate([hex16("2e66").view(np.int16), ramp(16 * bits + 1, 514 * bits)[1:]])
    states, scale = exl3.embedding_states(ring, bits)
    assert scale == np.float16(0.0999756)
    assert np.array_equal(states[:4], hex16(first))
    assert sha(states)[:16] == digest
    values = exl3.codebook("mul1")[states].astype(np.float32) * np.float32(scale)
    assert values.sum(dtype=np.float64) == pytest.approx(total, abs=2e-6)


def test_embedding_rows_are_rotated_and_trimmed():
    bits, hidden, rows = 4, 300, 3
    trellis = np.stack([ramp(2 * (1 + 16 * bits), 77 * r) for r in range(rows)])
    trellis[:, :: 1 + 16 * bits] = 0x2E66
    signs = np.where(np.arange(512) % 3 == 0, -1, 1).reshape(2, 256).astype(np.float16)
    found = exl3.decode_embedding(trellis, signs, hidden)

    i = np.arange(256)
    parity = np.array([[bin(a & b).count("1") & 1 for a in i] for b in i])
    states, scale = exl3.embedding_states(trellis.reshape(rows, 2, -1), bits)
    values = exl3.codebook("mul1")[states].astype(np.float64) * scale[..., None].astype(np.float64)
    expected = (values @ (1 - 2 * parity) / 16 * signs).reshape(rows, 512)[:, :hidden]
    assert found.shape == (rows, hidden) and found.dtype == np.float16
    assert np.abs(found - expected).max() <= 2.0**-11 * np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_decodes_as_exllamav3_does(matrices, case):
    codebook, bits = case.split("_")
    trellis, suh, svh = (matrices[f"{case}_{what}"] for what in ("trellis", "suh", "svh"))
    assert exl3.bits_from_words(trellis.shape[-1]) == float(bits)
    assert same_bits(exl3.decode_inner(trellis, codebook), matrices[f"{case}_w"])
    # The reference rounds to fp16 after every step: about 2^-11 each time, and `wfull` has four.
    full = exl3.dense_weight(trellis, suh, svh, codebook)
    assert relative(full, matrices[f"{case}_wfull"]) < 1.5e-3
    y = exl3.linear(matrices[f"{case}_x"], trellis, suh, svh, codebook)
    assert relative(y, matrices[f"{case}_y"]) < 5e-4


def test_every_reference_matrix_is_tested(matrices):
    assert sorted(CASES) == sorted(key[: -len("_w")] for key in matrices if key.endswith("_w"))
    assert len(CASES) == 22


@pytest.mark.parametrize("case", CASES)
def test_decodes_corners_as_exllamav3_does(corners, case):
    found = exl3.decode_inner(corners[f"{case}_corner_trellis"], case.split("_")[0])
    assert same_bits(found, corners[f"{case}_corner_w"])


@pytest.mark.parametrize("case", ["3inst_2", "mcg_3", "mcg_8", "mul1_2.5", "mul1_4"])
def test_linear_of_corners(corners, case):
    x, trellis, suh, svh = (corners[f"{case}_{what}"] for what in ("x", "trellis", "suh", "svh"))
    y = exl3.linear(x, trellis, suh, svh, case.split("_")[0])
    assert relative(y, corners[f"{case}_y"]) < 5e-4


@pytest.mark.parametrize("bits", exl3.LEGAL_BITS)
def test_packing_inverts_unpacking(bits):
    """Every bit string is a valid tile, so random words cover every state and every seam."""
    words = exl3.words_from_bits(bits)
    rng = np.random.default_rng(int(2 * bits))
    trellis = rng.integers(-(2**15), 2**15, (3, 5, words)).astype(np.int16)
    states = exl3.unpack_states(trellis)
    assert states.shape == (3, 5, 256)
    packed = exl3.pack_states(states, bits)
    assert packed.dtype == np.int16 and np.array_equal(packed, trellis)
    # The definition, bit by bit: a state is its predecessor with the new bits shifted in.
    ends = exl3.step_ends(bits)
    steps = np.diff(ends, prepend=0)
    assert ends[-1] == 256 * bits
    for i in range(256):
        kept = (states[..., i - 1].astype(int) << steps[i]) & 0xFFFF
        assert np.array_equal(kept >> steps[i] << steps[i], states[..., i] >> steps[i] << steps[i])


def test_packing_refuses_what_is_no_walk():
    states = exl3.unpack_states(ramp(64, 0))
    states[17] ^= 0x8000
    with pytest.raises(exl3.FormatError, match="ring position 17 does not continue"):
        exl3.pack_states(states, 4)
    with pytest.raises(exl3.FormatError, match="expected uint16"):
        exl3.pack_states(states.astype(np.int32), 4)


def test_unsigned_trellis_decodes_alike():
    trellis = ramp(2 * 48, 5).reshape(1, 2, 48)
    unsigned = exl3.decode_inner(trellis.view(np.uint16), "mcg")
    assert same_bits(unsigned, exl3.decode_inner(trellis, "mcg"))
    with pytest.raises(exl3.FormatError, match="int32, expected int16"):
        exl3.decode_inner(trellis.astype(np.int32), "mcg")


def test_hadamard_is_the_sylvester_matrix():
    i = np.arange(128)
    matrix = np.array([[(-1) ** bin(a & b).count("1") for a in i] for b in i]) / np.sqrt(128)
    assert exl3.hadamard(np.eye(128)) == pytest.approx(matrix, abs=1e-15)
    x = np.random.default_rng(0).normal(size=(2, 3, 384))
    assert exl3.hadamard(exl3.hadamard(x)) == pytest.approx(x, abs=1e-12)
    assert exl3.hadamard(x)[..., 128:256] == pytest.approx(exl3.hadamard(x[..., 128:256]))
    with pytest.raises(exl3.FormatError, match="multiple of 128"):
        exl3.hadamard(np.zeros((4, 64)))


def test_legacy_signs():
    """Bit i of word q, lowest first, set means -1 for element 16 q + i."""
    signs = np.ones(256, np.float16)
    signs[[0, 15, 16, 37, 255]] = -1
    packed = np.zeros(16, np.uint16)
    packed[0], packed[1], packed[2], packed[15] = 0x8001, 0x0001, 0x0020, 0x8000
    assert same_bits(exl3.unpack_signs(packed.view(np.int16)), signs)
    trellis = ramp(16 * 16 * 16, 9).reshape(16, 16, 16)
    legacy = exl3.dense_weight(trellis, packed.view(np.int16), packed.view(np.int16), "3inst")
    assert np.array_equal(legacy, exl3.dense_weight(trellis, signs, signs, "3inst"))


@pytest.mark.parametrize("words", [0, 8, 20, 72, 88, 144, 65536])
def test_illegal_widths(words):
    with pytest.raises(exl3.FormatError, match=f"{words} words per tile; legal are 16, 24, 32"):
        exl3.bits_from_words(words)


@pytest.mark.parametrize("bits", [0, 0.5, 4.5, 9, 2.25])
def test_illegal_rates(bits):
    with pytest.raises(exl3.FormatError, match="do not exist"):
        exl3.words_from_bits(bits)


@pytest.mark.parametrize("bits", HALF_RATES)
@pytest.mark.parametrize("codebook", ["3inst", "mcg"])
def test_half_rates_need_mul1(bits, codebook):
    trellis = np.zeros((1, 1, exl3.words_from_bits(bits)), np.int16)
    with pytest.raises(exl3.FormatError, match="half rates exist only with mul1"):
        exl3.decode_inner(trellis, codebook)
