"""preflight.yml and topology.yml, run by Ansible on this machine with cards that are made up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_host import answers_of
from test_host_gpus import fake_smi, two_cards  # noqa: F401  the fixture

CHECKOUT = Path(__file__).resolve().parents[2]


def play(name: str, store: Path, *more: str) -> tuple[int, str, int]:
    """Exit status, output and number of changes of one run."""
    command = [str(Path(sys.executable).with_name("ansible-playbook")), f"playbooks/{name}.yml"]
    command += ["-i", "playbooks/inventories/localhost", "-e", f"exl3_store_dir={store}", *more]
    env = {**os.environ, "ANSIBLE_CONFIG": "playbooks/ansible.cfg", "ANSIBLE_NOCOLOR": "1"}
    done = subprocess.run(
        command, cwd=CHECKOUT, env=env, capture_output=True, text=True, timeout=300
    )
    changed = re.search(r"changed=(\d+)", done.stdout)
    return done.returncode, done.stdout + done.stderr, int(changed.group(1)) if changed else -1


@pytest.fixture(autouse=True)
def cards(fake_smi: Path) -> None:  # noqa: F811
    """Every run sees two cards whose second one an instance of the inventory knows."""
    assert json.loads(Path(os.environ["EXL3_FAKE_HOST"]).read_text()) == answers_of(two_cards())


def test_topology_is_kept_and_does_not_change_by_itself(tmp_path: Path) -> None:
    store = tmp_path / "store"
    code, text, changed = play("topology", store, "--check", "--diff")
    assert (code, changed) == (0, 1), text
    assert not (store / "nodes").exists(), "a check writes nothing"
    code, text, changed = play("topology", store, "--diff")
    assert (code, changed) == (0, 1), text
    assert "2 ranks: GPUs 0,1" in text
    assert '+ "schema": "exl3-topology/1"' in text
    kept = json.loads((store / "nodes/topology.json").read_text())
    assert [g["bus_id"] for g in kept["gpus"]] == ["0000:41:00.0", "0000:81:00.0"]
    code, text, changed = play("topology", store)
    assert (code, changed) == (0, 0), text


def test_a_map_of_the_inventory_that_names_no_card_here(tmp_path: Path) -> None:
    instance = {"name": "chat", "recipe": "smollm2-135m-exl3-6bpw", "gpu_nodes": {"GPU-9": 0}}
    code, text, changed = play(
        "topology", tmp_path, "-e", json.dumps({"exl3_instances": [instance]})
    )
    assert code == 2 and changed == 0
    assert "gpu_nodes names the GPU GPU-9, which this host does not have" in text


def test_preflight_blocks_on_an_old_driver(tmp_path: Path) -> None:
    none = ("-e", '{"exl3_instances": []}')
    code, text, changed = play("preflight", tmp_path, *none)
    assert (code, changed) == (0, 0), text
    assert "driver 580.126.09" in text
    old = ("-e", "exl3_preflight_driver_min=590")
    code, text, changed = play("preflight", tmp_path, *none, *old)
    assert code == 2 and changed == 0
    assert "driver 580.126.09, 590 or newer is needed" in text
    assert "Install nvidia-driver-590 or newer" in text
    assert "blocked: driver; see the findings above" in text


def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    """docs/topology.md: what it tells people to type."""
    page = (CHECKOUT / "docs/topology.md").read_text()
    lines = [x for x in page.splitlines() if x.startswith(("scripts/exl3ctl", ".venv/bin"))]
    assert len(lines) == 9
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"mode": "none", "cpus": "0", "mems": None, "numactl": []}))
    names = {"PID": str(os.getpid()), "STORE/plans/NAME.json": str(plan)}
    names |= {"host.json": str(tmp_path / "host.json")}
    for line in lines:
        words = [names.get(word, word) for word in line.split()]
        if words[0] == ".venv/bin/ansible-playbook":
            # The two plays have tests of their own.
            assert (CHECKOUT / words[1]).is_file()
            continue
        if words[1] in ("topology", "preflight"):
            words += ["--store", str(tmp_path)]
        command = [sys.executable, "-m", "exl3_host.cli", *words[1:]]
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
        # There is no card that could be measured, and a preflight tells what this host is.
        allowed = {0, 1} if words[1] == "preflight" or "--measure" in words else {0}
        assert done.returncode in allowed, f"{line}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
