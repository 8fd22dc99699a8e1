"""Finds nvcc 13 and the programs that read machine code, of the system or from NVIDIA's wheels.

  python3 scripts/lib/cuda_tools.py nvcc|nvdisasm|cuobjdump [--under FOLDER]...

prints the path, or says what is missing. The wheels of requirements/kernels.txt put the programs
into `nvidia/cu13/bin` of a site-packages folder or of the folder that `pip --target` was given.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

OLDEST_NVCC = (13, 0)
WHEELS = Path("nvidia") / "cu13" / "bin"


class ToolError(RuntimeError):
    """A program is missing or of the wrong version; the message says how to get it."""


def candidates(name: str, under: Sequence[Path] = ()) -> Iterator[Path]:
    """Where a program of the CUDA toolkit may lie: CUDA_HOME, PATH, /usr/local/cuda, wheels."""
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home) / "bin" / name
    if found := shutil.which(name):
        yield Path(found)
    yield Path("/usr/local/cuda/bin") / name
    for folder in (*under, Path(sysconfig.get_path("purelib"))):
        yield Path(folder) / WHEELS / name


def version_of(nvcc: Path) -> tuple[int, int] | None:
    """Release of an nvcc, (13, 0) for example; None where it does not run."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    match = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if done.returncode == 0 and match else None


def find_nvcc(under: Sequence[Path] = (), exactly: tuple[int, int] | None = None) -> Path:
    """The first nvcc that is new enough, or of just this release. Raises ToolError."""
    seen = []
    for path in candidates("nvcc", under):
        version = version_of(path)
        if version is None:
            continue
        if version == exactly or (exactly is None and version >= OLDEST_NVCC):
            return path
        seen.append(f"{path} is {version[0]}.{version[1]}")
    wanted = "{}.{}".format(*exactly) if exactly else "{}.{} or newer".format(*OLDEST_NVCC)
    raise ToolError(
        f"no nvcc {wanted}: {'; '.join(seen) or 'there is none'}. "
        "Install one with: pip install -r requirements/kernels.txt"
    )


def find_tool(name: str, under: Sequence[Path] = ()) -> Path:
    """nvdisasm or cuobjdump; newer ones read what nvcc 13.0 wrote. Raises ToolError."""
    for path in candidates(name, under):
        if os.access(path, os.X_OK):
            return path
    raise ToolError(f"there is no {name}; install it with: pip install -r requirements/kernels.txt")


def main(arguments: list[str] | None = None) -> int:
    """Command line: prints the path, 0 found, 1 missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=("nvcc", "nvdisasm", "cuobjdump"))
    parser.add_argument("--under", type=Path, action="append", default=[])
    options = parser.parse_args(arguments)
    try:
        if options.name == "nvcc":
            print(find_nvcc(options.under))
        else:
            print(find_tool(options.name, options.under))
    except ToolError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
