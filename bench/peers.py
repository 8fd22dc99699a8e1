"""Other implementations of the same layer, driven as their own code drives them.

| peer | found when | what is timed |
|---|---|---|
| torch | always | bfloat16 `x @ W.T`, which is cuBLAS: what the model costs unquantised |
| exllamav3 | its compiled extension is importable | every path of its layer; the fastest counts |
| marlin | a CUDA build of vLLM is importable | int4 weights, one scale per 128, bfloat16 |

`EXL3_PEERS` names a folder that is put in front of the import path, for a prebuilt extension
(`exllamav3_ext.so`) that is not installed.

exllamav3 takes float16. Its layer calls `exl3_gemm` (both transforms inside, small GEMV kernels
chosen inside) up to 144 rows, above that rebuilds the whole weight and calls a dense product: up to
1023 rows in the rotated basis with transforms around it, from 1024 rows in the original basis. With
mul1 and one or two rows its default is a path with 8-bit activations, hence a wider check there.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.generate import Bank

EXLLAMAV3_GEMM_ROWS = 144
EXLLAMAV3_GEMV_ROWS = 8
EXLLAMAV3_FUSED_ROWS = 1024
EXLLAMAV3_SLICE = 32768
"""Columns that it rebuilds at once."""
REBUILD_FROM_ROWS = 32
"""Below this a rebuilt weight cannot win: reading it alone takes longer than the whole product."""
EXLLAMAV3_LIMIT = 1e-2
INT8_LIMIT = 3e-2
MARLIN_GROUP = 128


@dataclass
class Path:
    """One way a peer computes the layer.

    call: takes (copy, x) and returns `[m, n]`; x has `dtype`.
    limit: relative L2 error that passes; None where the truth does not apply to it.
    """

    peer: str
    name: str
    dtype: torch.dtype
    call: Callable[[int, torch.Tensor], torch.Tensor]
    limit: float | None = None


@dataclass
class Peers:
    """The peers of this process."""

    torch: bool = False
    exllamav3: Any = None
    marlin: Any = None
    absent: dict[str, str] = field(default_factory=dict)
    """Peers that were asked for and are not here, with the reason."""

    def names(self) -> list[str]:
        """Those that were found."""
        return [name for name in ("exllamav3", "torch", "marlin") if getattr(self, name)]


KNOWN = ("exllamav3", "torch", "marlin")


def parse(text: str) -> list[str]:
    """Names from a comma list, "all" or "none".

    Raises:
        ValueError: an unknown name.
    """
    if text == "none":
        return []
    names = list(KNOWN) if text == "all" else [name.strip() for name in text.split(",") if name]
    for name in names:
        if name not in KNOWN:
            raise ValueError(f"unknown peer {name!r}; there are {', '.join(KNOWN)}, all and none")
    return names


def find(names: list[str]) -> Peers:
    """Imports the peers among `names` that are here."""
    folder = os.environ.get("EXL3_PEERS")
    if folder and folder not in sys.path:
        sys.path.insert(0, os.path.abspath(folder))
    peers = Peers(torch="torch" in names)
    if "exllamav3" in names:
        try:
            peers.exllamav3 = importlib.import_module("exllamav3_ext")
        except ImportError as error:
            peers.absent["exllamav3"] = f"exllamav3_ext is not importable: {error}"
    if "marlin" in names:
        try:
            peers.marlin = _marlin_modules()
        except Exception as error:  # vLLM's imports fail in many ways where it has no CUDA build
            peers.absent["marlin"] = f"no CUDA build of vLLM: {error}"
    return peers


def exllamav3_paths(ext: Any, bank: Bank, rows: int) -> Iterator[Path]:
    """Every path of exllamav3's linear layer that can win at this row count.

    Args:
        ext: its extension module.
        bank: the layer; the trellis is used as stored.
        rows: rows of x.
    """
    mcg, mul1 = bank.codebook == "mcg", bank.codebook == "mul1"
    k, n = bank.k, bank.n
    device = bank.trellis.device
    half = {"dtype": torch.float16, "device": device}
    # float(bits) is what its layer hands over for whole and half rates alike.
    bits = float(bank.bits)

    def gemm(copy: int, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(rows, n, **half)
        scratch = torch.empty_like(x)
        ext.exl3_gemm(
            x, bank.trellis[copy], y, bank.suh[copy], scratch, bank.svh[copy], -1, mcg, mul1, 0
        )
        return y

    def gemv(copy: int, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(rows, n, **half)
        scratch = torch.empty_like(x)
        ext.exl3_gemv(x, bank.trellis[copy], y, bank.suh[copy], scratch, bank.svh[copy], mcg, mul1)
        return y

    slices = [(at, min(at + EXLLAMAV3_SLICE, n)) for at in range(0, n, EXLLAMAV3_SLICE)]

    def rotated(copy: int, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(rows, n, **half)
        transformed = torch.empty_like(x)
        ext.had_r_128(x, transformed, bank.suh[copy], None, 1.0)
        buffer = torch.empty(k * slices[0][1], **half)
        for begin, end in slices:
            weight = buffer[: k * (end - begin)].view(k, end - begin)
            if len(slices) == 1:
                ext.reconstruct(weight, bank.trellis[copy], bits, mcg, mul1)
            else:
                ext.reconstruct_slice(weight, bank.trellis[copy], bits, mcg, mul1, begin)
            ext.hgemm_recon(transformed, weight, y[:, begin:end])
        ext.had_r_128(y, y, None, bank.svh[copy], 1.0)
        return y

    def original(copy: int, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(rows, n, **half)
        trellis, suh, svh = bank.trellis[copy], bank.suh[copy], bank.svh[copy]
        buffer = torch.empty(k * slices[0][1], **half)
        for begin, end in slices:
            weight = buffer[: k * (end - begin)].view(k, end - begin)
            ext.reconstruct_had_slice(weight, trellis, suh, svh[begin:], bits, mcg, mul1, begin)
            ext.hgemm_recon(x, weight, y[:, begin:end])
        return y

    if rows <= EXLLAMAV3_GEMM_ROWS:
        limit = INT8_LIMIT if mul1 and rows <= 2 else EXLLAMAV3_LIMIT
        yield Path("exllamav3", "gemm", torch.float16, gemm, limit)
    gemv_rates = (2, 3, 4) if bank.codebook != "3inst" else (4,)
    if rows <= EXLLAMAV3_GEMV_ROWS and bank.bits in gemv_rates:
        yield Path("exllamav3", "gemv", torch.float16, gemv, EXLLAMAV3_LIMIT)
    if rows >= REBUILD_FROM_ROWS:
        yield Path("exllamav3", "rebuild rotated", torch.float16, rotated, EXLLAMAV3_LIMIT)
        yield Path("exllamav3", "rebuild original", torch.float16, original, EXLLAMAV3_LIMIT)


def exllamav3_own_choice(rows: int) -> str:
    """The path its layer takes by itself."""
    if rows <= EXLLAMAV3_GEMM_ROWS:
        return "gemm"
    return "rebuild original" if rows >= EXLLAMAV3_FUSED_ROWS else "rebuild rotated"


def dense_weights(k: int, n: int, copies: int, device: str = "cuda") -> torch.Tensor:
    """Random bfloat16 `[copies, n, k]`: as in a model, a row is an output."""
    weights = torch.empty(copies, n, k, dtype=torch.bfloat16, device=device)
    return weights.normal_(std=k**-0.5)


def torch_path(weights: torch.Tensor) -> Path:
    """cuBLAS on the given weights."""

    def call(copy: int, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weights[copy])

    return Path("torch", "linear", torch.bfloat16, call)


def _marlin_modules() -> Any:
    """vLLM's Marlin helpers, if its compiled ops are here."""
    importlib.import_module("vllm._custom_ops")
    if not hasattr(torch.ops._C, "marlin_gemm"):
        raise ImportError("torch.ops._C has no marlin_gemm")
    base = "vllm.model_executor.layers.quantization.utils"
    return (
        importlib.import_module(f"{base}.marlin_utils"),
        importlib.import_module(f"{base}.marlin_utils_test"),
        importlib.import_module("vllm.scalar_type").scalar_types,
    )


