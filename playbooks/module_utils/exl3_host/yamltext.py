"""Reads YAML so that every value keeps its line and column, and every trap is seen.

Values are resolved as YAML 1.2 says. A plain word that a YAML 1.1 reader (PyYAML, and with it
Ansible) would read as something else is reported rather than guessed: `off` is a word for one
reader and False for the other, `012` is twelve or ten, `1:30` is text or ninety.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from .errors import Problem, RecipeError

Path = tuple[Any, ...]

_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")

# What a YAML 1.1 reader makes of plain text that is a string, or another number, in YAML 1.2.
_TRAPS = (
    (
        re.compile(r"y|Y|yes|Yes|YES|on|On|ON"),
        "YAML readers disagree about {raw}: a word or True",
        "true",
    ),
    (
        re.compile(r"n|N|no|No|NO|off|Off|OFF"),
        "YAML readers disagree about {raw}: a word or False",
        "false",
    ),
    (
        re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"),
        "YAML readers disagree about {raw}: text or a number in base 60",
        "",
    ),
    (
        re.compile(r"[-+]?0[0-9_]+|[-+]?0o[0-7]+"),
        "YAML readers disagree about {raw}: decimal or octal",
        "",
    ),
    (
        re.compile(r"[-+]?(0x[0-9a-fA-F_]+|0b[01_]+)"),
        "YAML readers disagree about {raw}: text or a number",
        "",
    ),
    (
        re.compile(r"[-+]?[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?"),
        "YAML readers disagree about {raw}: text or a number",
        "",
    ),
    (
        re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][0-9]+|[-+]?[0-9]+[eE][-+]?[0-9]+"),
        "YAML readers disagree about {raw}: text or a number",
        "",
    ),
)


@dataclass(frozen=True)
class Trap:
    """A plain word that YAML readers understand differently."""

    raw: str
    message: str
    boolean: bool | None


@dataclass
class Document:
    """A YAML file as plain data, with the place of each value and the text it was written as.

    Keys of `places`, `key_places`, `raw` and `traps` are paths: tuples of mapping keys and
    sequence indices. Lines and columns count from 1.
    """

    file: str
    data: Any = None
    places: dict[Path, tuple[int, int]] = field(default_factory=dict)
    key_places: dict[Path, tuple[int, int]] = field(default_factory=dict)
    raw: dict[Path, str] = field(default_factory=dict)
    traps: dict[Path, Trap] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    text: str = ""

    def place(self, path: Path, prefer_key: bool = False) -> tuple[int, int]:
        """Line and column of a value (or of its key), else of the nearest thing around it."""
        if prefer_key and path in self.key_places:
            return self.key_places[path]
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, (0, 0))


def read_document(text: str, file: str) -> Document:
    """Parse one YAML document. Raises RecipeError where the text is no YAML at all."""
    document = Document(file, text=text)
    try:
        node = YAML(typ="rt", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        reason = " ".join(str(error.problem or error.context or "not YAML").split())
        raise RecipeError(
            [Problem(file, line, column, "", f"This is not YAML: {reason}.", "Check the indent.")]
        ) from None
    except ReaderError as error:
        line = text[: error.position].count("\n") + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        message = f"Character U+{error.character:04X} may not stand in YAML."
        raise RecipeError([Problem(file, line, column, "", message, "Remove it.")]) from None
    if node is None:
        raise RecipeError(
            [Problem(file, 1, 1, "", "The file is empty.", "See docs/recipes.md for a recipe.")]
        )
    document.data = _value(node, (), document, frozenset())
    return document


def _value(node: Node, path: Path, document: Document, open_nodes: frozenset[int]) -> Any:
    place = (node.start_mark.line + 1, node.start_mark.column + 1)
    document.places[path] = place
    if id(node) in open_nodes:
        document.problems.append(
            Problem(document.file, *place, dotted(path), "An alias contains itself.", "Remove it.")
        )
        return None
    if document.text[node.start_mark.index :].startswith("!"):
        message, fix = "A YAML tag (!) means nothing here.", "Remove it, or quote the text."
        document.problems.append(Problem(document.file, *place, dotted(path), message, fix))
    if isinstance(node, ScalarNode):
        return _scalar(node, path, document)
    inside = open_nodes | {id(node)}
    if isinstance(node, SequenceNode):
        return [_value(n, (*path, i), document, inside) for i, n in enumerate(node.value)]
    assert isinstance(node, MappingNode)
    out: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key_place = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
        key = key_node.value if isinstance(key_node, ScalarNode) else repr(key_node.value)
        if key in out:
            first = document.key_places[(*path, key)]
            document.problems.append(
                Problem(
                    document.file,
                    *key_place,
                    dotted((*path, key)),
                    f"key '{key}' is written twice; the first is on line {first[0]}.",
                    "Keep one.",
                )
            )
            continue
        document.key_places[(*path, key)] = key_place
        out[key] = _value(value_node, (*path, key), document, inside)
        if document.raw.get((*path, key)) == "":
            # The mark of a value that is not there is the next thing in the file.
            document.places[(*path, key)] = key_place
    return out


def _scalar(node: ScalarNode, path: Path, document: Document) -> Any:
    text = node.value
    if node.style in ("'", '"', "|", ">"):
        return text
    document.raw[path] = text
    for pattern, message, boolean in _TRAPS:
        if pattern.fullmatch(text):
            read_as = None if not boolean else boolean == "true"
            document.traps[path] = Trap(text, message.format(raw=f"'{text}'"), read_as)
            return text
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def dotted(path: Path) -> str:
    """`profiles.cpu.args[0]` for a path."""
    out = ""
    for part in path:
        if isinstance(part, int):
            out += f"[{part}]"
        else:
            out += f".{part}" if out else str(part)
    return out
