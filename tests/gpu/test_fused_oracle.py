"""Whether the bounds of fused layers pass an honest kernel and stop a wrong one; on the CPU."""

import pytest
import torch

from exl3_plugin import ops
from tests.gpu import cases
from tests.gpu.fused_layers import EPSILON, expectations, fractions
from tests.gpu.test_oracle import EXACT, FAST, simulate
from tests.ops import fused_cases

ROWS = 20
SIZES = [(1024, 0, 1024), (512, 64, 440)]


@pytest.fixture(scope="module", autouse=True)
def library():
    ops.load()


def make(codebook: str, words: int, k: int, k_begin: int) -> cases.Layer:
    spec = [(codebook, words, 512)]
    return cases.make_layer([51, words], k, spec, "cpu", torch.float32, k_begin)


def result(layer: cases.Layer, hidden: torch.Tensor, plan: ops.Plan) -> torch.Tensor:
    """What a kernel makes of what goes into the layer."""
    wide = hidden.new_zeros(ROWS, layer.k)
    wide[:, layer.k_begin : layer.k_begin + hidden.shape[1]] = hidden
    return simulate(layer, wide, plan)


def normed(values: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + EPSILON)
    return ((values * scale).to(weight.dtype) * weight).to(dtype)


@pytest.mark.parametrize("plan", [EXACT, FAST], ids=["exact", "fast"])
@pytest.mark.parametrize(("codebook", "words"), [("mcg", 64), ("mul1", 64), ("mul1", 40)])
@pytest.mark.parametrize(("k", "k_begin", "k_in"), SIZES)
def test_honest_kernels_pass_and_faults_do_not(k, k_begin, k_in, codebook, words, plan):
    layer = make(codebook, words, k, k_begin)
    for dtype in cases.DTYPES:
        for weight_dtype in (dtype, torch.float32):
            x, residual, weight = fused_cases.norm_inputs(1, ROWS, k_in, dtype, weight_dtype)
            hidden = fused_cases.normed(x, residual, weight, EPSILON)
            expected = expectations(layer, hidden, dtype)
            total = x.float() + residual.float()
            y = result(layer, normed(total, weight, dtype), plan)
            assert fractions(layer, y, expected)[0] <= 1, (dtype, weight_dtype)
            # In fp16 so many numbers may go either way that rounding elsewhere hides among them.
            rounded = result(layer, normed(total.to(dtype).float(), weight, dtype), plan)
            shifted = result(layer, normed(total, weight.roll(1), dtype), plan)
            faults = [shifted] if dtype == torch.float16 else [shifted, rounded]
            assert all(fractions(layer, y, expected)[0] > 2 for y in faults), weight_dtype


@pytest.mark.parametrize("plan", [EXACT, FAST], ids=["exact", "fast"])
@pytest.mark.parametrize(("k", "k_begin", "k_in"), SIZES)
def test_honest_gates_pass_and_faults_do_not(k, k_begin, k_in, plan):
    layer = make("mcg", 64, k, k_begin)
    silu = torch.nn.functional.silu
    for dtype in cases.DTYPES:
        x = fused_cases.gated_inputs(2, ROWS, k_in, dtype)
        gate, up = x.chunk(2, -1)
        expected = expectations(layer, fused_cases.gated(x), dtype)
        assert fractions(layer, result(layer, silu(gate) * up, plan), expected)[0] <= 1
        faults = [silu(up) * gate, gate * up]
        if dtype == torch.bfloat16:
            faults.append((silu(gate.float()) * up.float()).to(dtype))
        for fault in faults:
            assert fractions(layer, result(layer, fault, plan), expected)[0] > 2
