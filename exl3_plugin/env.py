"""Every environment variable of the plugin, declared once: name, type, default, help.

Names begin with `EXL3_`. The names that earlier EXL3 plugins used, `CUDA_EXL3_*` and
`VLLM_EXL3_*`, still resolve, with one warning per name.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("vllm.exl3")

PREFIX = "EXL3_"
LEGACY_PREFIXES = ("CUDA_EXL3_", "VLLM_EXL3_")

_warned: set[str] = set()


@dataclass(frozen=True)
class Variable:
    """One environment variable: how its text is read and what it means."""

    name: str
    type: str
    default: Any
    help: str
    parse: Callable[[str], Any]


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return value

    return parse


VARIABLES: dict[str, Variable] = {
    variable.name: variable
    for variable in (
        Variable(
            name="EXL3_LOAD_AUDIT",
            type="refuse | warn",
            default="refuse",
            help="what happens when a tensor of the checkpoint was not placed or a parameter was "
            "not filled: refuse to start, or say so in the log and serve all the same",
            parse=_choice("refuse", "warn"),
        ),
        Variable(
            name="EXL3_PROFILE",
            type="path",
            default=None,
            help="calibration profile written by bench/calibrate.py",
            parse=str,
        ),
    )
}


def _raw(name: str) -> tuple[str, str] | None:
    """The variable's text and the name it was found under; None where it is not set."""
    if name in os.environ:
        return os.environ[name], name
    for prefix in LEGACY_PREFIXES:
        legacy = prefix + name.removeprefix(PREFIX)
        if legacy in os.environ:
            if legacy not in _warned:
                _warned.add(legacy)
                logger.warning("%s is an old name; set %s instead", legacy, name)
            return os.environ[legacy], legacy
    return None


def get(name: str) -> Any:
    """The value of a declared variable, its default where the environment does not set it.

    Raises KeyError for a name that is not declared here, ValueError for text that does not fit.
    """
    variable = VARIABLES[name]
    found = _raw(name)
    if found is None or found[0] == "":
        return variable.default
    text, where = found
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ValueError(f"{where}={text!r}: {error} ({variable.help})") from error


def unknown() -> list[str]:
    """Names in the environment that look like ours and are declared nowhere: likely typos."""
    known = set(VARIABLES) | {
        prefix + name.removeprefix(PREFIX) for name in VARIABLES for prefix in LEGACY_PREFIXES
    }
    return sorted(
        name
        for name in os.environ
        if name.startswith((PREFIX, *LEGACY_PREFIXES)) and name not in known
    )
