"""A real vLLM with a tiny checkpoint, deployed with an API key as the playbooks deploy it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from exl3_host import runner, service, spec

# Not like any real key, so that it can be searched for in everything that is written.
CANARY = "canary-4f1d0c7e9b-key"
ENTRY = "[vllm.general_plugins]\nexl3 = exl3_plugin:register\n"


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def program(name: str) -> str:
    """The path of a program, or a loud skip."""
    found = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")
    if found is None:
        pytest.skip(f"{name.upper()} NOT TESTED: it is not installed")
    return found


def play(checkout: Path, name: str, inventory: Path, *arguments: str):
    """Run one playbook as a person does, without our ansible.cfg."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    env.pop("PYTHONPATH", None)
    command = [str(Path(sys.executable).with_name("ansible-playbook"))]
    command += [f"playbooks/{name}.yml", "-i", str(inventory), *arguments]
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)


def write_inventory(folder: Path, checkout: Path, store: Path, **variables) -> Path:
    """An inventory of this machine alone."""
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    hosts = {
        "hosts": {"box1": local},
        "vars": {
            "exl3_checkout_dir": str(checkout),
            "exl3_store_dir": str(store),
            **variables,
        },
    }
    path = folder / "hosts.json"
    path.write_text(json.dumps({"all": {"children": {"exl3_hosts": hosts}}}))
    return path


class Live:
    """The running server: where it is, what it wrote, and how to ask it."""

    def __init__(self, folder: Path, checkout: Path) -> None:
        self.folder, self.checkout, self.store = folder, checkout, folder / "store"
        self.port = free_port()
        self.key_file = folder / "api-key"
        self.key_file.touch(0o600)
        self.key_file.write_text(CANARY + "\n")
        self.store.mkdir()
        self.instance = {
            "name": "tiny",
            "recipe": "none",
            "port": self.port,
            "api_key_file": str(self.key_file),
        }

    def start(self) -> None:
        entry = self.folder / "site" / "exl3_fleet-0.0.0.dist-info"
        entry.mkdir(parents=True)
        (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: exl3-fleet\nVersion: 0\n")
        (entry / "entry_points.txt").write_text(ENTRY)
        model = self.checkout / "tests" / "fixtures" / "tiny-llama-mul1-2.5"
        argv = [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
        argv += ["--served-model-name", "tiny", "--max-model-len", "256", "--dtype", "float32"]
        argv += ["--enforce-eager", "--host", "127.0.0.1", "--port", str(self.port)]
        paths = [self.folder / "site", self.checkout, self.checkout / "playbooks/module_utils"]
        env = {
            "PYTHONPATH": ":".join(map(str, paths)),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CACHE_ROOT": str(self.folder / "cache"),
        }
        plan = {
            "schema": "exl3-plan/1",
            "instance": "tiny",
            "runtime": "native",
            "profile": "cpu",
            "release": None,
            "container": None,
            "recipe": {"name": "tiny", "path": "/nowhere", "sha256": "0" * 64},
            "model": {
                "source": {"kind": "path", "path": str(model)},
                "quantize": None,
                "dir": str(model),
                "served_name": "tiny",
            },
            "venv": {"dir": str(self.folder / "venv")},
            "serve": {
                "argv": argv,
                "env": env,
                "host": "127.0.0.1",
                "port": self.port,
                "api_key_file": str(self.key_file),
            },
            "pin": {"mode": "none", "cpus": "0", "mems": None, "nodes": [], "numactl": []},
            "fit": {"ok": True, "needed_gib": 0.1, "available_gib": 1.0, "lines": []},
            "health": {
                "ready_timeout_s": 240,
                "stall_timeout_s": 120,
                "smoke": {"endpoint": "completion", "prompt": "hello", "max_tokens": 2},
            },
            "start": {"attempts": 1, "backoff_s": 0, "retry_on": []},
        }
        service.ensure(plan, self.store, service.Options(manager="supervisor"))

    def stop(self) -> None:
        runner.halt(spec.Paths(self.store, "tiny"))

    def fetch(self, path: str, body: dict | None = None, key: str | None = CANARY):
        """(status, text) of one request to the server itself."""
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data=data, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
