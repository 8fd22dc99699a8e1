"""What the CUDA kernels must reach on an H200, as data, and how a set of points stands to it.

A floor is a ratio that a point must reach: to exllamav3's best path, to cuBLAS in bfloat16, or to
the read ruler. They are floors, not aims: work on the kernels goes on while a change still pays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

WIDE = ("5120x12288", "17408x5120")
SMALL = ("4096x2048",)
ALL = WIDE + SMALL

ROW_CLASSES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("1 to 16", (1, 2, 4, 8, 16)),
    ("32 to 128", (32, 64, 128)),
    ("256, 512", (256, 512)),
    ("2048, 8192", (2048, 8192)),
)
PEERS = ("exllamav3", "torch", "marlin")


@dataclass(frozen=True)
class Floor:
    """Points of these shapes, rates and row counts must reach `at_least` in `metric`.

    metric: a peer's name (its time over ours) or "ruler" (share of the read bandwidth).
    """

    shapes: tuple[str, ...]
    bits: tuple[float, ...]
    rows: tuple[int, ...]
    metric: str
    at_least: float
    form: str = "exact"
    codebook: str = "mcg"


def _floors() -> tuple[Floor, ...]:
    few, some, many, most = (rows for _, rows in ROW_CLASSES)
    rates = (4.0, 6.0)
    floors = [
        Floor(WIDE, rates, few, "exllamav3", 2.0),
        Floor(WIDE, rates, few, "torch", 1.0),
        Floor(SMALL, rates, few, "exllamav3", 1.7),
        Floor(WIDE, rates, some, "exllamav3", 2.2),
        Floor(SMALL, rates, some, "exllamav3", 1.7),
        Floor(SMALL, rates, many, "exllamav3", 1.2),
        Floor(WIDE, (4.0,), (1,), "ruler", 0.46),
        Floor(WIDE, (4.0,), (1,), "ruler", 0.55, form="fast"),
        Floor(WIDE, (6.0,), (1,), "ruler", 0.65),
        Floor(WIDE, (8.0,), (1,), "ruler", 0.88),
    ]
    for rows, ratio in zip(many, (1.5, 1.15)):
        floors.append(Floor(WIDE, rates, (rows,), "exllamav3", ratio))
    for rows, peer, dense in zip(most, (1.10, 1.05), (1.15, 1.08)):
        floors.append(Floor(ALL, rates, (rows,), "exllamav3", peer))
        floors.append(Floor(ALL, rates, (rows,), "torch", 1 / dense))
    return tuple(floors)


FLOORS = _floors()


@dataclass(frozen=True)
class Cell:
    """One point against one floor; `value` is None where the point was not measured."""

    floor: Floor
    shape: str
    bits: float
    rows: int
    value: float | None

    @property
    def margin(self) -> float:
        """Reached over required: below 1 is a miss."""
        return math.nan if self.value is None else self.value / self.floor.at_least

    @property
    def verdict(self) -> str:
        """pass, MISS or "not measured"."""
        if self.value is None:
            return "not measured"
        return "pass" if self.margin >= 1 else "MISS"

    def describe(self) -> str:
        """The cell in words."""
        unit = "of the read ruler" if self.floor.metric == "ruler" else f"x {self.floor.metric}"
        reached = "not measured" if self.value is None else f"{self.value:.3f} {unit}"
        return (
            f"{self.shape} {self.bits:g} bit {self.floor.codebook} {self.floor.form}, "
            f"{self.rows} rows: {reached}, floor {self.floor.at_least:.3f}"
        )


def metric_of(point: dict[str, Any], metric: str) -> float | None:
    """A point's value of a floor's metric, None where it has none."""
    if metric == "ruler":
        return point.get("ruler_share")
    return point.get("ratios", {}).get(metric)


def _is_dispatch(point: dict[str, Any]) -> bool:
    return point.get("kernel") == "auto" and "us" in point


def evaluate(points: Iterable[dict[str, Any]], floors: Sequence[Floor] = FLOORS) -> list[Cell]:
    """Every cell of the floors, the worst first and those without a point last.

    Args:
        points: the points of `bench/linear.py`; only kernel "auto" counts, since that is what a
            model runs. A fast form that is measured once for all row counts stands in the points
            under its own name.
        floors: the table.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for point in points:
        if _is_dispatch(point):
            key = (point["shape"], float(point["bits"]), point["codebook"], point["form"])
            found[(*key, point["rows"])] = point
    cells = []
    for floor in floors:
        for shape in floor.shapes:
            for bits in floor.bits:
                for rows in floor.rows:
                    key = (shape, bits, floor.codebook, floor.form, rows)
                    point = found.get(key)
                    value = None if point is None else metric_of(point, floor.metric)
                    cells.append(Cell(floor, shape, bits, rows, value))
    return sorted(cells, key=lambda cell: math.inf if cell.value is None else cell.margin)


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean; NaN of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def class_means(points: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric means of the ratios to each peer, by codebook, form, rate and class of rows.

    Returns:
        One row per group that has a ratio: codebook, form, bits, rows (name of the class), points,
        and one entry per peer.
    """
    groups: dict[tuple[str, str, float, str], list[dict[str, Any]]] = {}
    for point in points:
        if not _is_dispatch(point) or not point.get("ratios"):
            continue
        for name, rows in ROW_CLASSES:
            if rows[0] <= point["rows"] <= rows[-1]:
                key = (point["codebook"], point["form"], float(point["bits"]), name)
                groups.setdefault(key, []).append(point)
    means = []
    for (codebook, form, bits, rows), members in groups.items():
        row: dict[str, Any] = {"codebook": codebook, "form": form, "bits": bits, "rows": rows}
        row["points"] = len(members)
        for peer in PEERS:
            values = [p["ratios"][peer] for p in members if p["ratios"].get(peer)]
            if values:
                row[peer] = geometric_mean(values)
        means.append(row)
    return means
