"""What a person types: scripts/quickstart without network, and the question at its end."""

import os
import shutil
import socket
import subprocess
import sys

import pytest
from exl3_host import service, spec


@pytest.fixture
def clone(tmp_path, checkout):
    """The part of a fresh checkout that quickstart needs before it installs anything."""
    for name in ("scripts", "requirements"):
        shutil.copytree(checkout / name, tmp_path / "clone" / name)
    return tmp_path / "clone"


def test_quickstart_without_network_says_so_and_deploys_nothing(clone):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = probe.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"http://127.0.0.1:{closed}/simple"}
    done = subprocess.run(
        ["scripts/quickstart"], cwd=clone, env=env, capture_output=True, text=True
    )
    assert done.returncode == 1 and "Without network" in done.stderr
    assert sorted(path.name for path in clone.iterdir()) == [".venv", "requirements", "scripts"]


def test_quickstart_explains_itself(clone):
    done = subprocess.run(
        ["scripts/quickstart", "--help"], cwd=clone, capture_output=True, text=True
    )
    assert done.returncode == 0 and "scripts/quickstart [arguments" in done.stdout
    assert not (clone / ".venv").exists()


def test_python_that_is_too_old_is_passed_over(clone, tmp_path):
    old, new = tmp_path / "bin" / "python3", tmp_path / "bin" / "python3.12"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\nexit 1\n")
    new.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for path in (old, new):
        path.chmod(0o755)
    code = "source scripts/lib/common.sh; find_python"
    env = {**os.environ, "PATH": f"{old.parent}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", code], cwd=clone, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == str(new), done.stderr


def test_ask_prints_endpoint_question_and_answer(checkout, store, make_plan):
    plan = make_plan("--answer", "It is Paris.")
    path = store / "plans" / "small.json"
    spec.write_json(path, plan)
    command = [sys.executable, str(checkout / "scripts" / "lib" / "ask.py"), str(path)]
    env = {**os.environ, "PYTHONPATH": str(checkout / "playbooks" / "module_utils")}
    dead = subprocess.run(command, env=env, capture_output=True, text=True)
    assert dead.returncode == 1 and "does not answer" in dead.stderr
    service.ensure(plan, store, service.Options(manager="supervisor"))
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0
    port = plan["serve"]["port"]
    assert done.stdout.splitlines() == [
        f"endpoint  http://127.0.0.1:{port}/v1  (model small)",
        "question  Capital of France?",
        "answer    It is Paris.",
    ]
