#!/usr/bin/python
"""Ansible module: peer access between the GPUs of one instance, measured where nothing is kept."""

from __future__ import annotations

import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import peers, preflight
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_peers
short_description: Test whether the GPUs of an instance reach each other's memory
description:
  - Plans the instance to learn which GPUs it gets; with two or more of them the test of peer access
    runs once for these GPUs, this driver and this NCCL, and is kept in the peers folder of the
    store, where M(exl3_plan) finds it. Containers bring a torch of their own, so for them the test
    is run by hand (docs/peer-access.md).
options:
  instance: {type: dict, required: true, description: "One entry of exl3_instances."}
  bind_address: {type: str, required: true, description: "Address for instances that name none."}
  checkout: {type: path, required: true, description: "A checkout of this repository on the host."}
  store: {type: path, required: true, description: "The store."}
  venv: {type: path, required: true, description: "The venv with torch."}
  others: {type: list, elements: str, default: [],
    description: "Names of all instances of the host, whose GPUs are taken."}
  defaults: {type: dict, default: {},
    description: "Settings of the inventory that an instance may override."}
  again: {type: bool, default: false, description: "Measure even where a report is kept."}
"""

EXAMPLES = """
- exl3_peers:
    instance: {name: glm, recipe: glm-5.3-flash-exl3-4bpw, port: 8000}
    bind_address: 127.0.0.1
    checkout: /opt/exl3-fleet
    store: /var/lib/exl3
    venv: /opt/exl3-fleet/.venv
"""

RETURN = """
summary: {type: str, returned: always, description: "What was found, in a line."}
verdict: {type: dict, returned: when measured or kept, description: "The verdict for these GPUs."}
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **preflight.INSTANCE_OPTIONS,
            "again": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    given = module.params
    store, venv, checkout = (Path(given[name]) for name in ("store", "venv", "checkout"))
    name = given["instance"]["name"]
    if shutil.which("nvidia-smi") is None:
        module.exit_json(changed=False, summary=f"{name}: no GPU, nothing to prove")
    command = preflight.planner(venv)
    if command is None:
        module.exit_json(changed=False, summary=f"{name}: judged once the venv is there")
    try:
        plan = preflight.planned(command, given)
        gpus = plan["pin"].get("gpus") or []
        reason = peers.not_measured(plan, module.check_mode)
        if reason is not None:
            module.exit_json(changed=False, summary=f"{name}: {reason}")
        env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        run = peers.run_program(venv / "bin" / "python", checkout, env)
        report, kept = peers.look(run, store, len(gpus), again=given["again"])
        verdict = peers.decide(report, len(gpus))
    except HostError as error:
        module.fail_json(msg=str(error))
    for warning in verdict.warnings:
        module.warn(warning)
    said = f"{name}: peer access of {len(gpus)} GPUs: {verdict.verdict}; {verdict.reason}"
    module.exit_json(
        changed=not kept, summary=said + (" (kept)" if kept else ""), verdict=verdict.as_dict()
    )


if __name__ == "__main__":
    main()
