"""The word order of the CUDA kernels: where each word goes, and back without a lost bit."""

import pytest
import torch

from exl3_plugin import format as exl3
from exl3_plugin import ops

WORDS = [exl3.words_from_bits(bits) for bits in exl3.LEGAL_BITS]


def numbered(k, n, words):
    """A trellis whose 32-bit words count up from zero in stored order."""
    count = k // 16 * (n // 16) * words // 2
    return torch.arange(count, dtype=torch.int32).view(torch.int16).view(k // 16, n // 16, words)


@pytest.mark.parametrize("words", WORDS)
def test_every_word_goes_where_the_kernels_look(words):
    k, n, pairs = 256, 384, words // 2
    strips = ops.to_strips(numbered(k, n, words)).view(torch.int32).tolist()
    for strip in range(n // 128):
        for k_tile in range(k // 16):
            for n_tile in range(8):
                for word in range(pairs):
                    at = (((strip * (k // 16) + k_tile) * 2 + n_tile // 4) * pairs + word) * 4
                    stored = (k_tile * (n // 16) + 8 * strip + n_tile) * pairs + word
                    assert strips[at + n_tile % 4] == stored


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("k,n", [(16, 128), (128, 128), (640, 384), (128, 1024)])
def test_round_trip(words, k, n):
    trellis = torch.randint(-(2**15), 2**15, (k // 16, n // 16, words), dtype=torch.int16)
    flat = ops.to_strips(trellis)
    assert flat.dtype == torch.int16 and flat.shape == (trellis.numel(),) and flat.is_contiguous()
    assert torch.equal(ops.from_strips(flat, k, n), trellis)
    assert torch.equal(ops.to_strips(trellis.transpose(0, 1).contiguous().transpose(0, 1)), flat)


def test_shards_are_reordered_one_by_one():
    a = torch.randint(-(2**15), 2**15, (8, 16, 64), dtype=torch.int16)
    b = torch.randint(-(2**15), 2**15, (8, 8, 40), dtype=torch.int16)
    pieces = [(a, "mcg", 0, 256), (b, "mul1", 3, 100)]
    flat, fields = ops.pack_shards(pieces, strips=True)
    assert torch.equal(flat, torch.cat([ops.to_strips(a), ops.to_strips(b)]))
    stored, same = ops.pack_shards(pieces)
    assert fields == same == [1, 64, 256, 0, 256, 2, 40, 128, 3, 100]
    assert torch.equal(stored, torch.cat([a.flatten(), b.flatten()]))
    cut = flat[a.numel() :]
    assert torch.equal(ops.from_strips(cut, 128, 128), b)


def test_what_is_no_matrix_is_refused():
    good = torch.zeros(8, 8, 64, dtype=torch.int16)
    for bad in (good.int(), good.flatten(), good[:, :4], good[..., :63]):
        with pytest.raises(ValueError, match="expected"):
            ops.to_strips(bad)
    flat = ops.to_strips(good)
    for strips, k, n in (
        (flat, 128, 120),
        (flat, 120, 128),
        (flat, 0, 128),
        (flat[:-2], 128, 128),
        (flat.int(), 128, 128),
        (good, 128, 128),
        (flat[:0], 128, 128),
    ):
        with pytest.raises(ValueError, match="expected"):
            ops.from_strips(strips, k, n)
