"""Resolves what an image installs, once, and writes every wheel with its version and SHA-256.

  .venv/bin/python scripts/lib/lock_wheels.py cpu|cuda [--platform amd64|arm64] [--out FILE]

The answer goes to images/locks/NAME-PLATFORM.txt, which pip reads with --require-hashes, so that
an image holds the same wheels whenever and wherever it is built. Only metadata is fetched. What is
asked for stands elsewhere: vLLM's version in images/versions.json, the rest in pyproject.toml.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import tomllib

CHECKOUT = Path(__file__).resolve().parents[2]
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
NEWEST_GLIBC = 36
# pip asks its own machine when a requirement depends on the processor, whatever --platform says.
_PIP = """
import platform, runpy, sys
platform.machine = lambda: "{machine}"
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__")
"""
# Under a CPU build of torch these are dead weight or cannot even be imported: torchvision and its
# kin come as CUDA builds, triton has no CPU backend (1 GB).
DROPPED = {"cpu": ("torchaudio", "torchcodec", "torchvision", "triton"), "cuda": ()}
ADDED = {"cpu": (), "cuda": ("nvidia-ml-py",)}


def version(name: str) -> str:
    """A default of images/versions.json."""
    variables = json.loads((CHECKOUT / "images" / "versions.json").read_text())["variable"]
    return variables[name]["default"]


def requirements(flavour: str) -> list[str]:
    """What the image asks for: vLLM, what our wheel needs, and its extra for quantising."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    own = [*project["dependencies"], *project["optional-dependencies"]["quantize"]]
    return [version(f"VLLM_{flavour.upper()}"), *own, *ADDED[flavour]]


def tags(platform: str) -> list[str]:
    """Every platform tag that Debian 12 takes, the newest glibc first."""
    machine = MACHINES[platform]
    named = [f"manylinux_2_{minor}_{machine}" for minor in range(NEWEST_GLIBC, 4, -1)]
    return [*named, f"manylinux2014_{machine}", f"manylinux1_{machine}", f"linux_{machine}"]


def resolve(wanted: list[str], platform: str) -> list[dict]:
    """pip's report of what it would install on `platform`; nothing is installed."""
    python = version("PYTHON").replace(".", "")
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-c", _PIP.format(machine=MACHINES[platform])]
        command += ["install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", str(report), "--target", scratch]
        command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
        for tag in tags(platform):
            command += ["--platform", tag]
        subprocess.run([*command, *wanted], check=True)
        return json.loads(report.read_text())["install"]


def lines(installs: list[dict], dropped: tuple[str, ...]) -> list[str]:
    """One line a wheel, sorted by name."""
    out = []
    for item in installs:
        name = item["metadata"]["name"].lower().replace("_", "-")
        if name in dropped:
            continue
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        out.append(f"{name}=={item['metadata']['version']} --hash=sha256:{digest}")
    return sorted(out)


def main(arguments: list[str] | None = None) -> int:
    """Command line: 0 written, 1 pip could not resolve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flavour", choices=sorted(DROPPED))
    parser.add_argument("--platform", choices=sorted(MACHINES), default="amd64")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    name = f"{options.flavour}-{options.platform}"
    out = options.out or CHECKOUT / "images" / "locks" / f"{name}.txt"
    wanted = requirements(options.flavour)
    try:
        found = lines(resolve(wanted, options.platform), DROPPED[options.flavour])
    except subprocess.CalledProcessError:
        print(f"pip cannot resolve {', '.join(wanted)} for {name}", file=sys.stderr)
        return 1
    head = (
        f"# Written by scripts/lib/lock_wheels.py {options.flavour} --platform {options.platform}"
    )
    out.write_text("\n".join([head, *found]) + "\n")
    print(f"{out}: {len(found)} wheels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
