"""Every environment variable of the plugin, declared once: name, type, default, help.

Names begin with `EXL3_`. The names that earlier EXL3 plugins used, `CUDA_EXL3_*` and
`VLLM_EXL3_*`, still resolve, with one warning per name.
"""

import difflib
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
            name="EXL3_CPU_ISA",
            type="avx512 | avx2 | neon | portable",
            default=None,
            help="instruction set of the CPU kernels, which read it themselves; the best one that "
            "the processor has where it is not set",
            parse=_choice("avx512", "avx2", "neon", "portable"),
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


def misspelt() -> list[tuple[str, str]]:
    """Names in the environment that are nearly a declared one: (as found, as probably meant).

    Other parts of the project have `EXL3_` names of their own, so only near misses are suspect.
    """
    known = set(VARIABLES)
    known |= {
        prefix + name.removeprefix(PREFIX) for name in VARIABLES for prefix in LEGACY_PREFIXES
    }
    found = []
    for name in sorted(os.environ):
        if name.startswith((PREFIX, *LEGACY_PREFIXES)) and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            found += [(name, near[0])] if near else []
    return found
