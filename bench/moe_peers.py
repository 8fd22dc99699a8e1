"""Other implementations of a whole block of routed experts, driven as their own code drives them.

| peer | found when | what is timed |
|---|---|---|
| exllamav3 | its compiled extension is importable | its cooperative path, or `exl3_moe` |
| triton | a CUDA build of vLLM is importable | bfloat16 through vLLM's Triton kernels |

exllamav3 takes its cooperative path (`run_bszN`) up to 8 rows, above that `exl3_moe`, before which
it sorts the tokens; that is timed with it. It computes in float16. Its fused kernel has room for a
number of rows an expert; it is given as much as the routing needs, which its own code does up to
128 rows and replaces by rebuilding above.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from bench.moe_bank import Layer, Shape

COOPERATIVE_ROWS = 8
DTYPE = torch.float16
SILU = 0


class Exllamav3:
    """The buffers and tables of its block for one of our layers; the words as stored."""

    def __init__(self, ext: Any, layer: Layer):
        self.ext, self.layer, self.shape = ext, layer, layer.shape
        self._stored = [layer.stored(expert) for expert in range(layer.shape.experts)]
        # One block of memory a matrix, as its loader has them.
        self._tensors = [
            [[t.clone() for t in matrix[:3]] for matrix in three] for three in self._stored
        ]
        del self._stored
        self.mcg, self.mul1 = layer.kind.codebook == "mcg", layer.kind.codebook == "mul1"
        self.bits = layer.kind.words / 16
        self.pointers = [
            [
                torch.tensor(
                    [three[projection][part].data_ptr() for three in self._tensors],
                    dtype=torch.long,
                    device="cuda",
                )
                for part in range(3)
            ]
            for projection in range(3)
        ]
        self._fused: dict[int, list[torch.Tensor]] = {}
        self._block = None
        self._cooperative()  # its tables come from the host, which a capture would not allow

    def _cooperative(self) -> Any:
        if self._block is not None:
            return self._block
        s, slots = self.shape, COOPERATIVE_ROWS * self.shape.slots
        hidden, inner = s.hidden, s.inner

        def empty(*size: int, dtype=DTYPE) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device="cuda")

        temp_hidden = empty(max(64, slots), hidden)
        temp_inner = empty(max(64, 2 * slots), inner)
        temp_active = empty(max(32, slots), inner)
        temp_out = empty(max(32, slots), hidden, dtype=torch.float32)
        counters = slots * (inner // 128) + COOPERATIVE_ROWS * (hidden // 128) + 2 * slots + 3
        rebuilt = empty(hidden, inner)
        self.out = empty(COOPERATIVE_ROWS, hidden, dtype=torch.float32)
        linears = [
            [
                self.ext.BC_LinearEXL3(*three[p], self.bits, None, self.mcg, self.mul1,
                                       temp_active if p == 2 else temp_hidden)
                for three in self._tensors
            ]
            for p in range(3)
        ]  # fmt: skip
        both = [
            torch.stack((self.pointers[0][part], self.pointers[1][part]), 1).contiguous()
            for part in range(3)
        ]
        rates = [x for p in range(3) for x in (*self.pointers[p], self.bits, self.mcg, self.mul1)]
        self._block = self.ext.BC_BlockSparseMLP(
            temp_hidden,
            temp_hidden[:slots].view(slots, 1, hidden),
            temp_inner,
            temp_inner[:slots].view(slots, 1, inner),
            temp_inner[slots : 2 * slots].view(slots, 1, inner),
            temp_active[:slots].view(slots, 1, inner),
            temp_active,
            temp_out[:slots].view(slots, 1, hidden),
            temp_out,
            None,
            torch.zeros(counters, dtype=torch.int32, device="cuda"),
            empty(slots, hidden),
            rebuilt,
            rebuilt.view(inner, hidden),
            -1,
            -1,
            *rates,
            True,
            False,
            False,
            None,
            None,
            0.0,
            *linears,
            *both,
            self.out,
        )
        return self._block

    def call(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """One block; `ids` int64, `weights` float16."""
        rows = x.shape[0]
        if rows <= COOPERATIVE_ROWS:
            self._cooperative().run_bszN(x, ids, weights)
            return self.out[:rows]
        s = self.shape
        flat, order, counts = self._sorted(ids)
        capacity = max(128, rows)
        if capacity not in self._fused:
            groups = self.ext.exl3_moe_max_concurrency(0)
            self._fused[capacity] = [
                torch.empty(groups, capacity, width, dtype=DTYPE, device="cuda")
                for width in (s.hidden, s.hidden, s.inner, s.inner)
            ]
        start = torch.cumsum(counts, 0) - counts
        tables = torch.stack([start, start, (counts > 0).long()])
        scratch = torch.empty(flat.numel(), s.hidden, dtype=torch.float32, device="cuda")
        out = torch.zeros(rows, s.hidden, dtype=torch.float32, device="cuda")
        tokens = torch.arange(rows, device="cuda").repeat_interleave(s.slots)[order]
        sorted_weights = weights.reshape(-1)[order]
        codebooks = [self.mcg, self.mul1] * 3
        self.ext.exl3_moe(
            x, out, counts, tokens, sorted_weights, *self._fused[capacity], SILU, self.bits,
            self.bits, self.bits, *self.pointers[0], *self.pointers[1], *self.pointers[2],
            *codebooks, 0.0, -1, scratch, tables[0], 1, capacity, 16,
        )  # fmt: skip
        inverse = torch.empty_like(order).scatter_(
            0, order, torch.arange(order.numel(), device="cuda")
        )
        n = s.experts
        self.ext.exl3_moe_gather(
            out, scratch, flat, inverse, tables[1, :n], tables[0, :n], tables[2, :n], sorted_weights
        )
        return out

    def _sorted(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = ids.reshape(-1)
        counts = torch.zeros(self.shape.experts + 1, dtype=torch.long, device="cuda")
        # bincount would wait for the host.
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        return flat, flat.argsort(), counts


def find_exllamav3() -> Any:
    """Its extension module.

    Raises:
        ImportError: it is not here.
    """
    return importlib.import_module("exllamav3_ext")


def triton_block(shape: Shape, layers: int) -> Callable[..., torch.Tensor]:
    """bfloat16 experts through vLLM; takes (layer, x, weights float32, ids int32).

    Raises:
        ImportError: no CUDA build of vLLM.
    """
    module = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    importlib.import_module("vllm._custom_ops")
    if not hasattr(torch.ops, "_moe_C") or not hasattr(torch.ops._moe_C, "moe_align_block_size"):
        raise ImportError("torch.ops._moe_C has no moe_align_block_size")
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    banks = [
        (
            torch.empty(shape.experts, 2 * shape.inner, shape.hidden, **options).normal_(std=0.02),
            torch.empty(shape.experts, shape.hidden, shape.inner, **options).normal_(std=0.02),
        )
        for _ in range(layers)
    ]

    def call(layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return module.fused_experts(x, *banks[layer], weights, ids)

    return call


PUBLISHED = {
    "128x2048x768x8": {1: 36.8, 2: 67.3, 4: 102.8, 8: 159.4, 16: 391.1, 64: 550.5, 256: 826.9,
                       2048: 3014.9},
    "288x4096x2048x8": {1: 104.2, 2: 210.5, 4: 381.1, 8: 670.8, 16: 1728.5, 64: 3732.5,
                        256: 4441.8, 2048: 18166.6},
}  # fmt: skip
"""Microseconds of the kernels of exllamav3 1.6.5's experts, without those of the router as in ours,
4 bit mcg, measured on an H200 with its own Python code; for where the extension is not here, and
for its paths of many rows."""