def marlin_path(modules: Any, k: int, n: int, copies: int, device: str = "cuda") -> Path:
    """Marlin on random int4 weights with one scale per 128 inputs.

    One copy is quantised by vLLM's own code; the others are the same words in another order, which
    is again a valid weight. The first copy is compared with what vLLM says it stands for.

    Raises:
        RuntimeError: the product is wrong.
    """
    utils, test, types = modules
    kind = types.uint4b8
    weight = torch.randn(k, n, dtype=torch.bfloat16, device=device) * k**-0.5
    reference, words, scales = test.marlin_quantize(weight, kind, MARLIN_GROUP)
    bank = [words.roll(13 * i, dims=0).contiguous() for i in range(copies)]
    scale_bank = [scales.clone() for _ in range(copies)]
    workspace = utils.marlin_make_workspace_new(torch.device(device))

    def call(copy: int, x: torch.Tensor) -> torch.Tensor:
        return utils.apply_gptq_marlin_linear(
            input=x,
            weight=bank[copy],
            weight_scale=scale_bank[copy],
            weight_zp=None,
            workspace=workspace,
            wtype=kind,
            output_size_per_partition=n,
            input_size_per_partition=k,
        )

    x = torch.randn(16, k, dtype=torch.bfloat16, device=device)
    wanted = x.double() @ reference.double()
    error = (call(0, x).double() - wanted).norm() / wanted.norm()
    if not error < EXLLAMAV3_LIMIT:
        raise RuntimeError(f"marlin: relative error {error:.2e} against vLLM's own weights")
    return Path("marlin", "int4 g128", torch.bfloat16, call)
