"""`exl3::norm_linear` and `exl3::gated_linear` on the device: bounds, bits, memory, arguments.

`tests/gpu/fused_layers.py` says what is compared with what.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch

from tests.gpu import cases, test_hygiene
from tests.gpu.fused_layers import (
    EPSILON,
    FEW_ROWS,
    expectations,
    fractions,
    gated_linear,
    norm_linear,
    rest,
)
from tests.ops import fused_cases

pytestmark = pytest.mark.usefixtures("gpu", "kernels")

ROWS = (1, 2, 5, 17, 64, 300)
LAYERS = {
    "3inst": [("3inst", 64, 512)],
    "mcg": [("mcg", 64, 512)],
    "mul1": [("mul1", 64, 512)],
    "mul1 2.5 bits": [("mul1", 40, 512)],
    "shards": cases.FUSED,
}
NORMS = [(d, w) for d in cases.DTYPES for w in (d, torch.float32)]

quick = pytest.mark.quick
over_norms = pytest.mark.parametrize(("dtype", "weight_dtype"), NORMS)
over_dtypes = pytest.mark.parametrize("dtype", cases.DTYPES)
over_layers = pytest.mark.parametrize("which", LAYERS)


@pytest.fixture(scope="module")
def kernels(gpu):
    for name in ("exl3::norm_linear", "exl3::gated_linear"):
        has = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        assert has, f"_C_cuda.so has no {name}; build the kernels anew"


def add(report, dtype, case, layer, y, expected):
    """Report a result; a rebuilt weight alone may reach its worst case where inputs are few."""
    limit = cases.WORST_LIMIT if len(y) <= FEW_ROWS else 1.0
    report.add(str(dtype), f"{case} m={len(y)}", fractions(layer, y, expected), limit)


def check_norm(report, layer, k_in, dtype, weight_dtype, case, rows=ROWS):
    """Both results at every number of rows, within the bounds, and the same in a second run."""
    x, residual, weight = fused_cases.norm_inputs(1, max(rows), k_in, dtype, weight_dtype, "cuda")
    hidden = fused_cases.normed(x, residual, weight, EPSILON)
    expected = expectations(layer, hidden, dtype)
    sums = (x.float() + residual.float()).to(dtype)
    for m in rows:
        y, total = norm_linear(layer, x[:m], residual[:m], weight)
        assert y.shape == (m, layer.n_out) and y.dtype == dtype
        assert cases.same_bits(total, sums[:m]), (case, m)
        add(report, dtype, f"{case} {weight_dtype}", layer, y, expected)
        again = norm_linear(layer, x[:m], residual[:m], weight)
        assert cases.same_bits(again[0], y) and cases.same_bits(again[1], total), (case, m)


def check_gated(report, layer, k_in, dtype, case, rows=ROWS):
    x = fused_cases.gated_inputs(2, max(rows), k_in, dtype, "cuda")
    expected = expectations(layer, fused_cases.gated(x), dtype)
    for m in rows:
        y = gated_linear(layer, x[:m])
        assert y.shape == (m, layer.n_out) and y.dtype == dtype
        add(report, dtype, case, layer, y, expected)
        assert cases.same_bits(gated_linear(layer, x[:m]), y), (case, m)


# Bounds


@quick
@over_norms
@over_layers
def test_norm_linear(which, dtype, weight_dtype, capfd):
    report = cases.Report()
    layer = cases.make_layer(31, 1024, LAYERS[which])
    check_norm(report, layer, 1024, dtype, weight_dtype, which)
    with capfd.disabled():
        report.check(f"norm inside, {which}")


@quick
@over_dtypes
@over_layers
def test_gated_linear(which, dtype, capfd):
    report = cases.Report()
    layer = cases.make_layer(32, 1024, LAYERS[which])
    check_gated(report, layer, 1024, dtype, which)
    with capfd.disabled():
        report.check(f"activation inside, {which}")


@quick
@pytest.mark.parametrize(
    ("k", "k_begin", "k_in"), [(384, 0, 344), (128, 0, 8), (1024, 100, 904), (2048, 64, 1984)]
)
def test_padding_cuts_and_biases(k, k_begin, k_in, capfd):
    """Inputs that end inside a block, and begin there; three dtypes of bias."""
    report = cases.Report()
    for bias in (torch.float32, torch.bfloat16, torch.float16):
        layer = cases.make_layer([33, k], k, cases.FUSED, bias=bias, k_begin=k_begin)
        for dtype in cases.DTYPES:
            case = f"{k_in} of {k} from {k_begin}, {bias}"
            check_norm(report, layer, k_in, dtype, dtype, case, (1, 2, 17, 130))
            check_gated(report, layer, k_in, dtype, case, (1, 2, 17, 130))
    with capfd.disabled():
        report.check(f"norm and activation inside, {k_in} of {k}")


@pytest.mark.parametrize(
    ("k", "n"), [(4096, 2048), (5120, 1024), (12288, 4096), (17408, 5120), (1024, 12288)]
)
def test_shapes(k, n, capfd):
    report = cases.Report()
    layer = cases.make_layer([34, k, n], k, [("mul1", 64, n)])
    check_norm(report, layer, k, torch.bfloat16, torch.bfloat16, f"{k} x {n}")
    check_gated(report, layer, k, torch.bfloat16, f"{k} x {n}")
    with capfd.disabled():
        report.check(f"norm and activation inside, {k} x {n}")


@over_dtypes
def test_every_row_count(dtype, capfd):
    report = cases.Report()
    layer = cases.make_layer(35, 640, [("mcg", 64, 384), ("mcg", 64, 128)])
    rows = cases.ROWS[1:]
    check_norm(report, layer, 640, dtype, dtype, "rows", rows)
    check_gated(report, layer, 640, dtype, "rows", rows)
    with capfd.disabled():
        report.check("norm and activation inside, every row count")


# Equal bits


def calls(layer: cases.Layer, m: int, dtype=torch.bfloat16) -> list[tuple[Callable, list]]:
    """Both operators with inputs for m rows: (function, its tensors with a row for each of x's)."""
    k_in = layer.k - layer.k_begin
    x, residual, weight = fused_cases.norm_inputs(3, m, k_in, dtype, dtype, "cuda")
    both = fused_cases.gated_inputs(4, m, k_in, dtype, "cuda")

    def norm(x, residual):
        return norm_linear(layer, x, residual, weight)

    def gate(x):
        return (gated_linear(layer, x),)

    return [(norm, [x, residual]), (gate, [both])]


def same(one: tuple, other: tuple) -> bool:
    return all(map(cases.same_bits, one, other))


@quick
def test_a_row_alone_is_the_same_each_time():
    """Each of 64 rows as a batch of one, in two orders, with other calls between."""
    layer = cases.make_layer(36, 1024, cases.FUSED, bias=torch.float32)
    for dtype in cases.DTYPES:
        for op, tensors in calls(layer, 64, dtype):
            first = [op(*(t[i : i + 1] for t in tensors)) for i in range(64)]
            op(*tensors)
            for i in reversed(range(64)):
                assert same(op(*(t[i : i + 1].clone() for t in tensors)), first[i]), i


@quick
@pytest.mark.parametrize("m", ROWS)
def test_captured_and_replayed(m):
    layer = cases.make_layer(37, 1024, cases.FUSED)
    for op, tensors in calls(layer, 3 * m):
        batches = list(zip(*(t.split(m) for t in tensors)))
        eager = [op(*batch) for batch in batches]
        static = [t.clone() for t in batches[0]]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            op(*static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [op(*static), op(*static)]
        for _ in range(2):
            for batch, expected in zip(batches, eager):
                for place, values in zip(static, batch):
                    place.copy_(values)
                graph.replay()
                assert same(captured[0], expected) and same(captured[1], expected)


def decoder_layers(layers: dict[str, cases.Layer], rows: int, count: int) -> list[torch.Tensor]:
    """What follows one another in a model, each call fed by the one before it."""
    x, residual, weight = fused_cases.norm_inputs(5, rows, 512, *[torch.bfloat16] * 2, "cuda")
    seen = []
    for _ in range(count):
        both, residual = norm_linear(layers["gate_up"], x, residual, weight)
        x = gated_linear(layers["down"], both)
        head, residual = norm_linear(layers["qkv"], x, residual, weight)
        x = layers["o"].run(head[:, :512].contiguous())
        # Unit rows, or ten layers of random numbers overflow.
        x = x / x.float().square().mean(-1, keepdim=True).sqrt().bfloat16()
        residual = residual / 2
        seen += [both, head, residual]
    return seen


@quick
@pytest.mark.parametrize("m", [1, 3, 40])
def test_chains_with_and_without_dependent_launch(m, options):
    """A kernel that starts early must not read what the one before it has still to write."""
    layers = {
        "qkv": cases.make_layer(38, 512, [("mcg", 64, 512), ("mul1", 40, 128), ("mcg", 64, 128)]),
        "o": cases.make_layer(39, 512, [("mcg", 64, 512)]),
        "gate_up": cases.make_layer(40, 512, [("mcg", 64, 1024), ("mcg", 64, 1024)]),
        "down": cases.make_layer(41, 1024, [("mul1", 64, 512)]),
    }
    results = []
    for dependent in (True, False, True):
        options(dependent_launch=dependent)
        results.append(decoder_layers(layers, m, 12))
    torch.cuda.synchronize()
    assert all(bool(torch.isfinite(t).all()) for t in results[0])
    assert same(results[0], results[1]) and same(results[0], results[2])


@quick
@pytest.mark.parametrize("m", [1, 5, 64])
def test_reruns_beside_a_busy_stream(m):
    layer = cases.make_layer(42, 2048, cases.FUSED)
    for op, tensors in calls(layer, m):
        first = op(*tensors)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in cases.beside_a_busy_stream():
            for got, expected in zip(op(*tensors), first):
                wrong += (got.view(torch.int16) != expected.view(torch.int16)).any()
        assert int(wrong) == 0, f"{int(wrong)} results of 100 reruns differ"


# Memory and shapes


@quick
@pytest.mark.parametrize("m", ROWS)
def test_poisoned_outputs_and_workspaces(m):
    layer = cases.make_layer(43, 1024, cases.FUSED, bias=torch.float16)
    for op, tensors in calls(layer, m):
        clean = op(*tensors)
        with test_hygiene.poisoned_memory():
            results = op(*tensors)
            finite = all(bool(torch.isfinite(t).all()) for t in results)
            right = finite and same(results, clean)
            del results
        assert right


@quick
@pytest.mark.parametrize("m", [1, 5, 40])
def test_rows_of_wider_tensors_and_more_dimensions(m):
    """Rows at odd places of tensors full of NaN, which no result may notice."""
    layer = cases.make_layer(44, 1024, cases.FUSED)
    for op, tensors in calls(layer, m):
        clean = op(*tensors)
        for begin in (64, 33):
            wide = [t.new_full((m, 2 * t.shape[1]), float("nan")) for t in tensors]
            places = [w[:, begin : begin + t.shape[1]] for w, t in zip(wide, tensors)]
            for place, t in zip(places, tensors):
                place.copy_(t)
            assert same(op(*places), clean), begin
        deep = op(*(t.view(1, m, 1, -1) for t in tensors))
        assert all(d.shape == (1, m, 1, c.shape[1]) for d, c in zip(deep, clean))
        assert same([d.view(m, -1) for d in deep], clean)
        none = op(*(t[:0] for t in tensors))
        assert all(n.shape == (0, c.shape[1]) for n, c in zip(none, clean))


@quick
def test_inputs_are_not_written_to():
    layer = cases.make_layer(45, 1024, cases.FUSED)
    for m in ROWS:
        for op, tensors in calls(layer, m):
            before = [t.clone() for t in tensors]
            results = op(*tensors)
            assert all(map(cases.same_bits, tensors, before)), m
            addresses = {t.data_ptr() for t in tensors}
            assert not addresses & {r.data_ptr() for r in results}, "a result is an input"


@quick
@pytest.mark.parametrize("m", [3, 40])
def test_what_is_not_finite_stays_in_its_row(m):
    layer = cases.make_layer(46, 1024, cases.FUSED)
    others = torch.tensor([i for i in range(m) if i != 1], device="cuda")
    for op, tensors in calls(layer, m):
        clean = op(*tensors)
        for t in tensors:
            t[1, 77] = float("nan")
        for got, expected in zip(op(*tensors), clean):
            assert cases.same_bits(got[others], expected[others])
            assert got[1].isnan().any()


# Arguments

GOOD_LAYER = partial(cases.make_layer, 47, 256, [("mcg", 64, 128), ("mul1", 40, 256, 0, 200)])
NORM_NAMES = ("x", "residual", "norm_weight")


def change_one(name: str, change: Callable) -> Callable[[dict], dict]:
    return lambda values: values | {name: change(values[name])}


def change_both(change: Callable) -> Callable[[dict], dict]:
    return lambda values: values | {n: change(values[n]) for n in ("x", "residual")}


REFUSED_NORMS = {
    "float32": (change_both(torch.Tensor.float), ["bfloat16", "float16"]),
    "x on the CPU": (change_one("x", torch.Tensor.cpu), [r"\bx\b|residual"]),
    "x too wide": (change_both(lambda t: t.repeat(1, 2)), ["512", "256"]),
    "residual of another dtype": (change_one("residual", torch.Tensor.half), ["residual"]),
    "residual on the CPU": (change_one("residual", torch.Tensor.cpu), ["residual"]),
    "residual of other rows": (change_one("residual", lambda t: t[:2]), ["residual"]),
    "residual of another width": (change_one("residual", lambda t: t[:, 8:]), ["residual"]),
    "norm_weight short": (change_one("norm_weight", lambda t: t[8:]), ["norm_weight"]),
    "norm_weight of another dtype": (change_one("norm_weight", torch.Tensor.half), ["norm_weight"]),
    "norm_weight on the CPU": (change_one("norm_weight", torch.Tensor.cpu), ["norm_weight"]),
    "norm_weight in two dimensions": (
        change_one("norm_weight", lambda t: t[None]),
        ["norm_weight"],
    ),
}
REFUSED_GATES = {
    "float32": (torch.Tensor.float, ["bfloat16", "float16"]),
    "x on the CPU": (torch.Tensor.cpu, ["x"]),
    "an odd width": (lambda t: t[:, :-1], ["x"]),
    "too wide": (lambda t: t.repeat(1, 2), ["256"]),
}


def refusal(op: str, arguments: list) -> str:
    """The message that an operator refuses arguments with."""
    with pytest.raises((RuntimeError, ValueError)) as caught:
        getattr(torch.ops.exl3, op)(*arguments)
    message = str(caught.value).split("Exception raised from")[0]
    assert f"exl3::{op}" in message, message
    return message


@quick
@pytest.mark.parametrize("what", REFUSED_NORMS)
def test_norm_linear_refuses(what):
    change, texts = REFUSED_NORMS[what]
    inputs = fused_cases.norm_inputs(6, 3, 256, torch.bfloat16, torch.bfloat16, "cuda")
    values = change(dict(zip(NORM_NAMES, inputs)))
    message = refusal("norm_linear", [*values.values(), EPSILON, *rest(GOOD_LAYER())])
    assert all(re.search(text, message) for text in texts), message


@quick
@pytest.mark.parametrize("what", REFUSED_GATES)
def test_gated_linear_refuses(what):
    change, texts = REFUSED_GATES[what]
    x = change(fused_cases.gated_inputs(7, 3, 256, torch.bfloat16, "cuda"))
    message = refusal("gated_linear", [x, *rest(GOOD_LAYER())])
    assert all(re.search(text, message) for text in texts), message


@quick
def test_the_layers_own_arguments_are_refused_too():
    layer = GOOD_LAYER()
    inputs = fused_cases.norm_inputs(8, 3, 256, torch.bfloat16, torch.bfloat16, "cuda")
    both = fused_cases.gated_inputs(8, 3, 256, torch.bfloat16, "cuda")
    short = [layer.flat[:-8], *rest(layer)[1:]]
    for op, own in (("norm_linear", [*inputs, EPSILON]), ("gated_linear", [both])):
        with pytest.raises(RuntimeError, match="trellis"):
            getattr(torch.ops.exl3, op)(*own, *short)
        results = getattr(torch.ops.exl3, op)(*own, *rest(layer))
        assert torch.isfinite(results[0]).all(), "the device does not work after a refusal"


@quick
@over_norms
def test_opcheck(dtype, weight_dtype):
    layer = GOOD_LAYER(bias=torch.float32)
    inputs = fused_cases.norm_inputs(9, 3, 256, dtype, weight_dtype, "cuda")
    both = fused_cases.gated_inputs(9, 3, 256, dtype, "cuda")
    torch.library.opcheck(torch.ops.exl3.norm_linear.default, [*inputs, EPSILON, *rest(layer)])
    torch.library.opcheck(torch.ops.exl3.gated_linear.default, [both, *rest(layer)])
