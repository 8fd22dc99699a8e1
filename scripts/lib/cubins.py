"""Which GPU architectures a compiled library holds, read from the file itself.

  python3 scripts/lib/cubins.py LIBRARY_OR_WHEEL [--expect 80,86,89,90,120+PTX,121]

nvcc puts the code of each source into the ELF section `.nv_fatbin`, one container ("fatbin") a
source: a header, then one entry for each cubin and each piece of PTX. Reading the headers needs no
tool and no GPU, so this checks a wheel wherever it lies. The layout is not documented; it was read
off what nvcc 13.0 writes, and tests/build compares the answer with what NVIDIA's cuobjdump says.
"""

from __future__ import annotations

import argparse
import re
import struct
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEFAULT = "80,86,89,90,120+PTX,121"
LIBRARY = "exl3_plugin/_C_cuda.so"
_MAGIC = 0xBA55ED50
_PTX, _ELF = 1, 2
_STRTAB, _DYNAMIC = 3, 6
_NEEDED = 1


class CubinError(ValueError):
    """The file is not what was expected: no ELF library, or containers of another layout."""


@dataclass(frozen=True)
class Code:
    """Machine code for one compute capability (times ten), or PTX that devices from it on take."""

    architecture: int
    is_ptx: bool

    def __str__(self) -> str:
        return f"compute_{self.architecture} PTX" if self.is_ptx else f"sm_{self.architecture}"


def parse_architectures(text: str) -> frozenset[Code]:
    """What "80,90,120+PTX" stands for; commas or semicolons. Raises CubinError."""
    found = set()
    for entry in re.split("[,;]", text):
        match = re.fullmatch(r"\s*(\d{2,3})(\+PTX)?\s*", entry, re.IGNORECASE)
        if not match:
            raise CubinError(f"{entry!r} is no architecture; expected entries like 90 or 120+PTX")
        found.add(Code(int(match[1]), False))
        if match[2]:
            found.add(Code(int(match[1]), True))
    return frozenset(found)


def sections(data: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Name, type and content of each section of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise CubinError("this is no 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count, names_index = struct.unpack_from("<3H", data, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
    names = headers[names_index]
    for name, kind, _, _, begin, length, *_ in headers:
        start = names[4] + name
        text = data[start : data.index(b"\0", start)].decode()
        yield text, kind, b"" if kind == 8 else data[begin : begin + length]


def needed(data: bytes) -> list[str]:
    """Names of the libraries that the dynamic linker loads for this one."""
    strings, entries = b"", b""
    for name, kind, content in sections(data):
        if kind == _DYNAMIC:
            entries = content
        elif kind == _STRTAB and name == ".dynstr":
            strings = content
    found = []
    for tag, value in struct.iter_unpack("<qQ", entries):
        if tag == _NEEDED:
            found.append(strings[value : strings.index(b"\0", value)].decode())
    return found


def containers(data: bytes) -> list[list[Code]]:
    """The code in each fatbin of a library or object file; sorted within a fatbin.

    Raises CubinError where there is none or its layout is unknown.
    """
    found = []
    for name, _, content in sections(data):
        if name == ".nv_fatbin":
            found += _read_containers(content)
    if not found:
        raise CubinError("the file holds no CUDA code (no section .nv_fatbin)")
    return found


def _read_containers(content: bytes) -> Iterator[list[Code]]:
    at = 0
    while at + 16 <= len(content):
        magic, _, header, size = struct.unpack_from("<IHHQ", content, at)
        if magic == 0:  # padding between containers
            at += 8
            continue
        if magic != _MAGIC or header < 16:
            raise CubinError(f"unknown container at byte {at} of .nv_fatbin: magic 0x{magic:08x}")
        end, entry, codes = at + header + size, at + header, []
        while entry < end:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", content, entry)
            (architecture,) = struct.unpack_from("<I", content, entry + 28)
            if kind not in (_PTX, _ELF) or not 50 <= architecture < 200 or entry_header < 32:
                raise CubinError(
                    f"unknown entry at byte {entry} of .nv_fatbin: kind {kind}, "
                    f"architecture {architecture}; this reads what nvcc 13.0 writes"
                )
            codes.append(Code(architecture, kind == _PTX))
            entry += entry_header + payload
        yield sorted(codes, key=lambda code: (code.architecture, code.is_ptx))
        at = end


def problems(data: bytes, expected: frozenset[Code]) -> list[str]:
    """What is wrong with a library that should hold exactly `expected`, in every source."""
    found, wrong = containers(data), []
    for code in sorted(expected, key=str):
        without = sum(code not in codes for codes in found)
        if without:
            wrong.append(f"{code} is missing in {without} of {len(found)} sources")
    extra = {code for codes in found for code in codes} - expected
    for code in sorted(extra, key=str):
        wrong.append(f"{code} is there and was not asked for")
    libraries = needed(data)
    if libraries:  # an object file has none
        if not any(name.startswith("libtorch_cuda.so") for name in libraries):
            wrong.append("it does not name libtorch_cuda.so, so torch's symbols stay undefined")
        wrong += [
            f"it wants {name}, and the CUDA runtime should be linked statically"
            for name in libraries
            if name.startswith("libcudart")
        ]
    return wrong


def read_library(path: Path) -> bytes:
    """The library's bytes, from the file itself or out of a wheel. Raises CubinError."""
    if path.suffix != ".whl":
        return path.read_bytes()
    with zipfile.ZipFile(path) as wheel:
        if LIBRARY not in wheel.namelist():
            raise CubinError(f"{path} holds no {LIBRARY}: it was built without the CUDA kernels")
        return wheel.read(LIBRARY)


def main(arguments: list[str] | None = None) -> int:
    """Command line: 0 as expected, 1 not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="a library, an object file or a wheel")
    parser.add_argument("--expect", default=DEFAULT, help=f"default {DEFAULT}")
    options = parser.parse_args(arguments)
    try:
        data = read_library(options.path)
        found = containers(data)
        wrong = problems(data, parse_architectures(options.expect))
    except (OSError, CubinError) as error:
        print(f"{options.path}: {error}", file=sys.stderr)
        return 1
    total = sorted({code for codes in found for code in codes}, key=lambda c: c.architecture)
    print(f"{options.path}: {len(data) / 1e6:.1f} MB, {len(found)} CUDA sources: ", end="")
    print(", ".join(map(str, total)))
    for text in wrong:
        print(f"{options.path}: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
