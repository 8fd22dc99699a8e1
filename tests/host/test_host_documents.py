"""The commands of docs/recipes.md and docs/models.md are run; the output they show is printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = ("recipes.md", "models.md")


def blocks(checkout: Path, page: str) -> list[list[str]]:
    text = (checkout / "docs" / page).read_text()
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block.splitlines() for kind, block in found if not kind]


def run(checkout: Path, line: str, *more: str) -> subprocess.CompletedProcess:
    program, *words = shlex.split(line, comments=True)
    words = [w for word in words for w in expanded(checkout, word)]
    modules = {"scripts/exl3ctl": ["-m", "exl3_host.cli"], ".venv/bin/python": []}
    return subprocess.run(
        [sys.executable, *modules[program], *words, *more],
        cwd=checkout,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(checkout / "playbooks/module_utils")},
        timeout=120,
    )


def expanded(checkout: Path, word: str) -> list[str]:
    return sorted(str(p) for p in checkout.glob(word)) if "*" in word else [word]


@pytest.mark.parametrize("page", PAGES)
def test_commands_run(checkout: Path, tmp_path: Path, page: str) -> None:
    found = [
        line
        for block in blocks(checkout, page)
        for line in block
        if line.startswith(("scripts/exl3ctl", ".venv/bin/python "))
    ]
    assert len(found) >= 4
    for line in found:
        if "vllm_args" in line:
            continue  # tests/host/test_host_lint.py runs it and compares the result
        uses_store = re.search(r" (store|bundle|plan|fit) ", line)
        options = ["--store", str(tmp_path)] if uses_store else []
        done = run(checkout, line, *options)
        assert done.returncode == 0, f"{line}\n{done.stderr}"


def test_plays_are_plays(checkout: Path) -> None:
    plays = [
        shlex.split(line)
        for block in blocks(checkout, "models.md")
        for line in block
        if line.startswith(".venv/bin/ansible-playbook")
    ]
    assert {words[1] for words in plays} == {"playbooks/bundle.yml"}
    defaults = (checkout / "playbooks/roles/exl3_bundle/defaults/main.yml").read_text()
    for words in plays:
        for setting in [w for w in words if "=" in w]:
            assert f"\n{setting.partition('=')[0]}:" in defaults, setting


def test_the_output_in_the_document_is_printed(checkout: Path) -> None:
    shown = next(
        b for b in blocks(checkout, "recipes.md") if b[0].startswith("$ scripts/exl3ctl fit")
    )
    done = run(checkout, shown[0].removeprefix("$ "))
    assert done.stdout.splitlines() == shown[1:]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(checkout: Path, page: str) -> None:
    text = (checkout / "docs" / page).read_text()
    for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text):
        file = checkout / "docs" / (target or page)
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            heads = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads]
            assert anchor in slugs, f"{target}#{anchor}"
