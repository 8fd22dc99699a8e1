"""Which tile serves a call on a card that is not here: pure, so every machine can ask."""

from __future__ import annotations

import pytest
import torch

from exl3_plugin import ops

H200 = [90, 132, 232448]
PRO6000 = [120, 188, 101376]
A100 = [80, 108, 166912]
QWEN3 = (8, 128, 128, 2048, 768, 2048)
GLM = (8, 288, 288, 4096, 2048, 4096)
EXACT, BATCH_INVARIANT = 1, 2


@pytest.fixture(scope="module", autouse=True)
def library():
    ops.load()


def choose(device, tokens, shape, options=0, two_products=1, joined=1, bfloat16=1):
    """rows, form, blocks, tokens at once, bytes."""
    numbers = [tokens, *shape, 8, 0, two_products, joined, bfloat16]
    return torch.ops.exl3.moe_plan(device, numbers, options)


def test_tiles_grow_with_the_rows_of_an_expert():
    heights = [choose(H200, m, QWEN3, joined=0)[0] for m in (9, 64, 95, 96, 192, 384, 768)]
    assert heights == [8, 8, 8, 16, 32, 64, 64]
    assert choose(PRO6000, 4096, QWEN3)[0] == 128
    for device in (H200, PRO6000, A100):
        for shape in (QWEN3, GLM):
            rows = [choose(device, m, shape)[0] for m in range(1, 1500, 37)]
            assert rows == sorted(rows) and set(rows) <= {1, 8, 16, 32, 64, 128, 256}


def test_many_tokens_go_through_warpgroups():
    """On sm_90, from 12 rows an expert on; slots' rows are short once the L2 does not hold them."""
    found = [choose(H200, m, QWEN3)[:3] for m in (191, 192, 1024, 1025, 8192)]
    assert found == [[16, 0, 264], [256, 0, 132], [256, 0, 132], [256, 1, 132], [256, 1, 132]]
    assert [choose(H200, m, GLM)[:2] for m in (431, 432, 8192)] == [[16, 0], [256, 0], [256, 1]]
    assert choose(H200, 8192, QWEN3, EXACT)[:2] == [256, 0]
    assert choose(H200, 8192, QWEN3, bfloat16=0)[:2] == [256, 0]
    assert choose(H200, 8192, QWEN3, two_products=0)[:2] == [256, 1]
    assert choose(H200, 8192, QWEN3, BATCH_INVARIANT)[0] == 64
    assert choose(PRO6000, 8192, QWEN3)[0] == choose(A100, 8192, QWEN3)[0] == 128


def test_what_warpgroups_cannot_take_goes_through_tiles():
    """Gate and up of different kinds, GELU by erf; too few whole strips for the multiprocessors."""
    assert choose(H200, 8192, QWEN3, joined=0)[0] == 128
    few = (2, 8, 8, 4096, 1024, 4096)  # 64 strips between the products, with 512 rows an expert 128
    assert [choose(H200, m, few)[0] for m in (200, 256, 2048)] == [64, 64, 256]
    assert choose(H200, 200, (2, 8, 8, 4096, 14336, 4096))[0] == 256
    # One of eight ranks of Qwen3-30B-A3B, by columns and by experts.
    assert choose(H200, 2048, (8, 128, 128, 2048, 128, 2048))[0] == 256
    assert choose(H200, 2048, (8, 16, 128, 2048, 768, 2048))[0] == 256
    assert choose(H200, 1, QWEN3, two_products=0)[0] == 8


