"""`python -m exl3_plugin.inspect DIR`: what a checkpoint holds, as a table or as JSON.

Reads headers only and needs neither torch nor vLLM. Exit code 0: the checkpoint can be served;
1: refused, the reason is on stderr; 2: wrong usage.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from exl3_plugin.checkpoint import Checkpoint, CheckpointError, Module, read_checkpoint
from exl3_plugin.shards import ShardingError, check_tensor_parallel

PIPE_COLUMNS = 140
"""Width of the tables where the output is no terminal and has no width of its own."""


def summarise(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything `inspect` prints, as one JSON-ready object.

    `bits_histogram` counts stored weights per rate. `average_bits.exl3` is the mean rate of the
    quantised linears; `average_bits.all` is all stored bits, scales included, per weight of the
    model, padding not counted as weights.
    """
    modules = checkpoint.modules.values()
    histogram: Counter[float] = Counter()
    for module in modules:
        if module.kind == "exl3":
            histogram[module.bits] += module.k * module.n
    quantised = sum(histogram.values())
    weights = sum(map(_weights, modules))
    return {
        "source": str(checkpoint.path),
        "revision": checkpoint.revision,
        "architectures": checkpoint.config.get("architectures", []),
        "files": checkpoint.files,
        "tensors": len(checkpoint.tensors),
        "bytes": checkpoint.nbytes,
        "weights": weights,
        "classes": _classes(modules),
        "bits_histogram": {f"{bits:g}": histogram[bits] for bits in sorted(histogram)},
        "average_bits": {
            "exl3": sum(b * count for b, count in histogram.items()) / quantised
            if quantised
            else None,
            "all": 8 * checkpoint.nbytes / weights if weights else None,
        },
        "warnings": checkpoint.warnings,
    }


def _weights(module: Module) -> int:
    """Weights of a module as the model counts them."""
    if module.kind == "plain":
        return sum(math.prod(tensor.shape) for tensor in module.tensors.values())
    return (module.k_true or module.k) * (module.n_true or module.n)


def _classes(modules: Iterable[Module]) -> list[dict[str, Any]]:
    """Modules of one name (numbers collapsed to *), kind, rate and size, in order of appearance."""
    classes: dict[tuple, dict[str, Any]] = {}
    for module in modules:
        dtypes = sorted({tensor.dtype for tensor in module.tensors.values()})
        entry = {
            "name": re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module.name),
            "kind": module.kind,
            "bits": module.bits,
            "codebook": module.codebook,
            "dtype": "/".join(dtypes) if module.kind == "plain" else None,
            "k": module.k,
            "n": module.n,
            "k_true": module.k_true,
            "n_true": module.n_true,
            "legacy_signs": module.legacy_signs,
        }
        found = classes.setdefault(tuple(entry.values()), {**entry, "count": 0, "bytes": 0})
        found["count"] += 1
        found["bytes"] += module.nbytes
    return list(classes.values())


def _padding(entry: dict[str, Any]) -> str:
    """Which dimensions are stored wider than the model's."""
    padded = [
        f"{axis} {entry[axis + '_true']} to {entry[axis]}"
        for axis in "kn"
        if entry[axis + "_true"] not in (None, entry[axis])
    ]
    return ", ".join(padded)


def _size(nbytes: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def _class_table(
    console: Console, title: str, entries: list[dict[str, Any]], columns: dict[str, Any]
) -> None:
    """Print one table of module classes; `columns` maps a heading to a function of the entry."""
    if not entries:
        return
    table = Table(title=title, title_justify="left")
    for heading in columns:
        justify = "right" if heading in ("count", "bits", "size") else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    for entry in entries:
        table.add_row(*(escape(str(cell(entry))) for cell in columns.values()))
    console.print(table)


def _print_tables(console: Console, summary: dict[str, Any]) -> None:
    classes = summary["classes"]
    name = {"module": lambda e: e["name"], "count": lambda e: e["count"]}
    matrix = {"k x n": lambda e: "" if e["k"] is None else f"{e['k']} x {e['n']}"}
    size = {"size": lambda e: _size(e["bytes"])}
    quantised = {
        "kind": lambda e: e["kind"],
        "bits": lambda e: f"{e['bits']:g}",
        "codebook": lambda e: e["codebook"],
    }
    _class_table(
        console,
        "Quantised",
        [e for e in classes if e["kind"] != "plain"],
        name | quantised | matrix | {"padding": _padding} | size,
    )
    _class_table(
        console,
        "Not quantised",
        [e for e in classes if e["kind"] == "plain"],
        name | {"dtype": lambda e: e["dtype"]} | matrix | size,
    )

    total = sum(summary["bits_histogram"].values())
    rates = Table(title="Bits per weight", title_justify="left")
    for column in ("bits", "weights", "share"):
        rates.add_column(column, justify="right")
    for bits, weights in summary["bits_histogram"].items():
        rates.add_row(bits, f"{weights:,}", f"{weights / total:.1%}")
    if rates.row_count:
        console.print(rates)

    average = summary["average_bits"]
    files = summary["files"]
    console.print(
        f"{_size(summary['bytes'])} ({summary['bytes']:,} bytes) in {summary['tensors']} tensors, "
        f"{len(files)} file{'s' if len(files) > 1 else ''}; {summary['weights']:,} weights"
    )
    if average["exl3"] is not None:
        console.print(
            f"average {average['exl3']:.3f} bits over the EXL3 weights, "
            f"{average['all']:.3f} over everything"
        )
    for warning in summary["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(warning)}")


def main(
    source: Annotated[
        str, typer.Argument(metavar="DIR", help="Checkpoint folder, or owner/name on the Hub.")
    ],
    revision: Annotated[
        str | None, typer.Option(help="Commit or tag of a Hub repository.", metavar="R")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, help="Also check that N ranks can share it.", metavar="N")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what an EXL3 checkpoint holds, from its safetensors headers alone."""
    try:
        checkpoint = read_checkpoint(source, revision)
        if tp is not None:
            check_tensor_parallel(checkpoint, tp)
    except (CheckpointError, ShardingError) as error:
        print(f"refused: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    summary = summarise(checkpoint)
    if tp is not None:
        summary["tensor_parallel_checked"] = tp
    if as_json:
        print(json.dumps(summary))
        return
    console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)
    _print_tables(console, summary)
    if tp is not None:
        console.print(f"tensor parallel size {tp}: every layer can be divided")


if __name__ == "__main__":
    typer.run(main)
