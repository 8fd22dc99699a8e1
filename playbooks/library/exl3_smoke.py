#!/usr/bin/python
"""Ansible module: one real question to a running server."""

from __future__ import annotations

import re
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import spec, wait

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
    name = given["instance"]
    running = spec.read_json(spec.Paths(Path(given["store"]), name).spec)
    if running is None:
        module.fail_json(msg=f"{name} is not deployed here.")
    endpoint = spec.endpoint_of(running)
    good, why = wait.healthy(endpoint)
    if not good:
        module.fail_json(msg=f"{name} at {endpoint.url} does not serve: {why}")
    smoke = endpoint.smoke
    began = time.monotonic()
    try:
        answer = wait.complete(
            endpoint,
            smoke["prompt"],
            smoke["max_tokens"],
            given["timeout_s"],
            smoke.get("endpoint") or "chat",
        )
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        module.fail_json(msg=f"{name}: {error}")
    seconds = time.monotonic() - began
    said = f"{name}: asked {smoke['prompt']!r} it says {answer.strip()!r} after {seconds:.2f} s"
    if smoke.get("expect") and not re.search(smoke["expect"], answer):
        module.fail_json(msg=f"{said}, expected /{smoke['expect']}/")
    module.exit_json(changed=False, summary=said)


if __name__ == "__main__":
    main()
