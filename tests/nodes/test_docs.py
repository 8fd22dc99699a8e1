"""The commands of the pages on peer access, several hosts and monitoring do what they say.

A command that stands there and has no entry here turns this red.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = ("peer-access", "two-nodes", "monitoring")
BIN = Path(sys.executable).parent
# Those that need GPUs, Sparks or an image: what they call is checked, not run.
CALLED = {
    "docker run --rm --gpus '\"device=0,1\"' --shm-size 1g --entrypoint python3 IMAGE "
    "/opt/exl3/bench/peer_access.py --ranks 2 > report.json": "bench/peer_access.py",
    "scripts/exl3ctl peers --report report.json --keep --store STORE": "scripts/exl3ctl",
}
PLAYS = {
    "ansible-playbook playbooks/nodes.yml -i playbooks/inventories/two-sparks",
    "ansible-playbook playbooks/status.yml -i playbooks/inventories/two-sparks",
    "ansible-playbook playbooks/teardown.yml -i playbooks/inventories/two-sparks",
    ".venv/bin/ansible-playbook playbooks/monitoring.yml -i playbooks/inventories/localhost",
    "ansible-playbook playbooks/proxy.yml -i INVENTORY",
}
RUN = {
    "scripts/exl3ctl peers",
    "scripts/exl3ctl peers --ranks 2 --backend gloo",
    "bench/allreduce.py --backend gloo --max-bytes 65536",
    "PYTHONPATH=playbooks/module_utils python3 -m exl3_host.metrics --store .exl3",
}


def commands(checkout: Path) -> set[str]:
    """What stands in the code blocks without a language of the three pages."""
    found = set()
    for page in PAGES:
        text = (checkout / "docs" / f"{page}.md").read_text()
        for block in re.findall(r"^```\n(.*?)^```$", text, re.M | re.S):
            found |= {line for line in block.splitlines() if line}
    return found


def test_every_command_is_known(checkout):
    assert commands(checkout) == set(CALLED) | PLAYS | RUN
    for place in CALLED.values():
        assert (checkout / place).is_file()


@pytest.mark.parametrize("command", sorted(PLAYS))
def test_plays_and_inventories_fit(checkout, command):
    words = command.replace("INVENTORY", "playbooks/inventories/localhost").split()
    done = subprocess.run(
        [str(BIN / "ansible-playbook"), *words[1:], "--list-hosts"],
        cwd=checkout,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    wanted = ["spark-a", "spark-b"] if "two-sparks" in command else ["localhost"]
    assert sorted(re.findall(r"^ {6}(\S+)$", done.stdout, re.M)) == wanted


def run(checkout: Path, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, shell=True, cwd=checkout, capture_output=True, text=True)


def test_what_exl3ctl_peers_says(checkout, tmp_path):
    command = "scripts/exl3ctl peers --ranks 2 --backend gloo"
    done = run(checkout, f"{command} --store {tmp_path}")
    assert done.returncode == 0 and "peer access at 2 ranks: use (measured now)" in done.stdout
    assert "granted yes, moves yes, collects yes" in done.stdout
    done = run(checkout, f"{command} --store {tmp_path}")
    assert "use (kept)" in done.stdout
    if shutil.which("nvidia-smi") is None:
        done = run(checkout, f"scripts/exl3ctl peers --store {tmp_path}")
        assert done.returncode == 1 and "no GPU answers here" in done.stdout + done.stderr


def test_status_lines(checkout, tmp_path):
    command = "PYTHONPATH=playbooks/module_utils python3 -m exl3_host.metrics --store .exl3"
    done = run(checkout, command.replace(".exl3", str(tmp_path)))
    assert done.returncode == 0 and done.stdout.startswith("# HELP exl3_status_time_seconds")
