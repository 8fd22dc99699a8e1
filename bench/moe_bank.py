"""Layers of random routed experts on a device, routings for them, and proof of a result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exl3_plugin import format as exl3
from exl3_plugin import ops
from exl3_plugin.experts import Experts, Kind, Stored, arrange
from exl3_plugin.tuning import WARPGROUP_ROWS
from tests.moe import moe_oracle

SUH_SIZE = 0.03
PROOF_TOKENS = 2
"""Tokens whose result is held against float64; all experts they go to are decoded for that."""


@dataclass(frozen=True)
class Shape:
    """A mixture of experts: E experts, T of them a token, hidden size H, width I."""

    experts: int
    hidden: int
    inner: int
    slots: int

    def __str__(self) -> str:
        return f"{self.experts}x{self.hidden}x{self.inner}x{self.slots}"

    @property
    def weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.inner


def parse_shapes(text: str) -> list[Shape]:
    """`ExHxIxT` items with commas between.

    Raises:
        ValueError: anything else.
    """
    shapes = []
    for item in text.split(","):
        parts = item.strip().split("x")
        if len(parts) != 4 or not all(part.isdigit() and int(part) for part in parts):
            raise ValueError(f"shape {item!r}: expected ExHxIxT, such as 128x2048x768x8")
        shape = Shape(*map(int, parts))
        if shape.hidden % 128 or shape.inner % 128 or shape.slots > shape.experts:
            raise ValueError(f"shape {item!r}: H and I must be multiples of 128, T at most E")
        shapes.append(shape)
    return shapes


@dataclass
class Layer:
    """One layer's experts, their words in the order of the kernels of their device.

    `scales` are float16 `[experts, 2, hidden]`, `[experts, 2, inner]`, `[experts, inner]` and
    `[experts, hidden]`.
    """

    shape: Shape
    kind: Kind
    experts: Experts

    @property
    def expert_bytes(self) -> int:
        """Bytes of the words of one expert."""
        return self.shape.weights * self.kind.words // 128

    def stored(self, expert: int) -> tuple[Stored, Stored, Stored]:
        """Gate, up and down of one expert as a checkpoint holds them."""
        e, s = self.experts, self.shape
        result = []
        for projection in range(3):
            down = projection == 2
            k, n = (s.inner, s.hidden) if down else (s.hidden, s.inner)
            first = int(e.table[projection, expert, 0])
            flat = (e.w2_trellis if down else e.w13_trellis)[first:][
                : k * n // 256 * self.kind.words
            ]
            suh = e.w2_suh[expert] if down else e.w13_suh[expert, projection]
            svh = e.w2_svh[expert] if down else e.w13_svh[expert, projection]
            if flat.is_cuda:
                trellis = ops.from_strips(flat, k, n)
            else:
                trellis = flat.view(k // exl3.TILE, n // exl3.TILE, self.kind.words)
            result.append(Stored(trellis, suh, svh, self.kind.codebook))
        return tuple(result)


def random_layer(
    shape: Shape, bits: float, codebook: str, seed: int = 0, device: str = "cuda"
) -> Layer:
    """Random words, and scales of the size and scatter of a real layer."""
    generator = torch.Generator(device=device).manual_seed(seed)
    kind = Kind(codebook, exl3.words_from_bits(bits))
    count = shape.experts
    plan = arrange([[kind] * 3] * count, shape.hidden, shape.inner, shape.hidden)

    def words(size: int) -> torch.Tensor:
        pairs = torch.randint(
            -(2**31), 2**31, (size // 2,), dtype=torch.int32, device=device, generator=generator
        )
        return pairs.view(torch.int16)

    def scales(typical: float, *size: int) -> torch.Tensor:
        uniform = torch.rand(size, device=device, generator=generator) + 0.5
        signs = torch.randint(0, 2, size, device=device, generator=generator) * 2 - 1
        return (signs * typical * uniform).half()

    experts = Experts(
        words(plan.w13_words),
        scales(SUH_SIZE, count, 2, shape.hidden),
        scales(1.0, count, 2, shape.inner),
        words(plan.w2_words),
        scales(SUH_SIZE, count, shape.inner),
        scales(1.0, count, shape.hidden),
        plan.table.to(device),
        plan.kinds,
        [0, shape.inner, shape.hidden, int(plan.paired)],
    )
    return Layer(shape, kind, experts)


def routings(
    shape: Shape, rows: int, count: int, seed: int = 0, device: str = "cuda"
) -> list[tuple]:
    """`count` routings of `rows` tokens: (weights, ids, live experts).

    Experts are drawn without regard to the token, as a balanced router's are in the mean; single
    tokens take turns through all experts, so that none comes back while it may still be cached.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    order = torch.randperm(shape.experts, generator=generator)
    for number in range(count):
        if rows * shape.slots <= shape.experts:
            at = torch.arange(rows * shape.slots) + number * rows * shape.slots
            if rows > 1:  # tokens of one batch may meet
                order = torch.randperm(shape.experts, generator=generator)
                ids = torch.stack(
                    [torch.randperm(shape.experts, generator=generator)[: shape.slots]
                     for _ in range(rows)]
                )  # fmt: skip
            else:
                ids = order[at % shape.experts].view(rows, shape.slots)
        else:
            noise = torch.rand(rows, shape.experts, generator=generator)
            ids = noise.topk(shape.slots, dim=1).indices
        weights = torch.rand(rows, shape.slots, generator=generator) + 0.1
        weights = weights / weights.sum(1, keepdim=True)
        live = len(ids.unique())
        found.append((weights.float().to(device), ids.int().to(device), live))
    return found


def form_of(plan) -> tuple[bool, bool]:
    """Whether a plan of `exl3::moe_with` leaves out a rounding of each weight, and whether it
    rounds the rows of slots."""
    form = plan is not None and plan[1] == 1
    return (form and plan[0] != WARPGROUP_ROWS, form and plan[0] == WARPGROUP_ROWS)


def prove(layer: Layer, x, weights, ids, y, fast: bool, short: bool) -> tuple[float, float]:
    """Fractions of the bounds (statistical, worst) in some tokens of a result.

    `fast` and `short` say what the result may leave out, see `tests/moe/moe_oracle.py`.
    """
    rows = sorted({0, x.shape[0] - 1})[:PROOF_TOKENS]
    used = ids[rows].unique().tolist()
    oracle = moe_oracle.Layer([layer.stored(expert) for expert in used], "cuda")
    places = torch.full((layer.shape.experts,), -1, dtype=torch.int32, device="cuda")
    places[used] = torch.arange(len(used), dtype=torch.int32, device="cuda")
    expected = oracle.expect(
        x[rows], weights[rows], ids[rows], places, cuda=True, fast=fast, short=short
    )
    return expected.fractions(y[rows])
