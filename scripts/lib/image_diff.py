"""Compares what two images hold, file by file.

  python3 scripts/lib/image_diff.py IMAGE IMAGE [--docker-host HOST]

Content, kind, mode and owner count, times do not. Exit 0 where nothing differs, else 1.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tarfile
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One file of an image."""

    kind: str
    mode: int
    owner: tuple[int, int]
    content: str


def contents(image: str, docker: list[str]) -> dict[str, Entry]:
    """Every file of an image, by path."""
    name = subprocess.run(
        [*docker, "create", image, "true"], capture_output=True, text=True, check=True
    ).stdout.strip()
    found: dict[str, Entry] = {}
    try:
        with (
            subprocess.Popen([*docker, "export", name], stdout=subprocess.PIPE) as process,
            tarfile.open(fileobj=process.stdout, mode="r|") as archive,
        ):
            for member in archive:
                found[member.name] = _entry(archive, member)
    finally:
        subprocess.run([*docker, "rm", "--force", name], capture_output=True)
    return found


def _entry(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Entry:
    content = member.linkname
    if member.isfile():
        with archive.extractfile(member) as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    kind = "folder" if member.isdir() else "file" if member.isfile() else "link"
    return Entry(kind, member.mode, (member.uid, member.gid), content)


def differences(first: dict[str, Entry], second: dict[str, Entry]) -> dict[str, str]:
    """Path to what is different about it."""
    out = {}
    for path in sorted({*first, *second}):
        one, other = first.get(path), second.get(path)
        if one == other:
            continue
        if one is None or other is None:
            out[path] = "only in the second" if one is None else "only in the first"
            continue
        fields = ("kind", "mode", "owner", "content")
        out[path] = ", ".join(f for f in fields if getattr(one, f) != getattr(other, f))
    return out


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", nargs=2, metavar="IMAGE")
    parser.add_argument("--docker-host")
    options = parser.parse_args(arguments)
    docker = ["docker", *(["-H", options.docker_host] if options.docker_host else [])]
    first, second = (contents(image, docker) for image in options.images)
    found = differences(first, second)
    for path, what in found.items():
        print(f"differs  {path}: {what}")
    print(f"{len(first)} files, {len(found)} differ")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
