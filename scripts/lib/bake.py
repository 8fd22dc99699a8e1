"""Reads images/docker-bake.hcl and images/versions.json the way `docker buildx bake` does.

Only what these two files use is understood: variables with defaults, inherited targets, a matrix of
one variable with objects, and strings with ${NAME} or ${VARIABLE.FIELD} in them. A variable of the
same name in the environment wins. tests/images compares the answers with buildx's own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hcl2

_HOLE = re.compile(r"\$\{([\w.]+)\}")


class BakeError(ValueError):
    """The files name something that is not there."""


def variables(versions: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Every variable with its value."""
    declared = json.loads(versions.read_text())["variable"]
    return {name: environ.get(name, entry["default"]) for name, entry in declared.items()}


def targets(bake: Path, values: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Every target that can be built, with inherited settings and variables filled in.

    Raises BakeError for a target or a variable that is not declared.
    """
    with bake.open() as file:
        body = hcl2.load(file)
    declared = {_word(name): block for entry in body["target"] for name, block in entry.items()}
    scopes: dict[str, Mapping[str, str]] = {}
    raw: dict[str, dict[str, Any]] = {}
    for declared_name, block in declared.items():
        for scope in _rows(block, values, declared_name):
            name = _filled(block.get("name", f'"{declared_name}"'), scope, declared_name)
            raw[name] = {k: v for k, v in block.items() if k not in ("name", "matrix")}
            scopes[name] = scope
    merged = {name: _merged(name, raw) for name in raw}
    return {
        name: {key: _filled(value, scopes[name], name) for key, value in block.items()}
        for name, block in merged.items()
        if "tags" in block
    }


def _rows(block: dict, values: Mapping[str, str], target: str) -> list[Mapping[str, str]]:
    """The variables of each target that a block stands for: one, or one for a row of its matrix."""
    if "matrix" not in block:
        return [values]
    matrix = {k: v for k, v in block["matrix"].items() if not k.startswith("__")}
    if len(matrix) != 1:
        raise BakeError(f"the matrix of target {target} has {len(matrix)} variables, expected one")
    ((variable, rows),) = matrix.items()
    return [
        {**values, **{f"{variable}.{k}": v for k, v in _filled(row, values, target).items()}}
        for row in rows
    ]


def _word(text: str) -> str:
    return text.strip('"')


def _merged(name: str, raw: Mapping[str, dict]) -> dict[str, Any]:
    if name not in raw:
        raise BakeError(f"a target inherits from {name!r}, which is not declared")
    out: dict[str, Any] = {}
    for parent in raw[name].get("inherits", []):
        out = _joined(out, _merged(_word(parent), raw))
    own = {k: v for k, v in raw[name].items() if k != "inherits" and not k.startswith("__")}
    return _joined(out, own)


def _joined(below: dict, above: dict) -> dict:
    out = {**below, **above}
    if "args" in below and "args" in above:
        out["args"] = {**below["args"], **above["args"]}
    return out


def _filled(value: Any, values: Mapping[str, str], target: str) -> Any:
    if isinstance(value, list):
        return [_filled(item, values, target) for item in value]
    if isinstance(value, dict):
        return {k: _filled(v, values, target) for k, v in value.items() if not k.startswith("__")}
    if re.fullmatch(r"\w+", value):  # a bare name is a variable
        return _value(value, values, target)
    return _HOLE.sub(lambda hole: _value(hole[1], values, target), _word(value))


def _value(name: str, values: Mapping[str, str], target: str) -> str:
    if name not in values:
        raise BakeError(f"target {target} uses {name}, which images/versions.json does not declare")
    return values[name]
