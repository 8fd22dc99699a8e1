#!/usr/bin/env python3
"""An nvidia-smi that answers from a file, for tests that run whole programs.

EXL3_FAKE_HOST names a JSON file {"nvidia-smi topo -m": {"rc", "out", "error"}}; what is not in it
is refused loudly, so that no new question slips through a test. EXL3_FAKE_SMI makes it fail:
`hang`, `no-driver`.
"""

import json
import os
import sys
import time

if os.environ.get("EXL3_FAKE_SMI") == "hang":
    time.sleep(60)
if os.environ.get("EXL3_FAKE_SMI") == "no-driver":
    print(
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure "
        "that the latest NVIDIA driver is installed and running."
    )
    sys.exit(9)
answers = json.load(open(os.environ["EXL3_FAKE_HOST"], encoding="utf-8"))  # noqa: SIM115
line = " ".join(["nvidia-smi", *sys.argv[1:]])
if line not in answers:
    print(f"fake nvidia-smi: unknown question {line}", file=sys.stderr)
    sys.exit(2)
sys.stdout.write(answers[line]["out"])
sys.stderr.write(answers[line]["error"])
sys.exit(answers[line]["rc"])
