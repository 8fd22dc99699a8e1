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


def _switch(text: str) -> bool:
    value = text.strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected 0 or 1")


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
        Variable(
            name="EXL3_EXACT",
            type="0 | 1",
            default=False,
            help="always the format's own rounded weights on a GPU, also for few rows, where a "
            "form that leaves out a weight's last rounding is faster",
            parse=_switch,
        ),
        Variable(
            name="EXL3_PDL",
            type="0 | 1",
            default=True,
            help="let a kernel start while the one before it ends, on GPUs that can (compute "
            "capability 9.0 and later); changes time, not results",
            parse=_switch,
        ),
        Variable(
            name="EXL3_FUSE",
            type="0 | 1",
            default=None,
            help="whether vLLM's compiled graphs compute a norm or a gated activation inside the "
            "layer behind it; where it is not set, on GPUs that it was measured on (compute "
            "capability 9.0)",
            parse=_switch,
        ),
        Variable(
            name="EXL3_PROFILE",
            type="path",
            default=None,
            help="file that bench/calibrate.py wrote on this device; its plans are used instead of "
            "the built-in ones, and it is refused where device, driver or build differ",
            parse=str,
        ),
        Variable(
            name="EXL3_SELF_TEST",
            type="0 | 1",
            default=None,
            help="whether loading holds the kernels against float64 on the model's own weights, on "
            "the first layer of each shape, and refuses to start where they are wrong; on for CUDA "
            "and off for the CPU where it is not set",
            parse=_switch,
        ),
        Variable(
            name="EXL3_LOAD_REPORT",
            type="path",
            default=None,
            help="file to write, once all is loaded, with what each module became: bits, bytes, "
            "padding, kernel plans; of several ranks each adds .rankN to the name",
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


def batch_invariant() -> bool:
    """vLLM's own switch `VLLM_BATCH_INVARIANT`, read as the compiled CPU kernels read it."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "") not in ("", "0")


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
