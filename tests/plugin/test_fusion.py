"""The pass that moves norms and gated activations into EXL3 layers: graphs and near misses.

Graphs are traced from functions as Inductor has them (its decompositions, any number of rows), so
what is recognised is what torch makes of vLLM's own layers. A fused graph is run and must say bit
for bit what the function says.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._decomp import decomposition_table
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor.decomposition import select_decomp_table
from vllm.model_executor.layers.activation import SiluAndMul

from exl3_plugin import format as exl3
from exl3_plugin import fusion, ops

ROWS, WIDTH, INNER = 5, 192, 320
EPSILON = 1e-5
NORM = torch.ops.vllm_ir.fused_add_rms_norm
SILU_AND_MUL = SiluAndMul.forward_native


def layer(seed: int, k: int, n: int, k_begin: int = 0, bias: bool = False):
    """A random layer of two matrices, as a function of its activations `[..., k]`."""
    rng = np.random.default_rng(seed)
    stored, columns = (-(-size // exl3.BLOCK) * exl3.BLOCK for size in (k_begin + k, n))
    tiles = (stored // 16, columns // 16)
    words = [
        torch.from_numpy(rng.integers(-(2**15), 2**15, (*tiles, w), dtype=np.int16))
        for w in (64, 40)
    ]
    flat, shards = ops.pack_shards([(words[0], "mcg", 0, n), (words[1], "mul1", 0, n)])
    suh = torch.from_numpy(rng.uniform(0.05, 0.2, (2, stored))).half()
    svh = torch.from_numpy(rng.uniform(0.25, 1, 2 * columns)).half()
    extra = torch.from_numpy(rng.standard_normal(2 * n)).float() if bias else None

    def run(x, suh=suh):
        return torch.ops.exl3.linear(x, flat, suh, svh, extra, shards, k_begin)

    return run


def activations(*shape: int, dtype=torch.bfloat16, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ours(graph: torch.fx.Graph) -> Counter:
    """How often each of the project's operators is called in a graph."""
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    return Counter(t._opname for t in targets if getattr(t, "namespace", None) == "exl3")


def compile_and_run(function, inputs, change, decompositions=None) -> tuple[torch.Tensor, ...]:
    """Compile a function as far as Inductor's passes for any number of rows, with `change` applied
    to the graph, and run what it became."""
    ops.load()
    torch._dynamo.reset()

    def compiler(graph: torch.fx.GraphModule, _) -> Callable:
        change(graph.graph)
        graph.graph.lint()
        graph.recompile()
        return make_boxed_func(graph.forward)

    table = select_decomp_table() if decompositions is None else decompositions
    backend = aot_autograd(fw_compiler=compiler, decompositions=table)
    for tensor in inputs:
        if tensor.dim() > 1:
            torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad():
        return torch.compile(function, backend=backend, fullgraph=True)(*inputs)


def fused(function, *inputs, decompositions=None) -> Counter:
    """Fuse a function's graph, check that it says what it said, and count its operators."""
    run, counts = fusion.Exl3FusionPass(), []

    def change(graph: torch.fx.Graph) -> None:
        run(graph)
        assert all("val" in node.meta for node in graph.nodes if node.op == "call_function")
        counts.append(ours(graph))

    found = compile_and_run(function, inputs, change, decompositions)
    for got, wanted in zip(found, function(*inputs), strict=True):
        assert torch.equal(got, wanted)
    (count,) = counts
    assert (run.norms, run.gated) == (count["norm_linear"], count["gated_linear"])
    return count


def norm_inputs(dtype=torch.bfloat16, weight=None, rows=(ROWS,), width=WIDTH):
    x, residual = activations(2, *rows, width, dtype=dtype)
    return x, residual, 1 + activations(width, dtype=weight or dtype, seed=4) / 4


# What is fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp32_weight", [False, True])
@pytest.mark.parametrize("rows", [(ROWS,), (2, 3)])
def test_a_norm_moves_into_its_layer(dtype, fp32_weight, rows):
    qkv = layer(1, WIDTH, 128, bias=True)

    def block(x, residual, weight):
        normed, total = NORM(x, residual, weight, EPSILON)
        return qkv(normed), total

    weight = torch.float32 if fp32_weight else dtype
    assert fused(block, *norm_inputs(dtype, weight, rows)) == {"norm_linear": 1}


