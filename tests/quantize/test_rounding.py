"""The arithmetic of one linear: rotation, error feedback, scale search, refit."""

import numpy as np
import pytest
import torch

from exl3_plugin import format as exl3
from exl3_plugin.quantize import ldlq, scales, tensor


def correlated(k: int, n: int, seed: int = 1):
    """A weight with rows of different size and the second moment of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(k, n, generator=generator) * 0.05
    weight *= torch.exp(0.5 * torch.randn(k, 1, generator=generator))
    mix = torch.randn(k, k, generator=generator, dtype=torch.float64)
    mix *= torch.logspace(0, -2, k, dtype=torch.float64)[:, None]
    x = torch.randn(4 * k, k, generator=generator, dtype=torch.float64) @ mix
    return weight, x.T @ x / len(x)


def proxy(weight: torch.Tensor, decoded: torch.Tensor, hessian: torch.Tensor) -> float:
    """`tr(E^T H E) / tr(W^T H W)` in float64, with H as it is."""
    w = weight.double()
    error = w - decoded.double()
    return float((error * (hessian @ error)).sum() / (w * (hessian @ w)).sum())


def round_without_feedback(weight: torch.Tensor, encoder: ldlq.Encoder) -> torch.Tensor:
    """The nearest tiles to the regularised weight, no Hessian anywhere, no refit."""
    regular = scales.regularise(weight, "in", "out")
    scale, _ = scales.search_scale(regular.inner, encoder)
    identity = torch.eye(128).expand(len(regular.suh) // 128, 128, 128)
    _, values = ldlq.ldlq(regular.inner * scale, identity, encoder)
    core = tensor.unrotate(values) * (regular.suh / scale)[:, None] * regular.svh
    return core[: weight.shape[0], : weight.shape[1]]


def stored_weight(stored: tensor.QuantizedLinear) -> np.ndarray:
    """What the numpy oracle reads from the stored tensors."""
    return exl3.dense_weight(
        stored.trellis.numpy(), stored.suh.numpy(), stored.svh.numpy(), stored.codebook
    )


def test_rotation_agrees_with_the_oracle():
    x = torch.randn(256, 128, dtype=torch.float64)
    assert np.allclose(ldlq.rotate_columns(x).numpy(), exl3.hadamard(x.numpy()), atol=1e-13)
    assert np.allclose(ldlq.rotate_rows(x).numpy(), exl3.hadamard(x.numpy().T).T, atol=1e-13)


def test_tiles_are_laid_out_as_the_format_says():
    # The oracle places the values; encoding its output must give the same tiles back.
    trellis = np.random.default_rng(0).integers(-(2**15), 2**15, (1, 8, 64)).astype(np.int16)
    inner = torch.from_numpy(exl3.decode_inner(trellis, "mul1").astype(np.float32))
    packed, values = ldlq.Encoder(4.0, "mul1")(ldlq.to_tiles(inner[None]))
    assert torch.equal(ldlq.from_tiles(values, 128)[0], inner)
    again = exl3.decode_inner(packed.reshape(1, 8, 64).numpy(), "mul1")
    assert np.array_equal(again.astype(np.float32), inner.numpy())


def test_block_ldl_factors_the_hessian():
    _, hessian = correlated(128, 16)
    lower = ldlq.block_ldl(tensor.damped(hessian)[None])[0].double()
    for begin in range(0, 128, 16):
        block = slice(begin, begin + 16)
        assert torch.allclose(lower[block, block], torch.eye(16).double(), atol=1e-6)
        assert not lower[begin, begin + 16 :].any()
    inverse = torch.linalg.inv(lower)
    middle = inverse @ tensor.damped(hessian) @ inverse.T
    for begin in range(0, 128, 16):
        off = middle[begin : begin + 16].clone()
        off[:, begin : begin + 16] = 0
        assert off.abs().max() < 1e-4 * middle.diagonal().max()


def test_an_indefinite_hessian_is_damped_and_a_hopeless_one_refused():
    lower = ldlq.block_ldl(torch.eye(128, dtype=torch.float64)[None] - 1e-2)
    assert torch.isfinite(lower).all()
    with pytest.raises(ldlq.QuantizeError, match="positive definite"):
        ldlq.block_ldl(-torch.eye(128, dtype=torch.float64)[None])


def test_block_diagonal_spans_round_as_the_whole_matrix_does():
    target = torch.randn(256, 128)
    blocks = torch.tril(0.1 * torch.randn(2, 128, 128))
    for begin in range(0, 128, 16):
        blocks[:, begin : begin + 16, begin : begin + 16] = torch.eye(16)
    whole = torch.block_diag(*blocks)[None]
    encoder = ldlq.Encoder(4.0, "mul1")
    spans, full = ldlq.ldlq(target, blocks, encoder), ldlq.ldlq(target, whole, encoder)
    assert torch.equal(spans[0], full[0])
    assert torch.equal(spans[1], full[1])


@pytest.mark.parametrize("bits, codebook", [(3.0, "mul1"), (2.0, "mcg")])
def test_feedback_beats_plain_rounding(bits, codebook):
    weight, hessian = correlated(192, 128)
    encoder = ldlq.Encoder(bits, codebook)
    stored, decoded = tensor.quantize_linear(weight, hessian, encoder, "in", "out")
    plain = proxy(weight, round_without_feedback(weight, encoder), hessian)
    fed_back = proxy(weight, decoded, hessian)
    print(f"{codebook} {bits:g}: plain {plain:.5f}, with feedback {fed_back:.5f}")
    assert fed_back < 0.5 * plain
    assert np.allclose(stored_weight(stored)[:192, :128], decoded.numpy(), atol=1e-5)


def test_feedback_helps_even_without_activations():
    weight, _ = correlated(192, 128)
    encoder = ldlq.Encoder(4.0, "mul1")
    _, decoded = tensor.quantize_linear(weight, None, encoder, "in", "out")
    identity = torch.eye(192, dtype=torch.float64)
    plain = proxy(weight, round_without_feedback(weight, encoder), identity)
    assert proxy(weight, decoded, identity) < 0.95 * plain


@pytest.mark.parametrize("given", [True, False])
def test_refit_lowers_the_error(given):
    weight, hessian = correlated(128, 128)
    hessian = tensor.damped(hessian) if given else torch.eye(128, dtype=torch.float64)
    encoder = ldlq.Encoder(2.0, "mul1")
    regular = scales.regularise(weight, "in", "out")
    scale, _ = scales.search_scale(regular.inner, encoder)
    identity = torch.eye(128)[None]
    _, values = ldlq.ldlq(regular.inner * scale, identity, encoder)
    core, suh = tensor.unrotate(values), regular.suh / scale
    before = proxy(weight, core * suh[:, None] * regular.svh, hessian)
    suh, svh = scales.refit(core, weight, hessian if given else None, suh, regular.svh)
    after = proxy(weight, core * suh[:, None] * svh, hessian)
    assert after < 0.98 * before


def test_padding_decodes_to_exact_zeros_and_dead_channels_do_no_harm():
    weight = torch.randn(192, 72)
    weight[5] = 0.0
    weight[:, 7] = 0.0
    encoder = ldlq.Encoder(5.0, "mul1")
    stored, decoded = tensor.quantize_linear(weight, None, encoder, "in", "out")
    assert tuple(stored.trellis.shape) == (16, 8, 80)
    whole = stored_weight(stored)
    assert not whole[:, 72:].any()
    assert not whole[:, 7].any()
    assert bool((stored.suh != 0).all())
    assert torch.isfinite(stored.suh).all()
    relative = proxy(weight, decoded, torch.eye(192, dtype=torch.float64))
    # 0.00117 is the rounding of a Gaussian source at 5 bits; the padding only helps.
    assert relative < 0.00125


@pytest.mark.parametrize("size", [1e-7, 3e3])
def test_extreme_weights_keep_their_scales_in_fp16(size):
    weight = torch.randn(128, 128) * size
    encoder = ldlq.Encoder(4.0, "mul1")
    stored, _ = tensor.quantize_linear(weight, None, encoder, "in", "out")
    decoded = torch.from_numpy(stored_weight(stored))
    assert proxy(weight, decoded, torch.eye(128, dtype=torch.float64)) < 0.005


def test_signs_follow_from_the_names():
    weight = torch.randn(128, 128)
    encoder = ldlq.Encoder(6.0, "mul1")
    first, _ = tensor.quantize_linear(weight, None, encoder, "in", "out")
    same, _ = tensor.quantize_linear(weight, None, encoder, "in", "out")
    other, _ = tensor.quantize_linear(weight, None, encoder, "in", "other")
    assert torch.equal(first.trellis, same.trellis)
    assert torch.equal(first.suh.sign(), other.suh.sign())
    assert not torch.equal(first.svh.sign(), other.svh.sign())
    assert abs(scales.signs("in", 1024).sum()) < 128  # four standard deviations


@pytest.mark.parametrize("codebook, bits", [("mul1", 6.0), ("mcg", 4.0), ("3inst", 2.0)])
def test_scale_search_finds_the_best_scale(codebook, bits):
    torch.manual_seed(3)
    inner = torch.randn(128, 256)
    encoder = ldlq.Encoder(bits, codebook)
    scale, error = scales.search_scale(inner, encoder)
    tiles = ldlq.to_tiles(inner.reshape(8, 16, 256))

    def error_at(candidate: float) -> float:
        _, values = encoder(tiles * candidate)
        return float((values / candidate - tiles).square().mean())

    best = error_at(scale)
    assert abs(error - best) < 0.1 * best
    assert best < 1.01 * error_at(0.85 * scale)
    assert best < 1.01 * error_at(1.18 * scale)
