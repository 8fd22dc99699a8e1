#!/usr/bin/python
"""Ansible module: an archive for a bug report, without secrets and names."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import report
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_report
short_description: Facts, plans, state and the ends of logs in one archive, redacted
options:
  store: {type: path, required: true, description: "The store."}
  checkout: {type: path, required: true, description: "A checkout of this repository on the host."}
  path: {type: path, required: true, description: "The archive, a .tar.gz."}
"""

EXAMPLES = """
- exl3_report: {store: /var/lib/exl3, checkout: /opt/exl3-fleet, path: /tmp/exl3-report.tar.gz}
"""

RETURN = """
files: {type: list, returned: always, description: "What is in it."}
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "store": {"type": "path", "required": True},
            "checkout": {"type": "path", "required": True},
            "path": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    given = module.params
    if module.check_mode:
        module.exit_json(changed=False, files=[])
    try:
        files = report.write(Path(given["store"]), Path(given["checkout"]), Path(given["path"]))
    except HostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, files=files)


if __name__ == "__main__":
    main()
