"""Run as a program: serves checkpoints through vLLM one after the other, in one process.

Starting Python, torch and vLLM takes longer than a small model does, so tests hand over all their
cases at once. stdin: a JSON list of {model, golden, dtype, ranks, engine, save}; stdout: one JSON
line a case, what `exl3_plugin.verify` prints, and loss and mean difference of each prompt. `engine`
holds further arguments of vLLM, `save` is a file for the log probabilities themselves.
"""

import json
import sys

import numpy as np

from exl3_plugin import verify


def run(case: dict) -> dict:
    golden = verify.read_golden(case["golden"])
    ranks, engine = case.get("ranks", 1), case.get("engine", {})
    scored = verify.score(case["model"], golden, dtype=case["dtype"], ranks=ranks, **engine)
    result = verify.compare(golden, scored)
    result["prompt_nll"] = [s.nll for s in scored]
    result["prompt_mean_diff"] = [
        verify.compare([g], [s])["mean_logprob_diff"] for g, s in zip(golden, scored)
    ]
    np.savez(case["save"], **{f"top_lp{i}": s.top_lp for i, s in enumerate(scored)})
    return result


def main() -> None:
    cases = json.load(sys.stdin)
    with verify.only_result_on_stdout() as out:
        for case in cases:
            print(json.dumps(run(case)), file=out, flush=True)
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
