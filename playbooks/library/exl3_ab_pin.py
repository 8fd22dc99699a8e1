#!/usr/bin/python
"""Ansible module: the fastest way of pinning one instance, found by trying."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import ab_pin, load, preflight, service
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_ab_pin
short_description: Try the ways of pinning an instance, keep the fastest
options:
  instance: {type: dict, required: true, description: "One entry of exl3_instances."}
  bind_address: {type: str, required: true, description: "Address for instances that name none."}
  checkout: {type: path, required: true, description: "A checkout of this repository on the host."}
  store: {type: path, required: true, description: "The store."}
  venv: {type: path, required: true, description: "The venv."}
  defaults: {type: dict, default: {},
    description: "Settings of the inventory that an instance may override."}
  others: {type: list, elements: str, default: [], description: "Names of all instances."}
  modes: {type: list, elements: str, default: [none, container, per_rank],
    description: "What is tried, the mildest first."}
  starts: {type: int, default: 3, description: "Starts of each; placement is decided at a start."}
  requests: {type: int, default: 16, description: "Requests in all, for each start."}
  concurrency: {type: int, default: 4, description: "Requests at a time."}
  input_words: {type: int, default: 100, description: "Words of each prompt."}
  output_tokens: {type: int, default: 64, description: "Tokens of each answer."}
  manager: {type: str, choices: [auto, systemd, supervisor], default: auto,
    description: "Who keeps it running."}
  docker_host: {type: str, default: "", description: "Socket of the engine, unix://..."}
"""

EXAMPLES = """
- exl3_ab_pin:
    instance: {name: chat, recipe: smollm2-135m-exl3-6bpw, port: 8000}
    bind_address: 127.0.0.1
    checkout: /opt/exl3-fleet
    store: /var/lib/exl3
    venv: /opt/exl3-fleet/.venv
"""

RETURN = """
mode: {type: str, returned: always, description: "The winner, which serves now."}
table: {type: str, returned: always, description: "One line for each mode."}
"""


def table(result: dict) -> str:
    """What a person wants to see."""
    lines = [f"{result['instance']}: {result['mode']} ({result['why']})"]
    for row in result["rows"]:
        runs = ", ".join(f"{run['output_tokens_per_s']:.2f}" for run in row["runs"])
        first = min(run["ttft_ms_p50"] for run in row["runs"])
        lines.append(
            f"  {row['mode']:<10} {row['tokens_per_s']:8.2f} tokens/s   starts: {runs}   "
            f"best first token {first:.0f} ms"
        )
    lines += [f"  {mode:<10} not tried: {why}" for mode, why in result["skipped"].items()]
    return "\n".join(lines)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **preflight.INSTANCE_OPTIONS,
            "modes": {"type": "list", "elements": "str", "default": list(ab_pin.MODES)},
            "starts": {"type": "int", "default": 3},
            "requests": {"type": "int", "default": 16},
            "concurrency": {"type": "int", "default": 4},
            "input_words": {"type": "int", "default": 100},
            "output_tokens": {"type": "int", "default": 64},
            "manager": {
                "type": "str",
                "choices": ["auto", "systemd", "supervisor"],
                "default": "auto",
            },
            "docker_host": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    given = module.params
    store, venv = Path(given["store"]), Path(given["venv"])
    name = given["instance"]["name"]
    if module.check_mode:
        module.exit_json(changed=True, mode="?", table=f"{name}: would try {given['modes']}")
    command = preflight.planner(venv)
    if command is None:
        module.fail_json(msg=f"{venv} cannot plan: deploy first.")

    def plan_of(mode: str) -> dict:
        return preflight.planned(command, given, pinning=mode)

    shape = load.Shape(
        given["requests"], given["concurrency"], given["input_words"], given["output_tokens"]
    )
    options = service.Options(
        manager=given["manager"], rehearsal="never", docker_host=given["docker_host"] or None
    )
    try:
        result = ab_pin.compare(
            plan_of, store, name, options, given["starts"], shape, tuple(given["modes"])
        )
    except HostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=True, mode=result["mode"], table=table(result))


if __name__ == "__main__":
    main()
