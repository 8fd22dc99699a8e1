"""Reads `nvidia-smi topo -m` and `topo -p2p` as people and drivers really hand them over.

Captures lose their leading tab, keep ANSI codes, glue header names or cells together, wrap, stop in
the middle, or come from containers that see no affinity. A row that does not add up is marked and
not guessed at. Standard library only.
"""

from __future__ import annotations

import re

from . import cpus as cpu_lists

# Order of closeness; a smaller number is a closer pair. SOC is what old drivers call SYS.
LINK_ORDER = {"NV": 0, "PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5}
COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")

# Both the real escape and one whose first byte a terminal or a paste has eaten.
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\[(?:0|1|4|24)m")
_NAME = r"(?:GPU\d+|NIC\d+|mlx\d+_\d+|[a-z]+\d*_\d+)"
_LABEL = re.compile(rf"\s*({_NAME})(?=\s|$)")
_LINK = re.compile(r"\s*(NV\d+|NODE|PIX|PXB|PHB|SYS|SOC|X)")
_LEGEND_NIC = re.compile(r"\s*(NIC\d+)\s*:\s*(\S+)\s*$")


def clean(text: str) -> list[str]:
    """Lines without ANSI codes and carriage returns."""
    return [_ANSI.sub("", line).replace("\r", "").rstrip() for line in text.split("\n")]


def parse(text: str, online: str | None = None) -> dict:
    """The table of `nvidia-smi topo -m`.

    {"devices": [name], "columns": [name], "rows": {device: row}, "nics": {NIC0: interface},
    "missing": [GPU without a row], "warnings": [text]}; a row is {"links": {device: link}, "cpus",
    "nodes", "memory_node"}. `links` is empty where the row's cells do not match the header. `cpus`
    is the printed list, shown to people and never used as a cpuset: the driver cuts it at an
    offline CPU. `nodes` is the printed node list as numbers, None where it is blank, N/A or not to
    be trusted. `online` (a kernel list) lets a list that names impossible CPUs be refused.
    """
    lines = clean(text)
    at, header = _header(lines)
    if header is None:
        return _empty(["no line of the table begins with GPU0"])
    left, _, _right = header.partition("CPU Affinity")
    devices = re.findall(_NAME, left)
    columns = [name for name in COLUMNS if name in header]
    known = None if online is None else set(cpu_lists.parse_list(online))
    rows: dict[str, dict] = {}
    nics: dict[str, str] = {}
    warnings: list[str] = []
    in_table = True
    for line in lines[at + 1 :]:
        if "Legend" in line:
            in_table = False
        if not in_table:
            match = _LEGEND_NIC.match(line)
            if match:
                nics[match.group(1)] = match.group(2)
            continue
        label = _LABEL.match(line)
        if label is None or label.group(1) not in devices:
            continue
        name = label.group(1)
        links, rest = _links(line[label.end() :], len(devices))
        if links is None:
            warnings.append(f"row {name} has not {len(devices)} links")
            rows[name] = {"links": {}, "cpus": None, "nodes": None, "memory_node": None}
            continue
        row = {"links": dict(zip(devices, links)), "cpus": None, "nodes": None, "memory_node": None}
        if name.startswith("GPU"):
            problem = _affinity(row, rest, columns, known)
            if problem:
                warnings.append(f"row {name}: {problem}")
        rows[name] = row
    missing = [d for d in devices if d.startswith("GPU") and d not in rows]
    if missing:
        warnings.append(f"rows missing: {','.join(missing)}")
    return {
        "devices": devices,
        "columns": columns,
        "rows": rows,
        "nics": nics,
        "missing": missing,
        "warnings": warnings,
    }


def groups(table: dict) -> list[list[int]]:
    """GPU numbers joined by anything closer than SYS, each group sorted.

    Enough to measure one GPU of each. On a host where every pair is SYS there are as many groups
    as GPUs although there may be two sockets, so many groups prove nothing.
    """
    numbers = gpu_numbers(table)
    group_of = {n: n for n in numbers}
    for one in numbers:
        for other in numbers:
            link = link_between(table, one, other)
            if one != other and link is not None and rank(link) < LINK_ORDER["SYS"]:
                old, new = group_of[other], group_of[one]
                group_of = {n: new if g == old else g for n, g in group_of.items()}
    found: dict[int, list[int]] = {}
    for number in numbers:
        found.setdefault(group_of[number], []).append(number)
    return sorted(found.values())


def gpu_numbers(table: dict) -> list[int]:
    """Numbers of the GPUs in the header."""
    return [int(d[3:]) for d in table["devices"] if d.startswith("GPU")]


def link_between(table: dict, one: int, other: int) -> str | None:
    """The link of a pair, from either row; None where no row tells."""
    for a, b in ((one, other), (other, one)):
        link = table["rows"].get(f"GPU{a}", {}).get("links", {}).get(f"GPU{b}")
        if link is not None:
            return link
    return None


def rank(link: str) -> int:
    """Place of a link in LINK_ORDER; NV4 and NV18 are both NVLink."""
    return LINK_ORDER["NV" if link.startswith("NV") else link]


def parse_p2p(text: str) -> dict[str, dict[str, str]]:
    """A matrix of `nvidia-smi topo -p2p`: {"GPU0": {"GPU1": "OK"}}, without the diagonal.

    OK says that the driver grants it, not that data arrives.
    """
    lines = clean(text)
    at = next((i for i, line in enumerate(lines) if line.strip().startswith("GPU0")), None)
    if at is None:
        return {}
    names = re.findall(r"GPU\d+", lines[at])
    out: dict[str, dict[str, str]] = {}
    for line in lines[at + 1 :]:
        words = line.split()
        if not words or words[0] not in names:
            if out:
                break
            continue
        if len(words) == len(names) + 1:
            pairs = zip(names, words[1:])
            out[words[0]] = {n: w for n, w in pairs if n != words[0]}
    return out


def parse_nearest(text: str) -> list[int] | None:
    """Nodes in the answer of `nvidia-smi topo -C -i N`; None where it names none."""
    for line in clean(text):
        match = re.search(r"NUMA ID.*?(?::|\bis\b)\s*:?\s*([0-9][0-9,\-]*)\s*$", line)
        if match:
            return cpu_lists.parse_list(match.group(1))
    return None


def _header(lines: list[str]) -> tuple[int, str | None]:
    for number, line in enumerate(lines):
        match = re.search(r"(?:^|\s)(GPU0(?:\s|$|GPU|NIC).*)", line)
        if match is None:
            continue
        before = match.group(1).partition("CPU Affinity")[0]
        if re.search(r"(?:^|\s)X(?:\s|$)", before) is None:
            return number, match.group(1)
    return 0, None


def _links(text: str, wanted: int) -> tuple[list[str] | None, str]:
    """The first `wanted` links of a row, glued ones taken apart, and what follows them."""
    links: list[str] = []
    at = 0
    while len(links) < wanted:
        match = _LINK.match(text, at)
        if match is None:
            return None, ""
        links.append("SYS" if match.group(1) == "SOC" else match.group(1))
        at = match.end()
    return (None, "") if _LINK.match(text, at) else (links, text[at:])


def _affinity(row: dict, rest: str, columns: list[str], online: set[int] | None) -> str | None:
    """Fill cpus, nodes and memory_node of a GPU row; the reason where the cells do not add up."""
    # `0N/A` is two cells whose tab was lost; `N/AN/A` too.
    fields = re.sub(r"(?<=[0-9A])N/A", " N/A", rest).split()
    if not columns or not fields:
        return None
    if len(fields) == 1 and len(columns) == 3 and fields[0] == "N/A":
        # A container without affinity prints only the last column.
        return None
    if len(fields) != len(columns):
        return f"{len(fields)} affinity cells for {len(columns)} columns"
    cells = dict(zip(columns, fields))
    cpus = _numbers(cells.get("CPU Affinity"))
    if cpus and online is not None and max(cpus) > max(online, default=0):
        return f"CPU list {cells['CPU Affinity']} names CPUs that do not exist"
    row["cpus"] = cells["CPU Affinity"] if cpus else None
    row["nodes"] = _numbers(cells.get("NUMA Affinity"))
    memory = _numbers(cells.get("GPU NUMA ID"))
    row["memory_node"] = memory[0] if memory and len(memory) == 1 else None
    return None


def _numbers(text: str | None) -> list[int] | None:
    if text is None or not re.fullmatch(r"[0-9][0-9,\-]*", text):
        return None
    try:
        return cpu_lists.parse_list(text)
    except ValueError:
        return None


def _empty(warnings: list[str]) -> dict:
    return {
        "devices": [],
        "columns": [],
        "rows": {},
        "nics": {},
        "missing": [],
        "warnings": warnings,
    }
