"""Which way of pinning is fastest for one instance, found by trying.

Every way is planned, started as often as asked (placement is decided at each start, so one start
proves nothing), and measured with the same load. The winner is written down in the store, where the
next plan of the instance finds it; what an inventory sets itself wins over it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from . import load, service
from .errors import HostError
from .spec import Paths, endpoint_of, read_json, write_json

SCHEMA = "exl3-ab-pin/1"
MODES = ("none", "container", "per_rank")
# A gain below this is noise, and the mildest mode is kept.
LEAST_GAIN = 0.02


def choice_file(store: Path, instance: str) -> Path:
    return store / "choices" / f"{instance}.json"


def chosen(store: Path, instance: str) -> str | None:
    """The pinning mode that an earlier comparison found best, None without one."""
    return (read_json(choice_file(store, instance)) or {}).get("mode")


def compare(
    planner: Callable[[str], dict],
    store: Path,
    instance: str,
    options: service.Options,
    starts: int,
    shape: load.Shape,
    modes: tuple[str, ...] = MODES,
    tell: Callable[[str], None] = lambda text: None,
) -> dict:
    """Try the modes and keep the best; {mode, rows, skipped, why}. Raises HostError where none ran.

    `planner` makes the plan of a mode and raises HostError where the host cannot have it. Modes
    whose plans are the same server are tried once. In the end the best one serves.
    """
    rows, skipped, seen = [], {}, {}
    for mode in modes:
        try:
            plan = planner(mode)
        except HostError as error:
            skipped[mode] = error.message
            continue
        same = seen.get(plan["config_hash"])
        if same is not None:
            skipped[mode] = f"the same server as with {same}"
            continue
        seen[plan["config_hash"]] = mode
        rows.append({"mode": mode, "plan": plan, "runs": []})
    for row in rows:
        for start in range(1, starts + 1):
            row["runs"].append(_one_start(row["plan"], store, options, shape))
            speed = row["runs"][-1]["output_tokens_per_s"]
            tell(f"{row['mode']} start {start} of {starts}: {speed} tokens/s")
        row["tokens_per_s"] = median(run["output_tokens_per_s"] for run in row["runs"])
    if not rows:
        raise HostError(f"no way of pinning can be had for {instance!r}: {skipped}.")
    best, why = pick({row["mode"]: row["tokens_per_s"] for row in rows})
    winner = next(row for row in rows if row["mode"] == best)
    service.ensure(winner["plan"], store, options)
    result = {
        "schema": SCHEMA,
        "instance": instance,
        "mode": best,
        "why": why,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "starts": starts,
        "rows": [{key: row[key] for key in ("mode", "tokens_per_s", "runs")} for row in rows],
        "skipped": skipped,
    }
    write_json(choice_file(store, instance), result)
    return result


def pick(speeds: dict[str, float]) -> tuple[str, str]:
    """(mode, reason): the fastest, or the first of those that are as fast within LEAST_GAIN."""
    fastest = max(speeds.values())
    for mode, speed in speeds.items():
        if speed * (1 + LEAST_GAIN) >= fastest:
            others = ", ".join(f"{m} {s:.2f}" for m, s in speeds.items() if m != mode) or "none"
            return mode, f"{speed:.2f} tokens/s; others: {others}; below {LEAST_GAIN:.0%} is noise"
    raise AssertionError("the fastest is within reach of itself")


def _one_start(plan: dict, store: Path, options: service.Options, shape: load.Shape) -> dict:
    paths = Paths(store, plan["instance"])
    # A start, even where this very server runs: where its pages lie is decided once per start.
    service.halt(paths)
    service.ensure(plan, store, options)
    endpoint = endpoint_of(read_json(paths.spec))
    warm = load.Shape(2, 1, shape.input_words, min(8, shape.output_tokens), shape.seed + 999)
    load.measure(endpoint, warm)
    return load.measure(endpoint, shape).as_dict()
