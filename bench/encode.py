"""Speed and quality of the tile encoder: `python bench/encode.py [--rates 4,2.5] [--json FILE]`.

For every rate and codebook: CPU time of one thread per tile of 256 weights, and the mean squared
error on unit Gaussian tiles relative to their variance, next to the published reference and to the
rate-distortion bound 2^(-2 bits).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from exl3_plugin import ops
from exl3_plugin.format import CODEBOOKS, words_from_bits

TILE = 256
BLOCK = 32
"""Tiles per timed call: a few milliseconds, so one undisturbed call is easily found."""


class Reference(NamedTuple):
    """What an exact two-pass search reaches: 1024 Gaussian tiles times sigma, error over sigma^2.

    From the format's notes, section 4.9 ("Quality reference numbers"); sigma is the best of a grid
    of about 3 %.
    """

    bits: float
    codebook: str
    mse: float
    sigma: float


REFERENCES = [
    Reference(bits, codebook, *pair)
    for bits, pairs in {
        1: [(0.26667, 1.435), (0.26634, 1.435), (0.27207, 1.12)],
        1.5: [None, None, (0.13697, 1.03)],
        2: [(0.06884, 1.244), (0.06847, 1.244), (0.06830, 1.00)],
        2.5: [None, None, (0.03452, 0.968)],
        3: [(0.017741, 1.169), (0.017394, 1.169), (0.017366, 0.94)],
        3.5: [None, None, (0.008792, 0.912)],
        4: [(0.004607, 1.127), (0.004520, 1.127), (0.004445, 0.912)],
        5: [(0.0012016, 1.050), (0.0011911, 1.050), (0.0011449, 0.88)],
        6: [(3.179e-4, 1.020), (3.147e-4, 1.020), (2.998e-4, 0.845)],
        7: [(8.480e-5, 0.974), (8.458e-5, 0.945), (8.023e-5, 0.783)],
        8: [(2.300e-5, 0.897), (2.295e-5, 0.897), (2.083e-5, 0.76)],
    }.items()
    for codebook, pair in zip(CODEBOOKS, pairs)
    if pair is not None
]


def gaussian_tiles(count: int, seed: int = 0) -> torch.Tensor:
    """`count` tiles of unit Gaussian weights, float32 `[count, 256]`."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((count, TILE), dtype=np.float32))


def tile_errors(tiles: torch.Tensor, reference: Reference) -> np.ndarray:
    """Mean squared error of each unit-variance tile at the reference's sigma, float64 `[count]`."""
    ops.load()
    words, codebook = words_from_bits(reference.bits), CODEBOOKS.index(reference.codebook)
    scaled = tiles * reference.sigma
    _, values = torch.ops.exl3.encode_tiles(scaled, words, codebook)
    return ((values - scaled).double() / reference.sigma).square().mean(1).numpy()


def measure(tiles: torch.Tensor, reference: Reference) -> dict:
    """Encodes `tiles` in one thread, in calls of 32, and returns one row of the table."""
    tile_errors(tiles[:BLOCK], reference)
    errors, times = [], []
    for block in tiles.split(BLOCK):
        begin = time.process_time()
        errors.append(tile_errors(block, reference))
        times.append((time.process_time() - begin) / len(block))
    errors = np.concatenate(errors)
    return {
        **reference._asdict(),
        "isa": ops.cpu_isa(),
        "tiles": len(tiles),
        # CPU time is blind to waiting, not to a neighbour's use of the caches: report both.
        "best_ms_per_tile": 1e3 * min(times),
        "median_ms_per_tile": 1e3 * float(np.median(times)),
        "tiles_per_second": 1 / float(np.median(times)),
        "measured_mse": float(errors.mean()),
        "standard_error": float(errors.std(ddof=1) / len(errors) ** 0.5),
        "ratio": float(errors.mean() / reference.mse),
        "over_bound": float(errors.mean() * 4**reference.bits),
    }


def print_table(rows: list[dict]) -> None:
    """The rows for a person."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Tile encoder, one thread, {rows[0]['isa']}, {rows[0]['tiles']} tiles")
    for name in ("bits", "codebook", "tiles/s", "ms/tile", "best", "mse", "reference", "ratio"):
        table.add_column(name, justify="left" if name == "codebook" else "right")
    table.add_column("ratio's s.e.", justify="right")
    table.add_column("over bound", justify="right")
    for row in rows:
        error = abs(row["ratio"] - 1)
        table.add_row(
            f"{row['bits']:g}",
            row["codebook"],
            f"{row['tiles_per_second']:.0f}",
            f"{row['median_ms_per_tile']:.3f}",
            f"{row['best_ms_per_tile']:.3f}",
            f"{row['measured_mse']:.5g}",
            f"{row['mse']:.5g}",
            f"{row['ratio']:.4f}",
            f"{row['standard_error'] / row['mse']:.4f}",
            f"{row['over_bound']:.3f}",
            style="red" if error > 0.02 else None,
        )
    Console(width=110).print(table)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns 1 if an error is more than 2 % above its reference, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", type=int, default=1024, help="Gaussian tiles (1024)")
    parser.add_argument("--rates", help="bits, separated by commas (all)")
    parser.add_argument("--codebooks", help="names, separated by commas (all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write one JSON line per row to this file")
    options = parser.parse_args(arguments)

    rates = {float(rate) for rate in options.rates.split(",")} if options.rates else None
    codebooks = options.codebooks.split(",") if options.codebooks else CODEBOOKS
    chosen = [r for r in REFERENCES if r.codebook in codebooks and (not rates or r.bits in rates)]
    if not chosen or options.tiles < 2:
        parser.error("nothing to measure: no such rate and codebook, or fewer than 2 tiles")

    torch.set_num_threads(1)
    tiles = gaussian_tiles(options.tiles, options.seed)
    rows = [measure(tiles, reference) for reference in chosen]
    print_table(rows)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return int(any(row["ratio"] > 1.02 for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
