#!/usr/bin/env python3
"""Decode and prefill speed of checkpoints in vLLM on the CPU, in alternating runs.

`bench/cpu_serving.py EXL3_DIR BF16_DIR [--rounds 3]` starts one engine after the other, A B A B ..,
each in a process of its own with equal settings, and prints the median of every figure and the
ratio pair by pair. A GGUF file stands for its dequantised weights in bfloat16.

Decode: one sequence, tokens per second between the first and the last token. Prefill: one prompt,
time to its first token. Each figure is the best of several repeats in one engine, since other work
on the machine only ever adds time.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
REPEATS = 5


def measure(model: str, prompt_tokens: int, decode_tokens: int, compiled: bool) -> dict:
    """Figures of one engine in this process, in tokens per second."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=8,
        enable_prefix_caching=False,
        enforce_eager=not compiled,
        distributed_executor_backend="uni",
    )
    vocabulary = llm.get_tokenizer().vocab_size

    def seconds(tokens: int, length: int, seed: int) -> float:
        prompt = [(seed * 7919 + 31 * i) % (vocabulary - 100) + 50 for i in range(length)]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        return time.perf_counter() - start

    seconds(4, prompt_tokens, 0)
    decode, prefill = [], []
    for seed in range(1, REPEATS + 1):
        first = seconds(1, 32, seed)
        decode.append((decode_tokens - 1) / (seconds(decode_tokens, 32, seed) - first))
        prefill.append(prompt_tokens / seconds(1, prompt_tokens, seed))
    return {"decode_tokens_s": max(decode), "prefill_tokens_s": max(prefill)}


def dequantised(gguf: Path, out: Path) -> Path:
    """Writes the weights of a GGUF file as a bfloat16 Hugging Face folder."""
    import torch

    from exl3_plugin.quantize.source import open_source

    source = open_source(gguf)
    source.transformers_model().to(torch.bfloat16).save_pretrained(out)
    source.write_companions(out)
    return out


def main(
    exl3: Annotated[Path, typer.Argument(help="EXL3 checkpoint folder")],
    bf16: Annotated[Path, typer.Argument(help="the same model: a bf16 folder or a GGUF file")],
    rounds: Annotated[int, typer.Option(help="engine starts of each arm")] = 3,
    prompt_tokens: Annotated[int, typer.Option()] = 512,
    decode_tokens: Annotated[int, typer.Option()] = 129,
    compiled: Annotated[bool, typer.Option(help="torch.compile instead of eager")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Compares EXL3 with bfloat16 in vLLM on this machine's CPU."""
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        if bf16.is_file():
            console.print(f"dequantising {bf16.name} to bfloat16")
            bf16 = dequantised(bf16, Path(folder) / "bf16")
        arms = {"exl3": exl3, "bf16": bf16}
        figures: dict[str, list[dict]] = {name: [] for name in arms}
        with Progress(console=console) as progress:
            task = progress.add_task("engines", total=rounds * len(arms))
            for _ in range(rounds):
                for name, path in arms.items():
                    command = [sys.executable, __file__, "--arm", str(path), str(prompt_tokens)]
                    command += [str(decode_tokens), str(int(compiled))]
                    result = subprocess.run(
                        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True
                    )
                    if result.returncode != 0:
                        console.print(result.stderr[-4000:], markup=False)
                        raise typer.Exit(1)
                    figures[name].append(json.loads(result.stdout.strip().splitlines()[-1]))
                    progress.advance(task)
    summary: dict = {"rounds": rounds, "compiled": compiled}
    table = Table("figure", "exl3", "bf16", "exl3 / bf16 (each pair)")
    for key in ("decode_tokens_s", "prefill_tokens_s"):
        pairs = [a[key] / b[key] for a, b in zip(figures["exl3"], figures["bf16"])]
        medians = {
            name: statistics.median(run[key] for run in runs) for name, runs in figures.items()
        }
        summary[key] = {**medians, "ratios": pairs, "ratio": statistics.median(pairs)}
        shown = ", ".join(f"{ratio:.2f}" for ratio in pairs)
        table.add_row(
            key,
            f"{medians['exl3']:.1f}",
            f"{medians['bf16']:.1f}",
            f"{statistics.median(pairs):.2f}  ({shown})",
        )
    if as_json:
        print(json.dumps(summary))
    else:
        Console().print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--arm"]:
        path, prompt, decode, compiled_flag = sys.argv[2:6]
        print(json.dumps(measure(path, int(prompt), int(decode), compiled_flag == "1")))
    else:
        typer.run(main)
