"""Loads a recipe file; every mistake in it is reported at once with line, column and fix."""

from __future__ import annotations

import hashlib
import types
import typing
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Literal, Union

from pydantic import BaseModel, ValidationError

from .errors import HostError, Problem, RecipeError, count, nearest
from .schema import PROFILE_TAGS, Profile, Recipe, profile_tag
from .yamltext import Document, Path, Trap, dotted, read_document

# Words that a person who wrote `off` or `on` most likely meant, in order of preference.
_NEGATIVE = ("disable", "none", "skip", "drop")
_POSITIVE = ("force", "require", "keep", "auto")


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that passed every check, with the file it came from."""

    recipe: Recipe
    path: FilePath
    sha256: str

    @property
    def folder(self) -> FilePath:
        """Relative paths in a recipe start here."""
        return self.path.resolve().parent


def load_recipe(path: str | FilePath) -> LoadedRecipe:
    """Read and check one recipe.

    Raises RecipeError with all problems of the file, HostError where there is no such file.
    """
    file = FilePath(path)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise HostError(
            f"Recipe {path} cannot be read: {error.strerror}.",
            "Give the path of a recipe file, or the name of one in recipes/.",
        ) from None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise RecipeError(
            [Problem(str(path), line, 1, "", "The file is not UTF-8.", "Save it as UTF-8.")]
        ) from None
    recipe = parse_recipe(text, str(path), expected_name=file.stem)
    return LoadedRecipe(recipe, file, hashlib.sha256(content).hexdigest())


def parse_recipe(text: str, file: str, expected_name: str | None = None) -> Recipe:
    """Check the text of a recipe; `file` is only the name used in messages."""
    document = read_document(text, file)
    if not isinstance(document.data, dict):
        raise RecipeError(
            [Problem(file, 1, 1, "", "A map is expected.", "See docs/recipes.md for a recipe.")]
        )
    problems = list(document.problems)
    problems += [_trap_problem(document, path, trap) for path, trap in document.traps.items()]
    recipe = None
    try:
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        found = [
            (_document_path(item["loc"], document.data), item)
            for item in error.errors(include_url=False)
        ]
        # A misspelt key is one mistake, not also a missing one.
        meant = {
            (*path[:-1], _closest_key(path, document.data))
            for path, item in found
            if item["type"] == "extra_forbidden"
        }
        for path, item in found:
            if path not in document.traps and not (item["type"] == "missing" and path in meant):
                problems.append(_problem(document, path, item))
    name = document.data.get("name")
    if expected_name is not None and isinstance(name, str) and name != expected_name:
        line, column = document.place(("name",))
        problems.append(
            Problem(
                file,
                line,
                column,
                "name",
                f"'{name}' differs from the file name '{expected_name}'.",
                f"Write name: {expected_name}, or rename the file to {name}.yaml.",
            )
        )
    if problems or recipe is None:
        raise RecipeError(problems)
    return recipe


def find_recipe(wanted: str, folders: list[FilePath]) -> FilePath:
    """The file of a recipe that is given as a path or by name. Raises HostError if there is none.

    A bare name is looked up as `<name>.yaml` in each folder.
    """
    direct = FilePath(wanted)
    if direct.is_file():
        return direct
    names: list[str] = []
    if "/" not in wanted:
        stem = wanted.removesuffix(".yaml")
        for folder in folders:
            candidate = folder / f"{stem}.yaml"
            if candidate.is_file():
                return candidate
            names += sorted(p.stem for p in folder.glob("*.yaml"))
        close = nearest(stem, names)
        hint = f"Did you mean '{close}'?" if close else f"Known recipes: {', '.join(names)}."
        raise HostError(f"There is no recipe '{wanted}'.", hint if names else "")
    raise HostError(
        f"There is no recipe file {wanted}.", "Give a path, or the name of a recipe in recipes/."
    )


def _document_path(loc: tuple[Any, ...], data: Any) -> Path:
    """pydantic's location without the union tags and the mark of a key."""
    path: list[Any] = []
    here = data
    for part in loc:
        if part == "[key]":
            break
        if part in PROFILE_TAGS and not (isinstance(here, dict) and part in here):
            continue
        path.append(part)
        try:
            here = here[part]
        except (KeyError, IndexError, TypeError):
            here = None
    return tuple(path)