def test_what_becomes_of_the_sum_does_not_matter():
    gate_up = layer(2, WIDTH, 128)

    def unused(x, residual, weight):
        return (gate_up(NORM(x, residual, weight, EPSILON, None)[0]),)

    def used_before_and_behind(x, residual, weight):
        normed, total = NORM(x, residual, weight, EPSILON)
        doubled = total * 2
        return gate_up(normed), doubled, total + 1

    def seen_through_views(x, residual, weight):
        normed, total = NORM(x, residual, weight, EPSILON)
        return gate_up(normed.view(normed.shape[0], WIDTH).reshape(-1, WIDTH)), total

    for block in (unused, used_before_and_behind, seen_through_views):
        assert fused(block, *norm_inputs()) == {"norm_linear": 1}, block.__name__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [(ROWS,), (2, 3)])
def test_a_gated_activation_moves_into_its_layer(dtype, rows):
    down = layer(3, INNER, 128)

    def block(x):
        return (down(SILU_AND_MUL(x)),)

    x = activations(*rows, 2 * INNER, dtype=dtype)
    assert fused(block, x) == {"gated_linear": 1}


def test_silu_as_torch_decomposes_it_elsewhere():
    """x * sigmoid(x), as torch's own table has it, and not decomposed at all."""
    silu = torch.ops.aten.silu.default
    table = select_decomp_table() | {silu: decomposition_table[silu]}

    def has_sigmoid(graph):
        assert torch.ops.aten.sigmoid.default in {node.target for node in graph.nodes}

    down = layer(3, INNER, 128)

    def block(x):
        return (down(SILU_AND_MUL(x)),)

    for dtype in (torch.float32, torch.bfloat16):
        x = activations(ROWS, 2 * INNER, dtype=dtype)
        compile_and_run(block, [x], has_sigmoid, table)
        assert fused(block, x, decompositions=table) == {"gated_linear": 1}
        assert fused(block, x, decompositions={}) == {"gated_linear": 1}


def silu_and_mul_operator():
    """vLLM's own kernel; where this vLLM was built without it, its schema."""
    if not hasattr(torch.ops._C, "silu_and_mul"):
        library = torch.library.Library("_C", "FRAGMENT")
        library.define("silu_and_mul(Tensor! result, Tensor input) -> ()")
        silu_and_mul_operator.library = library
    return torch.ops._C.silu_and_mul.default


def test_vllms_own_kernel_of_the_activation_is_recognised():
    down = layer(3, INNER, 128)
    kernel = silu_and_mul_operator()
    x = activations(ROWS, 2 * INNER)

    def change(graph):
        (linear,) = graph.find_nodes(op="call_function", target=torch.ops.exl3.linear.default)
        half = linear.args[0]
        with graph.inserting_before(linear):
            arguments = {"result": half, "input": half.args[0]}
            call = graph.call_function(auto_functionalized, (kernel,), arguments)
            result = graph.call_function(operator.getitem, (call, 1))
        result.meta["val"] = half.meta["val"]
        linear.replace_input_with(half, result)
        fusion.Exl3FusionPass()(graph)
        assert ours(graph) == {"gated_linear": 1}

    (found,) = compile_and_run(lambda x: (down(x[..., :INNER]),), [x], change)
    assert torch.equal(found, down(SILU_AND_MUL(x)))


def test_a_block_of_a_model():
    """A layer behind its attention, and the first projection of the next."""
    out, gate_up, down, qkv = (
        layer(5, 256, 128), layer(6, 256, INNER), layer(7, INNER, 128), layer(8, 256, 128)
    )  # fmt: skip

    def block(attended, residual, first, second):
        normed, residual = NORM(out(attended), residual, first, EPSILON)
        normed, residual = NORM(down(SILU_AND_MUL(gate_up(normed))), residual, second, EPSILON)
        return qkv(normed), residual

    x, residual, weight = norm_inputs(width=256)
    count = fused(block, x, residual, weight, weight + 1)
    assert count == {"linear": 1, "norm_linear": 2, "gated_linear": 1}


def test_a_weight_that_the_graph_computes():
    """Gemma's norms add one to their weight, in float32."""
    qkv = layer(1, WIDTH, 128)

    def block(x, residual, weight):
        normed, total = NORM(x, residual, weight.float() + 1.0, EPSILON)
        return qkv(normed), total

    assert fused(block, *norm_inputs()) == {"norm_linear": 1}


# Near misses

PLAIN, CUT, NARROW = layer(1, WIDTH, 128), layer(1, WIDTH, 128, k_begin=6), layer(1, 60, 128)


def two_users(x, residual, weight):
    normed, total = NORM(x, residual, weight, EPSILON)
    return PLAIN(normed), normed, total


def two_layers(x, residual, weight):
    normed, total = NORM(x, residual, weight, EPSILON)
    return PLAIN(normed), PLAIN(normed), total


