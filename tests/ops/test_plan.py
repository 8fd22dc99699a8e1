"""`exl3::plan` and `exl3::workspace_bytes`: properties that hold on every GPU, checked without one.

Which row counts go where is a matter of measurement and not tested here; what every answer must
satisfy is.
"""

import itertools

import pytest
import torch

from exl3_plugin import ops
from exl3_plugin.format import LEGAL_BITS

DEVICES = {
    "A100": ops.Device(80, 108, 166_912),
    "RTX A6000": ops.Device(86, 84, 101_376),
    "L40S": ops.Device(89, 142, 101_376),
    "H200": ops.Device(90, 132, 232_448),
    "RTX PRO 6000": ops.Device(120, 188, 101_376),
    "GB10": ops.Device(121, 48, 101_376),
}
SHAPES = ((128, 128), (4096, 2048), (5120, 1024), (5120, 34816), (17408, 5120), (4096, 154880))
ROWS = (*range(1, 70), 96, 100, *range(120, 140), 191, 192, 193, 255, 256, 257, 300, 383, 384, 385)
ROWS = (*ROWS, 511, 512, 513, 600, 767, 768, 1000, 1023, 1024, 1025, 2048, 8192, 100_000)
RATES = [(codebook, bits) for codebook in ("mcg", "mul1") for bits in LEGAL_BITS]
RATES = [(codebook, bits) for codebook, bits in RATES if codebook == "mul1" or bits == int(bits)]
TILES = (8, 16, 32, 64, 128)
MODES = list(itertools.product((False, True), repeat=2))

on_devices = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


@pytest.fixture(scope="module", autouse=True)
def library():
    ops.load()
    if not hasattr(torch.ops.exl3, "plan"):
        pytest.fail("the library in exl3_plugin/ has no exl3::plan; build it anew")


def plans(device, k, n, codebook, bits, exact=False, batch_invariant=False):
    return {m: ops.plan(device, m, k, n, bits, codebook, exact, batch_invariant) for m in ROWS}


@on_devices
def test_every_answer_is_legal(device):
    """A kernel that exists, few enough blocks to run at once, no fast form where there is none."""
    for (k, n), (codebook, bits), mode in itertools.product(SHAPES, RATES, MODES):
        for m, plan in plans(device, k, n, codebook, bits, *mode).items():
            case = (m, k, n, codebook, bits, mode, plan)
            assert plan.kernel in (ops.GEMM, ops.DENSE, ops.STREAM), case
            if plan.kernel == ops.DENSE:
                assert plan.form == ops.EXACT, case
                continue
            if plan.kernel == ops.STREAM:
                assert (m, plan.rows, device.capability) == (1, 1, 90), case
                assert 1 <= plan.blocks <= device.multiprocessors, case
                continue
            assert plan.rows in TILES, case
            assert plan.form in (ops.EXACT, ops.FAST), case
            assert plan.form == ops.EXACT or plan.rows == 8, case
            # Blocks wait for one another, so all of them must fit on the device at once.
            assert 1 <= plan.blocks <= 2 * device.multiprocessors, case
            assert plan.blocks <= k // 16 * (n // 128), case


