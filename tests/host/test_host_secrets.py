"""A canary token through Ansible: what a person sees at the highest verbosity, logs, temporary
files, arguments and environments of every process while the module runs.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import hub_server

PLAY = """\
- hosts: localhost
  gather_facts: false
  tasks:
    - exl3_model:
        plan: "{{ plan }}"
        store: "{{ store }}"
        hf_token_file: "{{ token }}"
        licenses: [someone/little]
      register: made
    - debug: {var: made}
"""


def test_a_canary_token_shows_nowhere(checkout: Path, tmp_path: Path) -> None:
    canary = "hf_Canary" + os.urandom(12).hex()
    repository = tmp_path / "repository"
    shutil.copytree(checkout / "tests/fixtures/tiny-llama-mul1-2.5", repository)
    token = tmp_path / "token"
    token.write_text(canary)
    token.chmod(0o600)
    (tmp_path / "play.yml").write_text(PLAY)
    source = {"kind": "hub", "repo": "someone/little", "revision": hub_server.COMMIT}
    settings = {
        "plan": {
            "instance": "tiny",
            "model": {
                "source": {**source, "gated": True},
                "quantize": None,
                "dir": str(tmp_path / "store/models/tiny-0"),
            },
            "venv": {"dir": str(Path(sys.executable).parents[1])},
            "secrets": {"hf_token": True, "api_key": False},
        },
        "store": str(tmp_path / "store"),
        "token": str(token),
        "ansible_python_interpreter": sys.executable,
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    seen, stop = set(), threading.Event()

    def watch() -> None:
        while not stop.is_set():
            for entry in Path("/proc").glob("[0-9]*"):
                for name in ("cmdline", "environ"):
                    try:
                        text = (entry / name).read_bytes()
                    except OSError:
                        continue
                    if canary.encode() in text:
                        seen.add(name)
                    if b"snapshot_download" in text:
                        seen.add("downloader")
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with hub_server.serve(repository) as hub:
            hub.token = canary
            done = subprocess.run(
                [
                    Path(sys.executable).with_name("ansible-playbook"),
                    tmp_path / "play.yml",
                    "-vvvv",
                    "-e",
                    f"@{tmp_path / 'settings.json'}",
                ],
                capture_output=True,
                text=True,
                timeout=120,
                env={
                    **os.environ,
                    "ANSIBLE_CONFIG": str(checkout / "playbooks/ansible.cfg"),
                    "ANSIBLE_LOCAL_TEMP": str(tmp_path / "ansible"),
                    "ANSIBLE_REMOTE_TEMP": str(tmp_path / "ansible-remote"),
                    "ANSIBLE_KEEP_REMOTE_FILES": "1",
                    "HF_ENDPOINT": hub.address,
                    "HF_HOME": str(tmp_path / "hf"),
                    "HF_HUB_DISABLE_XET": "1",
                },
            )
    finally:
        stop.set()
        watcher.join()
    assert done.returncode == 0 and "failed=0" in done.stdout, done.stdout[-3000:]
    assert (tmp_path / "store/models/tiny-0/config.json").is_file()
    assert seen == {"downloader"}, "the downloader ran, and no process showed the token"
    assert canary not in done.stdout + done.stderr
    # Ansible's own temporary files are kept here, so that they are searched as well.
    assert list((tmp_path / "ansible-remote").rglob("AnsiballZ_*"))
    holders = [
        str(path)
        for path in tmp_path.rglob("*")
        if path.is_file() and path != token and canary.encode() in path.read_bytes()
    ]
    assert holders == []
