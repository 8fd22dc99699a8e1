#!/usr/bin/env python3
"""Tables from the points of `bench/linear.py`: `bench/report.py points.jsonl [more] [--markdown]`.

The worst cell comes first: a table that opens with its best figure hides what is left to do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import floors

SHOWN_CELLS = 12
SHOWN_FAILURES = 12
SHOWN_ARMS = 16
"""A run of more arms than this prints no table of points; the file has them."""
METRICS = {
    "us": ("us a call", "{:.1f}"),
    "share": ("share of the read ruler", "{:.2f}"),
    "tflops": ("TFLOP/s", "{:.0f}"),
    "exllamav3": ("times exllamav3's best path", "{:.2f}"),
    "torch": ("times bf16 cuBLAS", "{:.2f}"),
    "marlin": ("times Marlin", "{:.2f}"),
    "error": ("relative error, 1e-4", "{:.1f}"),
    "bound": ("largest error, % of its bound", "{:.1f}"),
    "noise": ("largest error, % of the statistical bound", "{:.0f}"),
    "spread": ("spread of the replays, %", "{:.1f}"),
}


def metric(point: dict[str, Any], name: str) -> float | None:
    """One number of a point by its name in `METRICS`; None where the point has none."""
    if name in floors.PEERS:
        return point.get("ratios", {}).get(name)
    key = {"share": "ruler_share", "tflops": "tflop_s"}.get(name, name)
    value = point.get(key)
    scale = {"error": 1e4, "spread": 100, "bound": 100, "noise": 100}.get(name, 1)
    return None if value is None else value * scale


def read_points(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run headers and points of JSON-lines files; a later reading of a point replaces an earlier.

    Raises:
        ValueError: a line is no JSON object, with file and line number.
    """
    headers: list[dict[str, Any]] = []
    points: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
            if "run" in value:
                headers.append(value["run"])
                continue
            names = ("shape", "bits", "codebook", "rows", "kernel", "form")
            points[tuple(value[name] for name in names)] = value
    return headers, list(points.values())


def cell_table(points: list[dict[str, Any]], name: str) -> tuple[list[str], list[list[str]]]:
    """Header and lines of one metric: a line a layer and arm, a column a row count."""
    columns = sorted({point["rows"] for point in points})
    lines: dict[tuple[Any, ...], dict[int, str]] = {}
    pattern = METRICS[name][1]
    for point in points:
        value = metric(point, name)
        if value is None and "problem" not in point:
            continue
        arm = point["form"] if point["kernel"] == "auto" else f"{point['kernel']} {point['form']}"
        key = (point["shape"], float(point["bits"]), point["codebook"], arm)
        shown = "failed" if value is None else pattern.format(value)
        lines.setdefault(key, {})[point["rows"]] = shown
    header = ["shape", "bits", "codebook", "arm", *(f"m={m}" for m in columns)]
    body = []
    for (shape, bits, codebook, arm), cells in lines.items():
        body.append([shape, f"{bits:g}", codebook, arm, *(cells.get(m, "") for m in columns)])
    return header, body


def markdown(header: list[str], body: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(line) + " |" for line in body]
    return "\n".join(lines)


def _rich_table(header: list[str], body: list[list[str]], title: str) -> Table:
    table = Table(*header, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for line in body:
        table.add_row(*line)
    return table


def summary_lines(points: list[dict[str, Any]], failures: Sequence[str]) -> list[str]:
    """The worst cell, then failures, then every missed floor, in words."""
    cells = floors.evaluate(points)
    measured = [cell for cell in cells if cell.value is not None]
    missed = [cell for cell in measured if cell.margin < 1]
    lines = []
    if measured:
        lines.append(f"worst cell: {measured[0].describe()} ({measured[0].margin:.2f} of it)")
    for failure in failures[:SHOWN_FAILURES]:
        lines.append(f"FAILED {failure}")
    if len(failures) > SHOWN_FAILURES:
        lines.append(f"and {len(failures) - SHOWN_FAILURES} more failures")
    lines.append(
        f"floors: {len(measured) - len(missed)} of {len(measured)} measured cells pass, "
        f"{len(cells) - len(measured)} cells not measured"
    )
    for cell in missed[:SHOWN_CELLS]:
        lines.append(f"MISS {cell.describe()} ({cell.margin:.2f} of it)")
    if len(missed) > SHOWN_CELLS:
        lines.append(f"and {len(missed) - SHOWN_CELLS} more misses")
    for cell in measured[len(missed) : len(missed) + 3]:
        lines.append(f"pass {cell.describe()} ({cell.margin:.2f} of it)")
    return lines


def means_table(points: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Geometric means of the ratios, by class of rows."""
    means = floors.class_means(points)
    present = [peer for peer in floors.PEERS if any(peer in row for row in means)]
    header = ["codebook", "form", "bits", "rows", "points", *(f"x {peer}" for peer in present)]
    order = [name for name, _ in floors.ROW_CLASSES]
    means.sort(
        key=lambda row: (row["codebook"], row["form"], row["bits"], order.index(row["rows"]))
    )
    body = [
        [row["codebook"], row["form"], f"{row['bits']:g}", row["rows"], str(row["points"])]
        + [f"{row[peer]:.2f}" if peer in row else "" for peer in present]
        for row in means
    ]
    return header, body


def print_summary(
    console: Console, points: list[dict[str, Any]], failures: Sequence[str] = ()
) -> None:
    """What a run prints last: means of the classes, then the floors with the worst cell first."""
    header, body = means_table(points)
    if body:
        console.print(_rich_table(header, body, "geometric means, ours faster above 1"))
    arms = {(p["shape"], p["bits"], p["codebook"], p["kernel"], p["form"]) for p in points}
    if len(arms) <= SHOWN_ARMS:
        for name in ("us", "share", "exllamav3", "torch"):
            header, body = cell_table(points, name)
            if body:
                console.print(_rich_table(header, body, METRICS[name][0]))
    for line in summary_lines(points, failures):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def main(
    files: Annotated[list[Path], typer.Argument(help="files that bench/linear.py wrote")],
    metrics: Annotated[
        str, typer.Option(help=", ".join(METRICS))
    ] = "us,share,tflops,exllamav3,torch",
    as_markdown: Annotated[bool, typer.Option("--markdown")] = False,
) -> None:
    """Prints whole tables, one a metric, after the floors."""
    try:
        headers, points = read_points(files)
    except (OSError, ValueError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    names = [name.strip() for name in metrics.split(",")]
    for name in names:
        if name not in METRICS:
            print(f"report.py: no metric {name!r}; there are {', '.join(METRICS)}", file=sys.stderr)
            raise typer.Exit(2)
    console = Console(width=None if as_markdown else 150)
    for run in headers:
        device, scale = run["device"], run["ruler"]
        print(
            f"{device['name']}, driver {device['driver']}, torch {device['torch']}, "
            f"read ruler {scale['read_gb_s']:.0f} GB/s, dense {scale['dense_tflop_s']:.0f} TFLOP/s"
        )
    for line in summary_lines(points, []):
        print(line)
    tables = [(METRICS[name][0], *cell_table(points, name)) for name in names]
    for title, header, body in [("geometric means", *means_table(points)), *tables]:
        if not body:
            continue
        if as_markdown:
            print(f"\n### {title}\n\n{markdown(header, body)}")
        else:
            console.print(_rich_table(header, body, title))


if __name__ == "__main__":
    typer.run(main)
