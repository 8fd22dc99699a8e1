"""The arguments that one vLLM release knows, as data, so that a recipe is checked without it.

`python -m exl3_host.vllm_args --out args.json` asks the installed vLLM's own parser and writes the
list; every image holds one at /opt/exl3/args.json, and recipes/args has one per release. The shape,
`exl3-serve-args/1`:

    schema, vllm (its version), arguments {name: {values, kinds, choices, negative, deprecated}}
    values      "flag", "one", "optional" or "many"
    kinds       what its converter takes, found by trying: "int", "float", "text", "json"
    choices     the words it takes, or null
    negative    whether --no-NAME exists
    deprecated  whether vLLM says so in its help

The parser is the truth: nothing here is copied by hand. Only the standard library is used here.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from .errors import HostError, nearest

SCHEMA = "exl3-serve-args/1"
# Words that tell what a converter takes. A converter may take several kinds.
_PROBES = {"int": "7", "float": "0.5", "text": "word-x", "json": '{"a": 1}'}


def collect(parser: argparse.ArgumentParser, version: str) -> dict:
    """The list of a parser's arguments. Positional arguments and --help are left out."""
    out = {}
    for action in parser._actions:
        longs = [o.removeprefix("--") for o in action.option_strings if o.startswith("--")]
        if not longs or isinstance(action, argparse._HelpAction):
            continue
        for name in longs:
            if not name.startswith("no-") or name.removeprefix("no-") not in longs:
                # 0.33 names the inverse of --enable-x --disable-x and still takes --no-enable-x.
                is_pair = isinstance(action, argparse.BooleanOptionalAction)
                out[name] = {**_describe(action), "negative": is_pair}
    return {"schema": SCHEMA, "vllm": version, "arguments": dict(sorted(out.items()))}


def as_text(listed: dict) -> str:
    """The list as JSON with one argument a line, so that two releases can be compared."""
    head = (
        f'{{"schema": {json.dumps(SCHEMA)}, "vllm": {json.dumps(listed["vllm"])}, "arguments": {{\n'
    )
    lines = [
        f" {json.dumps(name)}: {json.dumps(entry, sort_keys=True)}"
        for name, entry in listed["arguments"].items()
    ]
    return head + ",\n".join(lines) + "\n}}\n"


def _describe(action: argparse.Action) -> dict:
    if action.nargs == 0:
        values = "flag"
    else:
        values = {"?": "optional", "+": "many", "*": "many"}.get(str(action.nargs), "one")
    choices = None if action.choices is None else sorted(str(c) for c in action.choices)
    convert = action.type or str
    kinds = [k for k, probe in _PROBES.items() if values != "flag" and _takes(convert, probe)]
    text = str(action.help or "").lower()
    is_old = "deprecated" in text.split("\n")[0] or bool(getattr(action, "deprecated", False))
    return {"values": values, "kinds": kinds, "choices": choices, "deprecated": is_old}


def _takes(convert: Any, probe: str) -> bool:
    try:
        convert(probe)
    except Exception:
        # Converters raise what they like; whatever it is, they do not take this.
        return False
    return True


def collect_installed() -> dict:
    """The list of the vLLM in this environment. Raises HostError where there is none."""
    try:
        import vllm
        from vllm.entrypoints.cli.serve import ServeSubcommand
        from vllm.platforms import current_platform
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise HostError(
            f"vLLM's parser cannot be imported: {error}.",
            "Run this with the Python of a venv or image that holds vLLM 0.32 or later.",
        ) from None
    if not current_platform.device_type:
        # A CUDA image is built on a machine without a GPU, where the parser would refuse to exist.
        current_platform.device_type = "cuda"
    # The subcommand itself: the module that builds its parser moved between 0.32 and 0.33.
    parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = vllm.__version__
    return collect(parser, version)


