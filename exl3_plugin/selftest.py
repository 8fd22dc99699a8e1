"""The boot self-test: the kernels against float64, on the weights that are about to be served.

On the first layer of each distinct matrix (sizes, rate, codebook) the layer is multiplied with
random activations at a few row counts, so through every kernel a plan may choose, and compared in
some 128-column blocks with a product in float64. The truth is decoded here, by gathering 16-bit
windows of the stored words, and shares nothing with the kernels. Where the device takes
norms and activations inside layers (`EXL3_FUSE`), those operators are tested too.

Errors are measured in units of what an output is in the mean: |svh| of its column times the root
mean square of the block before svh. Rounding is below 0.02 units with bfloat16 (half a unit in the
last place of outputs up to five times the mean, weights rounded in the dense kernel, sums in
float32); a wrong word, tile, scale or order is of the order of 1.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from vllm.logger import init_logger

from exl3_plugin import format as exl3
from exl3_plugin import fusion, loading, ops
from exl3_plugin.report import describe_plan, plan_of
from exl3_plugin.tuning import Profile

logger = init_logger("vllm.exl3")

ROWS = (1, 8, 40, 256)
"""Row counts: one token, a small and a middling batch, and enough for the dense kernel."""

WORST, TYPICAL = 0.05, 0.005
"""Most that one output, and that the root mean square of all, may be off, in units."""

BLOCK, TILE = exl3.BLOCK, exl3.TILE


class SelfTestError(RuntimeError):
    """The kernels compute something else than the weights say."""


@dataclass(frozen=True)
class Sample:
    """Columns to compare: `columns` of the output, and `first` of them in the stored block.

    `weight` is the rotated weight of that block, float64 `[k, 128]`.
    """

    module: str
    shard: int
    columns: slice
    first: int
    weight: torch.Tensor
    svh: torch.Tensor


@dataclass(frozen=True)
class Prepared:
    """A layer's truth, taken from what was loaded; `suh` float64 `[segments, k]`."""

    prefix: str
    samples: list[Sample]
    suh: torch.Tensor
    started: float


@dataclass(frozen=True)
class Result:
    """What the test of one layer found, over all its row counts."""

    layer: str
    blocks: int
    worst: float
    typical: float
    seconds: float


# Truth


