"""Stands for bench/node_probe.py in the guest: real binding and real pages, figures made up.

The guest's GPUs cannot copy, so each has a table of figures by node; the node where the process
runs is read from its affinity, not from its arguments, so a binding that failed gives itself away.
"""

import json
import os
import sys

import node_probe


def main() -> None:
    node = int(sys.argv[sys.argv.index("--node") + 1])
    if not os.environ.get("GUEST_PROBE_UNBOUND"):
        node_probe.bind(node)
    memory = node_probe.buffer(8 << 20)
    import ctypes

    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    print(json.dumps({"ready": True}), flush=True)
    for _line in sys.stdin:
        runs_on = 0 if min(os.sched_getaffinity(0)) < 8 else 1
        gpus = []
        for index, home in enumerate((0, 1, 1)):
            latency, loaded = (700.0, 50.0) if runs_on == home else (1000.0, 40.0)
            gpus.append(
                {
                    "uuid": f"GPU-00000000-0000-0000-0000-{index:012d}",
                    "latency_ns": latency,
                    "alone_gbs": 25.0,
                    "loaded_gbs": loaded,
                    "pages": node_probe.pages_at(address),
                }
            )
        print(json.dumps({"gpus": gpus}), flush=True)


main()
