#!/usr/bin/python
"""Ansible module: one real question to a running server."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import spec, status
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_smoke
short_description: Ask a running server the question of its recipe, and judge the answer
options:
  instance: {type: str, required: true, description: "Name of the instance."}
  store: {type: path, required: true, description: "The store."}
  timeout_s: {type: int, default: 120, description: "Longest wait for the answer."}
"""

EXAMPLES = """
- exl3_smoke: {instance: chat, store: /var/lib/exl3}
"""

RETURN = """
summary: {type: str, returned: always, description: "Question, answer, seconds."}
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "instance": {"type": "str", "required": True},
            "store": {"type": "path", "required": True},
            "timeout_s": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        said = status.smoke(spec.Paths(Path(given["store"]), given["instance"]), given["timeout_s"])
    except HostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, summary=said)


if __name__ == "__main__":
    main()
