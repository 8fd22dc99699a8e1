"""Cases and the error bound for `exl3::linear`, shared by the tests of every instruction set.

The bound follows the kernel's order of operations. With u = 2^-24 and E the exact value:

* input transform: one product and seven butterfly stages, each rounding once. For independent
  rounding errors (variance u^2/3 relative to the value rounded) an output of one 128-block has
  variance (8/3) u^2 sum(t^2), t = x * suh.
* product: each of four lanes adds k/4 terms one after the other (fused; the portable path rounds
  the product too), then two adds join them: (u^2/3) (2 k/4 / 2 + 2) sum (xh A)^2, the partial sums
  growing linearly in the mean.
* output transform: seven stages, svh, bias: (7/3) u^2 sum(c^2) and three roundings of y.
* conversion to the output type: half a unit in the last place.

bfloat16 activations of `DENSE_ROWS` rows or more take the dense route: the weight in the original
basis is rounded once to bfloat16 (u' = 2^-8), which adds (u'^2/3) sum (x W)^2.

`SIGMAS` standard deviations of that, plus the conversion, is what a result may be off. The
deterministic worst case of the same order (every rounding of full size and one sign) is checked as
well; it is some hundred times larger.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import torch

from exl3_plugin import format as exl3
from exl3_plugin import ops

U = 2.0**-24
SIGMAS = 10.0
ROWS = (0, 1, 2, 7, 16, 17, 64, 129)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RATES = [
    (codebook, words)
    for codebook in exl3.CODEBOOKS
    for words in (16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
    if words % 16 == 0 or codebook == "mul1"
]
DENSE_ROWS = 128
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass
class Shard:
    """One matrix of a fused layer, and the columns wanted of it."""

    trellis: np.ndarray
    suh: np.ndarray
    svh: np.ndarray
    codebook: str
    n_begin: int
    n_out: int


def random_shard(rng, k, n, codebook, words, n_begin=0, n_out=None) -> Shard:
    """Random words are a valid trellis; scales vary by a factor of eight, some are zero."""
    trellis = rng.integers(-(2**15), 2**15, (k // 16, n // 16, words), dtype=np.int16)
    suh = (rng.choice([-1.0, 1.0], k) * rng.uniform(0.05, 0.4, k)).astype(np.float16)
    svh = (rng.choice([-1.0, 1.0], n) * rng.uniform(0.25, 2.0, n)).astype(np.float16)
    svh[rng.integers(0, n, 2)] = 0
    return Shard(trellis, suh, svh, codebook, n_begin, n - n_begin if n_out is None else n_out)


def run(x: torch.Tensor, shards: list[Shard], bias=None, k_begin=0) -> torch.Tensor:
    """`exl3::linear` over the shards."""
    pieces = [(torch.from_numpy(s.trellis), s.codebook, s.n_begin, s.n_out) for s in shards]
    flat, fields = ops.pack_shards(pieces)
    suh = torch.from_numpy(np.stack([s.suh for s in shards]))
    svh = torch.from_numpy(np.concatenate([s.svh for s in shards]))
    return torch.ops.exl3.linear(x, flat, suh, svh, bias, fields, k_begin)


def _oracle(x: np.ndarray, shard: Shard) -> tuple[np.ndarray, ...]:
    """Exact y, its standard deviation and worst case, before bias, and what rounding the weight
    to bfloat16 adds to both; all [m, n_out]."""
    m, k = x.shape
    a = exl3.decode_inner(shard.trellis, shard.codebook).astype(np.float64)
    svh = shard.svh.astype(np.float64)
    t = x * shard.suh.astype(np.float64)
    blocks = t.reshape(m, -1, 128)
    xh = exl3.hadamard(t) * np.sqrt(128.0)
    c = xh @ a
    y = exl3.hadamard(c) / np.sqrt(128.0) * svh

    energy = np.repeat((blocks**2).sum(-1), 128, axis=1)
    var_c = (8 / 3) * U**2 * (energy @ a**2) + (U**2 / 3) * (k / 4 + 2) * (xh**2 @ a**2)

    def spread(v: np.ndarray) -> np.ndarray:
        return np.repeat(v.reshape(m, -1, 128).sum(-1), 128, axis=1)

    var_y = (spread(var_c) + (7 / 3) * U**2 * spread(c**2)) * (svh / 128) ** 2 + U**2 * y**2
    magnitude = np.repeat(np.abs(blocks).sum(-1), 128, axis=1) @ np.abs(a)
    worst = (8 + 2 * k / 4 + 2 + 8) * U * spread(magnitude) * np.abs(svh) / 128
    weight = exl3.dense_weight(shard.trellis, shard.suh, shard.svh, shard.codebook)
    dense_sigma = np.sqrt(UNIT_ROUNDOFF[torch.bfloat16] ** 2 / 3 * (x**2 @ weight**2))
    dense_worst = (UNIT_ROUNDOFF[torch.bfloat16] + k * U) * (np.abs(x) @ np.abs(weight))
    wanted = slice(shard.n_begin, shard.n_begin + shard.n_out)
    results = (y, np.sqrt(var_y), worst, dense_sigma, dense_worst)
    return tuple(result[:, wanted] for result in results)


class Oracle:
    """Exact results of a fused layer for some rows, with both bounds.

    Args:
        x: `[m, k_in]` activations, any dtype.
        shards: the matrices.
        bias: tensor or None.
        k_begin: first stored row that x covers.
    """

    def __init__(self, x: torch.Tensor, shards: list[Shard], bias=None, k_begin: int = 0):
        wide = np.zeros((x.shape[0], shards[0].suh.shape[0]))
        wide[:, k_begin : k_begin + x.shape[1]] = x.double().numpy()
        parts = [_oracle(wide, shard) for shard in shards]
        columns = [np.concatenate(part, axis=1) for part in zip(*parts)]
        self.y, self.sigma, self.worst, self.dense_sigma, self.dense_worst = columns
        if bias is not None:
            self.y = self.y + bias.double().numpy()

    def fractions(self, got: torch.Tensor) -> tuple[float, float]:
        """Largest error of the first rows, as a fraction of the statistical and worst bound."""
        if got.numel() == 0:
            return 0.0, 0.0
        m = got.shape[0]
        y = np.abs(self.y[:m])
        # 2^-25 is half of binary16's smallest step; the factor covers rounding an inexact value.
        conversion = UNIT_ROUNDOFF[got.dtype] * y * (1 + 2.0**-7) + U * y + 1e-300
        if got.dtype == torch.float16:
            conversion += 2.0**-25
        sigma, worst = self.sigma[:m], self.worst[:m]
        if got.dtype == torch.bfloat16 and m >= DENSE_ROWS:
            sigma = np.hypot(sigma, self.dense_sigma[:m])
            worst = worst + self.dense_worst[:m]
        error = np.abs(got.double().numpy() - self.y[:m])
        statistical = error / (SIGMAS * sigma + conversion)
        return float(statistical.max()), float((error / (worst + conversion)).max())


def sweep_rates(seed: int = 0) -> dict[tuple[str, int], tuple[float, float]]:
    """Every rate and codebook, every row count, three dtypes: worst fractions of the bounds."""
    result = {}
    for codebook, words in RATES:
        rng = np.random.default_rng([seed, words, exl3.CODEBOOKS.index(codebook)])
        shard = random_shard(rng, 256, 256, codebook, words)
        fine = torch.from_numpy(rng.standard_normal((max(ROWS), 256)).astype(np.float32))
        # bfloat16 numbers of this size are binary16 numbers too: one oracle serves all dtypes.
        coarse = fine.bfloat16().float()
        worst = (0.0, 0.0)
        for values, dtypes in ((fine, (torch.float32,)), (coarse, DTYPES)):
            oracle = Oracle(values, [shard])
            for dtype in dtypes:
                for m in ROWS:
                    y = run(values[:m].to(dtype), [shard])
                    assert y.shape == (m, 256) and y.dtype == dtype
                    assert torch.isfinite(y).all()
                    worst = tuple(map(max, worst, oracle.fractions(y)))
        result[codebook, words] = worst
    return result


def sweep_shards(seed: int = 1, rounds: int = 12) -> tuple[float, float]:
    """1 to 4 shards of different rates, cuts inside blocks, bias: worst fractions of the bounds."""
    worst = (0.0, 0.0)
    for count in (1, 2, 3, 4):
        for number in range(rounds):
            rng = np.random.default_rng([seed, count, number])
            k = int(rng.choice([128, 384, 640]))
            shards = []
            for _ in range(count):
                codebook, words = RATES[rng.integers(len(RATES))]
                n = 128 * int(rng.integers(1, 4))
                begin = int(rng.integers(0, n // 2))
                out = int(rng.integers(1, n - begin + 1))
                shards.append(random_shard(rng, k, n, codebook, words, begin, out))
            k_begin = int(rng.choice([0, 64, 100]))
            k_in = int(rng.integers(1, k - k_begin + 1))
            dtype = DTYPES[number % 3]
            m = ROWS[1 + number % (len(ROWS) - 1)]
            x = torch.from_numpy(rng.standard_normal((m, k_in))).to(dtype)
            bias = None
            if number % 2:
                bias = torch.from_numpy(rng.standard_normal(sum(s.n_out for s in shards)))
                bias = bias.to(DTYPES[(number // 2) % 3])
            y = run(x, shards, bias, k_begin)
            assert y.shape == (m, sum(s.n_out for s in shards)) and y.dtype == dtype
            worst = tuple(map(max, worst, Oracle(x, shards, bias, k_begin).fractions(y)))
    return worst


def main() -> None:
    """Runs both sweeps in this process and prints the worst fractions, one line per sweep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", help="write outputs of fixed cases to this .npz")
    arguments = parser.parse_args()
    ops.load()
    rates = sweep_rates()
    statistical = max(value[0] for value in rates.values())
    worst = max(value[1] for value in rates.values())
    print(f"{ops.cpu_isa()} rates {statistical:.4f} {worst:.6f}")
    statistical, worst = sweep_shards()
    print(f"{ops.cpu_isa()} shards {statistical:.4f} {worst:.6f}")
    if arguments.save:
        outputs = {}
        for codebook, words in RATES:
            rng = np.random.default_rng(words)
            shard = random_shard(rng, 512, 256, codebook, words)
            for m in (1, 5):
                x = torch.from_numpy(rng.standard_normal((m, 512)).astype(np.float32))
                outputs[f"{codebook}_{words}_{m}"] = run(x, [shard]).numpy()
        np.savez(arguments.save, **outputs)


if __name__ == "__main__":
    main()
