#!/usr/bin/python
"""Ansible module: the links between the hosts that serve one model together."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import commands, links, nccl, peers, procs, spec
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_links
short_description: Find the links between hosts, send packets over them, and prove a collective
description:
  - C(found) reads this host. C(proved) takes what every host found, pairs them up, pings the other
    hosts over the chosen interfaces alone, and runs an all-reduce over all hosts whose values are
    checked. It has to run on all hosts at once. A proof is kept as long as the links stay the same.
options:
  state: {type: str, choices: [found, proved], default: found, description: "What to do."}
  hosts: {type: dict, default: {},
    description: "C(links) of every host by its name, the head first. Needed for C(proved)."}
  host: {type: str, default: "", description: "Name of this host in C(hosts)."}
  fabric: {type: str, choices: [auto, roce, tcp], default: auto, description: "Kind of link."}
  mtu: {type: int, default: 0, description: "Frames of this size have to pass; 0 asks for none."}
  port: {type: int, default: 29601, description: "Where the collective meets on the head."}
  ranks: {type: int, default: 0, description: "Ranks in all; 0 takes every GPU, or one a host."}
  test: {type: bool, default: true, description: "Run the collective where no proof is kept."}
  checkout: {type: path, default: "", description: "A checkout of this repository on the host."}
  store: {type: path, default: "", description: "The store; proofs lie in its peers folder."}
  venv: {type: path, default: "", description: "The venv with torch."}
"""

EXAMPLES = """
- exl3_links:
  register: exl3_links_found
- exl3_links:
    state: proved
    hosts: {spark-a: "{{ hostvars['spark-a'].exl3_links_found.links }}"}
    host: spark-a
"""

RETURN = """
links: {type: dict, returned: state is found, description: "Interfaces of this host."}
chosen: {type: dict, returned: state is proved, description: "The link of every host by name."}
summary: {type: str, returned: state is proved, description: "What was chosen and proved."}
"""

LEAST_SHARE = 0.5
"""An all-reduce of 64 MiB below this share of the link's rate is worth a warning."""


def gpus_here() -> int:
    """GPUs of this host, at least 1: without any a host has one rank, on its CPU."""
    answer = commands.run_here(["nvidia-smi", "-L"])
    return max(1, sum(line.startswith("GPU ") for line in answer.out.splitlines()))


def key_of(chosen: dict, ranks: int) -> str:
    """Names a proof: links, addresses and rank count of all hosts."""
    text = json.dumps([chosen, ranks], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def collective(module: AnsibleModule, chosen: dict, ranks: int) -> tuple[dict, bool]:
    """The all-reduce over all hosts, kept or run now; (report, whether it was kept)."""
    given = module.params
    kept = Path(given["store"]) / "peers" / f"links-{key_of(chosen, ranks)}.json"
    report = spec.read_json(kept)
    if report is not None:
        return report, True
    names = list(chosen)
    rank, head = names.index(given["host"]), chosen[names[0]]["address"]
    taken = procs.conflicting(head, given["port"]) if rank == 0 else []
    if taken:
        raise HostError(
            f"port {given['port']} is in use on the head: {taken[0]}.",
            "Stop that server (teardown.yml), or set exl3_nodes_port to another one.",
        )
    # The same environment as the server will have: it is what is on trial.
    env = {one.name: one.value for one in nccl.for_links(chosen[given["host"]])}
    python = Path(given["venv"]) / "bin" / "python"
    run = peers.run_program(python, Path(given["checkout"]), env)
    arguments = ["--ranks", str(ranks), "--nodes", str(len(names)), "--node-rank", str(rank)]
    report = run([*arguments, "--master", f"{head}:{given['port']}"])
    (row,) = report["collectives"]
    if row["state"] != "right":
        raise HostError(
            f"the all-reduce of {ranks} ranks over {', '.join(names)} was {row['state']}: "
            f"{row['detail']}.",
            f"Let TCP through between {', '.join(one['address'] for one in chosen.values())}, on "
            "every port; NCCL_DEBUG=INFO in the environment says where NCCL stands still.",
        )
    spec.write_json(kept, report)
    return report, False


def summary(chosen: dict, host: str, report: dict | None, kept: bool) -> tuple[str, list[str]]:
    """What a person wants to know, and warnings."""
    mine = chosen[host]
    lines = [f"{host}: {mine['address']} on {mine['interface']}; {mine['reason']}"]
    if report is None:
        return "\n".join(lines), []
    row = report["collectives"][0]
    largest, rate = row["sizes"][-1], links.rate_gb_s(mine)
    lines.append(
        f"  all-reduce of {row['ranks']} ranks: values right, {largest['bytes'] >> 20} MiB at "
        f"{largest['bus_gb_s']:.2f} GB/s" + (" (kept)" if kept else "")
    )
    if rate and largest["bus_gb_s"] < LEAST_SHARE * rate:
        slow = f"{largest['bus_gb_s']:.2f} GB/s of {rate:.2f} GB/s that the link carries"
        return "\n".join(lines), [f"The collective reaches {slow}: see docs/two-nodes.md."]
    return "\n".join(lines), []


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["found", "proved"], "default": "found"},
            "hosts": {"type": "dict", "default": {}},
            "host": {"type": "str", "default": ""},
            "fabric": {"type": "str", "choices": ["auto", "roce", "tcp"], "default": "auto"},
            "mtu": {"type": "int", "default": 0},
            "port": {"type": "int", "default": 29601},
            "ranks": {"type": "int", "default": 0},
            "test": {"type": "bool", "default": True},
            "checkout": {"type": "path", "default": ""},
            "store": {"type": "path", "default": ""},
            "venv": {"type": "path", "default": ""},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        if given["state"] == "found":
            found = links.collect(Path("/"), commands.run_here)
            module.exit_json(changed=False, links={**found, "gpus": gpus_here()})
        hosts, host, mtu = given["hosts"], given["host"], given["mtu"] or None
        chosen = links.choose(hosts, given["fabric"], mtu)
        others = {name: one for name, one in chosen.items() if name != host}
        faults = links.verify(chosen[host], others, commands.run_here, mtu)
        if faults:
            raise HostError("\n".join(faults))
        report, kept = None, True
        if given["test"] and not module.check_mode:
            each = min(one.get("gpus", 1) for one in hosts.values())
            report, kept = collective(module, chosen, given["ranks"] or each * len(hosts))
    except HostError as error:
        module.fail_json(msg=str(error))
    said, warnings = summary(chosen, host, report, kept)
    for one in warnings:
        module.warn(one)
    module.exit_json(changed=not kept, chosen=chosen, summary=said)


if __name__ == "__main__":
    main()
