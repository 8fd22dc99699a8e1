"""Run as a program: serves checkpoints through vLLM's own compiler, on a CPU, one after the other.

On CPUs vLLM hands graphs to plain Inductor. Here its configuration is set back to what GPUs get
(graphs in pieces, vLLM's pass manager, its operators lowered late), so that everything but the
device is as it is there. stdin: a JSON list of {model, golden, dtype, fuse, cache, save, pass}:
`fuse` is what EXL3_FUSE says, `cache` the folder for compiled graphs, `save` a file for the log
probabilities themselves, and `pass`, where it is there, the name of a pass that the user set.
stdout: one JSON line a case, what `exl3_plugin.verify` prints, the type of the pass `installed`,
`norms` and `gated` that were fused while it compiled, `called`, how often the prompts ran each
operator of ours, and `folder`, where vLLM kept the graphs.
"""

import collections
import json
import os
import sys
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from exl3_plugin import verify


class Calls(TorchDispatchMode):
    """Counts calls of the project's operators."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "exl3":
            self.count[func.name().partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def leave_alone(graph) -> None:
    """A pass of a user's own."""


def as_on_a_gpu():
    """vLLM's configuration of a CPU, changed to its own compiler."""
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    settle = CpuPlatform.check_and_update_config

    def check_and_update_config(config) -> None:
        settle(config)
        compilation = config.compilation_config
        compilation.mode = CompilationMode.VLLM_COMPILE
        compilation.ir_enable_torch_wrap = True
        compilation.compile_sizes = []

    patched = staticmethod(check_and_update_config)
    return mock.patch.object(CpuPlatform, "check_and_update_config", patched)


def run(case: dict) -> dict:
    golden = verify.read_golden(case["golden"])[:2]
    os.environ |= {"VLLM_CACHE_ROOT": case["cache"], "EXL3_FUSE": case["fuse"]}
    longest = max(len(prompt.ids) for prompt in golden)
    engine = {"enforce_eager": False}
    if "pass" in case:
        engine["compilation_config"] = {
            "inductor_passes": {"post_grad_custom_post_pass": case["pass"]}
        }
    with as_on_a_gpu():
        llm = verify.start(case["model"], longest, dtype=case["dtype"], **engine)
    compilation = llm.llm_engine.vllm_config.compilation_config
    with Calls() as calls:
        scored = verify.score_all(llm, golden)
    llm.llm_engine.engine_core.shutdown()
    np.savez(case["save"], **{f"top_lp{i}": s.top_lp for i, s in enumerate(scored)})
    installed = compilation.inductor_compile_config.get("post_grad_custom_post_pass")
    return verify.compare(golden, scored) | {
        "installed": type(installed).__name__,
        "norms": getattr(installed, "norms", 0),
        "gated": getattr(installed, "gated", 0),
        "called": calls.count,
        "folder": compilation.local_cache_dir,
    }


def main() -> None:
    cases = json.load(sys.stdin)
    verify.settle_environment(None, 1)
    with verify.only_result_on_stdout() as out:
        for case in cases:
            print(json.dumps(run(case)), file=out, flush=True)
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
            torch._dynamo.reset()


if __name__ == "__main__":
    main()
