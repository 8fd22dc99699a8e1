"""Which profile of a recipe is used on a host, and why the others are not."""

from __future__ import annotations

from typing import Any

from .errors import HostError, nearest
from .recipe import LoadedRecipe
from .schema import CpuProfile, GpuMatch, GpuProfile

GIB = 2**30


class Decisions:
    """Every choice with its reason, in the order they are made."""

    def __init__(self) -> None:
        self.entries: list[dict] = []

    def add(self, what: str, value: Any, why: str) -> None:
        self.entries.append({"what": what, "value": value, "why": why})

    def choose(self, what: str, *candidates: tuple[Any, str]) -> Any:
        """The first candidate that is not None, noted with its reason."""
        for value, why in candidates:
            if value is not None:
                self.add(what, value, why)
                return value
        raise AssertionError(f"{what} has no candidate")


def choose_profile(
    loaded: LoadedRecipe,
    facts: dict,
    wanted: str | None,
    log: Decisions | None = None,
    nodes: int = 1,
) -> tuple[str, CpuProfile]:
    """The profile to use: the one asked for, else the first in the recipe that fits this host.

    Raises HostError with one reason per profile that was dropped.
    """
    profiles = loaded.recipe.profiles
    if wanted is not None and wanted not in profiles:
        close = nearest(wanted, list(profiles))
        raise HostError(
            f"Recipe {loaded.recipe.name} has no profile '{wanted}'.",
            f"Did you mean '{close}'?" if close else f"It has: {', '.join(profiles)}.",
        )
    dropped: dict[str, str] = {}
    for name in [wanted] if wanted is not None else list(profiles):
        reason = _mismatch(profiles[name], facts, nodes)
        if reason is None:
            why = "asked for" if wanted else "the first profile of the recipe that fits this host"
            if dropped:
                why += "; dropped: " + "; ".join(f"{n}: {r}" for n, r in dropped.items())
            if log is not None:
                log.add("profile", name, why)
            return name, profiles[name]
        dropped[name] = reason
    lines = [f"  {name}: {reason}" for name, reason in dropped.items()]
    raise HostError(
        f"No profile of recipe {loaded.recipe.name} fits this host:\n" + "\n".join(lines),
        "Use another host, another recipe, or add a profile (docs/recipes.md).",
        dropped=dropped,
    )


def _mismatch(profile: CpuProfile | GpuProfile, facts: dict, nodes: int) -> str | None:
    if isinstance(profile, GpuProfile):
        return _gpu_mismatch(profile.match, facts, nodes)
    least = profile.match.memory_gib_min
    memory = facts["memory"]
    totals = [memory["total_bytes"], memory["cgroup_limit_bytes"]]
    known = [t for t in totals if t is not None]
    if known and min(known) / GIB < least:
        return f"needs a host with {least:g} GiB of memory, this one has {min(known) / GIB:.2f}"
    return None


def _gpu_mismatch(match: GpuMatch, facts: dict, nodes: int) -> str | None:
    """Why the GPUs of this host are not those of a profile, None where enough of them are."""
    if not facts["gpus"]:
        return f"needs {match.gpus_per_node} GPU(s), this host has none"
    if match.nodes != nodes:
        return f"is for {match.nodes} host(s), and {nodes} serve together here"
    dropped: dict[str, int] = {}
    fitting = 0
    for gpu in facts["gpus"]:
        reason = _gpu_differs(match, gpu)
        if reason is None:
            fitting += 1
        else:
            dropped[reason] = dropped.get(reason, 0) + 1
    if fitting >= match.gpus_per_node:
        return None
    why = "; ".join(f"{number} {reason}" for reason, number in dropped.items())
    needed = f"needs {match.gpus_per_node} GPU(s) of compute capability {match.compute_capability}"
    return f"{needed}, this host has {fitting}" + (f" ({why})" if why else "")


def _gpu_differs(match: GpuMatch, gpu: dict) -> str | None:
    found = gpu["compute_capability"]
    if found != match.compute_capability:
        return f"{gpu['name']} with {found or 'unknown'}"
    if match.gpu_name is not None and match.gpu_name not in gpu["name"]:
        return f"{gpu['name']}, not {match.gpu_name}"
    memory = gpu["memory_bytes"]
    least = 0.0 if match.unified_memory else match.vram_gib_min or 0.0
    if memory is not None and memory / GIB < least:
        return f"with {memory / GIB:.1f} GiB, less than {least:g}"
    return None
