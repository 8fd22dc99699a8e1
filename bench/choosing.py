"""What every calibration shares: which of the measured plans is taken, and how a run goes on.

A plan is anything with a `form`; the built-in one has the benefit of the doubt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from exl3_plugin import ops

HYSTERESIS = 1.02
FAST_PENALTY = 1.05
SCREEN_REPLAYS = 3
FINAL_REPLAYS = 11
FINALISTS_WITHIN = 1.06
"""Plans within this factor of the fastest of the screening are measured again, longer."""

P = TypeVar("P")
Read = Callable[[P, int, bool], dict[str, Any] | None]
"""(plan, replays, whether it has to be proven first) to a reading, None where it cannot run."""


def cost(plan: Any, us: float) -> float:
    """Time of a plan with the price of a fast form added."""
    return us * (FAST_PENALTY if plan.form == ops.FAST else 1)


def choose(times: dict[P, float], default: P) -> P:
    """The plan to use, from microseconds; ties go to the earlier one, doubt to the built-in one."""
    best = min(times, key=lambda plan: cost(plan, times[plan]))
    if default in times and cost(default, times[default]) <= HYSTERESIS * cost(best, times[best]):
        return default
    return best


def finalists(times: dict[P, float], default: P) -> list[P]:
    """Plans to measure again: the built-in one and those close to the fastest."""
    least = min(cost(plan, us) for plan, us in times.items())
    return [
        plan
        for plan, us in times.items()
        if plan == default or cost(plan, us) <= FINALISTS_WITHIN * least
    ]


def measure(
    plans: Iterable[P], default: P, with_blocks: Callable[[P], list[P]], read: Read
) -> list[dict[str, Any]]:
    """Screens the plans of one point, then other blocks for the best, then the finalists, longer.

    Returns:
        `plan`, `us`, `spread`, `default`, `chosen` of every plan that runs here; empty if none.
    """
    readings: dict[P, dict[str, Any]] = {}

    def screen(some: Iterable[P]) -> None:
        for plan in some:
            reading = read(plan, SCREEN_REPLAYS, True)
            if reading is not None:
                readings[plan] = reading

    def times() -> dict[P, float]:
        return {plan: reading["us"] for plan, reading in readings.items()}

    screen(plans)
    if not readings:
        return []
    screen(plan for plan in with_blocks(choose(times(), default)) if plan not in readings)
    final = {}
    for plan in finalists(times(), default):
        reading = read(plan, FINAL_REPLAYS, False)
        if reading is not None:
            readings[plan] = reading
            final[plan] = reading["us"]
    chosen = choose(final or times(), default)
    return [
        {
            "plan": list(plan),
            "us": reading["us"],
            "spread": reading["spread"],
            "default": plan == default,
            "chosen": plan == chosen,
        }
        for plan, reading in readings.items()
    ]


def choices(
    measured: Iterable[dict[str, Any]], number: str, plan: type[P]
) -> list[tuple[int, P, bool]]:
    """(rows or tokens, plan, whether it is the built-in one) of the chosen, numbers ascending."""
    chosen = sorted((item for item in measured if item["chosen"]), key=lambda item: item[number])
    return [(item[number], plan(*item["plan"]), item["default"]) for item in chosen]


def gain_lines(
    measured: Iterable[dict[str, Any]],
    key: tuple[str, ...],
    describe: Callable[..., str],
    count: int = 10,
) -> list[str]:
    """The largest gains over the built-in plans, in words.

    Args:
        measured: what `measure` returned, with the fields of `key` added.
        key: fields that name a point.
        describe: words for the values of these fields.
        count: how many gains are told.
    """
    points: dict[tuple[int, ...], dict[str, dict[str, Any]]] = {}
    for item in measured:
        for name in ("default", "chosen"):
            if item[name]:
                points.setdefault(tuple(item[field] for field in key), {})[name] = item
    gains = sorted(
        (
            (pair["default"]["us"] / pair["chosen"]["us"], point, pair)
            for point, pair in points.items()
            if len(pair) == 2 and not pair["chosen"]["default"]
        ),
        key=lambda entry: (-entry[0], entry[1]),
    )
    lines = [f"{len(gains)} of {len(points)} points changed"]
    for gain, point, pair in gains[:count]:
        lines.append(
            f"{gain:.2f}x  {describe(*point)}: "
            f"{pair['default']['plan']} {pair['default']['us']:.1f} us -> "
            f"{pair['chosen']['plan']} {pair['chosen']['us']:.1f} us"
        )
    return lines


class Partial:
    """Results on the way: a file of JSON lines whose first line says what they belong to."""

    def __init__(self, path: Path, identity: dict[str, Any]):
        """Opens the file; results of another identity are dropped."""
        self.path = path
        self.done: dict[tuple[int, ...], dict[str, Any]] = {}
        lines = path.read_text().splitlines() if path.is_file() else []
        try:
            entries = [json.loads(line) for line in lines]
        except json.JSONDecodeError:
            # The last line of an interrupted run may be half written.
            entries = [json.loads(line) for line in lines[:-1]]
        self.resumed = bool(entries) and entries[0] == identity
        if self.resumed:
            self.done = {tuple(entry["layer"]): entry for entry in entries[1:]}
        with path.open("w") as out:
            for entry in [identity, *self.done.values()]:
                print(json.dumps(entry), file=out)

    def add(self, entry: dict[str, Any]) -> None:
        """Keeps the result of one layer."""
        self.done[tuple(entry["layer"])] = entry
        with self.path.open("a") as out:
            print(json.dumps(entry), file=out)
