"""`exl3ctl peers`: measure whether the GPUs of this host reach each other's memory, and decide."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import nccl, peers
from .errors import HostError

RanksOption = Annotated[
    int | None, typer.Option(min=1, max=16, help="Ranks of the server; default: one per GPU.")
]
ReportOption = Annotated[
    Path | None, typer.Option("--report", help="Judge this report instead of measuring.")
]
KeepFlag = Annotated[bool, typer.Option("--keep", help="Keep the given report in the store.")]
AgainFlag = Annotated[bool, typer.Option("--again", help="Measure even where a report is kept.")]
WantedOption = Annotated[str, typer.Option(help="verify, disable or force, as in a profile.")]
BackendOption = Annotated[
    str | None, typer.Option(help="nccl or gloo; default: nccl where torch sees GPUs.")
]


def work(
    ranks: int | None,
    report_file: Path | None,
    again: bool,
    wanted: str,
    backend: str | None,
    store: Path,
    venv: Path,
    checkout: Path | None,
    keep: bool = False,
) -> tuple[int, dict, Callable[[Console], None]]:
    """(exit code, the verdict with its settings, how to show it). Raises HostError."""
    kept = False
    if report_file is not None:
        report = _read(report_file)
        count = ranks or report["ranks"]
        if keep:
            peers.keep(store, report)
    else:
        if checkout is None:
            raise HostError("there is no checkout here.", "Run exl3ctl from a checkout.")
        count = ranks or _gpu_count()
        run = peers.run_program(venv / "bin" / "python", checkout)
        report, kept = peers.look(run, store, count, backend, again)
    mesh = _mesh(count) if report_file is None and backend != "gloo" else None
    verdict = peers.decide(report, count, wanted, mesh)
    settings = nccl.for_peers(verdict)
    result = {
        **verdict.as_dict(),
        "kept": kept,
        "key": peers.cache_key(report),
        "settings": [
            {"kind": one.kind, "name": one.name, "value": one.value, "reason": one.reason}
            for one in settings
        ],
        "report": report,
    }
    return 0, result, lambda out: _show(result, out)


def _gpu_count() -> int:
    from . import commands

    answer = commands.run_here(["nvidia-smi", "-L"])
    count = sum(line.startswith("GPU ") for line in answer.out.splitlines())
    if not count:
        raise HostError(
            f"no GPU answers here ({answer.error or 'nvidia-smi -L lists none'}).",
            "Say how many ranks to test on the CPU: exl3ctl peers --ranks 2 --backend gloo",
        )
    return count


def _mesh(count: int) -> bool | None:
    from . import commands, topo_matrix

    answer = commands.run_here(["nvidia-smi", "topo", "-m"])
    if not answer.ok:
        return None
    return peers.full_mesh(topo_matrix.parse(answer.out), list(range(count)))


def _read(file: Path) -> dict:
    try:
        report = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise HostError(
            f"the report {file} cannot be read: {error}.",
            "Make one with: bench/peer_access.py --ranks N --json FILE",
        ) from None
    if not isinstance(report, dict) or report.get("schema") != peers.SCHEMA:
        found = report.get("schema") if isinstance(report, dict) else type(report).__name__
        raise HostError(
            f"{file} is no report on peer access: schema is {found!r}, expected '{peers.SCHEMA}'.",
            "Make one with: bench/peer_access.py --ranks N --json FILE",
        )
    return report


def _show(result: dict, out: Console) -> None:
    layers = result["layers"]
    out.print(
        f"peer access at {result['ranks']} ranks: [bold]{result['verdict']}[/bold]"
        f" ({'kept' if result['kept'] else 'measured now'})",
        highlight=False,
    )
    steps = ", ".join(f"{name} {answer}" for name, answer in layers.items())
    out.print(f"  {steps}", f"  {result['reason']}", sep="\n", highlight=False, markup=False)
    for one in result["report"]["collectives"]:
        sizes = ", ".join(f"{row['bytes'] >> 10} KiB {row['us']:.0f} us" for row in one["sizes"])
        line = f"  all-reduce, peer access {one['peer_access']}: {one['state']}  {sizes}"
        out.print(line, highlight=False, markup=False)
    custom = "on" if result["custom_all_reduce"] else "off"
    line = f"  vLLM's own all-reduce: {custom}; {result['custom_reason']}"
    out.print(line, highlight=False, markup=False)
    for warning in result["warnings"]:
        out.print(f"WARN {warning}", highlight=False, markup=False)
    if result["settings"]:
        table = Table("set", "to", "because", box=None, pad_edge=False)
        for one in result["settings"]:
            value = one["value"]
            text = value if isinstance(value, str) else json.dumps(value)
            name = one["name"] if one["kind"] == "env" else f"--{one['name']}"
            table.add_row(name, text, one["reason"])
        out.print(table)
