"""Run as a program: checkpoints through the whole of vLLM on a GPU, eager and with CUDA graphs.

    python tests/gpu/serving.py [--data DIR] [--cases SUBSTRING] [--budget SECONDS] [--ranks N]

A case is a checkpoint, a dtype and a mode. Each starts vLLM, with the self-test and the load
report, and is compared in two ways:

* prompts: log probabilities against those of exllamav3 (golden.npz), by the thresholds of the CPU's
  tests in float16, and 0.08 nats and 97 % in bfloat16;
* decoding: a dozen requests of unlike lengths are generated at once, so that single tokens go
  through the kernels of few rows (and, compiled, through captured graphs of several sizes). Some of
  the texts are then read again as one prompt, through the kernels of many rows: the token chosen
  may not have been less likely than the best by more than five times the threshold.

With one rank a last case plants a fault: one word of one layer is changed behind the self-test's
back, and the start must be refused with that layer's name.

stdout: one JSON line a case, at once; exit code 1 where one is wrong or failed. Cases that begin
after the budget are skipped, and said to be. DIR holds folders, each with a checkpoint and its
golden.npz.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

MEAN_DIFFERENCE = {"float32": 0.01, "float16": 0.01, "bfloat16": 0.08}
SAME_BEST = {"float32": 0.99, "float16": 0.99, "bfloat16": 0.97}
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
REQUESTS, NEW_TOKENS, READ_AGAIN = 12, 24, 4
CAPTURED = [1, 2, 4, 8, 16, 32, 64]
PLANTED = "one wrong word"

# The most telling cases come first, in case the budget ends early.
ORDER = [
    ("float16", "eager"),
    ("bfloat16", "compiled"),
    ("bfloat16", "eager"),
    ("float16", "compiled"),
]


def find_cases(folders: list[Path], wanted: str) -> list[tuple[Path, str, str]]:
    """All cases whose name (model-dtype-mode) holds `wanted`; the first combination of all models
    first."""
    models = [f for folder in folders for f in sorted(folder.glob("*/")) if _is_case(f)]
    models = list({model.name: model for model in models}.values())
    cases = [(model, dtype, mode) for dtype, mode in ORDER for model in models]
    return [case for case in cases if wanted in name_of(*case)]


def _is_case(folder: Path) -> bool:
    return (folder / "golden.npz").is_file() and (folder / "model.safetensors").is_file()


def name_of(model: Path, dtype: str, mode: str) -> str:
    return f"{model.name}-{dtype}-{mode}"


def mode_arguments(device: str, compiled: bool) -> dict:
    """Arguments of vLLM that tell eager from compiled, on a GPU with graphs of a few sizes."""
    arguments = {"enforce_eager": not compiled}
    if compiled and device == "cuda":
        arguments["compilation_config"] = {"cudagraph_capture_sizes": CAPTURED}
    return arguments


def engine_arguments(device: str, mode: str, longest: int) -> dict:
    arguments = mode_arguments(device, mode == "compiled") | {
        "max_num_seqs": 32,
        "max_model_len": longest + NEW_TOKENS + 1,
        "max_num_batched_tokens": max(longest + NEW_TOKENS + 1, 128),
    }
    if device == "cuda":
        arguments["gpu_memory_utilization"] = 0.1
    return arguments


def run(model: Path, dtype: str, mode: str, device: str, ranks: int, tokens: dict) -> dict:
    """One case; `tokens` keeps what each generated, to compare modes."""
    from exl3_plugin import verify

    golden = verify.read_golden(model / "golden.npz")
    report = Path(tempfile.mkdtemp()) / "report.json"
    os.environ["EXL3_LOAD_REPORT"] = str(report)
    began = time.perf_counter()
    longest = max(len(prompt.ids) for prompt in golden)
    llm = verify.start(
        model, longest, dtype=dtype, ranks=ranks, **engine_arguments(device, mode, longest)
    )
    started = time.perf_counter()
    try:
        result = verify.compare(golden, verify.score_all(llm, golden))
        result |= decode(llm, golden, verify)
    finally:
        llm.llm_engine.engine_core.shutdown()
    texts = result.pop("texts")
    other = tokens.setdefault((model.name, dtype), texts)
    same = sum(a == b for one, two in zip(texts, other) for a, b in zip(one, two))
    result |= load_facts(report)
    result["same_tokens_as_first_mode"] = same / sum(len(text) for text in texts)
    result["start_s"] = round(started - began, 1)
    result["run_s"] = round(time.perf_counter() - started, 1)
    return result | {"ok": not complaints(result, dtype), "wrong": complaints(result, dtype)}


def decode(llm, golden: list, verify) -> dict:
    """Generate at once, read again; the largest gap in nats between chosen and best token."""
    from vllm import SamplingParams

    prompts = [golden[i % len(golden)].ids.tolist()[: 3 + 2 * i] for i in range(REQUESTS)]
    sampling = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0.0, detokenize=False, ignore_eos=True
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    gap = 0.0
    for i in range(0, REQUESTS, REQUESTS // READ_AGAIN):
        ids, first = prompts[i] + texts[i], len(prompts[i])
        chosen = [[token] for token in [*ids[1:], 0]]
        answer = verify.ask(llm, ids, chosen)
        places = range(first - 1, len(ids) - 1)
        gap = max(gap, *(answer["best_lp"][p] - answer["top_lp"][p][0] for p in places))
    return {"texts": texts, "decode_gap": gap}


def planted(model: Path, device: str) -> dict:
    """A start with one wrong word, which the self-test has to find."""
    from unittest import mock

    from exl3_plugin import boot, loading, verify

    original, spoilt = loading.to_kernel_order, []

    def to_kernel_order(layer):
        original(layer)
        if not spoilt:
            layer.trellis.data[5] ^= 1 << 9
            spoilt.append(layer)

    def complete(layer, prefix, *args, **kwargs):
        names[id(layer)] = prefix
        return original_complete(layer, prefix, *args, **kwargs)

    names, original_complete = {}, boot.complete
    with (
        mock.patch.object(loading, "to_kernel_order", to_kernel_order),
        mock.patch.object(boot, "complete", complete),
    ):
        try:
            verify.start(model, 64, dtype="bfloat16", **engine_arguments(device, "eager", 64))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        else:
            said = "started all the same"
    expected = f"EXL3 self-test: {names[id(spoilt[0])]} is wrong" if spoilt else "nothing spoilt"
    return {"ok": expected in said, "said": said}


def load_facts(report: Path) -> dict:
    """What the plugin said of loading, rank 0."""
    file = report if report.exists() else report.with_name(f"{report.name}.rank0")
    found = json.loads(file.read_text())
    tests = found["self_test"] or []
    plans = {m["module"]: m["plans"] for m in found["modules"] if m.get("plans")}
    return {
        "device": found["device"],
        "loaded_bytes": found["bytes"],
        "self_test": {
            "layers": len(tests),
            "worst": max((t["worst"] for t in tests), default=None),
            "typical": max((t["typical"] for t in tests), default=None),
            "seconds": round(sum(t["seconds"] for t in tests), 3),
        },
        "plans": plans.get("lm_head"),
    }


def complaints(result: dict, dtype: str) -> list[str]:
    found = []
    if not result["mean_logprob_diff"] < MEAN_DIFFERENCE[dtype]:
        found.append(f"mean difference is not below {MEAN_DIFFERENCE[dtype]}")
    if not result["top1_agreement_clear"] >= SAME_BEST[dtype]:
        found.append(f"best tokens agree in less than {SAME_BEST[dtype]:.0%}")
    if not result["decode_gap"] < 5 * MEAN_DIFFERENCE[dtype]:
        found.append("decoding chose tokens that reading finds unlikely")
    if not result["self_test"]["layers"]:
        found.append("the self-test did not run")
    return found


def settle_environment(ranks: int) -> str:
    settings = {
        "EXL3_SELF_TEST": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    from exl3_plugin import verify

    return verify.settle_environment(None, ranks)


def clean_up() -> None:
    import torch
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()
    torch._dynamo.reset()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", help="default: tests/fixtures")
    parser.add_argument("--cases", default="", help="only cases whose name holds this")
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS")
    parser.add_argument("--ranks", type=int, default=1, metavar="N")
    options = parser.parse_args()
    began, failed, tokens = time.perf_counter(), 0, {}
    cases = find_cases(options.data or [FIXTURES], options.cases)
    if not cases:
        parser.error(f"no case holds {options.cases!r}")

    from exl3_plugin.verify import only_result_on_stdout

    with only_result_on_stdout() as out:
        device = settle_environment(options.ranks)
        for case in cases:
            line = {"case": name_of(*case)}
            if time.perf_counter() - began > options.budget:
                line |= {"skipped": "the budget is spent"}
            else:
                try:
                    line |= run(*case, device, options.ranks, tokens)
                    failed += not line["ok"]
                except Exception as error:
                    traceback.print_exc()
                    line |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
                    failed += 1
                clean_up()
            print(json.dumps(line), file=out, flush=True)
        if options.ranks == 1:
            line = {"case": PLANTED} | planted(cases[0][0], device)
            failed += not line["ok"]
            print(json.dumps(line), file=out, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
