#!/usr/bin/env python3
"""Where the time of one decoding step goes on a GPU, kernel by kernel, in vLLM with its graphs.

    bench/step_profile.py FOLDER [--rows 1,8,64] [--context 512] [--steps 20] [--json FILE]

A batch of random prompts is prefilled, then torch's profiler watches some steps of nothing but
decoding. Printed for each batch: kernels a step, those of ours for each EXL3 layer, and the time of
a step by kernel; what no kernel covers is `idle` (profiling makes launches dearer, so that figure
is an upper bound). vLLM runs in this process and without asynchronous scheduling, so that steps
and kernels can be counted.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.serving import ENVIRONMENT, is_invented, numbers

OURS = re.compile(r"\bexl3::")


def short(name: str) -> str:
    """A kernel's name without return type, template arguments and parameters."""
    name = re.sub(r"\(anonymous namespace\)::|^void ", "", name)
    return re.split(r"[<(]", name, maxsplit=1)[0][:60] or name[:60]


def summarise(events: list[dict], steps: int, layers: int) -> dict:
    """Figures of one step.

    Args:
        events: `traceEvents` of a trace of torch's profiler, times in microseconds.
        steps: decoding steps in it.
        layers: EXL3 layers that one step multiplies with.

    Returns:
        `kernels` and `ours` launched in a step, `ours_per_layer`, `step_us` from the first kernel
        to the last, `busy_us` of it covered by at least one kernel, `ours_us` of that, and
        `by_kernel`: name to [launches, us], the longest first. Where kernels overlap (dependent
        launches begin early and wait), time belongs to the one that was there first.

    Raises:
        ValueError: the trace holds no kernels.
    """
    kernels = sorted(
        (e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
        key=lambda e: e["ts"],
    )
    if not kernels:
        raise ValueError("the trace holds no kernels: is this a GPU, and may it be profiled?")
    by_kernel: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    busy = covered = 0.0
    ours = ours_us = launched = 0
    for event in kernels:
        begin, end = event["ts"], event["ts"] + event["dur"]
        own = max(0.0, end - max(begin, covered))
        covered = max(covered, end)
        busy += own
        entry = by_kernel[short(event["name"])]
        entry[0] += 1 / steps
        entry[1] += own / steps
        launched += event["cat"] == "kernel"
        if OURS.search(event["name"]):
            ours += 1
            ours_us += own
    return {
        "steps": steps,
        "layers": layers,
        "kernels": launched / steps,
        "ours": ours / steps,
        "ours_per_layer": ours / steps / layers if layers else None,
        "step_us": (covered - kernels[0]["ts"]) / steps,
        "busy_us": busy / steps,
        "ours_us": ours_us / steps,
        "by_kernel": dict(sorted(by_kernel.items(), key=lambda item: -item[1][1])),
    }


def decode_steps(engine, rows: int, context: int, steps: int, trace: Path) -> int:
    """Prefill `rows` prompts, then profile `steps` steps; returns the steps that were counted."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    rng = np.random.default_rng(rows)
    vocabulary = engine.model_config.get_vocab_size()
    sampling = SamplingParams(
        temperature=0, max_tokens=steps + 16, ignore_eos=True, detokenize=False
    )
    for i in range(rows):
        prompt = {"prompt_token_ids": rng.integers(2, vocabulary, context).tolist()}
        engine.add_request(f"{rows}-{i}", prompt, sampling)
    tokens: dict[str, int] = {}

    def step() -> None:
        for output in engine.step():
            tokens[output.request_id] = len(output.outputs[0].token_ids)

    while len(tokens) < rows or min(tokens.values()) < 4:
        step()
    torch.cuda.synchronize()
    before = tokens[f"{rows}-0"]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    counted = tokens[f"{rows}-0"] - before
    profiler.export_chrome_trace(str(trace))
    while engine.has_unfinished_requests():
        step()
    return counted


def table(points: list[dict], shown: int = 14) -> Table:
    """One column for each batch."""
    result = Table("of one step", *[f"{p['rows']} rows" for p in points])
    figures = [("step us", "step_us"), ("kernels", "kernels"), ("ours", "ours"),
               ("ours a layer", "ours_per_layer")]  # fmt: skip
    for title, key in figures:
        result.add_row(title, *["" if p[key] is None else f"{p[key]:.2f}" for p in points])
    for title, part in (("ours us", lambda p: p["ours_us"]),
                        ("idle us", lambda p: p["step_us"] - p["busy_us"])):  # fmt: skip
        result.add_row(title, *[f"{part(p):.1f} ({part(p) / p['step_us']:.0%})" for p in points])
    names = list(dict.fromkeys(n for p in points for n in list(p["by_kernel"])[:shown]))
    for name in names:
        found = [p["by_kernel"].get(name) for p in points]
        result.add_row(name, *["" if f is None else f"{f[0]:.1f} x, {f[1]:.1f} us" for f in found])
    return result


def main(
    folder: Annotated[Path, typer.Argument(help="model folder")],
    rows: Annotated[str, typer.Option(help="batch sizes")] = "1,8,64",
    context: Annotated[int, typer.Option(help="tokens of each prompt", min=2)] = 512,
    steps: Annotated[int, typer.Option(min=2)] = 20,
    engine: Annotated[str, typer.Option(help="further arguments of vLLM, as JSON")] = "{}",
    file: Annotated[Path | None, typer.Option("--json", help="one JSON line a batch")] = None,
) -> None:
    """Splits the time of a decoding step by kernel."""
    work = Path(tempfile.mkdtemp(prefix="step-"))
    report = work / "report.json"
    for name, value in {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
        os.environ.setdefault(name, value)
    os.environ["EXL3_LOAD_REPORT"] = str(report)
    from vllm import LLM

    began = time.monotonic()
    batches = numbers(rows)
    arguments = {
        "max_model_len": context + steps + 32,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "load_format": "dummy" if is_invented(folder) else "auto",
    }
    llm = LLM(str(folder), skip_tokenizer_init=True, **arguments | json.loads(engine))
    print(f"started in {time.monotonic() - began:.1f} s", flush=True)
    layers = 0
    if report.exists():
        found = json.loads(report.read_text())
        layers = len({m["layer"] for m in found["modules"] if m["became"] in ("exl3", "head")})
    points = []
    for batch in batches:
        trace = work / f"{batch}.json"
        counted = decode_steps(llm.llm_engine, batch, context, steps, trace)
        events = json.loads(trace.read_text())["traceEvents"]
        points.append({"rows": batch, "context": context} | summarise(events, counted, layers))
        if file is not None:
            with file.open("a") as out:
                out.write(json.dumps(points[-1]) + "\n")
    Console(width=140).print(table(points))


if __name__ == "__main__":
    typer.run(main)
