#!/usr/bin/python
"""Ansible module: what a host has of Docker, and its daemon.json."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import engine_host
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_engine
short_description: Look at a host's Docker engine, and merge settings into its daemon.json
description:
  - Foreign keys of daemon.json stay; what ours replace is written down beside it and comes back
    with O(settings) empty.
options:
  settings: {type: dict, description: "Keys of daemon.json; without it nothing is written."}
  path: {type: path, default: /etc/docker/daemon.json, description: "The file."}
  manage: {type: str, choices: [auto, 'true', 'false'], default: auto,
    description: "Whether an engine may be installed; auto leaves vendor-managed systems alone."}
  gpus: {type: bool, default: false,
    description: "Whether containers are to get GPUs. With O(settings), CDI devices are switched on
      where the engine is older than 28.2."}
  root: {type: path, default: /, description: "Look at the files below this folder instead."}
"""

EXAMPLES = """
- exl3_engine: {gpus: true}
- exl3_engine: {settings: {features: {cdi: true}}}
"""

RETURN = """
engine: {type: dict, returned: always,
  description: "version, toolkit, vendor, and what is to be done with the reason."}
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "settings": {"type": "dict"},
            "path": {"type": "path", "default": "/etc/docker/daemon.json"},
            "manage": {"type": "str", "choices": ["auto", "true", "false"], "default": "auto"},
            "gpus": {"type": "bool", "default": False},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    given = module.params
    path = Path(given["path"])
    try:
        found = engine_host.look(given["root"], given["gpus"], given["manage"])
        if given["settings"] is None:
            if found["action"] == "refuse":
                module.fail_json(msg=found["reason"], engine=found)
            module.exit_json(changed=False, engine=found)
        ours = engine_host.wanted_settings(found, given["settings"], given["gpus"], given["manage"])
        changed, before, after = engine_host.apply_settings(path, ours, module.check_mode)
    except HostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=changed,
        engine=found,
        diff={
            "before": before,
            "after": after,
            "before_header": str(path),
            "after_header": str(path),
        },
    )


if __name__ == "__main__":
    main()
