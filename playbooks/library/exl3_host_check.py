#!/usr/bin/python
"""Ansible module: is this host fit to serve?"""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import checks, commands, facts

DOCUMENTATION = """
module: exl3_host_check
short_description: One finding per thing that keeps a host from serving, or will slow it down
description:
  - Changes nothing. Looks at driver, GPUs, memory nodes, CPUs, tools, engine and disk.
options:
  store: {type: path, required: true, description: "The store, for the disk that it is on."}
  runtime: {type: str, default: native, choices: [native, docker], description: "How it serves."}
  driver_min: {type: str, default: "", description: "Oldest NVIDIA driver that will do."}
"""

EXAMPLES = """
- exl3_host_check: {store: /var/lib/exl3, runtime: docker, driver_min: "580"}
"""

RETURN = """
checks: {type: list, returned: always, description: "Findings: id, status, found, fix."}
blocked: {type: list, returned: always, description: "Ids of findings that forbid serving."}
warnings_found: {type: list, returned: always, description: "Ids of warnings and unknowns."}
table: {type: str, returned: always, description: "One line per finding."}
"""


def lines(findings: list[dict]) -> list[str]:
    """One line per finding; what to do stands below it."""
    width = max(len(one["id"]) for one in findings)
    out = []
    for one in findings:
        out.append(f"{one['status']:<8} {one['id']:<{width}}  {one['found']}")
        if one["fix"] and one["status"] != "ok":
            out.append(" " * (width + 11) + one["fix"])
    return out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "store": {"type": "path", "required": True},
            "runtime": {"type": "str", "default": "native", "choices": ["native", "docker"]},
            "driver_min": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    given = module.params
    found = checks.run(
        facts.collect(),
        commands.run_here,
        store=Path(given["store"]),
        runtime=given["runtime"],
        driver_min=given["driver_min"] or None,
    )
    verdict = checks.verdict(found)
    module.exit_json(
        changed=False,
        checks=found,
        blocked=verdict["blocked"],
        warnings_found=verdict["warnings"],
        table="\n".join(lines(found)),
    )


if __name__ == "__main__":
    main()
