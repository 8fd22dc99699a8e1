#!/usr/bin/python3 -IS
"""What Triton calls as its C compiler: hands out the one module that it needs, compiled beforehand.

Triton compiles its link to the CUDA driver (driver.c) at the first start. The image has no
compiler; it has that module, built from the same file: /opt/exl3/prebuilt/SHA256-OF-THE-SOURCE.so.
"""

import hashlib
import shutil
import sys
from pathlib import Path

PREBUILT = Path(__file__).resolve().parent / "prebuilt"


def main(words: list[str]) -> int:
    """`cc SOURCE ... -o OUTPUT ...`: 0 where the module is there, else 1 with the reason."""
    sources = [word for word in words if word.endswith((".c", ".cc", ".cpp"))]
    if len(sources) != 1 or "-o" not in words[:-1]:
        print("cc: this image has no compiler, only Triton's driver module", file=sys.stderr)
        return 1
    digest = hashlib.sha256(Path(sources[0]).read_bytes()).hexdigest()
    built = PREBUILT / f"{digest}.so"
    if not built.is_file():
        print(
            f"cc: this image has no compiler, and {sources[0]} is none of the files that were "
            'compiled beforehand; build the image with EXTRA_PACKAGES="gcc libc6-dev python3-dev" '
            "and start it with CC=gcc (docs/images.md)",
            file=sys.stderr,
        )
        return 1
    shutil.copyfile(built, words[words.index("-o") + 1])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
