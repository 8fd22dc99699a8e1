#!/usr/bin/python
"""Ansible module: the calibration of this host's GPUs, once per type."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import calibration, facts
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_calibrate
short_description: Measure each type of GPU of a host once, and keep the profile
options:
  plan: {type: dict, default: {},
    description: "A plan, whose image or venv is measured, and the experts of its model."}
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
    model = calibration.model_of(plan)
    python = Path(plan["venv"]["dir"]) / "bin" / "python"
    command = calibration.native_command(python, checkout, model)
    if box:
        command = calibration.container_command(box, given["docker_host"], model)
    try:
        changed, told = calibration.measure(
            store,
            facts.collect(store=store),
            software,
            command,
            given["force"],
            tuple(given["arguments"]),
            module.check_mode,
            box["user"] if box else None,
            model,
        )
    except HostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=changed, summary="; ".join(told))


if __name__ == "__main__":
    main()
