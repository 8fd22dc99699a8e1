"""What the image knows about itself: build.json, args.json, models.json of /opt/exl3."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any

from exl3_image import HOME, Refusal


@dataclass(frozen=True)
class Code:
    """Machine code for one compute capability (times ten), or PTX that later ones translate."""

    capability: int
    is_ptx: bool


def architectures(text: str) -> list[Code]:
    """What "90,120+PTX" stands for; "none" is an empty list."""
    found = []
    for entry in re.split("[,;]", text):
        match = re.fullmatch(r"\s*(\d{2,3})(\+PTX)?\s*", entry)
        if match:
            found.append(Code(int(match[1]), False))
            if match[2]:
                found.append(Code(int(match[1]), True))
    return found


def runs_on(codes: list[Code], capability: int) -> bool:
    """Whether any code runs on a card: own and earlier minors as cubin, any earlier as PTX."""
    return any(
        code.capability <= capability and (code.is_ptx or code.capability // 10 == capability // 10)
        for code in codes
    )


def load(name: str) -> Any:
    """One of the image's own JSON files. Raises Refusal where it is missing."""
    try:
        return json.loads((HOME / name).read_text())
    except (OSError, ValueError) as error:
        raise Refusal(
            f"{HOME / name} cannot be read ({error}): this image was not built whole."
        ) from None


def build() -> dict:
    """build.json (generate.py tells its shape) and the commit, which is a setting of the image."""
    return {**load("build.json"), "revision": os.environ.get("EXL3_REVISION", "unknown")}


def line(facts: dict) -> str:
    """The image in a few words."""
    cuda = (
        "" if facts["flavour"] == "cpu" else f", CUDA {facts['cuda']}, sm {facts['architectures']}"
    )
    return (
        f"exl3-fleet {facts['plugin']} ({facts['flavour']} image, vLLM {facts['vllm']}{cuda}, "
        f"{facts['revision'][:12]})"
    )


def image_for(capability: int, images: dict[str, str]) -> str | None:
    """The flavour whose kernels are meant for a card, from the architectures of all images."""
    exact = [n for n, text in images.items() if _holds(text, capability)]
    loose = [n for n, text in images.items() if runs_on(architectures(text), capability)]
    return next(iter([*exact, *loose]), None)


def _holds(text: str, capability: int) -> bool:
    return any(code.capability == capability for code in architectures(text))
