#!/usr/bin/python
"""Ansible module: the calibration of this host's GPUs, once per type."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import calibration, containers, facts
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_calibrate
short_description: Measure each type of GPU of a host once, and keep the profile
options:
  plan: {type: dict, default: {}, description: "A plan, whose image or venv is measured."}
  checkout: {type: path, required: true, description: "A checkout of this repository on the host."}
  store: {type: path, required: true, description: "The store; profiles go to its calibration."}
  force: {type: bool, default: false, description: "Measure again where a profile is kept."}
  arguments: {type: list, elements: str, default: [],
    description: "Further arguments of bench/calibrate.py."}
  docker_host: {type: str, default: "", description: "Socket of the engine, unix://..."}
"""

EXAMPLES = """
- exl3_calibrate:
    plan: "{{ exl3_plan_made.plan }}"
    checkout: /opt/exl3-fleet
    store: /var/lib/exl3
"""

RETURN = """
summary: {type: str, returned: always, description: "What was measured, what was kept."}
"""


def command_of(plan: dict, checkout: Path, out: Path, docker_host: str, gpu: dict) -> list[str]:
    """The program that measures: in the image of the plan, or from the checkout by its venv."""
    box = plan.get("container")
    if not box:
        python = Path(plan["venv"]["dir"]) / "bin" / "python"
        return [str(python), str(checkout / "bench" / "calibrate.py"), "--out", str(out)]
    image = f"{box['image']['name']}@{box['image']['digest']}"
    command = ["docker", *(["-H", docker_host] if docker_host else []), "run", "--rm", "--init"]
    command += ["--network", "none", "--user", box["user"], "--cap-drop", "ALL"]
    command += ["--device", f"nvidia.com/gpu={gpu['uuid']}"]
    command += ["--mount", f"type=bind,source={out.parent},target=/out"]
    return [*command, image, "calibrate", "--out", f"/out/{out.name}"]


def measure(command: list[str], log: Path, gpu: dict) -> None:
    """Run it, its output in the log. Raises HostError with the end of it."""
    env = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if command[0] != "docker":
        env["CUDA_VISIBLE_DEVICES"] = str(gpu["index"])
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as out:
        out.write(f"$ {' '.join(command)}\n")
        out.flush()
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=env)
    if done.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise HostError(
            f"calibrating {gpu['name']} ended with exit status {done.returncode}:\n{tail}",
            f"The GPU must be idle. Log: {log}; a second run goes on where this one stopped.",
        )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "default": {}},
            "checkout": {"type": "path", "required": True},
            "store": {"type": "path", "required": True},
            "force": {"type": "bool", "default": False},
            "arguments": {"type": "list", "elements": "str", "default": []},
            "docker_host": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    given = module.params
    plan, store, checkout = given["plan"], Path(given["store"]), Path(given["checkout"])
    if not plan:
        module.exit_json(changed=False, summary="nothing is planned here yet")
    box = plan.get("container")
    software = box["image"]["digest"] if box else (plan.get("release") or "none")
    told, changed = [], False
    try:
        for key, gpu in calibration.wanted(facts.collect(store=store), software):
            path = calibration.file_of(store, key)
            if path.is_file() and not given["force"]:
                told.append(f"{key['name']}: kept ({path.name})")
                continue
            changed = True
            if module.check_mode:
                told.append(f"{key['name']}: would be measured")
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            out = path.with_name(f"new-{path.name}")
            if box:
                uid, gid = (int(part) for part in f"{box['user']}:0".split(":")[:2])
                containers.give(path.parent, uid, gid, 0o755)
            command = command_of(plan, checkout, out, given["docker_host"], gpu)
            measure([*command, *given["arguments"]], store / "logs" / "calibrate.log", gpu)
            json.loads(out.read_text())
            os.replace(out, path)
            calibration.keep(store, key)
            told.append(f"{key['name']}: measured ({path.name})")
    except (HostError, OSError, ValueError) as error:
        module.fail_json(msg=str(error))
    summary = "; ".join(told) or "no GPU here: CPU kernels are not calibrated"
    module.exit_json(changed=changed, summary=summary)


if __name__ == "__main__":
    main()
