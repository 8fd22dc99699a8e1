"""The entry point: `docker run IMAGE COMMAND ...`.

  serve RECIPE [--profile P] [--host H] [--port N] [--print]   serve a recipe's model
  vllm serve MODEL [--option VALUE]...                         serve with vLLM's own arguments
  calibrate --out FILE [...]     measure this card (bench/calibrate.py)
  topology [--json] [...]        GPUs, sockets, links (exl3ctl topology)
  inspect MODEL [...]            what a checkpoint holds
  quantize SOURCE OUT [...]      make an EXL3 checkpoint
  doctor [--json]                can this container serve here?
  version [--json]               what is inside

Exit status: the server's own; 1 refused, with one line that says why; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from exl3_image import HOME, Refusal, about, cards, init

PYTHON = str(HOME / "venv" / "bin" / "python")


def main(words: list[str]) -> int:
    """Run one command."""
    command, rest = (words[0], words[1:]) if words else ("doctor", [])
    if command in ("-h", "--help", "help"):
        print(__doc__.partition("\n\n")[2].strip())
        return 0
    if command.startswith("-"):  # options alone are meant for vLLM
        command, rest = "vllm", ["serve", *words]
    try:
        if command == "vllm":
            return vllm(rest)
        if command == "serve":
            return serve(rest)
        if command == "doctor":
            from exl3_image import doctor

            return doctor.main(rest)
        if command == "version":
            return version(rest)
        if command in PASSED_ON:
            hand_over([PYTHON, *PASSED_ON[command], *rest])
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 1
    print(f"error: unknown command '{command}'; --help lists them", file=sys.stderr)
    return 2


PASSED_ON = {
    "calibrate": [str(HOME / "bench" / "calibrate.py")],
    "inspect": ["-m", "exl3_plugin.inspect"],
    "quantize": ["-m", "exl3_plugin.quantize"],
    "verify": ["-m", "exl3_plugin.verify"],
    "topology": ["-m", "exl3_host.cli", "topology"],
    "preflight": ["-m", "exl3_host.cli", "preflight"],
    "exl3ctl": ["-m", "exl3_host.cli"],
}


def hand_over(argv: list[str]) -> None:
    """Become another program."""
    sys.stdout.flush()
    os.execv(argv[0], argv)


def vllm(words: list[str]) -> int:
    """Plain vLLM arguments; a server goes through the checks, anything else straight to vLLM."""
    from exl3_image import serve as serving

    if any(word.startswith(("-h", "--help")) for word in words):
        hand_over([PYTHON, "-I", "-m", "exl3_image.help", *words])
    if words[:1] != ["serve"]:
        hand_over([str(serving.VLLM), *words])
    init.hold()
    build = about.build()
    return serving.run(serving.plain(words), build, cards.look())


def serve(words: list[str]) -> int:
    """A recipe."""
    from exl3_image import serve as serving

    parser = argparse.ArgumentParser(prog="serve", description="Serve a recipe's model.")
    parser.add_argument(
        "recipe", help="a file, or a name in /recipes or of the image's own recipes"
    )
    parser.add_argument("--profile", help="default: the first that fits")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--print", action="store_true", help="check, say what would run, and end")
    options = parser.parse_args(words)
    init.hold()
    build, sight = about.build(), cards.look()
    if build["flavour"] != "cpu":
        # The card comes first: a wrong one makes every other question moot.
        serving.checks.cards(build, sight, 1)
    server = serving.from_recipe(options, build, sight)
    return serving.run(server, build, sight, options.print)


def version(words: list[str]) -> int:
    """What is inside, in a line or as JSON."""
    build = about.build()
    print(json.dumps(build, indent=1, sort_keys=True) if "--json" in words else about.line(build))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