def load(path: Path) -> dict:
    """Read a list. Raises HostError where the file is absent or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HostError(
            f"The argument list {path} cannot be read: {error}.",
            "Make one with: python -m exl3_host.vllm_args --out FILE",
        ) from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise HostError(f"{path} is no argument list.", f"Expected schema {SCHEMA}.")
    return found


def choose(folder: Path, wanted: str | None, device: str) -> dict | None:
    """The list for a vLLM version ("0.32.0") and a device ("cpu" or "cuda"), None without one.

    Without `wanted` the newest is taken; lists of the device win over others of the version.
    """
    found = [load(path) for path in sorted(folder.glob("*.json"))]
    if wanted is not None:
        found = [one for one in found if _release(one["vllm"]) == _release(wanted)]
    if not found:
        return None
    fits = [one for one in found if ("+cpu" in one["vllm"]) == (device == "cpu")]
    return max(fits or found, key=lambda one: _release(one["vllm"]))


def _release(version: str) -> tuple[int, ...]:
    numbers = version.strip("=v ").split("+")[0].split(".")
    return tuple(int(n) for n in numbers if n.isdigit())


def problem_with(name: str, value: Any, listed: dict) -> tuple[str, str] | None:
    """What is wrong with one argument of a recipe, as (message, fix); None when nothing is.

    `value` is as in a recipe: true is a bare flag, a list several values, a map one JSON value.
    """
    known, version = listed["arguments"], listed["vllm"]
    is_negative = name.startswith("no-") and name not in known
    entry = known.get(name.removeprefix("no-") if is_negative else name)
    if entry is None or (is_negative and not entry["negative"]):
        close = nearest(name, list(known))
        hint = f"Did you mean '{close}'?" if close else "See vllm serve --help."
        return f"vLLM {version} has no argument '{name}'.", hint
    if entry["values"] == "flag" or is_negative:
        if not isinstance(value, bool):
            return f"'{name}' is a flag and takes no value.", "Write true or false."
        if value is False and not entry["negative"]:
            return f"'{name}' cannot be switched off: there is no --no-{name}.", "Remove it."
        return None
    if isinstance(value, bool):
        if entry["values"] == "optional" and value:
            return None
        return f"'{name}' is no flag.", _wants(entry)
    if isinstance(value, list):
        if entry["values"] != "many":
            return f"'{name}' takes one value, not a list.", _wants(entry)
        wrong = [v for v in value if not _kind_fits(v, entry)]
        return (f"'{wrong[0]}' is not possible for '{name}'.", _wants(entry)) if wrong else None
    if not _kind_fits(value, entry):
        return f"{_shown(value)} is not possible for '{name}'.", _wants(entry, value)
    return None


def _kind_fits(value: Any, entry: dict) -> bool:
    if entry["choices"] is not None:
        return str(value) in entry["choices"]
    kinds = entry["kinds"]
    if not kinds:
        return True
    if isinstance(value, dict):
        return "json" in kinds
    if isinstance(value, int):
        return bool({"int", "float", "text"} & set(kinds))
    if isinstance(value, float):
        return bool({"float", "text"} & set(kinds))
    if "text" in kinds:
        return True
    return ("int" in kinds and _converts(int, value)) or (
        "float" in kinds and _converts(float, value)
    )


def _converts(kind: type, value: str) -> bool:
    # vLLM reads 8k and 1.5M for numbers in some places.
    try:
        kind(value.rstrip("kKmMgGtT"))
    except ValueError:
        return False
    return True


def _wants(entry: dict, value: Any = None) -> str:
    if entry["choices"] is not None:
        close = nearest(value, entry["choices"]) if isinstance(value, str) else None
        if close:
            return f"Did you mean '{close}'?"
        return f"Use one of: {', '.join(entry['choices'])}."
    names = {"int": "a whole number", "float": "a number", "text": "text", "json": "a map"}
    kinds = [k for k in entry["kinds"] if k != "int" or "float" not in entry["kinds"]]
    return f"Expected {' or '.join(names[k] for k in kinds) or 'a value'}."


def _shown(value: Any) -> str:
    return "A map" if isinstance(value, dict) else f"'{value}'"


def main(argv: list[str] | None = None) -> int:
    """Write the installed vLLM's list to a file or to stdout."""
    parser = argparse.ArgumentParser(prog="vllm_args", description="Arguments of `vllm serve`.")
    parser.add_argument("--out", type=Path, help="file to write; default: stdout")
    given = parser.parse_args(argv)
    try:
        found = collect_installed()
    except HostError as error:
        print(error, file=sys.stderr)
        return 1
    text = as_text(found)
    if given.out is None:
        sys.stdout.write(text)
    else:
        given.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
