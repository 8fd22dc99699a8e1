"""Changes single values of a recipe's text; comments, order and spacing of the rest stay."""

from __future__ import annotations

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from .errors import HostError

Path = tuple[str, ...]


def set_values(text: str, values: dict[Path, str | int]) -> str:
    """The text with each value replaced, or added to its map where it is not there yet.

    The map around a value has to be there. Raises HostError where it is not.
    """
    for path, value in values.items():
        written = str(value) if isinstance(value, int) else _quoted(value)
        text = _set_one(text, path, written)
    return text


def _quoted(value: str) -> str:
    # Forty digits would be read as a number.
    return f'"{value}"' if value.isdigit() or value == "" else value


def _set_one(text: str, path: Path, written: str) -> str:
    root = YAML(typ="rt", pure=True).compose(text)
    parent = _find(root, path[:-1])
    if not isinstance(parent, MappingNode) or not parent.value:
        raise HostError(f"The recipe has no map '{'.'.join(path[:-1])}'.", "Add it first.")
    for key, value in parent.value:
        if key.value == path[-1]:
            if not isinstance(value, ScalarNode):
                raise HostError(f"'{'.'.join(path)}' is no plain value.", "Correct the recipe.")
            begin, end = value.start_mark.index, value.end_mark.index
            return text[:begin] + written + text[end:]
    key, value = parent.value[-1] if parent.flow_style else parent.value[0]
    if parent.flow_style:
        end = value.end_mark.index
        return f"{text[:end]}, {path[-1]}: {written}{text[end:]}"
    # A block map: a line of its own before the first key, whatever comments follow that one.
    begin = key.start_mark.index
    return f"{text[:begin]}{path[-1]}: {written}\n{' ' * key.start_mark.column}{text[begin:]}"


def _find(node: Node | None, path: Path) -> Node | None:
    for part in path:
        if not isinstance(node, MappingNode):
            return None
        node = next((v for k, v in node.value if k.value == part), None)
    return node
