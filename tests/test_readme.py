"""The README stays true: every command in it is run, every link leads somewhere."""

import os
import re
import shlex
import subprocess

import pytest

from tests.quantize import small_models

FIXTURE = "tests/fixtures/tiny-llama-mul1-2.5"


def commands(text: str) -> list[str]:
    """The lines of all code blocks that begin with a program of this checkout."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(("scripts/", ".venv/"))]


@pytest.fixture(scope="module")
def readme(checkout) -> str:
    return (checkout / "README.md").read_text()


def run(checkout, *command: str) -> subprocess.CompletedProcess:
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (
        f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    )
    return done


def test_links_lead_somewhere(readme, checkout):
    targets = re.findall(r"\]\(([^)#]+)\)", readme)
    assert targets
    assert [target for target in targets if not (checkout / target).exists()] == []


@pytest.mark.slow
def test_every_command_runs(readme, checkout, tmp_path):
    found = commands(readme)
    assert len(found) >= 9
    for line in found:
        program, *arguments = shlex.split(line)
        if program in ("scripts/quickstart", "scripts/test"):
            # The end-to-end test deploys what quickstart deploys; this suite is what test runs.
            assert not arguments and os.access(checkout / program, os.X_OK)
        elif program == ".venv/bin/ansible-playbook":
            assert (checkout / arguments[0]).is_file() and arguments[1] == "-i"
            run(checkout, program, *arguments, "--syntax-check")
        else:
            assert program == "scripts/exl3ctl"
            run(checkout, program, *filled_in(arguments, checkout, tmp_path))


def filled_in(arguments: list[str], checkout, folder) -> list[str]:
    """Real files for the words in capitals."""
    if arguments[0] == "quantize":
        source = folder / "source"
        small_models.llama(source)
        text = folder / "text"
        text.write_text((checkout / "LICENSE").read_text())
        values = {"SRC": str(source), "OUT": str(folder / "out"), "TEXT": str(text)}
    else:
        values = {"DIR": FIXTURE, "FILE.npz": f"{FIXTURE}/golden.npz"}
    return [values.get(word, word) for word in arguments]
