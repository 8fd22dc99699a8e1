"""How facts, plans and verdicts look in a terminal."""

from __future__ import annotations

import shlex
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .errors import HostError, count
from .facts import TOOLS
from .redact import redact_text


def stdout() -> Console:
    """A terminal keeps its width; a pipe gets wide lines, so that tables are not folded."""
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)


def stderr() -> Console:
    """Errors and warnings; lines are never folded."""
    return Console(stderr=True, soft_wrap=True)


def refusal(problem: HostError) -> None:
    """Why something is refused, on stderr and without secrets."""
    stderr().print(Text(redact_text(str(problem))), highlight=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _rows(out: Console, rows: list[tuple[str, str]]) -> None:
    table = _table("", "")
    for name, value in rows:
        table.add_row(name, Text(value))
    out.print(table)


def _gib(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 2**30:.2f} GiB"


def show_facts(found: dict, out: Console) -> None:
    """A host on one screen."""
    cpus, memory, tools = found["cpus"], found["memory"], found["tools"]
    rows = [
        ("system", f"{found['os']['id']} {found['os']['version']}, {found['arch']}"),
        (
            "CPU",
            f"{cpus['model']}, {count(cpus['packages'], 'package')}, "
            f"{count(cpus['cores'], 'core')}, {count(cpus['threads_per_core'], 'thread')} per core",
        ),
        ("CPUs", f"online {cpus['online']}, allowed {cpus['affinity']}, cgroup {cpus['cgroup']}"),
        ("features", " ".join(cpus["flags"]) or "none read"),
    ]
    for node in found["numa"]["nodes"]:
        sizes = f"{_gib(node['total_bytes'])}, {_gib(node['available_bytes'])} available"
        rows.append((f"node {node['id']}", f"CPUs {node['cpus'] or 'none'}, {sizes}"))
    limit = memory["cgroup_limit_bytes"]
    limit_text = "no cgroup limit" if limit is None else f"cgroup limit {_gib(limit)}"
    sizes = f"{_gib(memory['total_bytes'])}, {_gib(memory['available_bytes'])} available"
    rows.append(("memory", f"{sizes}, {limit_text}"))
    paths = [f"{name} {tools[name] or 'absent'}" for name in TOOLS]
    running = "runs this host" if tools["systemd_running"] else "does not run this host"
    rows.append(("tools", ", ".join([*paths, f"systemd {running}"])))
    names = [f"{g['name']} ({g['compute_capability']})" for g in found["gpus"]]
    rows.append(("GPUs", ", ".join(names) or "none"))
    if found["disk"]:
        rows.append(
            ("disk", f"{_gib(found['disk']['free_bytes'])} free at {found['disk']['path']}")
        )
    _rows(out, rows)


def show_plan(plan: dict, explain: bool, out: Console) -> None:
    """A plan in a few lines; with `explain` every reason and the command that would be run."""
    serve, pin, model = plan["serve"], plan["pin"], plan["model"]
    origin = {"package": "name", "path": "path", "hub": "repo"}[model["source"]["kind"]]
    _rows(
        out,
        [
            ("instance", f"{plan['instance']} (recipe {plan['recipe']['name']})"),
            ("profile", plan["profile"]),
            ("model", f"{model['source'][origin]} -> {model['dir']} ({model['prepare']})"),
            ("serves", f"{model['served_name']} at {serve['url']}"),
            ("pin", f"{pin['mode']}: CPUs {pin['cpus']}, mems {pin['mems']}; {pin['reason']}"),
            ("config", plan["config_hash"]),
        ],
    )
    show_fit(plan["fit"], out)
    if explain:
        table = _table("decision", "value", "why")
        for entry in plan["decisions"]:
            table.add_row(entry["what"], Text(str(entry["value"])), Text(entry["why"]))
        out.print()
        out.print(table)
        out.print()
        out.print(Text(command_line(plan)))
    for warning in plan["warnings"]:
        stderr().print(Text(f"warning: {warning}"), highlight=False)


def command_line(plan: dict) -> str:
    """The start of the server as a person would type it, one setting per line."""
    lines = [f"{name}={shlex.quote(value)}" for name, value in plan["serve"]["env"].items()]
    words = [*plan["pin"]["numactl"], *plan["serve"]["argv"]]
    for word in words:
        starts_line = word.startswith("--") or word == words[0]
        if starts_line:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n  ".join(lines)


def show_fit(verdict: dict, out: Console) -> None:
    """The memory verdict; a refusal goes to stderr with what would fit."""
    for line in verdict["lines"]:
        out.print(Text(f"fit  {line}"), highlight=False)
    have = verdict["available_gib"]
    figures = f"{verdict['needed_gib']:.2f} GiB needed"
    if have is not None:
        figures += f", {have:.2f} GiB available"
    if verdict["ok"]:
        out.print(f"fit  ok: {figures}", highlight=False)
        return
    err = stderr()
    err.print(f"fit  refused: {figures}", highlight=False)
    for reason in verdict["reasons"]:
        err.print(Text(f"     because {reason}"), highlight=False)
    for suggestion in verdict["would_fit"]:
        err.print(Text(f"     try: {suggestion}"), highlight=False)
