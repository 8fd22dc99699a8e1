"""What stands before a layer, computed inside it: `exl3::norm_linear` and `exl3::gated_linear`.

Both are defined with `exl3::linear`, and the CUDA kernels are registered by their own library. Here
are the fakes of both, and the CPU's implementation: torch's operators in the order and with the
roundings by which vLLM defines its norm and activation, then `exl3::linear`. Compiled code may
leave such roundings out; but for those a model says the same whether its graph was fused or not.
"""

from __future__ import annotations

import functools

import torch

from exl3_plugin.format import shard_columns

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of activations on a CPU; the CUDA kernels take the last two."""


@functools.cache
def register() -> torch.library.Library:
    """Registers the CPU implementations and the fakes, once; `_C_cpu.so` has to be loaded.

    Returns:
        The registration, which lives as long as it is referred to.
    """
    library = torch.library.Library("exl3", "IMPL")
    library.impl("norm_linear", norm_linear_cpu, "CPU")
    library.impl("gated_linear", gated_linear_cpu, "CPU")
    torch.library.register_fake("exl3::norm_linear", _norm_linear_fake)
    torch.library.register_fake("exl3::gated_linear", _gated_linear_fake)
    return library


def norm_linear_cpu(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: list[int],
    k_begin: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual sum, its RMS norm and the layer behind it, as vLLM's `fused_add_rms_norm` rounds.

    Args:
        x: `[..., k_in]`, float32, bfloat16 or float16.
        residual: what is added to it, of the same shape and dtype.
        norm_weight: `[k_in]`, float32 or x's dtype; a norm is rounded to it before they are
            multiplied, and once more to x's dtype.
        epsilon: added to the mean of squares, which is of the sum before it is rounded.
        trellis: with `suh`, `svh`, `bias`, `shards` and `k_begin`, as `exl3::linear` takes them.

    Returns:
        The layer's result `[..., n]` and the sum `[..., k_in]`, both in x's dtype.
    """
    _check_norm(x, residual, norm_weight)
    wide = x.float() + residual.float()
    norm = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    normed = (norm.to(norm_weight.dtype) * norm_weight).to(x.dtype)
    y = torch.ops.exl3.linear(normed, trellis, suh, svh, bias, shards, k_begin)
    return y, wide.to(x.dtype)


def gated_linear_cpu(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: list[int],
    k_begin: int,
) -> torch.Tensor:
    """silu(gate) * up and the layer behind it, as vLLM's `SiluAndMul` rounds.

    Args:
        x: `[..., 2 k_in]`, gate before up, float32, bfloat16 or float16. silu is computed in
            float32 and rounded to x's dtype, and so is the product.
        trellis: with `suh`, `svh`, `bias`, `shards` and `k_begin`, as `exl3::linear` takes them.

    Returns:
        `[..., n]` in x's dtype.
    """
    _check_gated(x)
    half = x.shape[-1] // 2
    gated = torch.nn.functional.silu(x[..., :half]) * x[..., half:]
    return torch.ops.exl3.linear(gated, trellis, suh, svh, bias, shards, k_begin)


def _check_norm(x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor) -> None:
    """Refuse what the CUDA kernels refuse as well; what follows is `exl3::linear`'s to check."""
    where = "exl3::norm_linear"
    if x.dtype not in DTYPES or x.dim() < 1:
        raise ValueError(
            f"{where}: x is {_described(x)}, expected float32, bfloat16 or float16 [..., k]"
        )
    if residual.dtype != x.dtype or residual.shape != x.shape or residual.device != x.device:
        raise ValueError(
            f"{where}: residual is {_described(residual)}, expected what x is, {_described(x)}"
        )
    right = norm_weight.dtype in (x.dtype, torch.float32) and norm_weight.device == x.device
    if not right or norm_weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{where}: norm_weight is {_described(norm_weight)}, expected [{x.shape[-1]}] on "
            f"{x.device}, in float32 or the dtype of x, {x.dtype}"
        )


def _check_gated(x: torch.Tensor) -> None:
    if x.dtype not in DTYPES or x.dim() < 1 or x.shape[-1] % 2:
        raise ValueError(
            f"exl3::gated_linear: x is {_described(x)}, expected float32, bfloat16 or float16 "
            "[..., 2 k], gate before up"
        )


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


def _norm_linear_fake(x, residual, norm_weight, epsilon, trellis, suh, svh, bias, shards, k_begin):
    return x.new_empty(*x.shape[:-1], shard_columns(shards)), x.new_empty(x.shape)


def _gated_linear_fake(x, trellis, suh, svh, bias, shards, k_begin):
    return x.new_empty(*x.shape[:-1], shard_columns(shards))
