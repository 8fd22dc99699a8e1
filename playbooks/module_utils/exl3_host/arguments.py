"""Arguments and environment of `vllm serve`: layers merged, defaults chosen, one argv made."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .errors import HostError
from .schema import Args, Env

# A choice is noted as (what, value, why).
Note = Callable[[str, Any, str], None]

# Where bf16 arithmetic exists in the CPU, by /proc/cpuinfo's names.
_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")


def argument_list(args: dict[str, Any]) -> list[str]:
    """A map of arguments as an argv, in the order of the map.

    true is a bare flag, false its `--no-` form, a list several values, a map one JSON value.
    """
    out: list[str] = []
    for name, value in args.items():
        if value is True:
            out.append(f"--{name}")
        elif value is False:
            out.append(f"--no-{name}")
        elif isinstance(value, list):
            out += [f"--{name}", *(_text(v) for v in value)]
        elif isinstance(value, dict):
            out += [f"--{name}", json.dumps(value, separators=(",", ":"), sort_keys=True)]
        else:
            out += [f"--{name}", _text(value)]
    return out


def merge_args(*layers: dict[str, Any]) -> dict[str, Any]:
    """Later layers win; `no-x: true` and `x: false` are one setting.

    Raises HostError for an argument that a recipe may not hold.
    """
    out: dict[str, Any] = {}
    for layer in layers:
        for name, value in _validated(Args, layer, "args").items():
            if name.startswith("no-") and isinstance(value, bool):
                name, value = name.removeprefix("no-"), not value
            out[name] = value
    return out


def merge_env(*layers: dict[str, str]) -> dict[str, str]:
    """Later layers win. Raises HostError for a name or value that a recipe may not hold."""
    out: dict[str, str] = {}
    for layer in layers:
        out.update(_validated(Env, layer, "env"))
    return out


def _validated(kind: Any, layer: dict, what: str) -> dict:
    """The instance's overrides obey the same rules as a recipe's."""
    try:
        return TypeAdapter(kind).validate_python(layer, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        context = first.get("ctx", {})
        name = first["loc"][0] if first["loc"] else ""
        message = context.get("message", f"{first['msg']}.")
        raise HostError(
            f"{what}.{name} of the instance: {message}", context.get("fix", "")
        ) from None


def choose_dtype(args: dict[str, Any], facts: dict, note: Note) -> None:
    """Set `dtype` where nobody did: bf16 where the CPU computes in it, else float32."""
    if "dtype" in args:
        note("dtype", args["dtype"], "set by the recipe or the instance")
        return
    found = [f for f in _BF16_FLAGS if f in facts["cpus"]["flags"]]
    if found:
        args["dtype"] = "bfloat16"
        why = f"this CPU computes in bf16 ({', '.join(found)}); the EXL3 weights keep their bits"
    else:
        args["dtype"] = "float32"
        why = "this CPU has no bf16 arithmetic; only activations and the KV cache are wider"
    note("dtype", args["dtype"], why)


def choose_eager(args: dict[str, Any], note: Note) -> None:
    """Set `enforce-eager` where nobody did."""
    if "enforce-eager" in args:
        note("enforce_eager", args["enforce-eager"], "set by the recipe or the instance")
        return
    args["enforce-eager"] = True
    note(
        "enforce_eager",
        True,
        "compiling costs 25 to 60 s at every start on a CPU and is not reused between starts",
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
