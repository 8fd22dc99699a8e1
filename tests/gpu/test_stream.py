"""The kernel for one row: bounds, equal bits, memory and arguments."""

import pytest
import torch

from exl3_plugin import ops
from tests.gpu import cases, test_hygiene

pytestmark = [pytest.mark.usefixtures("gpu", "sm_90"), pytest.mark.quick]

PLANS = {
    "exact": ops.Plan(ops.STREAM, 1, ops.EXACT, 0),
    "fast": ops.Plan(ops.STREAM, 1, ops.FAST, 0),
}
SHAPES = ((128, 128), (256, 1280), (1024, 128), (4096, 2048), (17408, 512), (640, 40960))

over_forms = pytest.mark.parametrize("form", PLANS)


@pytest.fixture(scope="module")
def sm_90():
    capability = ops.cuda_device().capability
    if capability != 90:
        pytest.skip(f"compute capability {capability}: the kernel for one row is for 90")


def check(report, layer, k_in, case, dtype=torch.bfloat16, seed=1, blocks=0):
    x = cases.activations(seed, 1, k_in, dtype)
    for name, plan in PLANS.items():
        y = layer.run(x, plan._replace(blocks=blocks))
        assert y.shape == (1, layer.n_out) and y.dtype == dtype
        report.add(name, case, layer.expect(x, plan).fractions(y))


def test_every_rate(capfd):
    report = cases.Report()
    for index, (codebook, words) in enumerate(cases.RATES):
        layer = cases.make_layer([21, index], 384, [(codebook, words, 384)])
        check(report, layer, 384, f"{codebook} {words}", cases.DTYPES[index % 2])
    with capfd.disabled():
        report.check("one row, every rate")


@pytest.mark.parametrize("k,n", SHAPES)
def test_shapes(k, n, capfd):
    report = cases.Report()
    for number, (codebook, words) in enumerate((("mcg", 64), ("mul1", 96))):
        layer = cases.make_layer([22, k, n, number], k, [(codebook, words, n)])
        for blocks in (0, 1, 7, 131):
            # One block alone meets every strip, many share each: both ends of the split.
            if blocks == 1 and k * n > 1 << 23:
                continue
            check(report, layer, k, f"{codebook} {words} {k}x{n} {blocks}", blocks=blocks)
    with capfd.disabled():
        report.check(f"one row, {k} x {n}")


def test_fused_layers_and_cuts(capfd):
    """Shards of other scales, rates and codebooks; inputs that begin and end inside a block."""
    report = cases.Report()
    for number, (k, k_begin, k_in) in enumerate(
        ((384, 0, 384), (1024, 100, 900), (1024, 64, 960), (128, 5, 1), (2048, 0, 1))
    ):
        bias = (None, torch.float32, torch.bfloat16, torch.float16)[number % 4]
        layer = cases.make_layer([23, number], k, cases.FUSED, bias=bias, k_begin=k_begin)
        for dtype in cases.DTYPES:
            for blocks in (0, 1, 3, 50):
                case = f"{k} from {k_begin}, {k_in}, {blocks} blocks"
                check(report, layer, k_in, case, dtype, seed=number, blocks=blocks)
    with capfd.disabled():
        report.check("one row, fused layers")


@over_forms
def test_equal_bits(form, options):
    """Reruns beside a busy stream, with and without dependent launch, captured and replayed."""
    layer = cases.make_layer(24, 2048, cases.FUSED, bias=torch.float32)
    rows = [cases.activations(25 + i, 1, 2048, torch.bfloat16) for i in range(4)]
    plan = PLANS[form]
    eager = [layer.run(x, plan) for x in rows]
    options(dependent_launch=False)
    assert all(cases.same_bits(layer.run(x, plan), y) for x, y in zip(rows, eager))
    options(dependent_launch=True)
    busy = torch.cuda.Stream()
    a = torch.randn(3072, 3072, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for call in range(100):
        if call % 5 == 0:
            with torch.cuda.stream(busy):
                for _ in range(3):
                    a @ a
        wrong += (layer.run(rows[call % 4], plan) != eager[call % 4]).any()
    assert int(wrong) == 0, f"{int(wrong)} of 100 reruns differ"

    static = rows[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [layer.run(static, plan) for _ in range(3)]
    for x, y in zip(rows, eager):
        static.copy_(x)
        graph.replay()
        assert all(cases.same_bits(result, y) for result in results)


@over_forms
def test_a_chain_of_calls(form, options):
    """Each call reads what the one before has just written."""
    layer = cases.make_layer(26, 512, [("mcg", 64, 512)])
    results = []
    for dependent in (True, False):
        options(dependent_launch=dependent)
        x = cases.activations(27, 1, 512, torch.float16)
        for _ in range(200):
            x = layer.run(x, PLANS[form])
            x = x / x.abs().amax()
        results.append(x)
    assert torch.isfinite(results[0]).all() and cases.same_bits(*results)


@over_forms
def test_memory(form):
    """Poisoned workspaces do not matter, and the peak is what is declared."""
    plan = PLANS[form]._replace(blocks=90)
    layer = cases.make_layer(28, 1024, cases.FUSED)
    x = cases.activations(29, 1, 1024, torch.bfloat16)
    clean = layer.run(x, plan)
    with test_hygiene.poisoned_memory():
        y = layer.run(x, plan)
        right = cases.same_bits(y, clean)
        del y
    assert right
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    y = layer.run(x, plan)
    stats = torch.cuda.memory_stats()
    output = y.numel() * y.element_size()
    declared = ops.workspace_bytes(1, layer.k, layer.n_stored, len(layer.shards), plan)
    assert stats["requested_bytes.all.peak"] - before == declared + output
    assert stats["requested_bytes.all.current"] - before == output


def test_more_rows_are_refused():
    layer = cases.make_layer(30, 128, [("mcg", 64, 128)])
    with pytest.raises(RuntimeError, match="kernel 2 is for one row"):
        layer.run(cases.activations(31, 2, 128, torch.bfloat16), PLANS["exact"])
    assert layer.run(cases.activations(31, 0, 128, torch.bfloat16)).shape == (0, 128)


def test_the_default_takes_it():
    """At one row, in the form that the options allow, and never in batch-invariant mode."""
    device = ops.cuda_device()
    assert ops.plan(device, 1, 4096, 2048, 4, "mcg").kernel == ops.STREAM
    assert ops.plan(device, 1, 4096, 2048, 4, "mcg", True) == (ops.STREAM, 1, ops.EXACT, 128)
    assert ops.plan(device, 2, 4096, 2048, 4, "mcg").kernel == ops.GEMM
    assert ops.plan(device, 1, 4096, 2048, 4, "mcg", False, True).kernel == ops.GEMM
