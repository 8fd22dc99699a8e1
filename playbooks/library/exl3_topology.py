#!/usr/bin/python
"""Ansible module: which GPUs, CPUs and memory nodes of a host belong together."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import facts, measure, spec, topology
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_topology
short_description: The node of each GPU with its source, links, and the pin for each number of ranks
description:
  - Keeps the picture as nodes/topology.json in the store, so that a change of it shows as a diff.
options:
  store: {type: path, required: true, description: "The store."}
  runtime: {type: str, default: native, choices: [native, docker], description: "How it serves."}
  gpu_nodes: {type: dict, default: {}, description: "Nodes that the inventory knows, by GPU."}
  measure: {type: bool, default: false, description: "Measure GPUs whose node nobody tells."}
  python: {type: path, default: "", description: "A Python with torch, for measuring."}
  checkout: {type: path, required: true, description: "A checkout of this repository on the host."}
"""

EXAMPLES = """
- exl3_topology: {store: /var/lib/exl3, checkout: /opt/exl3-fleet, runtime: docker}
"""

RETURN = """
topology: {type: dict, returned: always, description: "exl3-topology/1."}
table: {type: str, returned: always, description: "One line per GPU and per number of ranks."}
"""


def known_nodes(given: dict, found: dict, check_mode: bool) -> dict | None:
    """An earlier measurement of this very host, or a new one where it is wanted and needed."""
    kept = Path(given["store"]) / measure.KEPT
    known = measure.load(kept, found)
    if known is not None or not given["measure"] or check_mode:
        return known
    answers = topology.describe(found, given["gpu_nodes"])["gpus"]
    if all(one["node"] is not None for one in answers):
        return None
    probe = Path(given["checkout"]) / "bench/node_probe.py"
    told = measure.run(found, given["python"], probe)
    known = measure.decide(found, told["samples"])
    measure.save(kept, found, known)
    return known


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "store": {"type": "path", "required": True},
            "runtime": {"type": "str", "default": "native", "choices": ["native", "docker"]},
            "gpu_nodes": {"type": "dict", "default": {}},
            "measure": {"type": "bool", "default": False},
            "python": {"type": "path", "default": ""},
            "checkout": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    given = module.params
    found = facts.collect()
    try:
        known = known_nodes(given, found, module.check_mode)
        picture = topology.describe(found, given["gpu_nodes"], known, runtime=given["runtime"])
    except HostError as error:
        module.fail_json(msg=str(error))
    path = Path(given["store"]) / "nodes/topology.json"
    before = spec.read_json(path)
    kept = topology.lasting(picture)
    changed = before != kept
    if changed and not module.check_mode:
        spec.write_json(path, kept)
    module.exit_json(
        changed=changed,
        topology=picture,
        table="\n".join(topology.lines(picture)),
        diff={
            "before": topology.text(before),
            "after": topology.text(kept),
            "before_header": str(path),
            "after_header": str(path),
        },
    )


if __name__ == "__main__":
    main()
