#!/usr/bin/python
"""Ansible module: this host's part of a server that several hosts run together."""

from __future__ import annotations

import json
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import nodes, preflight, spec
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_nodes
short_description: The plan of one host out of the plan of the whole server
options:
  plan: {type: dict, default: {},
    description: "What M(exl3_plan) made here; empty in check mode before there is a venv."}
  chosen: {type: dict, required: true, description: "The link of every host, the head first."}
  host: {type: str, required: true, description: "Name of this host in C(chosen)."}
  port: {type: int, default: 29600, description: "Where the guards meet on the head."}
  store: {type: path, required: true, description: "The store."}
"""

EXAMPLES = """
- exl3_nodes:
    plan: "{{ exl3_plan_made.results[0].plan }}"
    chosen: "{{ exl3_links_proved.chosen }}"
    host: "{{ inventory_hostname }}"
    store: /var/lib/exl3
"""

RETURN = """
plan: {type: dict, returned: always, description: "The plan of this host."}
instance: {type: str, returned: always, description: "Name of the instance."}
"""


def shown(plan: dict | None) -> str:
    """A plan as text for a diff, without the figures of the moment."""
    lasting = preflight.lasting(plan)
    return json.dumps(lasting, indent=1, sort_keys=True) + "\n" if lasting else ""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "default": {}},
            "chosen": {"type": "dict", "required": True},
            "host": {"type": "str", "required": True},
            "port": {"type": "int", "default": nodes.MEET_PORT},
            "store": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    given = module.params
    plan, chosen, host = given["plan"], given["chosen"], given["host"]
    if not plan:
        module.exit_json(changed=True, plan={}, instance="", msg="planned once the venv is there")
    names = list(chosen)
    seat = nodes.Seat(
        rank=names.index(host),
        hosts=len(names),
        link=chosen[host],
        head=chosen[names[0]]["address"],
        meet_port=given["port"],
    )
    try:
        files = nodes.folder_digest(Path(plan["model"]["dir"]))
        mine = nodes.split(plan, seat, {"model files": files})
    except HostError as error:
        module.fail_json(msg=str(error))
    path = Path(given["store"]) / "plans" / f"{plan['instance']}.host.json"
    before = spec.read_json(path)
    changed = preflight.lasting(before) != preflight.lasting(mine)
    if changed and not module.check_mode:
        spec.write_json(path, mine)
    module.exit_json(
        changed=changed,
        plan=mine,
        instance=plan["instance"],
        diff={
            "before": shown(before),
            "after": shown(mine),
            "before_header": str(path),
            "after_header": str(path),
        },
    )


if __name__ == "__main__":
    main()
