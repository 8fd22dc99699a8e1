#!/usr/bin/python
"""Ansible module: what the servers of a host do."""

from __future__ import annotations

DOCUMENTATION = """
module: exl3_status
short_description: A table of the servers of a host, and what is wrong with them
options:
  instances: {type: list, elements: str, required: true, description: Names that should serve.}
  store: {type: path, required: true, description: The store.}
"""

EXAMPLES = """
- exl3_status: {instances: [chat], store: /var/lib/exl3}
"""

RETURN = """
table: {type: list, returned: always, description: One line per server.}
problems: {type: list, returned: always, description: One line per server that should serve and does not.}
servers: {type: list, returned: always, description: The same as data.}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import service

COLUMNS = ("instance", "state", "url", "model", "manager", "pid", "up", "GiB", "restarts", "last exit")


def row(status: service.Status) -> list[str]:
    up = "-" if status.uptime_s is None else f"{status.uptime_s // 60} min"
    memory = "-" if status.memory_gib is None else f"{status.memory_gib:.2f}"
    cells = [status.instance, status.state, status.url, status.model, status.manager, status.pid]
    cells += [up, memory, status.restarts, status.last_exit]
    return [str(cell) if cell not in ("", None) else "-" for cell in cells]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "instances": {"type": "list", "elements": "str", "required": True},
            "store": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    wanted, store = module.params["instances"], Path(module.params["store"])
    others = [path.name for path in sorted((store / "run").glob("*")) if path.name not in wanted]
    found = [service.look(service.Paths(store, name)) for name in [*wanted, *others]]
    rows = [list(COLUMNS), *(row(status) for status in found)]
    widths = [max(len(line[column]) for line in rows) for column in range(len(COLUMNS))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in rows
    ]
    table += [f"{name} is not in the inventory" for name in others]
    problems = [
        f"{status.instance} is {status.state}: {status.reason}"
        + (f" (log: {status.log})" if status.log else "")
        for status in found
        if status.instance in wanted and status.state != "serving"
    ]
    servers = [service.as_dict(status) for status in found]
    module.exit_json(changed=False, table=table, problems=problems, servers=servers)


if __name__ == "__main__":
    main()