@functools.cache
def _windows(words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each step: the word in which its 16-bit window begins, and the bits before it there."""
    start = torch.from_numpy(exl3.step_ends(words / TILE)) - TILE
    start %= TILE * words
    return start // TILE, start % TILE


def decode(trellis: torch.Tensor, codebook: str) -> torch.Tensor:
    """The rotated weight of some tiles.

    Args:
        trellis: int16 `[k/16, n/16, 16*bits]` as stored, on the device to compute on.
        codebook: its name.

    Returns:
        float64 `[k, n]`.
    """
    device, words = trellis.device, trellis.shape[-1]
    word, skipped = (t.to(device) for t in _windows(words))
    # 32-bit words are stored with the lower half first, and the ring begins with the upper one.
    swapped = torch.arange(words, device=device) ^ 1
    ring = trellis[..., swapped].long() & 0xFFFF
    pair = ring[..., word] << 16 | ring[..., (word + 1) % words]
    states = pair >> (16 - skipped) & 0xFFFF
    values = torch.from_numpy(exl3.codebook(codebook).astype("float64")).to(device)
    tiles = torch.empty(states.shape, dtype=torch.float64, device=device)
    tiles[..., torch.from_numpy(exl3.PERM).to(device)] = values[states]
    k_tiles, n_tiles, _ = states.shape
    matrix = tiles.view(k_tiles, n_tiles, TILE, TILE).transpose(1, 2)
    return matrix.reshape(TILE * k_tiles, TILE * n_tiles)


@functools.cache
def _hadamard(device: torch.device) -> torch.Tensor:
    """The orthonormal 128-point transform, float64 `[128, 128]`."""
    signs = torch.ones(1, 1, dtype=torch.float64, device=device)
    for _ in range(7):
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return signs / math.sqrt(BLOCK)


def transform(x: torch.Tensor) -> torch.Tensor:
    """The transform of every 128-block of the last axis; float64."""
    return (x.view(-1, BLOCK) @ _hadamard(x.device)).view(x.shape)


# One layer


def prepare(layer: torch.nn.Module, prefix: str, tested: set[tuple]) -> Prepared | None:
    """Decode sample blocks of each matrix of a layer whose like was not tested before.

    Args:
        layer: loaded, its trellis as stored.
        prefix: vLLM's name of it, for errors.
        tested: kinds of matrices seen, (k, n, words, codebook); this layer's are added.

    Returns:
        None where there is nothing new in it.
    """
    held: loading.Held = layer.exl3
    started = time.perf_counter()
    k = layer.suh.shape[1]
    samples: list[Sample] = []
    column = out = 0
    for number, (segment, trellis) in enumerate(
        zip(held.layout.quantised, loading.matrices(layer))
    ):
        source, cut = held.layout.members[segment.member], segment.columns
        kind = (k, cut.loaded, source.words, source.codebook)
        if kind not in tested:
            tested.add(kind)
            for block in _blocks(cut.begin, cut.size):
                first = max(block * BLOCK, cut.begin)
                last = min((block + 1) * BLOCK, cut.begin + cut.size)
                begin = out + first - cut.begin
                tiles = slice(block * BLOCK // TILE, (block + 1) * BLOCK // TILE)
                at = column + block * BLOCK
                samples.append(
                    Sample(
                        source.name,
                        number,
                        slice(begin, begin + last - first),
                        first - block * BLOCK,
                        decode(trellis[:, tiles], source.codebook),
                        layer.svh.data[at : at + BLOCK].double(),
                    )
                )
        column += cut.loaded
        out += cut.size
    return Prepared(prefix, samples, layer.suh.data.double(), started) if samples else None


def _blocks(begin: int, size: int) -> list[int]:
    """First, last and one inner block of those that hold columns in use."""
    first, last = begin // BLOCK, (begin + size - 1) // BLOCK
    inner = first + (last - first) * 5 // 8
    return sorted({first, inner, last}) if size else []


def run(layer: torch.nn.Module, test: Prepared, profile: Profile | None = None) -> Result:
    """Multiply a layer, now in kernel order, and compare.

    Raises:
        SelfTestError: names the layer, the stored module, the kernel and the worst error.
    """
    held: loading.Held = layer.exl3
    device = layer.trellis.device
    inputs, k = held.layout.rows.size, layer.suh.shape[1]
    random = torch.Generator(device=device).manual_seed(0)
    # Activations of a size at which neither fp16 images nor fp16 results leave their range.
    used = layer.suh.data[:, held.k_begin : held.k_begin + inputs].float()
    size = 1 / max(float(used.square().mean().sqrt()), 2.0**-10)
    worst = typical = 0.0
    for rows in ROWS:
        x = torch.randn(rows, inputs, generator=random, dtype=torch.float32, device=device)
        x = (size * x).to(held.dtype)
        for operator, got, multiplied in _products(layer, x, test.prefix, random):
            padded = torch.zeros(rows, k, dtype=torch.float64, device=device)
            padded[:, held.k_begin : held.k_begin + inputs] = multiplied
            found = [_errors(got, padded, test.suh[s.shard], s) for s in test.samples]
            errors = torch.stack(found).cpu()  # one wait for all samples
            bad = (errors[:, 0] > WORST) | (errors[:, 1] > TYPICAL)
            if bad.any():
                number = int(torch.where(bad, errors[:, 0], 0).argmax())
                where = _kernel(layer, operator, rows, profile)
                raise SelfTestError(_complaint(test, number, rows, errors[number], where))
            worst = max(worst, float(errors[:, 0].max()))
            typical = max(typical, float(errors[:, 1].max()))
    seconds = time.perf_counter() - test.started
    logger.debug("EXL3 self-test of %s: worst %.4f, %.0f ms", test.prefix, worst, 1e3 * seconds)
    return Result(test.prefix, len(test.samples), worst, typical, seconds)


@torch.inference_mode()
def _products(
    layer: torch.nn.Module, x: torch.Tensor, prefix: str, random: torch.Generator
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """What the layer's operators make of some rows: (operator, result, what it multiplied).

    With a norm or an activation inside, activations are made that come out as large as `x`.
    """
    yield "exl3::linear", loading.multiply(layer, x), x
    held: loading.Held = layer.exl3
    if held.k_begin or x.shape[1] % fusion.WIDTH_MULTIPLE or fusion.reason_here() is not None:
        return
    rest = (layer.trellis, layer.suh, layer.svh, None, held.shards, held.k_begin)
    states, residual, gate = torch.randn(
        3, *x.shape, generator=random, dtype=torch.float32, device=x.device
    ).to(x.dtype)
    gated = torch.nn.functional.silu(gate) * x
    both = torch.cat([gate, x], dim=-1)
    yield "exl3::gated_linear", torch.ops.exl3.gated_linear(both, *rest), gated

    weight = x[0].clone()
    total = states.float() + residual.float()
    norm = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
    normed = norm.to(x.dtype) * weight
    y, found = torch.ops.exl3.norm_linear(states, residual, weight, 1e-6, *rest)
    if not torch.equal(found, total.to(x.dtype)):
        raise SelfTestError(
            f"EXL3 self-test: {prefix}: exl3::norm_linear returns another sum than that of its "
            f"inputs with {len(x)} rows. EXL3_FUSE=0 serves without it; please report this"
        )
    yield "exl3::norm_linear", y, normed


def _errors(got: torch.Tensor, x: torch.Tensor, suh: torch.Tensor, sample: Sample) -> torch.Tensor:
    """Worst and root mean square error of one sample in units, float64 `[2]`; NaN is infinite."""
    image = transform(x * suh)
    raw = transform(image @ sample.weight)
    columns = slice(sample.first, sample.first + sample.columns.stop - sample.columns.start)
    truth = (raw * sample.svh)[:, columns]
    unit = raw.square().mean(1, keepdim=True).sqrt() * sample.svh[columns].abs()
    # Below its normal range a result has fewer digits; columns that svh switches off must be zero.
    step = torch.finfo(got.dtype).tiny * torch.finfo(got.dtype).eps
    error = (got[:, sample.columns].double() - truth).abs() - step
    error = torch.nan_to_num(error.clamp(min=0), nan=math.inf, posinf=math.inf)
    error = torch.where(error == 0, 0, error / unit)
    return torch.stack([error.max(), error.square().mean().sqrt()])


def _kernel(layer: torch.nn.Module, operator: str, rows: int, profile: Profile | None) -> str:
    """What computed a result, for a message."""
    where = layer.trellis.device
    kernel = "the CPU kernels"
    if where.type == "cuda":
        plan = describe_plan(plan_of(layer, rows, ops.cuda_device(where), profile))
        kernel = f"kernel {plan} on {torch.cuda.get_device_name(where)}"
    return kernel if operator == "exl3::linear" else f"{kernel} in {operator} (EXL3_FUSE)"


def _complaint(test: Prepared, number: int, rows: int, errors: torch.Tensor, kernel: str) -> str:
    sample = test.samples[number]
    return (
        f"EXL3 self-test: {test.prefix} is wrong with {rows} rows by {kernel}: columns "
        f"{sample.columns.start} to {sample.columns.stop} ({sample.module}) are off by up to "
        f"{float(errors[0]):.3g} times their usual size, {float(errors[1]):.3g} in the mean; "
        f"rounding accounts for {WORST:g} and {TYPICAL:g}. What would be served is not what the "
        "checkpoint holds: please report this with the line above and the version of exl3-fleet. "
        "EXL3_SELF_TEST=0 starts without the test"
    )


def summary(results: list[Result]) -> str:
    """One line for the log."""
    return (
        f"EXL3 self-test: {len(results)} layers, {sum(r.blocks for r in results)} blocks at "
        f"{', '.join(map(str, ROWS))} rows, worst error "
        f"{max((r.worst for r in results), default=0):.4f} of {WORST:g}, "
        f"{sum(r.seconds for r in results):.2f} s"
    )
