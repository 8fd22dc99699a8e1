#!/usr/bin/env python3
"""`exl3::moe` on a GPU against its peers and the read ruler, one JSON line a point.

    bench/moe.py --shapes 128x2048x768x8,288x4096x2048x8 --bits 4 --codebooks mcg \\
        --rows 1,2,4,8,16,32,64,256,2048,8192 --peers all --json moe.jsonl

A shape is experts x hidden x inner x experts a token. Every point is compared with float64 truth in
two of its tokens before it is timed; a wrong one is not timed, and the exit code is 1. Layers and
routings rotate, so that experts come from memory; bytes are those of the experts that a routing
touches. How figures are taken stands in `timing.py`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import moe_bank, moe_peers, ruler, timing
from bench.moe_bank import Layer, Shape
from exl3_plugin import devices, ops, tuning

LAYER_BYTES = 1 << 30
"""Experts of as many layers as fill this are rotated, two at least."""
PEERS = ("exllamav3", "triton")
SLOW_PEER_ROWS = 2048
"""The most rows at which exllamav3's fused kernel is run; above it is far from its own choice."""


def numbers(text: str) -> list[int]:
    """`1,2,4` to whole numbers above zero.

    Raises:
        ValueError: anything else.
    """
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdigit() and int(item) > 0 for item in items):
        raise ValueError(f"{text!r}: expected positive whole numbers with commas between")
    return [int(item) for item in items]


class Bench:
    """Layers of one shape and rate, and what is run on them."""

    def __init__(self, shape: Shape, bits: float, codebook: str, scale: ruler.Ruler, l2: int):
        self.shape, self.bits, self.codebook, self.ruler = shape, bits, codebook, scale
        one = int(shape.weights * shape.experts * bits / 8)
        self.layers = [
            moe_bank.random_layer(shape, bits, codebook, seed)
            for seed in range(max(2, math.ceil(LAYER_BYTES / one)))
        ]
        self.l2 = l2
        self.failures: list[str] = []

    def point(self, rows: int, dtype: torch.dtype, plan: list[int] | None) -> dict[str, Any]:
        """Ours: proof and reading."""
        given = self._inputs(rows, dtype)

        def call(copy: int) -> torch.Tensor:
            x, weights, ids, _ = given[copy]
            return run_ours(self.layers[copy % len(self.layers)], x, weights, ids, plan)

        point: dict[str, Any] = {
            "shape": str(self.shape), "bits": self.bits, "codebook": self.codebook, "rows": rows,
            "plan": plan, "layers": len(self.layers),
        }  # fmt: skip
        x, weights, ids, _ = given[0]
        y = call(0)
        # By the rule any of the forms may have been taken.
        forms = [(True, False), (False, False), (False, True)]
        if plan is not None:
            forms = [moe_bank.form_of(plan)]
        found = min(moe_bank.prove(self.layers[0], x, weights, ids, y, *form) for form in forms)
        point.update(noise=round(found[0], 4), bound=round(found[1], 5))
        if not (found[0] <= 1 and found[1] <= 0.5 and bool(torch.isfinite(y).all())):
            point["problem"] = f"wrong: {found[0]:.3g} of the statistical bound"
            self.failures.append(f"{self.shape} {rows} rows, plan {plan}: {point['problem']}")
            return point
        return {**point, **self._reading(call, given, rows)}

    def peer(self, name: str, call: Callable[..., torch.Tensor], rows: int) -> dict[str, Any]:
        """A peer's reading; `call` takes (layer number, x, weights, ids)."""
        dtype = torch.float16 if name == "exllamav3" else torch.bfloat16
        given = self._inputs(rows, dtype)
        if name == "exllamav3":
            given = [(x, w.half(), ids.long(), live) for x, w, ids, live in given]

        def one(copy: int) -> torch.Tensor:
            x, weights, ids, _ = given[copy]
            return call(copy % len(self.layers), x, weights, ids)

        try:
            result = self._reading(one, given, rows)
            if name == "exllamav3":
                x, weights, ids, _ = given[0]
                ours = run_ours(self.layers[0], x, weights.float(), ids.int(), None).float()
                result["differs"] = float((one(0).float() - ours).norm() / ours.norm())
            return result
        except RuntimeError as error:
            torch.cuda.synchronize()
            return {"problem": str(error).splitlines()[0]}

    def _inputs(self, rows: int, dtype: torch.dtype) -> list[tuple]:
        """Activations and routings for as many calls as rotate."""
        count = len(self.layers) * max(1, 16 // len(self.layers))
        routings = moe_bank.routings(self.shape, rows, count)
        xs = [torch.randn(rows, self.shape.hidden, dtype=dtype, device="cuda") for _ in range(2)]
        return [(xs[i % 2], *routing) for i, routing in enumerate(routings)]

    def _reading(self, call, given: list[tuple], rows: int) -> dict[str, Any]:
        reading = timing.time_rotating(call, len(given), ring=2)
        live = sum(item[3] for item in given) / len(given)
        size = live * self.layers[0].expert_bytes
        gb_s = size / (reading.us * 1e3)
        flops = 2.0 * rows * self.shape.slots * self.shape.weights
        return {
            "us": round(reading.us, 2),
            "spread": round(reading.spread, 4),
            "live": round(live, 1),
            "gb_s": round(gb_s, 1),
            "ruler_share": round(gb_s / self.ruler.read_gb_s, 4),
            "tflop_s": round(flops / (reading.us * 1e6), 2),
        }


def run_ours(layer: Layer, x, weights, ids, plan: list[int] | None) -> torch.Tensor:
    """One call on a layer, by the rule or by a plan."""
    if plan is None:
        return layer.experts.run(x, weights, ids)
    e = layer.experts
    return torch.ops.exl3.moe_with(
        x, weights, ids, None, e.w13_trellis, e.w13_suh, e.w13_svh, e.w2_trellis, e.w2_suh,
        e.w2_svh, e.table, e.kinds, e.sizes, 0, 1.0, 0.0, math.inf, False, plan,
    )  # fmt: skip


def plans_of(text: str) -> list[list[int] | None]:
    """`auto,4f,8,64` to what `exl3::moe_with` takes; None for the rule.

    Raises:
        ValueError: another name.
    """
    known: dict[str, list[int] | None] = {"auto": None}
    known |= {f"{rows}f": [rows, 1, 0, 0] for rows in tuning.FAST_EXPERT_TILE_ROWS}
    known |= {str(rows): [rows, 0, 0, 0] for rows in tuning.EXPERT_TILE_ROWS}
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"plan {name!r}; there are {', '.join(known)}")
    return [known[name] for name in names]


