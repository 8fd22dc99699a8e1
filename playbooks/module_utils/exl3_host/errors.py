"""What the host logic says when it refuses: what was found, where, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Problem:
    """One mistake in a recipe file.

    `line` and `column` count from 1; 0 means that no position is known. `path` names the place
    inside the document (`profiles.cpu.memory`), `fix` is the sentence that says what to do.
    """

    file: str
    line: int
    column: int
    path: str
    message: str
    fix: str

    def text(self, where_width: int = 0, path_width: int = 0) -> str:
        """One line for a terminal, padded so that several problems form columns."""
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        sentence = f"{self.message} {self.fix}".strip()
        return f"{where:<{where_width}}  {self.path:<{path_width}}  {sentence}"


class HostError(Exception):
    """Something asked for is refused; nothing was changed.

    `message` says what was found and what was expected, `fix` what to do, `details` holds the
    figures for a program that reads JSON.
    """

    def __init__(self, message: str, fix: str = "", **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.details = details

    def __str__(self) -> str:
        return f"{self.message}\n{self.fix}" if self.fix else self.message

    def as_dict(self) -> dict:
        """The error as one JSON object."""
        return {"error": self.message, "fix": self.fix, **self.details}


class RecipeError(HostError):
    """A recipe file with one or more problems, all of them found in one reading."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = sorted(problems, key=lambda p: (p.file, p.line, p.column, p.path))
        wheres = [f"{p.file}:{p.line}:{p.column}" if p.line else p.file for p in self.problems]
        where_width = max(len(w) for w in wheres)
        path_width = min(36, max(len(p.path) for p in self.problems))
        lines = [p.text(where_width, path_width) for p in self.problems]
        super().__init__("\n".join(lines), problems=[asdict(p) for p in self.problems])

    def as_dict(self) -> dict:
        return {"error": f"{count(len(self.problems), 'error')} in the recipe", **self.details}


def count(number: int, noun: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def nearest(word: str, known: list[str]) -> str | None:
    """The known word that `word` was most likely meant to be, or None when none is close."""
    import difflib

    found = difflib.get_close_matches(word.lower().replace("_", "-"), known, n=1, cutoff=0.6)
    if not found:
        found = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    return found[0] if found else None
