"""The Python face of `torch.ops.exl3`: loading the libraries, fakes, strips, plans, small helpers.

`_C_cpu.so` holds the operators' schemas, the CPU kernels and everything that is pure arithmetic
(plans, workspace sizes). `_C_cuda.so` adds the CUDA kernels; it is loaded where torch was built for
CUDA, and its absence is an error only once a CUDA tensor is to be used: `require_cuda` says it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from exl3_plugin import env, fused
from exl3_plugin.format import BLOCK, CODEBOOKS, TILE, shard_columns

GEMM, DENSE, STREAM = 0, 1, 2
"""Kernels a plan names: straight from the trellis, through a rebuilt slice of the weight, or
straight from the trellis for one row alone."""

EXACT, FAST = 0, 1
"""Forms a plan names: the format's own fp16 weights, or weights without their last rounding."""

_options: dict[str, bool] = {}
_cuda_error: str | None = None


class LibraryError(RuntimeError):
    """A compiled library is missing, does not load, or has no code for this device."""


class Device(NamedTuple):
    """What a plan needs to know of a GPU."""

    capability: int
    """Compute capability as one number: 90, 120, ..."""
    multiprocessors: int
    shared_bytes: int
    """Shared memory that one block may opt in to."""


class Plan(NamedTuple):
    """How one call is computed; the numbers `exl3::linear_with` takes."""

    kernel: int
    """`GEMM`, `DENSE` or `STREAM`."""
    rows: int
    """Rows of x a tile covers: 8, 16, 32, 64 or 128; 1 for `STREAM`, any for `DENSE`."""
    form: int
    """`EXACT` or `FAST`."""
    blocks: int
    """Thread blocks; 0 leaves the choice to the kernel."""


# Loading


def _find(name: str) -> Path | None:
    import exl3_plugin

    paths = [Path(folder) / name for folder in exl3_plugin.__path__]
    return next((path for path in paths if path.is_file()), None)


def _folders() -> str:
    import exl3_plugin

    return ", ".join(exl3_plugin.__path__)