def find_peers(text: str, bench: Bench, absent: dict[str, str]) -> dict[str, Callable]:
    """Calls of the peers that are here; the others go to `absent` with the reason."""
    wanted = PEERS if text == "all" else () if text == "none" else text.split(",")
    found: dict[str, Callable] = {}
    for name in wanted:
        try:
            if name == "exllamav3":
                ext = moe_peers.find_exllamav3()
                blocks = [moe_peers.Exllamav3(ext, layer) for layer in bench.layers]
                found[name] = lambda i, *given, blocks=blocks: blocks[i].call(*given)
            elif name == "triton":
                found[name] = moe_peers.triton_block(bench.shape, len(bench.layers))
            else:
                raise ValueError(f"unknown peer {name!r}; there are {', '.join(PEERS)}")
        except ValueError:
            raise
        except Exception as error:  # imports of foreign code fail in many ways
            absent[name] = str(error).splitlines()[0]
    return found


def describe(point: dict[str, Any]) -> str:
    """A line for people."""
    line = f"{point['shape']:18} {point['bits']:g} {point['codebook']} {point['rows']:5} rows "
    line += f"{'rule' if point['plan'] is None else str(point['plan'][:2]):8}"
    if "us" not in point:
        return line + f" {point.get('problem')}"
    line += f" {point['us']:9.1f} us {point['ruler_share']:5.0%} of the ruler"
    line += f" {point['tflop_s']:6.1f} TFLOP/s"
    for name, ratio in point.get("ratios", {}).items():
        line += f"  {name} {ratio:.2f}x"
    return line


def main(
    shapes: Annotated[str, typer.Option(help="ExHxIxT with commas between")] = (
        "128x2048x768x8,288x4096x2048x8"
    ),
    bits: Annotated[str, typer.Option(help="rates")] = "4",
    codebooks: Annotated[str, typer.Option(help="codebooks")] = "mcg",
    rows: Annotated[str, typer.Option(help="tokens")] = "1,2,4,8,16,32,64,256,2048,8192",
    plans: Annotated[str, typer.Option(help="auto, 1f to 8f, 256f, 1 to 256")] = "auto",
    peers: Annotated[str, typer.Option(help="all, none, or names")] = "all",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16")] = "bfloat16",
    json_file: Annotated[Path | None, typer.Option("--json", help="one line a point")] = None,
) -> None:
    """Measures a grid of mixtures of experts."""
    try:
        grid = moe_bank.parse_shapes(shapes)
        grid_rows, grid_plans = numbers(rows), plans_of(plans)
        rates = [float(item) for item in bits.split(",")]
        types = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        if dtype not in types:
            raise ValueError(f"dtype {dtype!r}: expected {' or '.join(types)}")
        nvml = devices.monitor()
    except (ValueError, RuntimeError) as error:
        print(f"moe.py: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    facts = devices.device_facts(0, nvml)
    timing.use_own_stream()
    ops.require_cuda()
    profile = tuning.use_profile()
    scale = ruler.measure(nvml=nvml)
    for line in ruler.describe(facts, scale):
        print(line)
    if profile is not None:
        print(f"auto takes the profile that EXL3_PROFILE names, of {profile.created}")
    out = json_file.open("w") if json_file else None
    failures: list[str] = []
    for shape in grid:
        for rate in rates:
            for codebook in codebooks.split(","):
                absent: dict[str, str] = {}
                bench = Bench(shape, rate, codebook, scale, facts.l2_bytes)
                found = find_peers(peers, bench, absent)
                for name, reason in absent.items():
                    print(f"peer {name} is absent: {reason}")
                for m in grid_rows:
                    readings = {
                        name: bench.peer(name, call, m)
                        for name, call in found.items()
                        if name != "exllamav3" or m <= SLOW_PEER_ROWS
                    }
                    published = moe_peers.PUBLISHED.get(str(shape), {}).get(m)
                    if published and (rate, codebook) == (4.0, "mcg"):
                        readings["exllamav3, published"] = {"us": published}
                    for plan in grid_plans:
                        point = bench.point(m, types[dtype], plan)
                        if readings and "us" in point:
                            point["peers"] = readings
                            point["ratios"] = {
                                name: round(reading["us"] / point["us"], 3)
                                for name, reading in readings.items()
                                if "us" in reading
                            }
                        print(describe(point), flush=True)
                        if out:
                            print(json.dumps(point), file=out, flush=True)
                failures += bench.failures
                del bench, found
                torch.cuda.empty_cache()
    for failure in failures:
        print(f"WRONG: {failure}")
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
