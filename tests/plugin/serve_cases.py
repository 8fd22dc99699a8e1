"""Run as a program: serves checkpoints through vLLM one after the other, in one process.

Starting Python, torch and vLLM takes longer than a small model does, so tests hand over all their
cases at once. stdin: a JSON list of {model, golden, dtype, ranks, engine, pin, save}; stdout: one
JSON line a case, what `exl3_plugin.verify` prints, loss and mean difference of each prompt, and
`warned`, of what the plugin warned while loading. `engine` holds further arguments of vLLM, `pin`
names layers that Llama's class then builds without a quantisation, `save` is a file for the log
probabilities themselves.
"""

import json
import sys
from contextlib import contextmanager
from unittest import mock

import numpy as np

from exl3_plugin import verify


@contextmanager
def pinned(leaves: list[str]):
    """Llama's class with layers that get no `quant_config`, as some classes have them."""
    from vllm.model_executor.models import llama

    def without(make):
        def build(*args, **kwargs):
            if kwargs["prefix"].rpartition(".")[2] in leaves:
                kwargs["quant_config"] = None
            return make(*args, **kwargs)

        return build

    if not leaves:
        yield
        return
    names = ("RowParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear")
    layers = {name: without(getattr(llama, name)) for name in names}
    with mock.patch.multiple(llama, **layers):
        yield


def run(case: dict) -> dict:
    golden = verify.read_golden(case["golden"])
    ranks, engine = case.get("ranks", 1), case.get("engine", {})
    verify.settle_environment(None, ranks)
    from exl3_plugin import taken  # vLLM, which reads the environment

    with pinned(case.get("pin", [])), mock.patch.object(taken, "logger") as logger:
        scored = verify.score(case["model"], golden, dtype=case["dtype"], ranks=ranks, **engine)
    said = [call.args[0] % call.args[1:] for call in logger.warning.call_args_list]
    result = verify.compare(golden, scored)
    result["warned"] = said
    result["prompt_nll"] = [s.nll for s in scored]
    result["prompt_mean_diff"] = [
        verify.compare([g], [s])["mean_logprob_diff"] for g, s in zip(golden, scored)
    ]
    if "save" in case:
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
