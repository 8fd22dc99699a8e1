"""What runs first in a container: commands, checks before anything loads, and the init process.

Standard library only, except where a command needs vLLM or the host logic: those are imported when
that command runs, so that a refusal takes a fraction of a second.
"""

from __future__ import annotations

import os
from pathlib import Path

HOME = Path(os.environ.get("EXL3_IMAGE_HOME", "/opt/exl3"))
"""Where the image keeps its software and what it knows about itself."""


class Refusal(Exception):
    """What was asked for cannot be done: one line with what was found and what to do."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


def cache_root() -> Path:
    """The writable place for compiled code."""
    return Path(os.environ.get("EXL3_CACHE", "/cache"))


def models_root() -> Path:
    """Where the model store's `models` folder is mounted, read-only."""
    return Path(os.environ.get("EXL3_MODELS", "/models"))


def endpoint_file() -> Path:
    """Where the entry point tells the health check what to ask."""
    return Path(os.environ.get("TMPDIR", "/tmp")) / "exl3-endpoint.json"