def test_few_tokens_have_a_route_of_their_own():
    """As many rows a tile as there are tokens, up to 4, where shared memory has room for them."""
    assert [choose(H200, m, QWEN3)[0] for m in range(1, 9)] == [1, 2, 4, 4, 4, 4, 4, 4]
    assert [choose(H200, m, GLM)[0] for m in (1, 2, 4, 8, 9)] == [1, 2, 4, 4, 8]
    # Inputs of 28,672 columns leave no room; with 14,336 there is room for one row, which serves
    # where an expert seldom has two: more would be decoded again.
    assert choose(H200, 1, (2, 8, 8, 4096, 28672, 4096))[0] == 8
    assert [choose(H200, m, (8, 256, 256, 14336, 2048, 14336))[0] for m in (1, 8)] == [1, 1]
    assert [choose(H200, m, (2, 8, 8, 7168, 2048, 7168))[0] for m in (1, 8)] == [1, 8]
    for device in (PRO6000, A100):
        assert choose(device, 1, QWEN3)[0] == 8
    assert choose(H200, 1, QWEN3, BATCH_INVARIANT)[0] == 32
    # For a token or two as many blocks as give each whole strips of both products, if there are.
    assert [choose(H200, m, QWEN3)[2] for m in (1, 2, 8)] == [132, 132, 132]
    assert [choose(H200, m, GLM)[2] for m in (1, 2, 3, 8)] == [128, 128, 132, 132]


def test_experts_of_other_ranks_count_in_the_average():
    """A rank with a quarter of the experts gets a quarter of the rows, so the same per expert."""
    alone = (8, 32, 32, 2048, 768, 2048)
    shared = (8, 32, 128, 2048, 768, 2048)
    assert choose(H200, 64, alone)[0] > choose(H200, 64, shared)[0] == 8


def test_forms():
    assert choose(H200, 1, GLM)[1] == 1
    assert choose(H200, 1, GLM, EXACT)[1] == 0
    assert choose(H200, 1, GLM, BATCH_INVARIANT)[1] == 0
    assert choose(H200, 500, GLM)[1] == 0  # tiles of 16 rows and more have no fast form
    assert choose(PRO6000, 1, GLM)[1] == choose(A100, 1, GLM)[1] == 0


def test_blocks_are_what_a_card_holds_at_once():
    assert choose(H200, 16, QWEN3)[2] == 264
    assert choose(H200, 1000, QWEN3, joined=0)[2] == 132
    assert choose(PRO6000, 1, QWEN3)[2] == 188
    assert choose(A100, 1, QWEN3)[2] == 108


def test_batch_invariant_tiles_have_one_order_of_additions():
    for tokens in (1, 64, 500, 5000):
        assert choose(H200, tokens, QWEN3, BATCH_INVARIANT)[0] in (32, 64)


def test_prompts_go_in_equal_chunks_that_fit_a_gigabyte_or_two():
    for shape in (QWEN3, GLM):
        for tokens in (1, 255, 256, 2048, 2049, 8192, 100_000):
            rows, _, _, chunk, nbytes = choose(PRO6000, tokens, shape)
            chunks = -(-tokens // chunk)
            assert chunk <= 4096 and (chunks - 1) * chunk < tokens <= chunks * chunk
            assert chunks == 1 or tokens / chunks > 0.9 * chunk
            pairs = min(tokens, chunk) * shape[0]
            rows_needed = pairs + min(pairs, shape[1]) * (rows - 1)
            at_most = rows_needed * (4 * shape[3] + 2 * shape[4] + 64) + pairs * 4 * shape[5]
            assert nbytes < 1.1 * at_most + (64 << 20)
            assert nbytes < 3 << 30


def test_warpgroups_take_the_rows_of_a_call():
    """Images of gate, up and down and a row for each slot, padded to 64 for each expert."""
    for shape in (QWEN3, GLM):
        for tokens in (512, 8192, 16384, 100_000):
            rows, form, _, chunk, nbytes = choose(H200, tokens, shape)
            assert rows == 256 and chunk <= 16384 and -(-tokens // chunk) * chunk < tokens + 64
            slots, _, experts, hidden, inner, outputs = shape
            pairs = min(tokens, chunk) * slots
            of_row = 4 * hidden + 2 * inner
            least = pairs * (of_row + (2 if form else 4) * outputs)
            assert least < nbytes < least + 64 * experts * of_row + (30 << 20) < 4 << 30
