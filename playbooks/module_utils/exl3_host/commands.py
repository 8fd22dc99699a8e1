"""Programs that facts are read from: nvidia-smi and NVML, run with a time limit, or replayed.

Every answer says how it ended, so that "there is no such program", "the driver does not answer" and
"the program printed nothing" stay three different things. Standard library only.
"""

from __future__ import annotations

import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from . import nvml

# nvidia-smi without persistence mode wakes every GPU first: eight of them take some ten seconds.
TIMEOUT_S = 60.0
NVML = "nvml"


@dataclass(frozen=True)
class Answer:
    """How a program ended. `rc` is its exit status; None where it is absent or took too long."""

    rc: int | None
    out: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.rc == 0


Runner = Callable[[list[str]], Answer]


def run_here(argv: list[str], timeout_s: float = TIMEOUT_S) -> Answer:
    """Run a program of this host. `["nvml"]` asks NVML in a process of its own.

    A driver in trouble blocks the process that asks it, so nothing is asked from inside this one.
    """
    if argv == [NVML]:
        # Read through the loader: under Ansible this package lies in a zip file.
        name = nvml.__name__.rpartition(".")[2]
        source = pkgutil.get_data(__package__, f"{name}.py") or b""
        argv = [sys.executable, "-c", source.decode()]
    elif shutil.which(argv[0]) is None:
        return Answer(None, error=f"{argv[0]} is not installed")
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, error=f"{argv[0]} gave no answer within {timeout_s:g} s")
    except OSError as error:
        return Answer(None, error=f"{argv[0]} cannot be run: {error.strerror}")
    error = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return Answer(done.returncode, done.stdout, error[-1] if error and done.returncode else "")


def nothing(argv: list[str]) -> Answer:
    """The runner for another machine's files: no program of this one may answer for it."""
    return Answer(None, error=f"{argv[0]} of another host cannot be asked")


def replay(answers: dict[str, dict]) -> Runner:
    """A runner that repeats recorded answers, `{"nvidia-smi topo -m": {"rc", "out", "error"}}`."""

    def runner(argv: list[str]) -> Answer:
        kept = answers.get(" ".join(argv))
        if kept is None:
            return Answer(None, error=f"{argv[0]} was not asked '{' '.join(argv[1:])}' there")
        return Answer(kept["rc"], kept["out"], kept.get("error", ""))

    return runner


def record(runner: Runner, answers: dict[str, dict]) -> Runner:
    """`runner`, with each answer kept in `answers` for `replay`."""

    def recorder(argv: list[str]) -> Answer:
        answer = runner(argv)
        answers[" ".join(argv)] = {"rc": answer.rc, "out": answer.out, "error": answer.error}
        return answer

    return recorder
