"""Layers of random experts and routings, shared by the tests of the CPU and of CUDA."""

from __future__ import annotations

import numpy as np
import torch

from exl3_plugin.experts import Kind, Stored

RATES = [
    Kind(codebook, words)
    for codebook in ("3inst", "mcg", "mul1")
    for words in (16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
    if words % 16 == 0 or codebook == "mul1"
]


def matrix(rng, k: int, n: int, kind: Kind) -> Stored:
    """Random words are a valid trellis; scales give outputs of the size of the inputs."""
    trellis = rng.integers(-(2**15), 2**15, (k // 16, n // 16, kind.words), dtype=np.int16)
    suh = (rng.choice([-1.0, 1.0], k) * rng.uniform(0.5, 1.5, k) / np.sqrt(k)).astype(np.float16)
    svh = (rng.choice([-1.0, 1.0], n) * rng.uniform(0.5, 1.5, n)).astype(np.float16)
    svh[rng.integers(0, n)] = 0
    return Stored(*map(torch.from_numpy, (trellis, suh, svh)), kind.codebook)


def layer(seed, experts: int, k: int, inner: int, n: int, kinds) -> list[tuple]:
    """Experts of random matrices.

    Args:
        seed: what `numpy.random.default_rng` takes.
        kinds: one kind for all, or a function of (expert, projection).
    """
    rng = np.random.default_rng(seed)
    of = kinds if callable(kinds) else lambda expert, projection: kinds
    return [
        tuple(matrix(rng, *((inner, n) if p == 2 else (k, inner)), of(expert, p)) for p in range(3))
        for expert in range(experts)
    ]


def routing(seed, rows: int, slots: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Different experts for each row, as a router gives them: (weights, ids)."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(experts)[:slots] for _ in range(rows)]) if rows else (
        np.zeros((0, slots))
    )  # fmt: skip
    weights = rng.uniform(0.05, 1.0, (rows, slots)).astype(np.float32)
    return torch.from_numpy(weights), torch.from_numpy(ids.astype(np.int32))


def counted(seed, counts: list[int], slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A routing in which expert i gets exactly counts[i] rows, the same one twice if need be."""
    rng = np.random.default_rng(seed)
    flat = np.repeat(np.arange(len(counts)), counts)
    rng.shuffle(flat)
    rows = -(-len(flat) // slots)
    ids = np.full(rows * slots, -1)
    ids[rng.permutation(rows * slots)[: len(flat)]] = flat
    weights = rng.uniform(0.05, 1.0, (rows, slots)).astype(np.float32)
    return torch.from_numpy(weights), torch.from_numpy(ids.reshape(rows, slots).astype(np.int32))


def activations(seed, m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal `[m, k]`, one row in eight a hundred times smaller."""
    x = np.random.default_rng(seed).standard_normal((m, k), dtype=np.float32)
    x[::8] *= 0.01
    return torch.from_numpy(x).to(dtype)
