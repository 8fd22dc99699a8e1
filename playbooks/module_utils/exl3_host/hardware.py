"""Classes of hardware that recipes name: recipes/profiles/hardware.yaml, `exl3-hardware/1`.

A GPU profile of a recipe has the id of one of these classes, so that `rtx_pro_6000_x4` means the
same everywhere, and a recipe can be checked against figures of a machine that is not here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from .errors import HostError
from .schema import Closed, Evidence, GpuMatch, ProfileId
from .yamltext import dotted, read_document

SCHEMA = "exl3-hardware/1"
FILE = "profiles/hardware.yaml"


class Hardware(Closed):
    """One class: what recognises it, and what its memory is.

    memory_gib: one GPU, as its driver reports it (unified: MemTotal of a node). available_gib:
    what of unified memory was free on a host that serves nothing yet.
    """

    gpu: str = Field(min_length=1, description="name of the GPU, as people say it")
    match: GpuMatch
    memory_gib: float = Field(gt=0)
    available_gib: float | None = Field(None, gt=0)
    link: Literal["none", "pcie", "nvlink", "roce"] = "none"
    evidence: Evidence

    def differs(self, match: GpuMatch) -> str | None:
        """What contradicts this class in a recipe's match, or None."""
        for name in ("compute_capability", "gpus_per_node", "nodes", "unified_memory"):
            ours, theirs = getattr(self.match, name), getattr(match, name)
            if ours != theirs:
                return f"{name} is {theirs}, hardware.yaml says {ours}"
        if match.vram_gib_min is not None and match.vram_gib_min > self.memory_gib:
            return f"vram_gib_min is {match.vram_gib_min:g}, such a GPU has {self.memory_gib:g}"
        return None


class HardwareFile(Closed):
    """The whole file."""

    schema_: Literal["exl3-hardware/1"] = Field(alias="schema")
    profiles: dict[ProfileId, Hardware] = Field(min_length=1)


def load_hardware(folder: Path) -> dict[str, Hardware]:
    """The classes in folder/profiles/hardware.yaml, none without it. Raises HostError."""
    path = folder / FILE
    if not path.is_file():
        return {}
    document = read_document(path.read_text(encoding="utf-8"), str(path))
    traps = [f"{dotted(p)}: {t.message}" for p, t in document.traps.items()]
    if traps:
        raise HostError(f"{path}: {'; '.join(traps)}.", "Quote the word or write it plainly.")
    try:
        return HardwareFile.model_validate(document.data).profiles
    except ValidationError as error:
        lines = []
        for item in error.errors(include_url=False):
            line, column = document.place(tuple(item["loc"]))
            lines.append(f"{path}:{line}:{column}  {dotted(item['loc'])}  {item['msg']}")
        raise HostError("\n".join(lines), "Correct the file.") from None
