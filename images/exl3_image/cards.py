"""The GPUs that this container sees, from nvidia-smi, which the container toolkit mounts."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

FIELDS = ("index", "uuid", "name", "compute_cap", "driver_version", "memory.total")


@dataclass(frozen=True)
class Card:
    """One GPU. `memory_mib` is None where the driver does not say (GB10 shares the host's)."""

    index: int
    uuid: str
    name: str
    capability: int
    driver: str
    memory_mib: int | None

    @property
    def kind(self) -> tuple:
        """What has to be equal for two cards to share a model. Memory counts in whole GiB."""
        memory = None if self.memory_mib is None else round(self.memory_mib / 1024)
        return (self.name, self.capability, memory)

    @property
    def sm(self) -> str:
        return f"{self.capability // 10}.{self.capability % 10}"


@dataclass(frozen=True)
class Sight:
    """Cards, or why there are none."""

    cards: tuple[Card, ...]
    why_none: str = ""


def look() -> Sight:
    """Ask nvidia-smi. A card whose compute capability cannot be read is not counted."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Sight((), "no nvidia-smi in the container")
    command = [program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Sight((), f"nvidia-smi does not answer ({type(error).__name__})")
    cards = tuple(card for line in done.stdout.splitlines() if (card := _card(line)) is not None)
    if cards:
        return Sight(cards)
    said = (done.stdout + done.stderr).strip().splitlines()
    return Sight((), f"nvidia-smi says: {said[0].strip()}" if said else "nvidia-smi lists no GPU")


def _card(line: str) -> Card | None:
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != len(FIELDS):
        return None
    index, uuid, name, capability, driver, memory = parts
    major, _, minor = capability.partition(".")
    if not (index.isdigit() and major.isdigit() and minor.isdigit()):
        return None
    known = int(memory) if memory.isdigit() else None
    return Card(int(index), uuid, name, 10 * int(major) + int(minor), driver, known)


def version(text: str) -> tuple[int, ...]:
    """A driver version as numbers; parts that are none count as 0."""
    return tuple(int(part) if part.isdigit() else 0 for part in text.split("."))
