"""Registers, spills and shared memory of every kernel in a compiled library, from cuobjdump.

  python3 scripts/lib/kernel_usage.py LIBRARY [--under FOLDER] [--registers 255] [--table]

A kernel that spills still gives right results, only slowly, so nothing but a look at the machine
code finds out. The compiler keeps spilled registers, and arrays it could not keep in registers, in
the stack frame of a kernel: a frame of more than 0 bytes is refused.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import cuda_tools

SHARED_LIMITS = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99, 121: 99}
"""KiB of shared memory a block may have, by compute capability times ten (CUDA's guide)."""

RESERVED_BYTES = 1024
"""Shared memory that the system keeps for each block, outside of what a block may have. From sm_90
on cuobjdump counts it in."""


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one architecture; bytes a thread for the stack, a block for shared
    memory (only what is declared with a size: dynamic shared memory is chosen at launch).
    """

    architecture: int
    kernel: str
    registers: int
    stack_bytes: int
    shared_bytes: int


def read_usage(path: Path, cuobjdump: Path) -> list[Usage]:
    """Usage of every kernel of a library, object file or cubin. Raises cuda_tools.ToolError."""
    done = subprocess.run(
        [cuobjdump, "--dump-resource-usage", path], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise cuda_tools.ToolError(f"cuobjdump on {path}: {done.stderr.strip()}")
    found, architecture, kernel = [], 0, ""
    for line in done.stdout.splitlines():
        if match := re.match(r"arch = sm_(\d+)", line):
            architecture = int(match[1])
        elif match := re.match(r" *Function (.+):$", line):
            kernel = match[1]
        elif match := re.match(r" *REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line):
            registers, stack, shared, local = map(int, match.groups())
            if architecture >= 90 and shared >= RESERVED_BYTES:
                shared -= RESERVED_BYTES
            found.append(Usage(architecture, kernel, registers, stack + local, shared))
    if not found:
        raise cuda_tools.ToolError(f"cuobjdump found no kernel in {path}")
    return found


PARKED_BYTES = 64
"""Stack of a product's kernel that may hold what only the code around its main loop needs; that the
loop itself keeps off the stack is a test's business (tests/build)."""


SET_DOWN_BYTES = 8
"""The same of the rebuild for 128 x 128 weights, straight code that sets a register down once."""


def problems(usages: list[Usage], most_registers: int = 255) -> list[str]:
    """What is wrong: spills, too many registers, more shared memory than the device has."""
    wrong = []
    for usage in usages:
        name = f"sm_{usage.architecture} {usage.kernel}"
        product = "gemm_kernel" in usage.kernel or "tall_kernel" in usage.kernel
        rebuild = "rebuild_kernel" in usage.kernel
        allowed = PARKED_BYTES if product else SET_DOWN_BYTES if rebuild else 0
        if usage.stack_bytes > allowed:
            wrong.append(
                f"{name}: {usage.stack_bytes} bytes of stack a thread, at most {allowed} allowed"
            )
        if usage.registers > most_registers:
            wrong.append(f"{name}: {usage.registers} registers, at most {most_registers} allowed")
        limit = SHARED_LIMITS.get(usage.architecture, 48) * 1024
        if usage.shared_bytes > limit:
            wrong.append(f"{name}: {usage.shared_bytes} bytes of shared memory, {limit} exist")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Command line: 0 good, 1 a kernel spills or takes too much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--under", type=Path, action="append", default=[])
    parser.add_argument("--registers", type=int, default=255)
    parser.add_argument("--table", action="store_true", help="print every kernel")
    options = parser.parse_args(arguments)
    try:
        usages = read_usage(options.path, cuda_tools.find_tool("cuobjdump", options.under))
    except cuda_tools.ToolError as error:
        print(error, file=sys.stderr)
        return 1
    for architecture in sorted({usage.architecture for usage in usages}):
        some = [usage for usage in usages if usage.architecture == architecture]
        print(
            f"sm_{architecture}: {len(some)} kernels, registers up to "
            f"{max(usage.registers for usage in some)}, "
            f"{sum(usage.stack_bytes > 0 for usage in some)} with a stack frame"
        )
        for usage in some if options.table else ():
            print(
                f"  {usage.registers:3} {usage.stack_bytes:4} {usage.shared_bytes:6} {usage.kernel}"
            )
    wrong = problems(usages, options.registers)
    for text in wrong:
        print(text, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
