"""The supervisor program itself, told what to run."""

import json
import os
import subprocess
import sys
from pathlib import Path

from exl3_host import supervisor


def run_supervisor(
    folder: Path, argv: list[str], *flags: str, **changes: object
) -> tuple[subprocess.Popen, Path, Path]:
    """Start it with `argv` in a folder; the program, its state file and the folder of its logs.

    `changes` replace settings of the spec.
    """
    spec = {
        "argv": argv,
        "cwd": str(folder),
        "env": {"PATH": os.environ["PATH"]},
        "secret_env": {},
        "state": str(folder / "state.json"),
        "log": str(folder / "logs" / "log"),
        "log_max_bytes": 10_000,
        "log_keep": 2,
        "grace_s": 1,
        "burst": 3,
        "interval_s": 60,
        "backoff_s": 0,
        "config_hash": "x",
        **changes,
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-I", "-S", supervisor.__file__, str(folder / "spec.json"), *flags]
    return subprocess.Popen(command), folder / "state.json", folder / "logs"