def test_tall_blocks_of_all_row_tiles_run_at_once():
    """On sm_90 a row tile gets its part of the multiprocessors, and no one is left out."""
    device = DEVICES["H200"]
    seen = set()
    for (k, n), (codebook, bits) in itertools.product(SHAPES, RATES):
        for m, plan in plans(device, k, n, codebook, bits).items():
            if plan.kernel != ops.GEMM or plan.rows < 32:
                continue
            tiles = -(-min(m, 512) // plan.rows)
            assert plan.blocks * tiles <= device.multiprocessors, (m, k, n, plan)
            # A strip that many blocks share is shared by as few as any card runs at once.
            assert plan.blocks <= 8 * (n // 128), (m, k, n, plan)
            seen.add(tiles)
    assert {1, 2, 3} <= seen


def test_ranges_of_one_row_begin_with_strips():
    """At most 5 % of the multiprocessors stay idle for it, and none where blocks have strips."""
    expected = {12288: 132, 6144: 132, 4096: 128, 2048: 128, 5120: 132, 24576: 132, 1024: 96, 0: 1}
    found = {n: ops.plan(DEVICES["H200"], 1, 4096, n, 4, "mcg").blocks for n in expected}
    assert found == expected


def test_one_row_needs_room_for_its_inputs():
    """At the limit, beside the rings of 8 bits and what the kernel declares itself."""
    wide = {k: ops.plan(DEVICES["H200"], 1, k, 17408, 8, "mcg").kernel for k in (50560, 50688)}
    assert wide == {50560: ops.STREAM, 50688: ops.GEMM}


@on_devices
def test_exact_means_exact(device):
    for (k, n), (codebook, bits) in itertools.product(SHAPES, RATES):
        for invariant in (False, True):
            for plan in plans(device, k, n, codebook, bits, True, invariant).values():
                assert plan.form == ops.EXACT
        free = plans(device, k, n, codebook, bits)
        exact = plans(device, k, n, codebook, bits, True)
        for m in ROWS:
            assert exact[m].kernel == free[m].kernel or free[m].form == ops.FAST


@on_devices
def test_batch_invariant_plans_differ_in_the_tile_alone(device):
    for (k, n), (codebook, bits) in itertools.product(SHAPES, RATES):
        for exact in (False, True):
            found = set()
            for plan in plans(device, k, n, codebook, bits, exact, True).values():
                assert plan.kernel == ops.GEMM and plan.form == ops.EXACT
                found.add(plan._replace(rows=0))
            assert len(found) == 1, found


@on_devices
def test_more_rows_never_go_back(device):
    """Tiles grow with the rows, and what is dense once stays dense."""
    for (k, n), (codebook, bits), mode in itertools.product(SHAPES, RATES, MODES):
        before = (0, 0)
        for m, plan in plans(device, k, n, codebook, bits, *mode).items():
            order = (ops.STREAM, ops.GEMM, ops.DENSE).index(plan.kernel)
            rank = (order, plan.rows if plan.kernel == ops.GEMM else 0)
            assert rank >= before, (m, k, n, codebook, bits, mode, before, rank)
            if plan.kernel == ops.GEMM:
                # A tile may be too large by a factor of two, or the rows are few.
                assert plan.rows < 2 * m or plan.rows <= 32, (m, plan)
            before = rank


def test_the_plan_is_pure():
    device = DEVICES["H200"]
    first = plans(device, 5120, 12288, "mcg", 4)
    plans(DEVICES["GB10"], 128, 128, "mul1", 2, True, True)
    assert plans(device, 5120, 12288, "mcg", 4) == first
    # Under the options in force where a call does not say.
    try:
        ops.configure(exact=True, batch_invariant=True)
        implied = ops.plan(device, 4, 5120, 12288, 4, "mul1")
    finally:
        ops.configure()
    assert implied == ops.plan(device, 4, 5120, 12288, 4, "mul1", True, True)


def test_wrong_lists_are_explained():
    for arguments, text in (
        (([90, 132], [1, 128, 128, 8, 0], 0), "device holds 2 numbers"),
        (([90, 132, 232448], [1, 128, 128, 8], 0), "problem holds 4 numbers"),
    ):
        with pytest.raises(RuntimeError, match=text):
            torch.ops.exl3.plan(*arguments)
    with pytest.raises(RuntimeError, match="plan holds 3 numbers"):
        torch.ops.exl3.workspace_bytes(1, 128, 128, 1, [0, 8, 0])


@pytest.mark.parametrize("rows,form", [*((rows, ops.EXACT) for rows in TILES), (8, 1)])
def test_workspace_grows_with_the_problem(rows, form):
    sizes = {
        "m": (1, 2, 7, 8, 9, 16, 33, 64, 100, 129, 300, 512, 513, 1000, 100_000),
        "k": (128, 256, 1024, 5120, 17408),
        "n": (128, 256, 2048, 5120, 34816),
        "shards": (1, 2, 3, 4),
        "blocks": (1, 2, 40, 132, 264),
    }
    middle = {"m": 16, "k": 1024, "n": 2048, "shards": 2, "blocks": 132}

    def workspace(m, k, n, shards, blocks):
        return ops.workspace_bytes(m, k, n, shards, ops.Plan(ops.GEMM, rows, form, blocks))

    for name, values in sizes.items():
        found = [workspace(**{**middle, name: value}) for value in values]
        assert found == sorted(found), (name, found)
        assert found[0] < found[-1], f"{name} makes no difference: {found}"
    # Every shard needs its own image of the rows in fp16.
    for m, k, shards in ((1, 128, 1), (100, 5120, 3)):
        assert workspace(m, k, 2048, shards, 132) >= m * k * 2 * shards
    assert workspace(0, 4096, 2048, 1, 132) == 0


def test_workspace_of_one_row():
    """A sum for every block and strip, and the end of every strip; shards change nothing."""
    for k, n in SHAPES:
        for blocks in (1, 40, 132):
            plan = ops.Plan(ops.STREAM, 1, ops.EXACT, blocks)
            strips, units = n // 128, k // 16 * (n // 128)
            sums = min(blocks, units) + 2 * strips
            held = ops.workspace_bytes(1, k, n, 1, plan)
            assert sums * 512 <= held < sums * 512 + 512
            assert ops.workspace_bytes(1, k, n, 3, plan) == held


def test_workspace_does_not_follow_a_prompt():
    """Rows are worked off in portions: a hundred thousand take no more than a few thousand."""
    for kernel, rows in ((ops.GEMM, 128), (ops.DENSE, 0)):
        plan = ops.Plan(kernel, rows, ops.EXACT, 132)
        large = ops.workspace_bytes(100_000, 17408, 5120, 1, plan)
        assert large == ops.workspace_bytes(8192, 17408, 5120, 1, plan)


def test_the_dense_slice_is_bounded():
    plan = ops.Plan(ops.DENSE, 0, ops.EXACT, 0)
    for k in (128, 4096, 5120, 17408):
        for n in (128, 1024, 12288, 34816, 154_880, 248_320, 1 << 20):
            held = ops.workspace_bytes(4096, k, n, 1, plan)
            assert 0 < held <= 256 << 20, (k, n)
            assert held <= 2 * k * n, (k, n)
