"""What must not change a bit: other rows, other work on the device, how kernels are launched."""

import pytest
import torch

from exl3_plugin import ops
from tests.gpu import cases

pytestmark = pytest.mark.usefixtures("gpu")

FUSED = [("mcg", 64, 384), ("mul1", 40, 256, 10, 200), ("3inst", 96, 128)]
GEMMS = [name for name, plan in cases.PLANS.items() if plan.kernel == ops.GEMM]


def layer_and_rows(m, seed=1, k=1024, dtype=torch.bfloat16):
    layer = cases.make_layer(seed, k, FUSED, bias=torch.float32)
    return layer, cases.activations(seed + 1, m, k, dtype)


@pytest.mark.quick
@pytest.mark.parametrize("name", GEMMS)
def test_a_row_alone_is_the_row_in_its_batch(name):
    """Within a tile of a tier: alone, in any company, in any order."""
    plan = cases.PLANS[name]
    for dtype in cases.DTYPES:
        layer, x = layer_and_rows(plan.rows, dtype=dtype)
        whole = layer.run(x, plan)
        for i in range(plan.rows):
            assert cases.same_bits(layer.run(x[i : i + 1], plan), whole[i : i + 1]), i
        order = torch.randperm(plan.rows, generator=torch.Generator().manual_seed(2)).cuda()
        assert cases.same_bits(layer.run(x[order], plan), whole[order])
        for m in range(1, plan.rows, max(plan.rows // 8, 1)):
            assert cases.same_bits(layer.run(x[:m], plan), whole[:m]), m


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_batch_invariant_at_every_row_count(dtype, options):
    options(batch_invariant=True)
    layer, x = layer_and_rows(1000, 3, 768, dtype)
    whole = layer.run(x)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    bits = whole.view(torch.int16)
    for m in range(1, 1001):
        wrong += (layer.run(x[:m]).view(torch.int16) != bits[:m]).any() * m
    for i in range(1000):
        wrong += (layer.run(x[i : i + 1]).view(torch.int16) != bits[i : i + 1]).any() * 10**6
    assert int(wrong) == 0, f"differing: {int(wrong) // 10**6} rows alone, and some row counts"
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(4)).cuda()
    assert cases.same_bits(layer.run(x[order]), whole[order])


@pytest.mark.parametrize("k,n", [(5120, 1024), (4096, 2048)])
def test_batch_invariant_at_real_sizes(k, n, options):
    options(batch_invariant=True)
    for codebook, words in (("mcg", 64), ("mul1", 96)):
        layer = cases.make_layer([5, k], k, [(codebook, words, n)])
        x = cases.activations(6, 2100, k, torch.bfloat16)
        whole = layer.run(x)
        for m in (1, 8, 9, 16, 33, 64, 65, 128, 129, 257, 1024, 2099):
            assert cases.same_bits(layer.run(x[:m]), whole[:m]), m
            assert cases.same_bits(layer.run(x[-m:]), whole[-m:]), m


@pytest.mark.quick
@pytest.mark.parametrize("name", [*cases.PLANS, "default"])
def test_reruns_beside_a_busy_stream(name):
    """A hundred calls, while matmuls of another stream take multiprocessors away at random."""
    layer, x = layer_and_rows(48, 7, 2048)
    plan = cases.PLANS.get(name)
    first = layer.run(x, plan)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in cases.beside_a_busy_stream():
        wrong += (layer.run(x, plan).view(torch.int16) != first.view(torch.int16)).any()
    assert int(wrong) == 0, f"{int(wrong)} of 100 reruns differ"


@pytest.mark.quick
def test_two_streams_at_once():
    """Workspaces belong to a call: layers on two streams do not meet."""
    layer, x = layer_and_rows(20, 8)
    other, z = layer_and_rows(20, 9)
    expected = [layer.run(x), other.run(z)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(50):
        results = []
        for stream, held, rows in zip(streams, (layer, other), (x, z)):
            with torch.cuda.stream(stream):
                results.append(held.run(rows))
        torch.cuda.synchronize()
        assert all(map(cases.same_bits, results, expected))


@pytest.mark.quick
@pytest.mark.parametrize("name", [*cases.PLANS, "default"])
def test_dependent_launch_changes_nothing(name, options):
    plan = cases.PLANS.get(name)
    layer, x = layer_and_rows(130, 10)
    results = []
    for dependent in (True, False):
        options(dependent_launch=dependent)
        # Chained without a pause, each call feeding the next, so that launches overlap.
        rows = [x, x.flip(0), x.roll(1, 0)]
        results.append([layer.run(r, plan) for _ in range(5) for r in rows])
    torch.cuda.synchronize()
    assert all(map(cases.same_bits, *results))
    for call in range(3):
        assert cases.same_bits(results[0][call], results[0][call + 12])


def test_a_chain_with_and_without_dependent_launch(options):
    """The output of one call is the input of the next, through small ops that are not ours."""
    layer = cases.make_layer(11, 512, [("mcg", 64, 512)])
    results = []
    for dependent in (True, False):
        options(dependent_launch=dependent)
        x = cases.activations(12, 5, 512, torch.bfloat16)
        for _ in range(30):
            x = layer.run(x)
            x = x / x.abs().amax(-1, keepdim=True)
        results.append(x)
    assert torch.isfinite(results[0]).all() and cases.same_bits(*results)


@pytest.mark.quick
@pytest.mark.parametrize("m", [1, 8, 40, 200])
@pytest.mark.parametrize("name", [*cases.PLANS, "default"])
def test_eager_captured_and_replayed(name, m):
    plan = cases.PLANS.get(name)
    layer, x = layer_and_rows(3 * m, 13)
    batches = x.split(m)
    eager = [layer.run(batch, plan) for batch in batches]
    static = batches[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer.run(static, plan)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = layer.run(static, plan)
        second = layer.run(static, plan)
    for _ in range(2):
        for batch, expected in zip(batches, eager):
            static.copy_(batch)
            graph.replay()
            assert cases.same_bits(first, expected)
            assert cases.same_bits(second, expected)


@pytest.mark.quick
def test_plan_table_overrides_and_clears(options):
    """`exl3::set_plan_table`: first row that fits wins, `exact` and batch invariance stay."""
    layer = cases.make_layer(14, 512, [("mcg", 64, 512)])
    x = cases.activations(15, 16, 512, torch.bfloat16)
    forced = {name: layer.run(x, cases.PLANS[name]) for name in ("dense", "rows8", "rows8-fast")}
    assert not cases.same_bits(forced["rows8"], forced["rows8-fast"])
    assert not cases.same_bits(forced["rows8"], forced["dense"])
    table = torch.ops.exl3.set_plan_table
    default = layer.run(x)
    try:
        table([512, 512, 8, 0, 15, 0, 8, 0, 0, 0, 0, 0, -1, 16, 1, 0, 0, 0])
        assert cases.same_bits(layer.run(x), forced["dense"])
        assert not cases.same_bits(layer.run(x[:15]), forced["dense"][:15])
        table([512, 512, 8, 0, 1000, 0, 8, 1, 0])
        assert cases.same_bits(layer.run(x), forced["rows8-fast"])
        options(exact=True)
        assert cases.same_bits(layer.run(x), forced["rows8"])
        options(batch_invariant=True)
        invariant = layer.run(x)
        table([0, 0, 0, -1, 1000, 1, 0, 0, 0])
        assert cases.same_bits(layer.run(x), invariant)
        options()
        assert cases.same_bits(layer.run(x), forced["dense"])
    finally:
        table([])
    assert cases.same_bits(layer.run(x), default)
