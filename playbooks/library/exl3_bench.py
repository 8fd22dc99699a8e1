#!/usr/bin/python
"""Ansible module: a measured load on a running server."""

from __future__ import annotations

import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import load, spec
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_bench
short_description: Measure a running server, and compare it with its last run
options:
  instance: {type: str, required: true, description: "Name of the instance."}
  store: {type: path, required: true, description: "The store; results go to its folder bench."}
  requests: {type: int, default: 16, description: "Requests in all."}
  concurrency: {type: int, default: 4, description: "Requests at a time."}
  input_words: {type: int, default: 100, description: "Words of each prompt."}
  output_tokens: {type: int, default: 64, description: "Tokens of each answer."}
"""

EXAMPLES = """
- exl3_bench: {instance: chat, store: /var/lib/exl3, concurrency: 8}
"""

RETURN = """
figures: {type: dict, returned: always, description: "Tokens per second, TTFT, TPOT."}
summary: {type: str, returned: always, description: "The same in one line."}
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "instance": {"type": "str", "required": True},
            "store": {"type": "path", "required": True},
            "requests": {"type": "int", "default": 16},
            "concurrency": {"type": "int", "default": 4},
            "input_words": {"type": "int", "default": 100},
            "output_tokens": {"type": "int", "default": 64},
        },
        supports_check_mode=True,
    )
    given = module.params
    store, name = Path(given["store"]), given["instance"]
    running = spec.read_json(spec.Paths(store, name).spec)
    if running is None:
        module.fail_json(msg=f"{name} is not deployed here.")
    if module.check_mode:
        module.exit_json(changed=False, figures={}, summary=f"{name} would be measured")
    shape = load.Shape(
        given["requests"], given["concurrency"], given["input_words"], given["output_tokens"]
    )
    try:
        figures = load.measure(spec.endpoint_of(running), shape).as_dict()
    except HostError as error:
        module.fail_json(msg=str(error))
    key = f"{running['config_hash'][:8]}-{shape.requests}-{shape.concurrency}"
    key += f"-{shape.input_words}-{shape.output_tokens}"
    last = store / "bench" / name / f"{key}.json"
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    verdict = load.compare(figures, spec.read_json(last))
    spec.write_json(last, {**figures, "time": moment, "shape": shape.__dict__})
    summary = (
        f"{name}: {figures['output_tokens_per_s']} tokens/s, first token "
        f"{figures['ttft_ms_p50']:.0f} ms (p99 {figures['ttft_ms_p99']:.0f}), each further "
        f"{figures['tpot_ms_p50']:.1f} ms (p99 {figures['tpot_ms_p99']:.1f}), "
        f"{figures['failed']} of {figures['requests']} failed; {verdict}"
    )
    module.exit_json(changed=False, figures=figures, summary=summary, verdict=verdict)


if __name__ == "__main__":
    main()
