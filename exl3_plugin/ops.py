"""The Python face of `torch.ops.exl3`: loading the library, fake implementations, small helpers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from exl3_plugin.format import CODEBOOKS

SHARD_FIELDS = 5
"""Numbers that describe one shard: codebook index, words a tile, n, n_begin, n_out."""


class LibraryError(RuntimeError):
    """The compiled library is missing or does not load."""


def _library_path() -> Path:
    import exl3_plugin

    folders = [Path(folder) for folder in exl3_plugin.__path__]
    for folder in folders:
        path = folder / "_C_cpu.so"
        if path.is_file():
            return path
    raise LibraryError(
        f"the compiled EXL3 kernels are not installed: no _C_cpu.so in "
        f"{', '.join(map(str, folders))}. Install the exl3-fleet wheel, or run scripts/test or "
        "scripts/quickstart in a checkout, which build it"
    )


@functools.cache
def load() -> None:
    """Loads the CPU kernels and registers their fake implementations; later calls do nothing.

    Raises:
        LibraryError: the library is absent, or torch refuses it (the message has torch's reason).
    """
    path = _library_path()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise LibraryError(f"{path} does not load into torch {torch.__version__}: {error}") from (
            error
        )
    torch.library.register_fake("exl3::linear", _linear_fake)
    torch.library.register_fake("exl3::reconstruct", _reconstruct_fake)
    torch.library.register_fake("exl3::encode_tiles", _encode_tiles_fake)


def _linear_fake(x, trellis, suh, svh, bias, shards, k_begin=0):
    columns = sum(shards[i] for i in range(SHARD_FIELDS - 1, len(shards), SHARD_FIELDS))
    return x.new_empty(*x.shape[:-1], columns)


def _reconstruct_fake(trellis, codebook):
    k_tiles, n_tiles, _ = trellis.shape
    return trellis.new_empty(k_tiles * 16, n_tiles * 16, dtype=torch.float16)


def _encode_tiles_fake(tiles, words, codebook):
    count = tiles.shape[0]
    return tiles.new_empty(count, words, dtype=torch.int16), tiles.new_empty(count, 256)


def cpu_isa() -> str:
    """Instruction set the CPU kernels run with: avx512, avx2, neon or portable."""
    load()
    return torch.ops.exl3.cpu_isa()


def pack_shards(
    pieces: Sequence[tuple[torch.Tensor, str, int, int]],
) -> tuple[torch.Tensor, list[int]]:
    """Joins the matrices of one fused layer into the form `exl3::linear` takes.

    Args:
        pieces: for each shard (trellis int16 `[k/16, n/16, 16*bits]`, codebook name, n_begin,
            n_out): the op returns columns `[n_begin, n_begin + n_out)` of its n columns.

    Returns:
        The flat trellis, int16 `[words]` (a view when there is one shard), and the `shards` list.
    """
    shards: list[int] = []
    for trellis, codebook, n_begin, n_out in pieces:
        _, n_tiles, words = trellis.shape
        shards += [CODEBOOKS.index(codebook), words, 16 * n_tiles, n_begin, n_out]
    flat = [trellis.reshape(-1) for trellis, *_ in pieces]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)), shards


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """One unfused EXL3 linear on the tensors as stored: `x W + bias`.

    Args:
        x: `[..., k_in]` float32, bfloat16 or float16; k_in up to k, the rest counts as zero.
        trellis: int16 `[k/16, n/16, 16*bits]`.
        suh: float16 `[k]`.
        svh: float16 `[n]`.
        codebook: "3inst", "mcg" or "mul1".
        bias: `[n]`, float32, bfloat16 or float16.

    Returns:
        `[..., n]` in x's dtype.
    """
    load()
    flat, shards = pack_shards([(trellis, codebook, 0, svh.shape[0])])
    return torch.ops.exl3.linear(x, flat, suh.reshape(1, -1), svh, bias, shards, 0)


def reconstruct(trellis: torch.Tensor, codebook: str) -> torch.Tensor:
    """The rotated weight of one matrix: int16 `[k/16, n/16, 16*bits]` to float16 `[k, n]`."""
    load()
    return torch.ops.exl3.reconstruct(trellis.contiguous(), CODEBOOKS.index(codebook))
