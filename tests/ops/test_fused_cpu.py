"""`exl3::norm_linear` and `exl3::gated_linear` on the CPU: bounds, arguments, compilers."""

import numpy as np
import pytest
import torch

from exl3_plugin import format as exl3
from exl3_plugin import ops
from tests.ops import fused_cases, linear_cases

EPSILON = 1e-5
K, K_IN, K_BEGIN = 384, 344, 6
ROWS = (0, 1, 2, 5, 17, 64, 130)
NORMS = [
    (dtype, weight)
    for dtype in linear_cases.DTYPES
    for weight in dict.fromkeys((dtype, torch.float32))
]

over_dtypes = pytest.mark.parametrize("dtype", linear_cases.DTYPES)
over_norms = pytest.mark.parametrize(("dtype", "weight_dtype"), NORMS)


class Layer:
    """A fused layer of three matrices, its arguments, and its oracle."""

    def __init__(self, seed: int = 1):
        rng = np.random.default_rng(seed)
        self.shards = [
            linear_cases.random_shard(rng, K, 256, "mcg", 64),
            linear_cases.random_shard(rng, K, 128, "mul1", 40, 3, 100),
            linear_cases.random_shard(rng, K, 128, "3inst", 96),
        ]
        pieces = [
            (torch.from_numpy(s.trellis), s.codebook, s.n_begin, s.n_out) for s in self.shards
        ]
        flat, fields = ops.pack_shards(pieces)
        suh = torch.from_numpy(np.stack([s.suh for s in self.shards]))
        svh = torch.from_numpy(np.concatenate([s.svh for s in self.shards]))
        self.bias = torch.from_numpy(rng.standard_normal(484)).float()
        self.arguments = [flat, suh, svh, self.bias, fields, K_BEGIN]

    def expect(self, hidden: fused_cases.Hidden) -> linear_cases.Oracle:
        """The layer's oracle, its bounds widened by what `hidden` leaves open."""
        oracle = linear_cases.Oracle(hidden.value, self.shards, self.bias, K_BEGIN)
        weights = [
            exl3.dense_weight(s.trellis, s.suh, s.svh, s.codebook)[
                K_BEGIN : K_BEGIN + K_IN, s.n_begin : s.n_begin + s.n_out
            ]
            for s in self.shards
        ]
        off = hidden.off.numpy() @ np.abs(np.concatenate(weights, axis=1))
        oracle.sigma = oracle.sigma + off / linear_cases.SIGMAS
        oracle.worst = oracle.worst + off
        return oracle


@pytest.fixture(scope="module")
def layer() -> Layer:
    ops.load()
    return Layer()


@over_norms
def test_norm_linear_is_within_its_bounds(layer, dtype, weight_dtype):
    x, residual, weight = fused_cases.norm_inputs(2, max(ROWS), K_IN, dtype, weight_dtype)
    oracle = layer.expect(fused_cases.normed(x, residual, weight, EPSILON))
    for m in ROWS:
        arguments = (x[:m], residual[:m], weight, EPSILON, *layer.arguments)
        y, total = torch.ops.exl3.norm_linear(*arguments)
        assert y.shape == (m, 484) and y.dtype == dtype
        assert torch.equal(total, (x[:m].float() + residual[:m].float()).to(dtype))
        assert max(oracle.fractions(y)) <= 1, (m, oracle.fractions(y))


@over_dtypes
def test_gated_linear_is_within_its_bounds(layer, dtype):
    x = fused_cases.gated_inputs(3, max(ROWS), K_IN, dtype)
    oracle = layer.expect(fused_cases.gated(x))
    for m in ROWS:
        y = torch.ops.exl3.gated_linear(x[:m], *layer.arguments)
        assert y.shape == (m, 484) and y.dtype == dtype
        assert max(oracle.fractions(y)) <= 1, (m, oracle.fractions(y))


def _faulty_norms(x, residual, weight):
    """Norms that round elsewhere, or forget something: what a kernel could get wrong."""
    wide = x.float() + residual.float()
    narrow = wide.to(x.dtype).float()

    def norm(values, epsilon=EPSILON, mean=None):
        variance = values.square().mean(-1, keepdim=True) if mean is None else mean
        return (values * torch.rsqrt(variance + epsilon)).to(weight.dtype)

    return {
        "of the rounded sum": norm(narrow) * weight,
        "without epsilon": norm(wide, 0) * weight,
        "of x alone": norm(x.float()) * weight,
        "mean over the stored width": norm(wide, mean=wide.square().sum(-1, keepdim=True) / K)
        * weight,
        "weight one place further": norm(wide) * weight.roll(1),
        "rounded once only": (norm(wide).float() * weight.float()).to(x.dtype)
        if weight.dtype == torch.float32
        else wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON) * weight.float(),
    }