def expected_type(path: Path, data: Any) -> Any:
    """The annotation that the recipe models have for a place in the document, or None."""
    kind: Any = Recipe
    for part in path:
        kind = _bare(kind)
        data = data.get(part) if isinstance(data, dict) else None
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            fields = {f.alias or n: f.annotation for n, f in kind.model_fields.items()}
            kind = fields.get(part)
        elif typing.get_origin(kind) in (dict, list):
            kind = typing.get_args(kind)[-1]
        else:
            return None
        if kind == Profile:
            kind = PROFILE_TAGS[profile_tag(data)]
    return _bare(kind)


def _bare(kind: Any) -> Any:
    """An annotation without Annotated and without `| None`."""
    while True:
        if kind == Profile:
            return kind
        if hasattr(kind, "__metadata__"):
            kind = typing.get_args(kind)[0]
        elif typing.get_origin(kind) in (Union, types.UnionType):
            inner = [a for a in typing.get_args(kind) if a is not type(None)]
            if len(inner) != 1:
                return kind
            kind = inner[0]
        else:
            return kind


def _words(kind: Any) -> list[str]:
    return [str(a) for a in typing.get_args(kind)] if typing.get_origin(kind) is Literal else []


def _trap_problem(document: Document, path: Path, trap: Trap) -> Problem:
    kind = expected_type(path, document.data)
    words = _words(kind)
    if words:
        likely = _POSITIVE if trap.boolean else _NEGATIVE
        meant = [w for w in likely if w in words]
        fix = f"Use: {meant[0]}" if meant else f"Use one of: {', '.join(words)}"
    elif kind is bool:
        fix = (
            f"Write {str(trap.boolean).lower()}"
            if trap.boolean is not None
            else "Write true or false"
        )
    elif kind in (int, float):
        fix = "Write a plain decimal number"
    elif kind is str:
        fix = f'Quote it: "{trap.raw}"'
    elif trap.boolean is not None:
        fix = f'Write {str(trap.boolean).lower()}, or quote it: "{trap.raw}"'
    else:
        fix = f'Write a plain decimal number, or quote it: "{trap.raw}"'
    line, column = document.place(path)
    return Problem(document.file, line, column, dotted(path), f"{trap.message}.", f"{fix}.")


def _problem(document: Document, path: Path, item: Any) -> Problem:
    """One pydantic error as a sentence at a place in the file."""
    kind, given, context = item["type"], item["input"], item.get("ctx", {})
    written = document.raw.get(path, _shown(given))
    wanted = expected_type(path, document.data)
    shown_path, at_key = path, item["loc"][-1:] == ("[key]",)
    if kind == "extra_forbidden":
        shown_path, at_key = path[:-1], True
        message, fix = _unknown_key(path, document.data)
    elif kind == "missing":
        shown_path = path[:-1]
        message, fix = f"'{path[-1]}' is missing.", _missing_fix(path, document.data)
    elif kind == "recipe":
        shown_path = path[:-1] if at_key else path
        message, fix = context["message"], context["fix"]
    elif kind in ("literal_error", "enum"):
        words = _words(wanted)
        close = nearest(str(given), words) if isinstance(given, str) else None
        message = f"'{written}' is not known here."
        fix = f"Did you mean '{close}'?" if close else f"Use one of: {', '.join(words)}."
    elif kind == "string_type":
        message, fix = _not_text(given, written)
    elif kind in ("int_type", "int_from_float", "float_type"):
        noun = "a whole number" if wanted is int else "a number"
        message = f"{_described(given, written)}. Expected {noun}."
        fix = "Remove the quotes." if isinstance(given, str) and _numeric(given, wanted) else ""
    elif kind == "bool_type":
        message, fix = f"{_described(given, written)}. Expected true or false.", ""
    elif kind in ("dict_type", "model_type", "model_attributes_type"):
        keys = _known_keys(path, document.data)
        message = f"{_described(given, written)}. Expected a map."
        fix = f"Its keys: {', '.join(keys)}." if keys else ""
    elif kind == "list_type":
        message, fix = f"{_described(given, written)}. Expected a list.", f"Write [{written}]."
    elif kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        message, fix = _out_of_range(kind, given, context)
    elif kind == "string_pattern_mismatch":
        message = f"'{given}' has the wrong form."
        fix = f"Expected a match of {context['pattern']}"
    elif kind in ("too_short", "string_too_short"):
        message, fix = "It is empty.", "Write at least one entry."
    elif kind == "string_too_long":
        message = f"It has {len(given)} characters."
        fix = f"At most {context['max_length']} are allowed."
    else:
        message, fix = f"{item['msg']}.", ""
    line, column = document.place(path, prefer_key=at_key)
    return Problem(document.file, line, column, dotted(shown_path), message, fix)


