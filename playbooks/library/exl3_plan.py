#!/usr/bin/python
"""Ansible module: the plan of one instance, kept in the store."""

from __future__ import annotations

import json
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import ab_pin, keys, preflight, spec
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_plan
short_description: Recipe and host become one reviewable plan, kept as plans/NAME.json in the store
options:
  instance: {type: dict, required: true, description: "One entry of exl3_instances."}
  bind_address: {type: str, required: true, description: "Address for instances that name none."}
  checkout: {type: path, required: true, description: "A checkout of this repository on the host."}
  store: {type: path, required: true, description: "The store."}
  venv: {type: path, required: true, description: "The venv."}
  calibration: {type: str, default: "",
    description: "auto, require or skip, instead of what the recipe says."}
  others: {type: list, elements: str, default: [],
    description: "Names of all instances of the host, whose GPUs are taken."}
  defaults: {type: dict, default: {},
    description: "Settings of the inventory that an instance may override."}
"""

EXAMPLES = """
- exl3_plan:
    instance: {name: chat, recipe: smollm2-135m-exl3-6bpw, port: 8000}
    bind_address: 127.0.0.1
    checkout: /opt/exl3-fleet
    store: /var/lib/exl3
    venv: /opt/exl3-fleet/.venv
"""

RETURN = """
plan: {type: dict, returned: always,
  description: "The plan; empty in check mode before there is a venv."}
instance: {type: str, returned: always, description: "Name of the instance."}
"""


def shown(plan: dict | None) -> str:
    """A plan as text for a diff, without the figures of the moment."""
    lasting = preflight.lasting(plan)
    return json.dumps(lasting, indent=1, sort_keys=True) + "\n" if lasting else ""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **preflight.INSTANCE_OPTIONS,
            "calibration": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    given = module.params
    store, venv = Path(given["store"]), Path(given["venv"])
    name = given["instance"]["name"]
    command = preflight.planner(venv)
    if command is None:
        if module.check_mode:
            module.exit_json(
                changed=True, plan={}, instance=name, msg="planned once the venv is there"
            )
        module.fail_json(msg=f"{venv} cannot plan: deploy the venv first (--tags venv).")
    try:
        # What a comparison found best holds where nobody says otherwise.
        pinning = given["instance"].get("pinning") or ab_pin.chosen(store, name)
        plan = preflight.planned(command, given, calibration=given["calibration"], pinning=pinning)
        key, ours = plan["serve"]["api_key_file"], keys.default_file(store, name)
        made_key = key == str(ours) and not ours.exists()
        if key == str(ours) and not module.check_mode:
            made_key = keys.ensure(ours)
    except HostError as error:
        module.fail_json(msg=str(error))
    path = store / "plans" / f"{name}.json"
    before = spec.read_json(path)
    differs = preflight.lasting(before) != preflight.lasting(plan)
    if differs and not module.check_mode:
        spec.write_json(path, plan)
    module.exit_json(
        changed=differs or made_key,
        plan=plan,
        instance=name,
        diff={
            "before": shown(before),
            "after": shown(plan),
            "before_header": str(path),
            "after_header": str(path),
        },
    )


if __name__ == "__main__":
    main()
