"""Looks at a wheel's compiled parts before it leaves the build machine, as auditwheel does.

  python3 scripts/lib/wheel_check.py WHEEL --machine x86_64|aarch64 [--glibc 2.34] [--cuda 120+PTX]

Checked for every library inside: the ELF machine, the newest glibc and libstdc++ symbols it asks
for, the libraries it names, no search path of the build machine; for the wheel: its tag, its entry
points, and with --cuda exactly these architectures in every CUDA source (see cubins.py). auditwheel
itself would want to copy torch's libraries into the wheel, which must not happen.
"""

from __future__ import annotations

import argparse
import struct
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cubins

MACHINES = {62: "x86_64", 183: "aarch64"}
_VERNEED = 0x6FFFFFFE
_RPATH, _RUNPATH = 15, 29
# What torch brings, and what every Linux with a C++ runtime has (the list of manylinux).
EXPECTED_LIBRARIES = {
    "libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so",
    "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libdl.so.2", "libpthread.so.0",
    "librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
}  # fmt: skip
# The newest symbols of GCC's runtimes that systems with this glibc have (manylinux_2_34's policy).
NEWEST = {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (11, 0, 0)}


@dataclass(frozen=True)
class Facts:
    """What an ELF library says about itself."""

    machine: str
    needed: tuple[str, ...]
    versions: dict[str, tuple[int, ...]]
    search_path: str


def read(data: bytes) -> Facts:
    """The facts of one library. Raises cubins.CubinError where it is no 64-bit ELF file."""
    sections = list(cubins.sections(data))
    (machine,) = struct.unpack_from("<H", data, 18)
    strings = next((content for name, _, content in sections if name == ".dynstr"), b"")
    newest: dict[str, tuple[int, ...]] = {}
    path = ""
    for name, kind, content in sections:
        if kind == _VERNEED:
            for text in _version_names(content, strings):
                prefix, _, number = text.partition("_")
                parts = number.split(".")
                if all(part.isdigit() for part in parts):
                    newest[prefix] = max(newest.get(prefix, (0,)), tuple(map(int, parts)))
        elif name == ".dynamic":
            for tag, value in struct.iter_unpack("<qQ", content):
                if tag in (_RPATH, _RUNPATH):
                    path = _text(strings, value)
    known = MACHINES.get(machine, f"machine {machine}")
    return Facts(known, tuple(cubins.needed(data)), newest, path)


def _version_names(content: bytes, strings: bytes) -> list[str]:
    found, at = [], 0
    while True:
        _, count, _, first, following = struct.unpack_from("<HHIII", content, at)
        inner = at + first
        for _ in range(count):
            _, _, _, name, step = struct.unpack_from("<IHHII", content, inner)
            found.append(_text(strings, name))
            inner += step
        if not following:
            return found
        at += following


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def library_problems(facts: Facts, machine: str, glibc: tuple[int, ...]) -> list[str]:
    """What is wrong with one library."""
    wrong = []
    if facts.machine != machine:
        wrong.append(f"is for {facts.machine}, expected {machine}")
    for prefix, limit in {"GLIBC": glibc, **NEWEST}.items():
        found = facts.versions.get(prefix, (0,))
        if found > limit:
            wrong.append(f"wants {prefix}_{_dotted(found)}; the wheel promises {_dotted(limit)}")
    wrong += [
        f"names {name}, which neither torch nor a bare system has"
        for name in facts.needed
        if name not in EXPECTED_LIBRARIES
    ]
    if "libtorch.so" not in facts.needed:
        wrong.append("does not name libtorch.so, so torch's symbols stay undefined")
    if facts.search_path:
        wrong.append(f"looks for libraries in {facts.search_path}, a folder of the build machine")
    return wrong


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def wheel_problems(
    wheel: Path, machine: str, glibc: tuple[int, ...], cuda: str | None
) -> tuple[list[str], list[str]]:
    """(what it holds, what is wrong). `cuda` None: there must be no CUDA library."""
    told, wrong = [], []
    if not wheel.name.endswith(f"-py3-none-manylinux_{glibc[0]}_{glibc[1]}_{machine}.whl"):
        wrong.append(
            f"{wheel.name} is not tagged py3-none-manylinux_{glibc[0]}_{glibc[1]}_{machine}"
        )
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        texts = {Path(name).name: name for name in names if ".dist-info/" in name}
        points = archive.read(texts["entry_points.txt"]).decode()
        wrong += [
            f"entry_points.txt lacks {point}"
            for point in ("exl3 = exl3_plugin:register", "exl3ctl = exl3_host.cli:main")
            if point.replace(" ", "") not in points.replace(" ", "")
        ]
        libraries = [name for name in names if name.endswith(".so")]
        expected = {"exl3_plugin/_C_cpu.so"} | ({cubins.LIBRARY} if cuda else set())
        if set(libraries) != expected:
            wrong.append(f"holds {sorted(libraries)}, expected {sorted(expected)}")
        for name in libraries:
            data = archive.read(name)
            facts = read(data)
            versions = ", ".join(f"{k} {_dotted(v)}" for k, v in sorted(facts.versions.items()))
            told.append(f"{name}: {len(data) / 1e6:.1f} MB, {facts.machine}, needs {versions}")
            wrong += [f"{name} {text}" for text in library_problems(facts, machine, glibc)]
        if cuda and cubins.LIBRARY in libraries:
            data = archive.read(cubins.LIBRARY)
            codes = {code for codes in cubins.containers(data) for code in codes}
            told.append(f"{cubins.LIBRARY}: {', '.join(sorted(map(str, codes)))}")
            wanted = cubins.parse_architectures(cuda)
            wrong += [f"{cubins.LIBRARY}: {text}" for text in cubins.problems(data, wanted)]
    return told, wrong


def main(arguments: list[str] | None = None) -> int:
    """Command line: 0 as expected, 1 not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--machine", choices=sorted(MACHINES.values()), required=True)
    parser.add_argument("--glibc", default="2.34", help="oldest glibc it must load with")
    parser.add_argument("--cuda", help="architectures that must be inside, and no others")
    options = parser.parse_args(arguments)
    glibc = tuple(int(part) for part in options.glibc.split("."))
    try:
        told, wrong = wheel_problems(options.wheel, options.machine, glibc, options.cuda)
    except (OSError, cubins.CubinError, KeyError) as error:
        told, wrong = [], [f"cannot be read: {error}"]
    for text in told:
        print(f"{options.wheel.name}: {text}")
    for text in wrong:
        print(f"{options.wheel.name}: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
