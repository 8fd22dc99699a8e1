"""Compiles to cubins and reads the machine code back: instruction counts by kernel and by pipe."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import cuda_tools

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-I", str(ROOT / "csrc"))
RELEASE = (13, 0)
"""The compiler release that the budgets were counted with."""

LOGIC = ("LOP3", "SHF", "PRMT", "IADD", "LEA", "SEL", "ISETP", "VIADD", "SGXT", "BMSK", "LOP")
MULTIPLY = ("IMAD", "IDP")
HALF = ("HADD2", "HFMA2", "HMUL2")
MEMORY = ("LDG", "LDS", "LDSM", "STG", "STS", "LDL", "STL", "LDC", "LDCU", "LD", "ST")


def compile_object(source: Path, architecture: int, target: Path, *flags: str) -> None:
    """Compiles one source for one architecture; the target's ending chooses cubin or object file.

    Raises RuntimeError with the compiler's words when it does not compile.
    """
    nvcc = cuda_tools.find_nvcc(exactly=RELEASE)
    kind = "-cubin" if target.suffix == ".cubin" else "-c"
    name = "90a" if architecture == 90 else str(architecture)  # as csrc/cuda.cmake
    code = f"-gencode=arch=compute_{name},code=sm_{name}"
    command = [nvcc, kind, *FLAGS, *flags, code, source, "-o", target]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{source} for sm_{architecture}:\n{done.stdout}{done.stderr}")


def instructions(cubin: Path) -> dict[str, Counter]:
    """How often each opcode (without its suffixes) occurs in each kernel of a cubin."""
    disassembler = cuda_tools.find_tool("nvdisasm")
    text = subprocess.run(
        [disassembler, "-c", cubin], capture_output=True, text=True, check=True
    ).stdout
    kernels: dict[str, Counter] = {}
    for part in re.split(r"^\.text\.", text, flags=re.MULTILINE)[1:]:
        name = part[: part.index(":")]
        codes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", part)
        while codes and codes[-1] in ("NOP", "BRA"):  # what follows the last EXIT
            codes.pop()
        kernels[name] = Counter(codes)
    if not kernels:
        raise RuntimeError(f"nvdisasm found no kernel in {cubin}")
    return kernels


def total(counts: Counter, opcodes: Sequence[str]) -> int:
    """Number of instructions whose opcode begins with one of `opcodes`."""
    return sum(n for code, n in counts.items() if code.startswith(tuple(opcodes)))


def without_memory(counts: Counter) -> Counter:
    """The counts without loads and stores."""
    return Counter({code: n for code, n in counts.items() if code not in MEMORY})


def main_loops(code: Path) -> dict[str, list[str]]:
    """Instructions of the main loop of each kernel that waits for its own copies.

    The loop begins where it waits for a stage (DEPBAR) and ends with its last matrix product; the
    object is straight-line code in between, but for the branches of the loop itself.
    """
    dump = subprocess.run(
        [cuda_tools.find_tool("cuobjdump"), "--dump-sass", code],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    loops = {}
    for part in dump.split("Function : ")[1:]:
        name, *lines = part.splitlines()
        lines = [line.strip() for line in lines if re.match(r"\s+/\*[0-9a-f]{4,5}\*/", line)]
        waits = [i for i, line in enumerate(lines) if "DEPBAR.LE" in line]
        products = [i for i, line in enumerate(lines) if "HMMA" in line or "HGMMA" in line]
        if waits and products and waits[0] < products[-1]:
            loops[name.strip()] = lines[waits[0] : products[-1] + 1]
    return loops