def part_of_the_row(x, residual, weight):
    return (PLAIN(NORM(x, residual, weight, EPSILON, 128)[0]),)


def without_weight(x, residual, weight):
    return (PLAIN(NORM(x, residual, None, EPSILON)[0]),)


def inside_a_block(x, residual, weight):
    return (CUT(NORM(x, residual, weight, EPSILON)[0]),)


def without_residual(x, residual, weight):
    return (PLAIN(torch.ops.vllm_ir.rms_norm(x, weight, EPSILON)),)


def the_sum_is_multiplied(x, residual, weight):
    return (PLAIN(NORM(x, residual, weight, EPSILON)[1]),)


def something_between(x, residual, weight):
    return (PLAIN(NORM(x, residual, weight, EPSILON)[0] * 2),)


def heads_are_normed(x, residual, weight):
    normed, _ = NORM(x.view(-1, 4, 48), residual.view(-1, 4, 48), weight[:48], EPSILON)
    return (PLAIN(normed.view(-1, WIDTH)),)


def width_the_kernels_do_not_read(x, residual, weight):
    return (NARROW(NORM(x[:, :60], residual[:, :60], weight[:60], EPSILON)[0]),)


def layer_made_behind_the_norm(x, residual, weight):
    normed, total = NORM(x, residual, weight, EPSILON)
    suh = total.half()[:2, :1].expand(2, 256).contiguous()
    return PLAIN(normed, suh), total


@pytest.mark.parametrize(
    "block",
    [two_users, two_layers, part_of_the_row, without_weight, inside_a_block, without_residual,
     the_sum_is_multiplied, something_between, heads_are_normed, layer_made_behind_the_norm,
     width_the_kernels_do_not_read],
)  # fmt: skip
def test_norms_that_stay_outside(block):
    count = fused(block, *norm_inputs())
    assert count == {"linear": 2 if block is two_layers else 1}


@pytest.mark.parametrize("kept", [2, 3])
def test_norms_called_by_keywords_stay_outside(kept):
    def change(graph):
        target = torch.ops.vllm_ir.fused_add_rms_norm.default
        (norm,) = graph.find_nodes(op="call_function", target=target)
        names = ("x", "x_residual", "weight", "epsilon", "variance_size")
        norm.kwargs = dict(zip(names[kept:], norm.args[kept:]))
        norm.args = norm.args[:kept]
        fusion.Exl3FusionPass()(graph)
        assert ours(graph) == {"linear": 1}

    block = lambda x, residual, weight: (PLAIN(NORM(x, residual, weight, EPSILON)[0]),)  # noqa: E731
    inputs = norm_inputs()
    (found,) = compile_and_run(block, inputs, change)
    assert torch.equal(found, block(*inputs)[0])


def test_dtypes_that_stay_outside():
    x, residual, weight = norm_inputs()

    def block(x, residual, weight):
        return (PLAIN(NORM(x, residual, weight, EPSILON)[0]),)

    assert fused(block, x, residual, weight) == {"norm_linear": 1}
    assert fused(block, x, residual, weight.half()) == {"linear": 1}
    assert fused(block, x, residual.float(), weight) == {"linear": 1}


def test_activations_that_stay_outside():
    down, cut = layer(3, INNER, 128), layer(3, INNER, 128, k_begin=6)
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu

    def twice(x):
        hidden = SILU_AND_MUL(x)
        return down(hidden), hidden

    blocks = {
        "two users": twice,
        "gelu": lambda x: (down(gelu(x[..., :INNER]) * x[..., INNER:]),),
        "up before gate": lambda x: (down(silu(x[..., INNER:]) * x[..., :INNER]),),
        "one half twice": lambda x: (down(silu(x[..., :INNER]) * x[..., :INNER]),),
        "of two tensors": lambda x: (down(silu(x[..., :INNER]) * (x + 1)[..., INNER:]),),
        "rounded once": lambda x: (
            down((silu(x[..., :INNER].float()) * x[..., INNER:].float()).to(x.dtype)),
        ),
        "inside a block": lambda x: (cut(SILU_AND_MUL(x)),),
        "no layer": lambda x: (SILU_AND_MUL(x) + 1, down(x[..., :INNER])),
        "part of a row": lambda x: (NARROW(silu(x[..., :60]) * x[..., 60:120]),),
        "every second": lambda x: (down(silu(x[..., ::2]) * x[..., 1::2]),),
    }
    x = activations(ROWS, 2 * INNER)

    def change(graph):
        before = str(graph)
        fusion.Exl3FusionPass()(graph)
        assert str(graph) == before

    for what, block in blocks.items():
        print(what)
        compile_and_run(block, [x], change)
