#!/usr/bin/python
"""Ansible module: one server, as its plan says, or gone."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import service, spec
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_service
short_description: Start, replace or remove a server, and wait until it gives a real answer
description:
  - A server that runs as planned is left alone. A new one is validated while the old one serves;
    when it does not become ready the old one is started again and the task fails with the reason.
options:
  plan: {type: dict, default: {},
    description: "The plan; empty in check mode before there is a venv."}
  instance: {type: str, default: "",
    description: "Name of the instance. With state absent, none means all of them."}
  store: {type: path, required: true, description: "The store."}
  state: {type: str, choices: [started, absent], default: started,
    description: "What it should be."}
  manager: {type: str, choices: [auto, systemd, supervisor], default: auto,
    description: "Who keeps it running."}
"""

EXAMPLES = """
- exl3_service: {plan: "{{ exl3_plan_made.plan }}", instance: chat, store: /var/lib/exl3}
- exl3_service: {instance: chat, store: /var/lib/exl3, state: absent}
"""

RETURN = """
summary: {type: str, returned: state is started,
  description: "Where it answers, what it said, how to stop it."}
attempts: {type: list, returned: state is started,
  description: "One line for every start that was tried."}
"""


def summary(outcome: service.Outcome, plan: dict) -> str:
    """What a person wants to know at the end."""
    endpoint = spec.endpoint_of(spec.make_spec(plan, Path("/"), "supervisor"))
    lines = [f"{plan['instance']}: {outcome.message}"]
    lines += [f"  {line}" for line in outcome.attempts]
    if outcome.reached:
        stages = ", ".join(f"{stage} {seconds} s" for stage, seconds in outcome.reached.items())
        lines.append(f"  reached: {stages}")
    lines.append(f"  endpoint: {endpoint.url}/v1   model: {endpoint.served_name}")
    if outcome.answer is not None:
        lines.append(f"  asked {endpoint.smoke['prompt']!r} it says {outcome.answer!r}")
    return "\n".join(lines)


def remove(module: AnsibleModule, store: Path, instance: str) -> None:
    names = [instance] if instance else [path.name for path in sorted((store / "run").glob("*"))]
    removed = [name for name in names if service.remove(spec.Paths(store, name), module.check_mode)]
    module.exit_json(changed=bool(removed), removed=removed)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "default": {}},
            "instance": {"type": "str", "default": ""},
            "store": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["started", "absent"], "default": "started"},
            "manager": {
                "type": "str",
                "choices": ["auto", "systemd", "supervisor"],
                "default": "auto",
            },
        },
        supports_check_mode=True,
    )
    given = module.params
    store, plan = Path(given["store"]), given["plan"]
    try:
        if given["state"] == "absent":
            remove(module, store, given["instance"])
        if not plan:
            said = f"{given['instance']}: would be started once the venv is there"
            module.exit_json(changed=True, summary=said, attempts=[], instance=given["instance"])
        outcome = service.ensure(plan, store, given["manager"], module.check_mode)
    except HostError as error:
        details = {
            name: error.details[name] for name in ("log", "attempts") if name in error.details
        }
        tail = "\n".join(error.details.get("tail", []))
        module.fail_json(msg=f"{error}\n\n{tail}" if tail else str(error), **details)
    module.exit_json(
        changed=outcome.changed,
        instance=plan["instance"],
        summary=summary(outcome, plan),
        attempts=outcome.attempts,
        diff={
            "before": outcome.before,
            "after": outcome.after,
            "before_header": f"running {plan['instance']}",
            "after_header": f"planned {plan['instance']}",
        },
    )


if __name__ == "__main__":
    main()
