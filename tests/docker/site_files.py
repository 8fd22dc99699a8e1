"""One inventory with one instance in a container, and the plays that a person would run on it."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from exl3_host import containers, preflight, service, spec, venv


def tree_hash(folder: Path) -> str:
    """SHA-256 over every path below a folder, its mode and content."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        total.update(f"{path.relative_to(folder)}\0{oct(info.st_mode)}\0".encode())
        if path.is_symlink():
            total.update(os.readlink(path).encode())
        elif path.is_file():
            total.update(path.read_bytes())
    return total.hexdigest()


class Site:
    """An inventory in a folder of its own; `recipe` is the file that tests rewrite."""

    def __init__(self, folder: Path, checkout: Path, port: int, docker_host: str):
        self.folder, self.checkout, self.port = folder, checkout, port
        self.store, self.venv = folder / "store", folder / "venv"
        self.recipe, self.model = folder / "little.yaml", folder / "model"
        # A venv that can plan: the Python of these tests, marked as set up.
        bin_folder = self.venv / "bin"
        bin_folder.mkdir(parents=True)
        (bin_folder / "python").symlink_to(sys.executable)
        (self.venv / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
        (self.venv / venv.PLANNER_STAMP).write_text(json.dumps(venv.PLANNER))
        python = {"ansible_python_interpreter": sys.executable}
        hosts = {"localhost": {"ansible_connection": "local", **python}}
        self.settings = {
            "exl3_checkout_dir": str(checkout),
            "exl3_venv_dir": str(self.venv),
            "exl3_store_dir": str(self.store),
            "exl3_runtime": "docker",
            "exl3_docker_host": docker_host,
            "exl3_service_manager": "supervisor",
            "exl3_instances": [{"name": "little", "recipe": str(self.recipe), "port": port}],
        }
        group = {"exl3_hosts": {"hosts": hosts, "vars": self.settings}}
        (folder / "hosts.json").write_text(json.dumps({"all": {"children": group}}))

    @staticmethod
    def platform() -> str:
        return "linux/arm64" if os.uname().machine == "aarch64" else "linux/amd64"

    def begin(self, name: str, *arguments: str, **options) -> subprocess.Popen:
        """Start one playbook as a person does, from the checkout."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
        env.pop("PYTHONPATH", None)
        command = [str(Path(sys.executable).with_name("ansible-playbook"))]
        command += [f"playbooks/{name}.yml", "-i", str(self.folder / "hosts.json"), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.checkout, env=env, **pipes, **options)

    def play(self, name: str, *arguments: str) -> subprocess.CompletedProcess:
        """One playbook to its end."""
        process = self.begin(name, *arguments)
        said, _ = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, said, "")

    def changed(self, name: str, *arguments: str) -> int:
        """A play that has to work; the number of changed tasks."""
        done = self.play(name, *arguments)
        assert done.returncode == 0, done.stdout
        return int(re.search(r"changed=(\d+)", done.stdout)[1])

    def serve(self) -> None:
        """What a first deploy.yml comes to, without Ansible, for tests of what comes after."""
        given = {
            "instance": self.settings["exl3_instances"][0],
            "bind_address": "127.0.0.1",
            "checkout": self.checkout,
            "store": self.store,
            "venv": self.venv,
            "defaults": {
                "default_runtime": "docker",
                "container_user": containers.DEFAULT_USER,
                "container_network": "host",
            },
        }
        planner = preflight.planner(self.venv)
        assert planner is not None
        plan = preflight.planned(planner, given)
        spec.write_json(self.store / "plans" / "little.json", plan)
        options = service.Options("supervisor", docker_host=self.settings["exl3_docker_host"])
        assert service.ensure(plan, self.store, options).changed

    def state(self) -> dict | None:
        return spec.read_json(spec.Paths(self.store, "little").state)
