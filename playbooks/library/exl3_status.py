#!/usr/bin/python
"""Ansible module: what the servers of a host do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import spec, status

DOCUMENTATION = """
module: exl3_status
short_description: A table of the servers of a host, and what is wrong with them
options:
  instances: {type: list, elements: str, required: true, description: "Names that should serve."}
  store: {type: path, required: true, description: "The store."}
"""

EXAMPLES = """
- exl3_status: {instances: [chat], store: /var/lib/exl3}
"""

RETURN = """
table: {type: str, returned: always, description: "One line per server."}
problems: {type: list, returned: always,
  description: "One line per server that should serve and does not."}
servers: {type: list, returned: always, description: "The same as data."}
"""

COLUMNS = (
    "instance",
    "state",
    "url",
    "model",
    "manager",
    "pid",
    "up",
    "GiB",
    "restarts",
    "last exit",
    "release",
    "image",
    "kv tokens",
    "pin",
)


def row(one: status.Status) -> list[str]:
    up = "-" if one.uptime_s is None else f"{one.uptime_s // 60} min"
    memory = "-" if one.memory_gib is None else f"{one.memory_gib:.2f}"
    cells = [one.instance, one.state, one.url, one.model, one.manager, one.pid]
    cells += [up, memory, one.restarts, one.last_exit, one.release, one.image]
    cells += [one.kv_tokens, one.pin]
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
    found = [status.look(spec.Paths(store, name)) for name in [*wanted, *others]]
    rows = [list(COLUMNS), *(row(one) for one in found)]
    widths = [max(len(line[column]) for line in rows) for column in range(len(COLUMNS))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in rows
    ]
    table += [f"{name} is not in the inventory" for name in others]
    problems = [
        f"{one.instance} is {one.state}: {one.reason}" + (f" (log: {one.log})" if one.log else "")
        for one in found
        if one.instance in wanted and one.state != "serving"
    ]
    problems += [
        f"{one.instance} does not run where it was pinned to: {one.pin}"
        for one in found
        if not one.pin_ok
    ]
    servers = [dataclasses.asdict(one) for one in found]
    module.exit_json(changed=False, table="\n".join(table), problems=problems, servers=servers)


if __name__ == "__main__":
    main()
