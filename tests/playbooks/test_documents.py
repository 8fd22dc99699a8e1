"""The commands of docs/deploy.md and docs/operate.md: plays that exist, tags and variables that do.

That the plays work is shown by tests/docker/test_life_cycle.py, which runs each of them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PAGES = ("deploy.md", "operate.md")


def commands(checkout: Path) -> list[str]:
    text = "\n".join((checkout / "docs" / page).read_text() for page in PAGES)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    return [line for kind, block in blocks if not kind for line in block.splitlines() if line]


def test_every_play_in_the_documents_is_one(checkout):
    found = [line for line in commands(checkout) if "ansible-playbook" in line]
    plays = sorted({re.search(r"playbooks/(\w+)\.yml", line)[1] for line in found})
    assert len(plays) >= 9
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "--syntax-check"]
    command += ["-i", "playbooks/inventories/localhost"]
    command += [f"playbooks/{play}.yml" for play in plays]
    env = {**os.environ, "ANSIBLE_CONFIG": "playbooks/ansible.cfg"}
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_exl3ctl_in_the_documents_runs(checkout, tmp_path):
    found = [line for line in commands(checkout) if line.startswith("scripts/exl3ctl")]
    assert len(found) == 1
    words = found[0].replace("/tmp/", f"{tmp_path}/").split()
    words += ["--store", str(tmp_path / "store")]
    env = {**os.environ, "PYTHONPATH": str(checkout / "playbooks" / "module_utils")}
    command = [sys.executable, "-m", "exl3_host.cli", *words[1:]]
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "CONTENTS" in done.stdout and (tmp_path / "exl3-report.tar.gz").exists()


@pytest.mark.parametrize("page", PAGES)
def test_every_default_in_the_documents_is_the_roles(checkout, page):
    defaults = {}
    for path in (checkout / "playbooks" / "roles").glob("*/defaults/main.yml"):
        defaults |= yaml.safe_load(path.read_text()) or {}
    rows = re.findall(r"^\| (`exl3_.*?) \| (.*?) \|", (checkout / "docs" / page).read_text(), re.M)
    assert len(rows) >= 12
    for names, values in rows:
        shown = re.findall(r"`([^`]*)`", values)
        for name, value in zip(re.findall(r"`(exl3_\w+)`", names), shown):
            if name not in ("exl3_report_path",):
                assert yaml.safe_load(value) == defaults[name] or value == defaults[name], name
