"""How a host's topology, findings and proofs look in a terminal. The only part here with rich."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import topo_matrix

_MARK = {"ok": "ok", "warning": "warn", "blocked": "BLOCKED", "failed": "FAILED", "unknown": "?"}


def show_topology(answer: dict, out: Console) -> None:
    """Nodes, GPUs with their node and who says so, links, and the pin for each number of ranks."""
    table = _table("node", "socket", "CPUs", "memory")
    for node in answer["nodes"]:
        memory = f"{node['memory_gib']:.0f} GiB" if node["memory_gib"] else "none"
        socket = "?" if node["socket"] is None else str(node["socket"])
        table.add_row(str(node["id"]), socket, node["cpus"] or "none", memory)
    out.print(table)
    if not answer["gpus"]:
        out.print("\nno GPU", highlight=False)
    else:
        out.print()
        _gpus(answer, out)
        _matrix(answer["matrix"], out)
        _pins(answer["pins"], out)
    for text in answer["warnings"]:
        out.print(Text(f"warning: {text}"), highlight=False)


def show_findings(verdict: dict, out: Console) -> None:
    """One line per check; the fix below what needs one."""
    table = _table("", "check", "found")
    for check in verdict["checks"]:
        text = check["found"]
        if check["fix"] and check["status"] != "ok":
            text += f"\n  {check['fix']}"
        table.add_row(_MARK[check["status"]], check["id"], Text(text))
    out.print(table)
    if verdict["ok"]:
        out.print("good: nothing keeps this host from serving", highlight=False)
    else:
        out.print(f"blocked: {', '.join(verdict['blocked'])}", highlight=False)


def show_proof(proof: dict, out: Console) -> None:
    """One line per check of a running server's pin."""
    table = _table("", "check", "found", "expected")
    for check in proof["checks"]:
        found = check["found"] + (f"\n  {check['fix']}" if check["fix"] else "")
        table.add_row(_MARK[check["status"]], check["id"], Text(found), Text(check["expected"]))
    out.print(table)
    verdict = "the pin holds" if proof["ok"] else "the pin does NOT hold"
    out.print(
        f"pid {proof['pid']}, {len(proof['processes'])} processes: {verdict}", highlight=False
    )


def _gpus(answer: dict, out: Console) -> None:
    table = _table("GPU", "PCI", "name", "node", "who says so", "why")
    for gpu in answer["gpus"]:
        if gpu["node"] is not None:
            node = str(gpu["node"])
        elif gpu["nodes"]:
            node = f"one of {','.join(str(n) for n in gpu['nodes'])}"
        else:
            node = "unknown"
        source = f"{gpu['source']} ({gpu['confidence']})"
        row = (str(gpu["index"]), gpu["bus_id"] or "?", gpu["name"] or "?", node, source)
        table.add_row(*row, Text(gpu["why"]))
    out.print(table)
    # The same advice for each GPU: once is enough.
    for fix in [gpu["fix"] for gpu in answer["gpus"] if gpu["fix"]][:1]:
        out.print(Text(fix), highlight=False)


def _matrix(table: dict | None, out: Console) -> None:
    if table is None or len(numbers := topo_matrix.gpu_numbers(table)) < 2:
        return
    links = _table("", *(f"GPU{n}" for n in numbers))
    for one in numbers:
        cells = (topo_matrix.link_between(table, one, other) or "?" for other in numbers)
        links.add_row(f"GPU{one}", *cells)
    out.print()
    out.print(links)


def _pins(pins: list[dict], out: Console) -> None:
    table = _table("ranks", "GPUs", "pin", "CPUs", "memory", "why")
    for pin in pins:
        if "error" in pin:
            table.add_row(str(pin["tp"]), "-", "refused", "-", "-", Text(pin["error"]))
            continue
        gpus = ",".join(str(n) for n in pin["indices"])
        mems = "free" if pin["mode"] == "none" or pin["mems"] is None else pin["mems"]
        row = (str(pin["tp"]), gpus, pin["mode"], pin["cpus"], mems)
        table.add_row(*row, Text(pin["reason"]))
    out.print()
    out.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
