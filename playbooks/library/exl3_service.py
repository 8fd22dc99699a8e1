#!/usr/bin/python
"""Ansible module: one server, as its plan says, or gone."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import rehearsal, releases, service, spec
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
  state: {type: str, choices: [started, rolled_back, absent], default: started,
    description: "What it should be."}
  manager: {type: str, choices: [auto, systemd, supervisor], default: auto,
    description: "Who keeps it running."}
  rehearsal: {type: str, choices: [auto, always, never], default: auto,
    description: "Whether a new container serves on a spare port before the old one is stopped."}
  keep_releases: {type: int, default: 2, description: "Earlier releases kept for a rollback."}
  release: {type: str, default: previous,
    description: "With state rolled_back: previous, a number, or the beginning of an id."}
  docker_host: {type: str, default: "", description: "Socket of the engine, unix://..."}
"""

EXAMPLES = """
- exl3_service: {plan: "{{ exl3_plan_made.plan }}", instance: chat, store: /var/lib/exl3}
- exl3_service: {instance: chat, store: /var/lib/exl3, state: rolled_back}
- exl3_service: {instance: chat, store: /var/lib/exl3, state: absent}
"""

RETURN = """
summary: {type: str, returned: state is started,
  description: "Where it answers, what it said, how to stop it."}
attempts: {type: list, returned: state is started,
  description: "One line for every start that was tried."}
"""


def summary(outcome: service.Outcome, name: str, store: Path) -> str:
    """What a person wants to know at the end."""
    running = spec.read_json(spec.Paths(store, name).spec)
    lines = [f"{name}: {outcome.message}"]
    lines += [f"  {line}" for line in outcome.attempts]
    if outcome.reached:
        stages = ", ".join(f"{stage} {seconds} s" for stage, seconds in outcome.reached.items())
        lines.append(f"  reached: {stages}")
    if running is not None:
        endpoint = spec.endpoint_of(running)
        lines.append(f"  endpoint: {endpoint.url}/v1   model: {endpoint.served_name}")
        if outcome.answer is not None:
            lines.append(f"  asked {endpoint.smoke['prompt']!r} it says {outcome.answer!r}")
    return "\n".join(lines)


def remove(module: AnsibleModule, store: Path, instance: str) -> None:
    names = [instance] if instance else [path.name for path in sorted((store / "run").glob("*"))]
    removed = [name for name in names if service.remove(spec.Paths(store, name), module.check_mode)]
    module.exit_json(changed=bool(removed), removed=removed)


def act(module: AnsibleModule) -> service.Outcome:
    """Start or roll back, as the task asks."""
    given = module.params
    store = Path(given["store"])
    options = service.Options(
        manager=given["manager"],
        rehearsal=given["rehearsal"],
        keep_releases=given["keep_releases"],
        docker_host=given["docker_host"] or None,
    )
    if given["state"] == "rolled_back":
        paths = spec.Paths(store, given["instance"])
        return service.rollback(paths, given["release"], options, module.check_mode)
    return service.ensure(given["plan"], store, options, module.check_mode)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "default": {}},
            "instance": {"type": "str", "default": ""},
            "store": {"type": "path", "required": True},
            "state": {
                "type": "str",
                "choices": ["started", "rolled_back", "absent"],
                "default": "started",
            },
            "manager": {
                "type": "str",
                "choices": ["auto", "systemd", "supervisor"],
                "default": "auto",
            },
            "rehearsal": {
                "type": "str",
                "choices": list(rehearsal.MODES),
                "default": "auto",
            },
            "keep_releases": {"type": "int", "default": releases.KEEP},
            "release": {"type": "str", "default": "previous"},
            "docker_host": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    given = module.params
    store, name = Path(given["store"]), given["instance"] or given["plan"].get("instance", "")
    try:
        if given["state"] == "absent":
            remove(module, store, given["instance"])
        if not given["plan"] and given["state"] == "started":
            said = f"{name}: would be started once the venv is there"
            module.exit_json(changed=True, summary=said, attempts=[], instance=name)
        outcome = act(module)
    except HostError as error:
        details = {key: error.details[key] for key in ("log", "attempts") if key in error.details}
        tail = "\n".join(error.details.get("tail", []))
        module.fail_json(msg=f"{error}\n\n{tail}" if tail else str(error), **details)
    module.exit_json(
        changed=outcome.changed,
        instance=name,
        summary=summary(outcome, name, store),
        attempts=outcome.attempts,
        diff={
            "before": outcome.before,
            "after": outcome.after,
            "before_header": f"running {name}",
            "after_header": f"planned {name}",
        },
    )


if __name__ == "__main__":
    main()
