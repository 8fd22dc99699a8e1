#!/usr/bin/python
"""Ansible module: what can be refused before anything is changed."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import preflight, service, spec
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_preflight
short_description: Refuse bad recipes, taken ports and small disks before anything is changed
description:
  - Changes nothing. Recipes are checked here when a Python with the planner's packages is there
    already, otherwise by M(exl3_plan) after the venv was made.
options:
  instances: {type: list, elements: dict, required: true, description: "The servers of this host."}
  bind_address: {type: str, required: true, description: "Address for instances that name none."}
  checkout: {type: path, required: true, description: "A checkout of this repository on the host."}
  store: {type: path, required: true, description: "The store."}
  venv: {type: path, required: true, description: "The venv."}
  defaults: {type: dict, default: {},
    description: "Settings of the inventory that an instance may override."}
"""

EXAMPLES = """
- exl3_preflight:
    instances: [{name: chat, recipe: smollm2-135m-exl3-6bpw, port: 8000}]
    bind_address: 127.0.0.1
    checkout: /opt/exl3-fleet
    store: /var/lib/exl3
    venv: /opt/exl3-fleet/.venv
"""

RETURN = """
planned: {type: bool, returned: always, description: "Whether recipes could be checked already."}
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "instances": {"type": "list", "elements": "dict", "required": True},
            "bind_address": {"type": "str", "required": True},
            "checkout": {"type": "path", "required": True},
            "store": {"type": "path", "required": True},
            "venv": {"type": "path", "required": True},
            "defaults": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    given = module.params
    store, venv = Path(given["store"]), Path(given["venv"])
    try:
        instances = [preflight.completed(one) for one in given["instances"]]
        preflight.check_instances(instances)
        for instance in instances:
            preflight.check_port(instance, given["bind_address"], store)
        preflight.check_disk(venv)
        preflight.check_room(store)
        command = preflight.planner(venv)
        for instance in instances if command else []:
            plan = preflight.planned(command, {**given, "instance": instance})
            # What runs already is judged when it is known whether it has to be replaced.
            if not spec.own_pids(spec.Paths(store, instance["name"])):
                service.refuse_unfit(plan)
    except HostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, planned=command is not None)


if __name__ == "__main__":
    main()
