"""Run as a program: serves mixture-of-experts checkpoints through vLLM, one after the other.

stdin: a JSON list of {model, golden, dtype, ranks, expert_parallel}; on stdout, one JSON line a
case: what `exl3_plugin.verify` prints.
"""

import json
import sys

from exl3_plugin import verify


def main() -> None:
    cases = json.load(sys.stdin)
    with verify.only_result_on_stdout() as out:
        for case in cases:
            golden = verify.read_golden(case["golden"])
            scored = verify.score(
                case["model"],
                golden,
                dtype=case["dtype"],
                ranks=case["ranks"],
                enable_expert_parallel=case["expert_parallel"],
            )
            print(json.dumps(verify.compare(golden, scored)), file=out, flush=True)
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
