"""What the exl3ctl commands share: how a result is printed, where checkout and store are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Console

from . import show
from .errors import HostError
from .redact import redact

EXIT_GOOD, EXIT_REFUSED = 0, 1

# What a command does: its exit code, its result as JSON, and how that looks in a terminal.
Work = Callable[[], tuple[int, dict, Callable[[Console], None]]]


def run(as_json: bool, work: Work) -> None:
    """Do the work, print its result one way or the other, and leave with its exit code."""
    try:
        code, result, present = work()
    except HostError as error:
        if as_json:
            print(json.dumps(redact(error.as_dict()), indent=2))
        else:
            show.refusal(error)
        raise typer.Exit(EXIT_REFUSED) from None
    if as_json:
        # Not redacted: a plan is applied as it stands, and no secret can get into one.
        print(json.dumps(result, indent=2))
    else:
        present(show.stdout())
    raise typer.Exit(code)


def checkout() -> Path | None:
    """The checkout that this package was started from, or None when it is installed."""
    for folder in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (folder / "recipes").is_dir() and (folder / "playbooks").is_dir():
            return folder
    return None


def store_dir(given: Path | None) -> Path:
    """The store that a command was given, else .exl3 of the checkout, else one of this user."""
    if given is not None:
        return given.expanduser().absolute()
    root = checkout()
    return root / ".exl3" if root is not None else Path.home() / ".local/share/exl3"
