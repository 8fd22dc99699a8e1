#!/usr/bin/env python3
"""Serving speed of checkpoints in vLLM, side by side.

    bench/serving.py exl3=FOLDER bf16=FOLDER [--concurrency 1,8,32,64] [--input 1024] [--output 256]
                     [--prefill 8000] [--mode serve|engine] [--budget SECONDS] [--json FILE]
    bench/serving.py --table FILE [FILE ...]

Each arm is started with equal settings (prefix caching off), measured at each concurrency and with
single long prompts, and stopped. `--mode serve` drives `vllm bench serve` against `vllm serve`;
`--mode engine` hands the same requests to vLLM's engine without HTTP, which starts sooner. Prompts
are random, with another seed in every run; tokens are counted as the server counts them.

A folder that holds no weights, or files that are holes (bench/random_checkpoint.py), is served with
invented weights. With `--budget` no point is begun after that many seconds and every point measured
is kept in the file at once, so that a table can be put together from several short runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

CHECKOUT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
GRACE_S = 60
"""How long an arm may run past its budget before it is ended: one point."""

LOG_FACTS = {
    "weights_gib": r"Model loading took ([\d.]+) GiB",
    "kv_tokens": r"KV cache size: ([\d,]+) tokens",
    "graphs_gib": r"Graph capturing finished in \d+ secs, took ([\d.]+) GiB",
}


def is_invented(folder: Path) -> bool:
    """Whether a model folder holds no weights to load: no files, or files that are mostly holes."""
    sizes = [file.stat() for file in folder.glob("*.safetensors")]
    held, said = sum(512 * s.st_blocks for s in sizes), sum(s.st_size for s in sizes)
    return held < said / 2 or not sizes


def log_facts(log: Path) -> dict:
    """What vLLM says of memory."""
    text = log.read_text(errors="replace")
    found = {name: re.search(pattern, text) for name, pattern in LOG_FACTS.items()}
    return {n: float(match[1].replace(",", "")) for n, match in found.items() if match}


def run_arm(arm: str, job: dict, log: Path, keep) -> None:
    """Measure one arm in a process of its own; every line goes to `keep`.

    Raises:
        RuntimeError: the arm failed; the end of its log is in the message.
    """
    command = [sys.executable, "-m", "bench.serving_arm", json.dumps(job)]
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=environment, start_new_session=True,
        )  # fmt: skip
        late = threading.Timer(job["budget_s"] + GRACE_S, process.terminate)
        late.start()
        try:
            for line in process.stdout:
                keep({"arm": arm, "mode": job["mode"], "seed": job["seed"]} | json.loads(line))
        except BaseException:
            process.terminate()
            raise
        finally:
            late.cancel()
            end_session(process)
    keep({"arm": arm, "mode": job["mode"]} | log_facts(log))
    if process.returncode:
        end = log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"arm {arm} ended with {process.returncode}; {log} ends:\n{end}")


def end_session(process: subprocess.Popen) -> None:
    """Wait for an arm that is done or was told to stop; what is left of its session is killed.

    A server or an engine that stayed would hold the device's memory, and the next arm would fail.
    """
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# -- the table ------------------------------------------------------------------------------------


def name_of(point: dict) -> str:
    if point["output"] == 1:
        return f"prefill {point['input']}"
    return f"{point['concurrency']} at once, {point['input']} in, {point['output']} out"


def arms_of(lines: list[dict]) -> dict[str, dict]:
    """For each arm its facts and, under "points", its points by name; later lines win."""
    arms: dict[str, dict] = {}
    for line in lines:
        arm = arms.setdefault(line["arm"], {"points": {}})
        if "concurrency" not in line:
            arm.update({k: v for k, v in line.items() if k not in ("arm", "mode", "seed")})
        elif "skipped" not in line:
            arm["points"][name_of(line)] = line
    return arms


def table(lines: list[dict]) -> Table:
    """Rows are points, columns arms; the last arm is what ratios refer to."""
    arms = arms_of(lines)
    *_, base = arms
    devices = {arm.get("device") for arm in arms.values()} - {None}
    shown = Table("", *arms, title=f"{', '.join(sorted(devices))}; (ratio to {base})")
    names = list(dict.fromkeys(n for arm in arms.values() for n in arm["points"]))
    figures = [
        ("output_tokens_s", "tokens/s", False),
        ("mean_tpot_ms", "TPOT ms", True),
        ("step_ms", "step ms", True),
        ("mean_ttft_ms", "TTFT ms", True),
        ("prefill_tokens_s", "tokens/s", False),
    ]
    for name in names:
        prefill = name.startswith("prefill")
        for key, unit, less_is_better in figures:
            if prefill != (key == "prefill_tokens_s"):
                continue
            found = [arm["points"].get(name, {}).get(key) for arm in arms.values()]
            if any(value is not None for value in found):
                cells = [_cell(value, found[-1], less_is_better) for value in found]
                shown.add_row(f"{name}: {unit}", *cells)
    for key in ("weights_gib", "kv_tokens", "start_s"):
        found = [arm.get(key) for arm in arms.values()]
        if any(value is not None for value in found):
            shown.add_row(key, *["" if v is None else f"{v:,g}" for v in found])
    return shown


def _cell(value: float | None, base: float | None, less_is_better: bool) -> str:
    if value is None:
        return ""
    if not value or not base:
        return f"{value:.1f}"
    return f"{value:.2f} ({base / value if less_is_better else value / base:.2f})"


# -- the command ----------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",") if part]
    except ValueError:
        raise typer.BadParameter(f"{text}: expected numbers with commas between") from None
    if any(number < 1 for number in found):
        raise typer.BadParameter(f"{text}: expected numbers from 1 on")
    return found


def main(
    arms: Annotated[list[str], typer.Argument(help="NAME=FOLDER, or files with --table")],
    concurrency: Annotated[str, typer.Option()] = "1,8,32,64",
    input_tokens: Annotated[int, typer.Option("--input", min=1)] = 1024,
    output_tokens: Annotated[int, typer.Option("--output", min=2)] = 256,
    prefill: Annotated[int, typer.Option(help="0: none")] = 8000,
    rounds: Annotated[int, typer.Option(help="requests for each place", min=1)] = 1,
    mode: Annotated[str, typer.Option(help="serve or engine")] = "serve",
    budget: Annotated[float, typer.Option(help="seconds, for all arms together")] = 1e6,
    ranks: Annotated[int, typer.Option(help="tensor parallel size", min=1)] = 1,
    engine: Annotated[str, typer.Option(help="further arguments of vLLM, as JSON")] = "{}",
    seed: Annotated[int | None, typer.Option(help="default: a new one")] = None,
    file: Annotated[Path | None, typer.Option("--json", help="add every line to it")] = None,
    logs: Annotated[Path | None, typer.Option(help="folder for vLLM's logs")] = None,
    show: Annotated[bool, typer.Option("--table", help="print a table of such files")] = False,
) -> None:
    """Measures arms one after the other and prints one table."""
    # `timeout` and the like: the arm that runs is ended as for Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(width=None if sys.stdout.isatty() else 160)
    if show:
        lines = [json.loads(li) for f in arms for li in Path(f).read_text().splitlines()]
        console.print(table(lines))
        return
    if mode not in ("serve", "engine"):
        raise typer.BadParameter(f"--mode {mode}: there are serve and engine")
    folders = dict(arm.partition("=")[::2] for arm in arms)
    for name, folder in folders.items():
        if not (Path(folder) / "config.json").is_file():
            raise typer.BadParameter(f"{name}={folder}: expected NAME=FOLDER of a model")
    logs = logs or Path(tempfile.mkdtemp(prefix="serving-"))
    logs.mkdir(parents=True, exist_ok=True)
    lines, failed, began = [], [], time.monotonic()

    def keep(line: dict) -> None:
        lines.append(line)
        console.print(json.dumps(line), soft_wrap=True, highlight=False, markup=False)
        if file is not None:
            with file.open("a") as out:
                out.write(json.dumps(line) + "\n")

    for i, (name, folder) in enumerate(folders.items()):
        left = budget - (time.monotonic() - began)
        job = {
            "model": str(Path(folder).resolve()),
            "mode": mode,
            "invented": is_invented(Path(folder)),
            "concurrency": numbers(concurrency),
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "prefill": prefill,
            "rounds": rounds,
            "seed": secrets.randbits(31) if seed is None else seed,
            "budget_s": max(left, 0.0) / (len(folders) - i),
            "ranks": ranks,
            "engine": json.loads(engine),
        }
        try:
            run_arm(name, job, logs / f"{name}.log", keep)
        except RuntimeError as error:
            failed.append(name)
            console.print(str(error), highlight=False, markup=False)
    console.print(table(lines))
    if failed:
        console.print(f"failed: {', '.join(failed)}; logs are in {logs}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