@functools.cache
def load() -> None:
    """Loads the kernels, registers their fakes and applies the environment's options, once.

    No device is touched: the CUDA library is loaded where torch was built for CUDA, whether there
    is a GPU or not, and what keeps it from loading is kept for `require_cuda` to raise.

    Raises:
        LibraryError: the CPU library is absent, or torch refuses it (the message has its reason).
        ValueError: a variable of the environment has a value that means nothing.
    """
    global _cuda_error
    options = _choose()
    path = _find("_C_cpu.so")
    if path is None:
        raise LibraryError(
            f"the compiled EXL3 kernels are not installed: no _C_cpu.so in {_folders()}. Install "
            "the exl3-fleet wheel, or run scripts/test or scripts/quickstart in a checkout, which "
            "build it"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise LibraryError(f"{path} does not load into torch {torch.__version__}: {error}") from (
            error
        )
    torch.library.register_fake("exl3::linear", _linear_fake)
    torch.library.register_fake("exl3::reconstruct", _reconstruct_fake)
    torch.library.register_fake("exl3::encode_tiles", _encode_tiles_fake)
    if hasattr(torch.ops.exl3, "moe"):
        torch.library.register_fake("exl3::moe", _moe_fake)
    fused.register()
    _cuda_error = _load_cuda()
    _apply(options)


def _load_cuda() -> str | None:
    """Loads `_C_cuda.so` and registers its fakes; else the reason why CUDA tensors cannot work."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
    path = _find("_C_cuda.so")
    if path is None:
        return (
            f"the EXL3 kernels for CUDA are not installed: no _C_cuda.so in {_folders()}. Install "
            "the exl3-fleet wheel of this platform that holds CUDA kernels, or run "
            "scripts/build-kernels in a checkout, which builds them"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path} does not load into torch {torch.__version__}: {error}"
    torch.library.register_fake("exl3::linear_with", _linear_with_fake)
    torch.library.register_fake("exl3::dense_weight", _dense_weight_fake)
    return None


def require_cuda(device: torch.device | str | int | None = None) -> None:
    """Checks that the CUDA kernels can run on a device; the current one by default.

    Raises:
        LibraryError: there is no such device, no library that loads, or it holds no code for the
            device's compute capability.
    """
    load()
    if _cuda_error is not None:
        raise LibraryError(_cuda_error)
    if not torch.cuda.is_available():
        raise LibraryError(
            f"torch {torch.__version__} finds no CUDA device; nvidia-smi shows whether the driver "
            "sees one, CUDA_VISIBLE_DEVICES whether it is hidden"
        )
    _check_capability(_index(device))


def _index(device: torch.device | str | int | None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


@functools.cache
def _check_capability(index: int) -> None:
    major, minor = torch.cuda.get_device_capability(index)
    info = json.loads(torch.ops.exl3.cuda_build_info())
    built = sorted(torch.ops.exl3.cuda_architectures())
    refusal = capability_error(10 * major + minor, built, info["ptx"])
    if refusal is not None:
        raise LibraryError(f"cuda:{index} ({torch.cuda.get_device_name(index)}) {refusal}")


def capability_error(capability: int, built: Sequence[int], ptx: Sequence[int] = ()) -> str | None:
    """Why a library does not run on a compute capability; None where it does.

    Machine code (`built`) runs on its own and on later minor versions of the same major version,
    PTX is translated by the driver for any later version.
    """
    if any(arch // 10 == capability // 10 and arch <= capability for arch in built):
        return None
    if any(arch <= capability for arch in ptx):
        return None
    names = ", ".join(f"sm_{arch}" for arch in built) or "nothing"
    return (
        f"is sm_{capability}, and _C_cuda.so was built for {names}. Build the kernels for it: "
        f"scripts/build-kernels with sm_{capability} among its architectures"
    )


def _linear_fake(x, trellis, suh, svh, bias, shards, k_begin=0):
    return x.new_empty(*x.shape[:-1], shard_columns(shards))


def _linear_with_fake(x, trellis, suh, svh, bias, shards, k_begin, plan):
    return _linear_fake(x, trellis, suh, svh, bias, shards, k_begin)


def _dense_weight_fake(trellis, suh, svh, shards, k_begin, k_in, bf16):
    return suh.new_empty(
        shard_columns(shards), k_in, dtype=torch.bfloat16 if bf16 else torch.float16
    )


def _reconstruct_fake(trellis, codebook):
    k_tiles, n_tiles, _ = trellis.shape
    return trellis.new_empty(k_tiles * TILE, n_tiles * TILE, dtype=torch.float16)


def _encode_tiles_fake(tiles, words, codebook):
    count = tiles.shape[0]
    return tiles.new_empty(count, words, dtype=torch.int16), tiles.new_empty(count, 256)


def _moe_fake(x, *arguments):
    sizes = arguments[11]  # inner_begin, inner_size, n_out, paired
    return x.new_empty(x.shape[0], sizes[2])


def cpu_isa() -> str:
    """Instruction set the CPU kernels run with: avx512, avx2, neon or portable."""
    load()
    return torch.ops.exl3.cpu_isa()


# Options and plans


def configure(
    exact: bool | None = None,
    batch_invariant: bool | None = None,
    dependent_launch: bool | None = None,
) -> dict[str, bool]:
    """Sets how the CUDA kernels choose; an argument left out takes the environment's value.

    Args:
        exact: no form that skips the last rounding of a weight (`EXL3_EXACT`, off).
        batch_invariant: one arithmetic whatever the number of rows (`VLLM_BATCH_INVARIANT`, off).
            The CPU kernels read that variable themselves.
        dependent_launch: let a kernel start before its predecessor ends, where the device can
            (`EXL3_PDL`, on). Bits do not depend on it.

    Returns:
        The options now in force.
    """
    load()
    _apply(_choose(exact, batch_invariant, dependent_launch))
    return dict(_options)


def _choose(exact=None, batch_invariant=None, dependent_launch=None) -> dict[str, bool]:
    return {
        "exact": env.get("EXL3_EXACT") if exact is None else exact,
        "batch_invariant": env.batch_invariant() if batch_invariant is None else batch_invariant,
        "dependent_launch": env.get("EXL3_PDL") if dependent_launch is None else dependent_launch,
    }


def _apply(options: dict[str, bool]) -> None:
    _options.update(options)
    if hasattr(torch.ops.exl3, "set_option"):
        for name, value in options.items():
            torch.ops.exl3.set_option(name, int(value))


def cuda_device(device: torch.device | str | int | None = None) -> Device:
    """The description of a CUDA device that `plan` takes; the current one by default."""
    found = torch.cuda.get_device_properties(_index(device))
    return Device(
        10 * found.major + found.minor,
        found.multi_processor_count,
        found.shared_memory_per_block_optin,
    )


def plan(
    device: Device,
    m: int,
    k: int,
    n: int,
    bits: float,
    codebook: str,
    exact: bool | None = None,
    batch_invariant: bool | None = None,
) -> Plan:
    """The built-in plan of one matrix on a device; pure, so it works on every machine.

    Args:
        device: the GPU, from `cuda_device` or written down.
        m: rows of x.
        k: stored rows of the weight.
        n: stored columns.
        bits: bits per weight.
        codebook: "3inst", "mcg" or "mul1".
        exact: as in `configure`; None takes the option in force.
        batch_invariant: likewise.
    """
    load()
    exact = _options["exact"] if exact is None else exact
    batch_invariant = _options["batch_invariant"] if batch_invariant is None else batch_invariant
    problem = [m, k, n, int(2 * bits), int(codebook == "mul1")]
    return Plan(*torch.ops.exl3.plan(list(device), problem, int(exact) + 2 * int(batch_invariant)))


def workspace_bytes(m: int, k: int, n: int, shards: int, plan: Plan) -> int:
    """Device memory one call takes beyond its inputs and its output, in bytes.

    Args:
        m: rows of x.
        k: stored rows of the weights.
        n: stored columns, all shards together.
        shards: number of matrices.
        plan: how it is computed.
    """
    load()
    return torch.ops.exl3.workspace_bytes(m, k, n, shards, list(plan))


# Layouts


def to_strips(trellis: torch.Tensor) -> torch.Tensor:
    """Reorders one matrix for the CUDA kernels: not a bit is changed, and `from_strips` undoes it.

    32-bit words `[k/16, n/16, w]` become `[n/128, k/16, 2, w, 4]`: strips of 128 columns, one
    Hadamard block, in which the k tiles follow one another, and 16 bytes hold the same word of four
    neighbouring tiles, which is what one load of a lane brings.

    Args:
        trellis: int16 `[k/16, n/16, 16*bits]` as stored, on any device; n a multiple of 128.

    Returns:
        int16, flat.

    Raises:
        ValueError: not such a tensor.
    """
    if trellis.dtype != torch.int16 or trellis.dim() != 3:
        raise ValueError(
            f"trellis is {trellis.dtype} {list(trellis.shape)}, expected int16 [k/16, n/16, words]"
        )
    k_tiles, n_tiles, words = trellis.shape
    if n_tiles % (BLOCK // TILE) or words % 2:
        raise ValueError(
            f"trellis {list(trellis.shape)} holds {TILE * n_tiles} columns and {words} words a "
            f"tile, expected a multiple of {BLOCK} columns and an even number of words"
        )
    tiles = trellis.contiguous().view(torch.int32).view(k_tiles, n_tiles // 8, 2, 4, words // 2)
    return tiles.permute(1, 0, 2, 4, 3).contiguous().view(torch.int16).reshape(-1)


def from_strips(flat: torch.Tensor, k: int, n: int) -> torch.Tensor:
    """One matrix as stored, from what `to_strips` made of it.

    Args:
        flat: int16, contiguous, the words of one matrix.
        k: rows, a multiple of 16.
        n: columns, a multiple of 128.

    Returns:
        int16 `[k/16, n/16, 16*bits]`.

    Raises:
        ValueError: the sizes do not fit.
    """
    if flat.dtype != torch.int16 or flat.dim() != 1:
        raise ValueError(f"strips are {flat.dtype} {list(flat.shape)}, expected flat int16")
    words, rest = divmod(flat.numel() * TILE * TILE, k * n) if k > 0 and n > 0 else (0, 1)
    if rest or k % TILE or n % BLOCK or words % 2 or not words:
        raise ValueError(
            f"{flat.numel()} words are no strips of a {k} x {n} matrix; expected k a multiple of "
            f"{TILE}, n of {BLOCK}, and an even number of words for each of {TILE} x {TILE} tiles"
        )
    strips = flat.contiguous().view(torch.int32).view(n // BLOCK, k // TILE, 2, words // 2, 4)
    tiles = strips.permute(1, 0, 2, 4, 3).contiguous().view(torch.int16)
    return tiles.view(k // TILE, n // TILE, words)


def pack_shards(
    pieces: Sequence[tuple[torch.Tensor, str, int, int]], strips: bool = False
) -> tuple[torch.Tensor, list[int]]:
    """Joins the matrices of one fused layer into the form `exl3::linear` takes.

    Args:
        pieces: for each shard (trellis int16 `[k/16, n/16, 16*bits]`, codebook name, n_begin,
            n_out): the op returns columns `[n_begin, n_begin + n_out)` of its n columns.
        strips: reorder each shard for the CUDA kernels; the CPU kernels take words as stored.

    Returns:
        The flat trellis, int16 `[words]` (a view when there is one shard and no reordering), and
        the `shards` list.
    """
    shards: list[int] = []
    for trellis, codebook, n_begin, n_out in pieces:
        _, n_tiles, words = trellis.shape
        shards += [CODEBOOKS.index(codebook), words, TILE * n_tiles, n_begin, n_out]
    flat = [to_strips(trellis) if strips else trellis.reshape(-1) for trellis, *_ in pieces]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)), shards


# Whole operations on tensors as stored


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """One unfused EXL3 linear on the tensors as stored: `x W + bias`.

    On CUDA every call reorders the trellis anew, so this is for tests and trials: a layer reorders
    once (`pack_shards`) and calls `torch.ops.exl3.linear`.

    Args:
        x: `[..., k_in]` bfloat16 or float16, on the CPU float32 too; k_in up to k, the rest counts
            as zero.
        trellis: int16 `[k/16, n/16, 16*bits]`.
        suh: float16 `[k]`.
        svh: float16 `[n]`.
        codebook: "3inst", "mcg" or "mul1".
        bias: `[n]`, float32, bfloat16 or float16.

    Returns:
        `[..., n]` in x's dtype.
    """
    _require(x)
    flat, shards = pack_shards([(trellis, codebook, 0, svh.shape[0])], strips=x.is_cuda)
    # The copy stands between the kernel that has just written `flat` and the product, which may
    # fetch weights before the kernel right before it is through.
    suh = suh.reshape(1, -1).clone() if x.is_cuda else suh.reshape(1, -1)
    return torch.ops.exl3.linear(x, flat, suh, svh, bias, shards, 0)


def reconstruct(trellis: torch.Tensor, codebook: str) -> torch.Tensor:
    """The rotated weight of one matrix: int16 `[k/16, n/16, 16*bits]` to float16 `[k, n]`.

    The trellis is as stored, on the CPU or a CUDA device.
    """
    _require(trellis)
    return torch.ops.exl3.reconstruct(trellis.contiguous(), CODEBOOKS.index(codebook))


def _require(tensor: torch.Tensor) -> None:
    """Loads what a call on this tensor's device needs."""
    if tensor.is_cuda:
        require_cuda(tensor.device)
    else:
        load()