def _unknown_key(path: Path, data: Any) -> tuple[str, str]:
    key, known, close = path[-1], _known_keys(path[:-1], data), _closest_key(path, data)
    fix = f"Did you mean '{close}'?" if close else f"Known keys: {', '.join(known)}."
    return f"unknown key '{key}'.", fix


def _closest_key(path: Path, data: Any) -> str | None:
    """The known key that an unknown one was most likely meant to be."""
    key, known = str(path[-1]), _known_keys(path[:-1], data)
    return nearest(key, known) or _by_part(key, known)


def _by_part(key: str, known: list[str]) -> str | None:
    """`ep` for `expert`: initials and beginnings that difflib finds too far apart."""
    for name in known:
        if len(key) > 1 and (name.startswith(key) or name.replace("_", "").startswith(key)):
            return name
    for name in known:
        letters = iter(name)
        if key[:1] == name[:1] and len(key) > 1 and all(c in letters for c in key):
            return name
    return None


def _known_keys(path: Path, data: Any) -> list[str]:
    kind = expected_type(path, data)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [f.alias or n for n, f in kind.model_fields.items()]
    return []


# Where a list of keys would not say what to write.
_MISSING = {
    ("schema",): "Write schema: exl3-recipe/1.",
    ("model",): "Add model: with repo and revision, or path, or package and quantize.",
    ("profiles",): "Add profiles: with one entry per class of hosts.",
}


def _missing_fix(path: Path, data: Any) -> str:
    if path in _MISSING:
        return _MISSING[path]
    kind = expected_type(path, data)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        needed = [f.alias or n for n, f in kind.model_fields.items() if f.is_required()]
        return f"Add {path[-1]}: with {', '.join(needed)}."
    words = _words(kind)
    if words:
        return f"Add {path[-1]}: {' | '.join(words)}."
    noun = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}.get(kind)
    return f"Add {path[-1]}: <{noun}>." if noun else f"Add {path[-1]}."


def _not_text(given: Any, written: str) -> tuple[str, str]:
    if isinstance(given, bool):
        return f"{written} was read as a boolean. Expected text.", f'Quote it: "{written}".'
    if isinstance(given, (int, float)):
        return f"{written} was read as a number. Expected text.", f'Quote it: "{written}".'
    return f"{_described(given, written)}. Expected text.", ""


def _out_of_range(kind: str, given: Any, context: dict) -> tuple[str, str]:
    limit = next(iter(context.values()))
    if kind.startswith("less"):
        if 0 < limit < 1 and 1 < given <= 100:
            return f"{given} is above {limit}.", f"A fraction is meant: {given / 100:g}."
        return f"{given} is above {limit}.", f"At most {limit} is allowed."
    least = f"At least {limit}" if kind == "greater_than_equal" else f"More than {limit}"
    return f"{given} is too small.", f"{least} is expected."


def _described(given: Any, written: str) -> str:
    if given is None:
        return "No value is given"
    if isinstance(given, bool):
        return f"{written} is a boolean"
    if isinstance(given, (int, float)):
        return f"{written} is a number"
    if isinstance(given, str):
        return f"'{given}' is text"
    return f"This is {'a list' if isinstance(given, list) else 'a map'}"


def _numeric(text: str, wanted: Any) -> bool:
    try:
        int(text) if wanted is int else float(text)
    except ValueError:
        return False
    return True


def _shown(given: Any) -> str:
    return given if isinstance(given, str) else repr(given)


def summary(loaded: list[LoadedRecipe]) -> str:
    """`3 recipes ok, 8 profiles (3 reported, 5 untested)`."""
    profiles = [p for item in loaded for p in item.recipe.profiles.values()]
    groups: dict[str, int] = {}
    for profile in profiles:
        status = profile.evidence.status if profile.evidence else "without evidence"
        groups[status] = groups.get(status, 0) + 1
    parts = ", ".join(f"{n} {s}" for s, n in sorted(groups.items()))
    return f"{count(len(loaded), 'recipe')} ok, {count(len(profiles), 'profile')} ({parts})"