@pytest.mark.parametrize("dtype", linear_cases.DTYPES[1:])
def test_the_bound_notices_norms_that_round_elsewhere(layer, dtype):
    x, residual, weight = fused_cases.norm_inputs(4, 64, K_IN, dtype, dtype)
    oracle = layer.expect(fused_cases.normed(x, residual, weight, EPSILON))
    for fault, normed in _faulty_norms(x, residual, weight).items():
        y = torch.ops.exl3.linear(normed.to(dtype), *layer.arguments)
        assert oracle.fractions(y)[0] > 1, fault


@pytest.mark.parametrize("dtype", linear_cases.DTYPES[1:])
def test_the_bound_notices_gates_that_round_elsewhere(layer, dtype):
    x = fused_cases.gated_inputs(5, 64, K_IN, dtype)
    oracle = layer.expect(fused_cases.gated(x))
    gate, up = x.chunk(2, -1)
    silu = torch.nn.functional.silu
    faults = {
        "up before gate": silu(up) * gate,
        "rounded once only": (silu(gate.float()) * up.float()).to(dtype),
        "another activation": torch.nn.functional.gelu(gate) * up,
        "no activation": gate * up,
    }
    for fault, values in faults.items():
        y = torch.ops.exl3.linear(values, *layer.arguments)
        assert oracle.fractions(y)[0] > 1, fault


def test_rows_of_wider_tensors_and_more_dimensions(layer):
    x, residual, weight = fused_cases.norm_inputs(6, 6, K_IN, torch.bfloat16, torch.bfloat16)
    both = fused_cases.gated_inputs(7, 6, K_IN, torch.bfloat16)
    norm, gate = torch.ops.exl3.norm_linear, torch.ops.exl3.gated_linear
    y, total = norm(x, residual, weight, EPSILON, *layer.arguments)
    z = gate(both, *layer.arguments)

    wide = torch.full((6, 3 * K_IN), float("nan"), dtype=x.dtype)
    wide[:, 3 : 3 + K_IN] = x
    found = norm(wide[:, 3 : 3 + K_IN], residual, weight, EPSILON, *layer.arguments)
    assert torch.equal(found[0], y) and torch.equal(found[1], total)
    wide[:, 5 : 5 + 2 * K_IN] = both
    assert torch.equal(gate(wide[:, 5 : 5 + 2 * K_IN], *layer.arguments), z)

    found = norm(x.view(2, 3, -1), residual.view(2, 3, -1), weight, EPSILON, *layer.arguments)
    assert torch.equal(found[0], y.view(2, 3, -1)) and torch.equal(found[1], total.view(2, 3, -1))
    assert torch.equal(gate(both.view(2, 3, -1), *layer.arguments), z.view(2, 3, -1))


@over_norms
def test_opcheck(layer, dtype, weight_dtype):
    x, residual, weight = fused_cases.norm_inputs(8, 3, K_IN, dtype, weight_dtype)
    both = fused_cases.gated_inputs(8, 3, K_IN, dtype)
    plain = [*layer.arguments[:3], None, *layer.arguments[4:]]
    for rest in (layer.arguments, plain):
        torch.library.opcheck(
            torch.ops.exl3.norm_linear.default, [x, residual, weight, EPSILON, *rest]
        )
        torch.library.opcheck(torch.ops.exl3.gated_linear.default, [both, *rest])


def test_wrong_arguments_are_explained(layer):
    x, residual, weight = fused_cases.norm_inputs(9, 3, K_IN, torch.bfloat16, torch.bfloat16)

    def refuses(text, op, *arguments, rest=layer.arguments):
        with pytest.raises((ValueError, RuntimeError), match=text):
            op(*arguments, *rest)

    norm, gate = torch.ops.exl3.norm_linear, torch.ops.exl3.gated_linear
    refuses("norm_linear: x is float64", norm, x.double(), residual, weight, EPSILON)
    refuses("norm_linear: residual is float32", norm, x, residual.float(), weight, EPSILON)
    refuses(r"norm_linear: residual .*\[2, 344\]", norm, x, residual[:2], weight, EPSILON)
    refuses(r"norm_linear: norm_weight .*\[343\]", norm, x, residual, weight[1:], EPSILON)
    refuses("norm_linear: norm_weight is float16", norm, x, residual, weight.half(), EPSILON)
    refuses("gated_linear: x is int32", gate, torch.zeros(3, 2 * K_IN, dtype=torch.int32))
    refuses(r"gated_linear: x .*\[3, 687\]", gate, torch.zeros(3, 2 * K_IN - 1))
    # What belongs to the layer is said by the layer.
    short = [layer.arguments[0][:-8], *layer.arguments[1:]]
    refuses("exl3::linear: trellis holds", norm, x, residual, weight, EPSILON, rest=short)
    refuses("x covers rows", gate, torch.zeros(3, 2 * K))
