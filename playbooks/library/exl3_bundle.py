#!/usr/bin/python
"""Ansible module: an offline bundle, made from recipes or unpacked into a store."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import bundle, preflight
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_bundle
short_description: Models, wheels and images in one folder with one manifest
options:
  bundle: {type: path, required: true, description: "The folder of the bundle."}
  state: {type: str, choices: [made, verified, unpacked], default: unpacked,
    description: "made writes a bundle from recipes; unpacked brings one into the store."}
  store: {type: path, required: true, description: "The store."}
  recipes: {type: list, elements: str, default: [], description: "Recipes to bundle (made)."}
  checkout: {type: path, required: true, description: "A checkout of this repository (made)."}
  venv: {type: path, required: true, description: "The venv (made)."}
  wheels: {type: bool, default: true, description: "Put wheels into the bundle (made)."}
  images: {type: bool, default: true, description: "Save or load images."}
  docker_host: {type: str, default: "", description: "Address of the engine; empty: its own."}
"""

EXAMPLES = """
- exl3_bundle:
    bundle: /media/exl3-bundle
    store: /var/lib/exl3
    checkout: /opt/exl3-fleet
    venv: /opt/exl3-fleet/.venv
"""

RETURN = """
steps: {type: list, returned: always, description: "What was done or would be done."}
"""


def made(given: dict, is_check: bool) -> tuple[bool, list[str]]:
    """Have a bundle of the recipes; the planner knows what belongs to them. Raises HostError."""
    folder = Path(given["bundle"])
    if (folder / bundle.FILE).is_file():
        missing = set(given["recipes"]) - set(bundle.read(folder)["recipes"])
        if missing:
            raise HostError(
                f"the bundle {folder} lacks {', '.join(sorted(missing))}.",
                "Choose another folder, or delete this one.",
            )
        return False, []
    if is_check:
        return True, [f"would make {folder} of {', '.join(given['recipes'])}"]
    command = preflight.planner(Path(given["venv"]))
    if command is None:
        raise HostError(f"{given['venv']} cannot plan.", "Deploy the venv first (--tags venv).")
    command += ["bundle", "make", *given["recipes"], "--out", str(folder), "--json"]
    command += ["--store", given["store"]]
    command += ["--wheels" if given["wheels"] else "--no-wheels"]
    command += ["--images" if given["images"] else "--no-images"]
    env = {**os.environ, "PYTHONPATH": str(Path(given["checkout"]) / "playbooks/module_utils")}
    if given["docker_host"]:
        env["DOCKER_HOST"] = given["docker_host"]
    done = subprocess.run(command, cwd=given["checkout"], env=env, capture_output=True, text=True)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise HostError(f"exl3ctl bundle make failed:\n{done.stderr[-2000:]}") from None
    if "error" in answer:
        raise HostError(answer["error"], answer.get("fix", ""))
    return True, [f"made {folder}: {', '.join(answer['models'] + answer['recipes'])}"]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "bundle": {"type": "path", "required": True},
            "state": {
                "type": "str",
                "choices": ["made", "verified", "unpacked"],
                "default": "unpacked",
            },
            "store": {"type": "path", "required": True},
            "recipes": {"type": "list", "elements": "str", "default": []},
            "checkout": {"type": "path", "required": True},
            "venv": {"type": "path", "required": True},
            "wheels": {"type": "bool", "default": True},
            "images": {"type": "bool", "default": True},
            "docker_host": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    given = module.params
    folder = Path(given["bundle"])
    try:
        if given["state"] == "made":
            changed, steps = made(given, module.check_mode)
        elif given["state"] == "verified":
            wrong = bundle.verify(folder)
            if wrong:
                raise HostError(f"the bundle {folder} is damaged: {'; '.join(wrong[:5])}.")
            changed, steps = False, ["every file verified"]
        else:
            host = given["docker_host"]
            command = ("docker", "-H", host) if host else ("docker",)
            docker = command if given["images"] and bundle.read(folder)["images"] else None
            changed, steps = bundle.unpack(
                folder, Path(given["store"]), module.check_mode, docker=docker
            )
    except HostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=changed,
        steps=steps,
        diff={"before": "", "after": "".join(f"{step}\n" for step in steps)},
    )


if __name__ == "__main__":
    main()
