#!/usr/bin/python
"""Ansible module: the model of one plan, in the store."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import store
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_model
short_description: Fetch or quantise the model that a plan names, once, and check it afterwards
options:
  plan: {type: dict, default: {},
    description: "The plan; empty in check mode before there is a venv."}
  store: {type: path, required: true, description: "The store."}
  state: {type: str, choices: [present, absent], default: present,
    description: "absent removes the whole store."}
  verify: {type: bool, default: false,
    description: "Read every byte and compare it with the manifest."}
  hf_token_file: {type: str, default: "", description: "File with a Hub token."}
  licenses: {type: list, elements: str, default: [],
    description: "Gated repositories whose licence has been accepted."}
  offline: {type: bool, default: false, description: "Use no package index."}
  find_links: {type: list, elements: str, default: [], description: "Folders with wheels."}
"""

EXAMPLES = """
- exl3_model: {plan: "{{ exl3_plan_made.plan }}", store: /var/lib/exl3, verify: true}
"""

RETURN = """
steps: {type: list, returned: always, description: "What was done or would be done."}
missing: {type: bool, returned: always, description: "Whether the model had to be made."}
log: {type: str, returned: always, description: "Output of the downloader and of the quantiser."}
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "default": {}},
            "store": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "verify": {"type": "bool", "default": False},
            "hf_token_file": {"type": "str", "default": "", "no_log": False},
            "licenses": {"type": "list", "elements": "str", "default": []},
            "offline": {"type": "bool", "default": False},
            "find_links": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    given = module.params
    folder = Path(given["store"])
    try:
        if given["state"] == "absent":
            removed = store.remove_all(folder, module.check_mode)
            module.exit_json(changed=bool(removed), missing=False, steps=removed, log="")
        if not given["plan"]:
            module.exit_json(
                changed=True, missing=True, steps=["once the venv is there"], log="", instance="?"
            )
        request = store.request_from_plan(
            given["plan"],
            folder,
            hf_token_file=given["hf_token_file"] or None,
            licenses=tuple(given["licenses"]),
            offline=given["offline"],
            find_links=tuple(given["find_links"]),
        )
        changed, steps = store.ensure(request, module.check_mode, given["verify"])
    except HostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=changed,
        missing=changed,
        steps=steps,
        log=str(request.log),
        instance=given["plan"]["instance"],
        diff={"before": "", "after": "".join(f"{step}\n" for step in steps)},
    )


if __name__ == "__main__":
    main()
