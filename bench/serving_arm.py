"""One arm of `bench/serving.py`, in a process of its own: `python -m bench.serving_arm JSON`.

The JSON object says what to measure (`Job`); each point goes to stdout as one JSON line as soon as
it is measured, so that what was measured survives a time limit. vLLM's own output goes to stderr.
"""

from __future__ import annotations

import json
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

PREFILL_REPEATS = 3


@dataclass(frozen=True)
class Job:
    """What to measure: `engine` are further arguments of vLLM, `invented` that it loads no weights.

    Each of `concurrency` is a point with prompts of `input_tokens` and answers of `output_tokens`;
    `prefill` is the length of prompts that are answered with one token, 0 for none.
    """

    model: str
    mode: str
    invented: bool
    concurrency: list[int]
    input_tokens: int
    output_tokens: int
    prefill: int
    rounds: int
    seed: int
    budget_s: float
    ranks: int = 1
    engine: dict = field(default_factory=dict)

    @property
    def arguments(self) -> dict:
        """Arguments of vLLM's engine, equal for every arm."""
        longest = max(self.input_tokens + self.output_tokens, self.prefill + 1)
        given = {
            "max_model_len": longest + 16,
            "max_num_seqs": max(self.concurrency, default=1),
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,
            "tensor_parallel_size": self.ranks,
            "load_format": "dummy" if self.invented else "auto",
        }
        return given | self.engine


Measure = Callable[[int, int, int, int], dict]
"""(concurrency, requests, input tokens, output tokens) to a point's figures."""


def points(job: Job, measure: Measure, deadline: float) -> Iterator[dict]:
    """Every point that begins before the deadline; others are said to be skipped."""
    measure(1, 1, 32, 8)
    for rows in job.concurrency:
        point = {"concurrency": rows, "input": job.input_tokens, "output": job.output_tokens}
        if time.monotonic() > deadline:
            yield point | {"skipped": "the budget is spent"}
            continue
        requests = max(rows * job.rounds, 2)
        yield point | measure(rows, requests, job.input_tokens, job.output_tokens)
    if job.prefill:
        point = {"concurrency": 1, "input": job.prefill, "output": 1}
        if time.monotonic() > deadline:
            yield point | {"skipped": "the budget is spent"}
        else:
            found = measure(1, PREFILL_REPEATS, job.prefill, 1)
            found["prefill_tokens_s"] = job.prefill / found["median_ttft_ms"] * 1e3
            yield point | found


def in_engine(job: Job) -> Iterator[dict]:
    """Without HTTP: vLLM's engine, all requests of a round handed over at once."""
    from vllm import LLM, SamplingParams

    began = time.monotonic()
    llm = LLM(job.model, skip_tokenizer_init=True, disable_log_stats=False, **job.arguments)
    cache = llm.llm_engine.vllm_config.cache_config
    yield {
        "start_s": round(time.monotonic() - began, 1),
        "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
    }
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    rng = np.random.default_rng(job.seed)

    def measure(rows: int, requests: int, length: int, tokens: int) -> dict:
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        seconds, stats, steps = 0.0, [], []
        for _ in range(max(1, requests // rows)):
            prompts = [
                {"prompt_token_ids": rng.integers(2, vocabulary, length).tolist()}
                for _ in range(rows)
            ]
            start = time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            seconds += time.perf_counter() - start
            counted = [len(output.outputs[0].token_ids) for output in outputs]
            if counted != [tokens] * rows:
                raise RuntimeError(f"asked for {tokens} tokens {rows} times, got {counted}")
            stats += [output.metrics for output in outputs]
            last = max((output.metrics for output in outputs), key=lambda s: s.first_token_ts)
            steps.append((last.last_token_ts - last.first_token_ts) / max(1, tokens - 1))
        ttft = [1e3 * s.first_token_latency for s in stats]
        tpot = [1e3 * (s.last_token_ts - s.first_token_ts) / max(1, tokens - 1) for s in stats]
        return {
            "requests": len(stats),
            "output_tokens_s": tokens * len(stats) / seconds,
            "mean_tpot_ms": statistics.mean(tpot),
            "step_ms": 1e3 * statistics.median(steps),
            "mean_ttft_ms": statistics.mean(ttft),
            "median_ttft_ms": statistics.median(ttft),
        }

    yield from points(job, measure, began + job.budget_s)
    llm.llm_engine.engine_core.shutdown()


def over_http(job: Job) -> Iterator[dict]:
    """`vllm serve` in a process of its own, loaded by `vllm bench serve`."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    began = time.monotonic()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", job.model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    for name, value in job.arguments.items():
        command += flags(name, value)
    server = subprocess.Popen(command, stdout=sys.stderr)
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", server, began + job.budget_s)
        yield {"start_s": round(time.monotonic() - began, 1)}
        parser = FlexibleArgumentParser()
        serve.add_cli_args(parser)
        runs = 0

        def measure(rows: int, requests: int, length: int, tokens: int) -> dict:
            nonlocal runs
            runs += 1
            given = {
                "backend": "openai", "base-url": f"http://127.0.0.1:{port}", "model": job.model,
                "dataset-name": "random", "random-input-len": length,
                "random-output-len": tokens, "num-prompts": requests, "max-concurrency": rows,
                "seed": job.seed + runs, "temperature": 0,
            }  # fmt: skip
            arguments = [part for name, value in given.items() for part in flags(name, value)]
            found = serve.main(parser.parse_args([*arguments, "--ignore-eos", "--disable-tqdm"]))
            check_counts(found, requests, length, tokens)
            return {
                "requests": found["completed"],
                "output_tokens_s": found["output_throughput"],
                "mean_tpot_ms": found["mean_tpot_ms"],
                "mean_ttft_ms": found["mean_ttft_ms"],
                "median_ttft_ms": found["median_ttft_ms"],
            }

        yield from points(job, measure, began + job.budget_s)
    finally:
        stop(server)


def check_counts(found: dict, requests: int, length: int, tokens: int) -> None:
    """Refuse a run in which requests failed, or in which tokens were not those asked for.

    The counts are the server's own (`usage`), so a text that is tokenised to another length shows.
    """
    counts = {
        "completed": requests,
        "failed": 0,
        "total_input_tokens": requests * length,
        "total_output_tokens": requests * tokens,
    }
    wrong = {name: (found.get(name), wanted) for name, wanted in counts.items()
             if found.get(name) != wanted}  # fmt: skip
    if wrong:
        said = ", ".join(f"{name} {got}, expected {want}" for name, (got, want) in wrong.items())
        raise RuntimeError(f"vllm bench serve counted {said}")


def flags(name: str, value: object) -> list[str]:
    """An argument of vLLM as its command line takes it; False is `--no-...`."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def wait_until_healthy(url: str, server: subprocess.Popen, deadline: float) -> None:
    """Poll until the server answers; raises where it ended or the deadline passed."""
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"vllm serve ended with {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError("vllm serve was not ready within the budget")


def stop(server: subprocess.Popen) -> None:
    """End the server; what it leaves behind, `bench/serving.py` ends with this arm's session."""
    server.terminate()
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def device() -> str:
    """What this machine computes with."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((li.partition(": ")[2] for li in lines if li.startswith("model name")), "CPU")


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    # What it started is ended with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from exl3_plugin.verify import only_result_on_stdout

    with only_result_on_stdout() as out:
        for line in (in_engine if job.mode == "engine" else over_http)(job):
            print(json.dumps(line), file=out, flush=True)
        print(json.dumps({"device": device()}), file=out, flush=True)


if __name__ == "__main__":
    main()
