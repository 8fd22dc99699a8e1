"""Routed experts: what must not change a bit, and memory."""

import pytest
import torch

from exl3_plugin.experts import Kind
from tests.gpu import moe_layers as moe
from tests.gpu.cases import beside_a_busy_stream, same_bits
from tests.gpu.test_hygiene import poisoned_memory

pytestmark = pytest.mark.usefixtures("gpu")

ALL = [*moe.PLANS, "default"]
MIXED = (Kind("mcg", 64), Kind("mul1", 40), Kind("3inst", 48))


def mixed(expert, projection):
    return MIXED[(expert + projection) % 3]


@pytest.fixture(scope="module")
def layer():
    return moe.make(1, 24, 1024, 384, 512)


@pytest.fixture(scope="module")
def layer_of_kinds():
    return moe.make(2, 8, 512, 256, 384, mixed)


@pytest.mark.quick
@pytest.mark.parametrize("name", ALL)
def test_reruns_beside_a_busy_stream(name, layer):
    weights, ids = moe.routed(3, 48, 4, 24)
    x, plan = moe.rows(4, 48, 1024), moe.PLANS.get(name)
    first = layer.run(x, weights, ids, plan)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in beside_a_busy_stream():
        got = layer.run(x, weights, ids, plan)
        wrong += (got.view(torch.int16) != first.view(torch.int16)).any()
    assert int(wrong) == 0, f"{int(wrong)} of 100 reruns differ"


@pytest.mark.quick
def test_two_streams_at_once(layer, layer_of_kinds):
    """Shared experts run beside routed ones: workspaces belong to a call."""
    jobs = []
    for number, held in enumerate((layer, layer_of_kinds)):
        weights, ids = moe.routed([5, number], 20, 3, 8)
        jobs.append((held, moe.rows(6, 20, held.oracle.k), weights, ids, torch.cuda.Stream()))
    expected = [held.run(x, weights, ids) for held, x, weights, ids, _ in jobs]
    torch.cuda.synchronize()
    for _ in range(50):
        results = []
        for held, x, weights, ids, stream in jobs:
            with torch.cuda.stream(stream):
                results.append(held.run(x, weights, ids))
        torch.cuda.synchronize()
        assert all(map(same_bits, results, expected))


@pytest.mark.quick
@pytest.mark.parametrize("name", ALL)
def test_dependent_launch_changes_nothing(name, layer, layer_of_kinds, options):
    plan = moe.PLANS.get(name)
    for held in (layer, layer_of_kinds):
        if not held.takes(plan):
            continue
        weights, ids = moe.routed(7, 70, 3, 8)
        x = moe.rows(8, 70, held.oracle.k)
        results = []
        for dependent in (True, False):
            options(dependent_launch=dependent)
            orders = [slice(None), slice(0, 3), slice(3, 70), slice(10, 11)]
            results.append(
                [held.run(x[o], weights[o], ids[o], plan) for _ in range(5) for o in orders]
            )
        torch.cuda.synchronize()
        assert all(map(same_bits, *results))


@pytest.mark.quick
@pytest.mark.parametrize("m", [1, 8, 40, 200])
@pytest.mark.parametrize("name", ALL)
def test_eager_captured_and_replayed(name, m, layer):
    """A graph of one size serves every routing, also one that sends nothing here."""
    plan = moe.PLANS.get(name)
    batches = []
    for number in range(3):
        weights, ids = moe.routed([9, number, m], m, 4, 24)
        batches.append((moe.rows([10, number], m, 1024), weights, ids))
    batches[1][2][:] = 5  # all to one expert, four times each
    batches.append((batches[0][0], batches[0][1], torch.full_like(batches[0][2], -1)))
    eager = [layer.run(*batch, plan) for batch in batches]
    static = [tensor.clone() for tensor in batches[0]]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer.run(*static, plan)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = layer.run(*static, plan)
        second = layer.run(*static, plan)
    for _ in range(2):
        for batch, expected in zip(batches, eager):
            for tensor, value in zip(static, batch):
                tensor.copy_(value)
            graph.replay()
            assert same_bits(first, expected)
            assert same_bits(second, expected)


def test_batch_invariant(options, layer, layer_of_kinds):
    """Alone, in any company, in any order, in any chunk of tokens."""
    options(batch_invariant=True)
    for held, count in ((layer, 24), (layer_of_kinds, 8)):
        weights, ids = moe.routed(11, 700, 4, count)
        x = moe.rows(12, 700, held.oracle.k)
        whole = held.run(x, weights, ids)
        for m in (1, 2, 7, 8, 9, 33, 64, 100, 257, 600, 699):
            assert same_bits(held.run(x[:m], weights[:m], ids[:m]), whole[:m]), m
            assert same_bits(held.run(x[-m:], weights[-m:], ids[-m:]), whole[-m:]), m
        for i in range(0, 700, 13):
            one = slice(i, i + 1)
            assert same_bits(held.run(x[one], weights[one], ids[one]), whole[one]), i
        order = torch.randperm(700, generator=torch.Generator().manual_seed(4)).cuda()
        assert same_bits(held.run(x[order], weights[order], ids[order]), whole[order])


@pytest.mark.quick
@pytest.mark.parametrize("name", ALL)
def test_poisoned_outputs_and_workspaces(name, layer, layer_of_kinds):
    plan = moe.PLANS.get(name)
    for held in (layer, layer_of_kinds):
        if not held.takes(plan):
            continue
        for m in (1, 9, 130):
            weights, ids = moe.routed([13, m], m, 3, 8)
            x = moe.rows(14, m, held.oracle.k)
            clean = held.run(x, weights, ids, plan)
            with poisoned_memory():
                y = held.run(x, weights, ids, plan)
                right = bool(torch.isfinite(y).all()) and same_bits(y, clean)
                del y
            assert right, m


@pytest.mark.quick
def test_neighbours_of_operands_are_neither_read_nor_written(layer):
    """Every operand between guard bands that are NaN as floats and wild as numbers."""
    weights, ids = moe.routed(15, 37, 4, 24)
    x = moe.rows(16, 37, 1024)
    clean = layer.run(x, weights, ids)
    buffers = []

    def fenced(tensor):
        guard = 4096
        raw = tensor.contiguous().view(torch.uint8).reshape(-1)
        whole = torch.full((raw.numel() + 2 * guard,), 0xFF, dtype=torch.uint8, device="cuda")
        whole[guard : guard + raw.numel()] = raw
        buffers.append((whole, whole.clone()))
        return whole[guard : guard + raw.numel()].view(tensor.dtype).view(tensor.shape)

    fields = vars(layer.packed)
    moved = {n: fenced(v) if isinstance(v, torch.Tensor) else v for n, v in fields.items()}
    other = moe.Layer(type(layer.packed)(**moved), layer.oracle)
    assert same_bits(other.run(fenced(x), fenced(weights), fenced(ids)), clean)
    assert all(torch.equal(now, before) for now, before in buffers)


@pytest.mark.quick
def test_memory_does_not_grow(layer):
    batches = [(moe.rows(17, m, 1024), *moe.routed([18, m], m, 4, 24)) for m in (1, 8, 33, 600)]
    for batch in batches:
        layer.run(*batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        for batch in batches:
            layer.run(*batch)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
