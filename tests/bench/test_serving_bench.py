"""Serving speed: the random checkpoints, the arms, the table, and the kernels of a step."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import typer
from exl3_host import procs
from rich.console import Console

from bench import random_checkpoint, serving, serving_arm, step_profile
from exl3_plugin import format as exl3
from exl3_plugin.checkpoint import read_checkpoint

BENCH = Path(serving.__file__).parent

# What the models' own cards say, in billions of parameters.
SIZES = {"qwen3-8b": 8.19, "dense-27b": 27.0, "qwen3-30b-a3b": 30.5}


@pytest.mark.parametrize("shape", SIZES)
def test_shapes_have_the_size_of_the_models_they_stand_for(shape, tmp_path):
    """Files of holes: gigabytes that take no room, with headers that the plugin accepts."""
    said = random_checkpoint.make(shape, tmp_path, 4, holes=True)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.warnings == []
    weights = sum((m.k_true or m.k or 0) * (m.n_true or m.n or 0)
                  for m in checkpoint.modules.values())  # fmt: skip
    assert weights / 1e9 == pytest.approx(SIZES[shape], rel=0.01)
    held = sum(512 * file.stat().st_blocks for file in tmp_path.iterdir())
    assert held < said / 100 and serving.is_invented(tmp_path)
    codebooks = {m.codebook for m in checkpoint.modules.values() if m.kind == "exl3"}
    assert codebooks == {"mul1"}


def test_random_weights_are_what_the_header_says_and_keep_sizes(tmp_path):
    from safetensors.torch import load_file

    random_checkpoint.make("tiny", tmp_path, 2.5, head_bits=5, codebook="mul1")
    assert not serving.is_invented(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    rates = {name: module.bits for name, module in checkpoint.modules.items() if module.bits}
    assert rates.pop("lm_head") == 5 and set(rates.values()) == {2.5} and len(rates) == 14
    tensors = {}
    for file in tmp_path.glob("*.safetensors"):
        tensors |= load_file(file)
    name = "model.layers.1.mlp.down_proj"
    parts = [tensors[f"{name}.{s}"].numpy() for s in ("trellis", "suh", "svh")]
    weight = exl3.dense_weight(*parts, "mul1")
    x = np.random.default_rng(0).standard_normal((64, len(weight)))
    assert np.std(x @ weight) == pytest.approx(1, rel=0.1)
    other = tensors["model.layers.0.mlp.down_proj.trellis"]
    assert (other != tensors[f"{name}.trellis"]).float().mean() > 0.99


def test_a_text_has_as_many_tokens_as_words(tmp_path):
    from transformers import AutoTokenizer

    random_checkpoint.make("tiny", tmp_path, None)
    assert serving.is_invented(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = np.random.default_rng(0).integers(2, 512, 300).tolist()
    text = tokenizer.decode(ids)
    assert tokenizer.encode(text) == ids
    longest = max(map(len, tokenizer.get_vocab()))
    assert len(text) < 300 * longest


def job(**changes) -> serving_arm.Job:
    given = {
        "model": "m", "mode": "serve", "invented": True, "concurrency": [1, 4],
        "input_tokens": 32, "output_tokens": 8, "prefill": 100, "rounds": 2, "seed": 1,
        "budget_s": 60.0,
    }  # fmt: skip
    return serving_arm.Job(**given | changes)


def test_points_are_measured_in_order_and_none_begins_after_the_budget():
    asked = []

    def measure(*arguments):
        asked.append(arguments)
        return {"median_ttft_ms": 50.0}

    found = list(serving_arm.points(job(), measure, time.monotonic() + 60))
    assert asked == [(1, 1, 32, 8), (1, 2, 32, 8), (4, 8, 32, 8), (1, 3, 100, 1)]
    assert [p["concurrency"] for p in found] == [1, 4, 1]
    assert found[-1]["prefill_tokens_s"] == pytest.approx(2000)
    late = list(serving_arm.points(job(), measure, time.monotonic() - 1))
    assert len(late) == 3 and all("skipped" in point for point in late)


def test_arguments_are_those_of_vllms_command_line():
    arguments = job(engine={"enforce_eager": True, "max_num_seqs": 7}).arguments
    assert arguments["max_model_len"] == 101 + 16 and arguments["max_num_seqs"] == 7
    assert arguments["enable_prefix_caching"] is False and arguments["load_format"] == "dummy"
    assert serving_arm.flags("enable_prefix_caching", False) == ["--no-enable-prefix-caching"]
    assert serving_arm.flags("compilation_config", {"a": [1]}) == [
        "--compilation-config", '{"a": [1]}'
    ]  # fmt: skip


def test_a_run_whose_tokens_were_not_those_asked_for_is_refused():
    good = {
        "completed": 3, "failed": 0, "total_input_tokens": 96, "total_output_tokens": 24,
    }  # fmt: skip
    serving_arm.check_counts(good, 3, 32, 8)
    for name in good:
        with pytest.raises(RuntimeError, match=f"{name} {good[name] + 1}, expected {good[name]}"):
            serving_arm.check_counts(good | {name: good[name] + 1}, 3, 32, 8)


def shown(table) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


def test_the_table_puts_runs_together_and_refers_to_the_last_arm():
    point = {"concurrency": 8, "input": 1024, "output": 256}
    lines = [
        {"arm": "exl3", **point, "output_tokens_s": 100.0, "mean_tpot_ms": 9.0},
        {"arm": "bf16", **point, "output_tokens_s": 100.0, "mean_tpot_ms": 10.0},
        {"arm": "exl3", **point, "output_tokens_s": 150.0, "mean_tpot_ms": 5.0},
        {"arm": "exl3", "kv_tokens": 479232.0, "device": "a card"},
        {"arm": "bf16", "concurrency": 64, "input": 1024, "output": 256, "skipped": "budget"},
    ]
    text = shown(serving.table(lines))
    assert "150.00 (1.50)" in text and "5.00 (2.00)" in text and "479,232" in text
    assert "a card" in text and "64 at once" not in text


def test_usage_errors_say_what_was_expected():
    for text in ("1,x", "0"):
        with pytest.raises(typer.BadParameter, match="expected numbers"):
            serving.numbers(text)
    for arguments in (["tiny", "out"], ["tiny", "out", "--bits", "4", "--bf16"], ["huge", "out"]):
        done = run("random_checkpoint.py", *arguments)
        assert done.returncode == 2, done.stderr


def test_a_steps_kernels_are_counted_and_their_times_split():
    """Two steps of two layers; two kernels overlap, and one gap of 3 us in each step."""
    events = [{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 500}]
    for start in (100.0, 120.0):
        for name, at, us in (
            ("void exl3::(anonymous namespace)::transform_kernel<4>(exl3::TransformParams)", 0, 2),
            ("void exl3::gemm_kernel<exl3::Config<8, 2> >(exl3::GemmParams)", 1, 6),
            ("triton_red_fused_rms_norm", 10, 1),
            ("void (anonymous namespace)::copy<int>(int*)", 11, 9),
        ):
            events.append({"cat": "kernel", "name": name, "ts": start + at, "dur": us})
    found = step_profile.summarise(events, steps=2, layers=1)
    assert (found["kernels"], found["ours"], found["ours_per_layer"]) == (4, 2, 2)
    assert (found["step_us"], found["busy_us"], found["ours_us"]) == (20, 17, 7)
    assert found["by_kernel"] == {
        "copy": [1, 9], "exl3::gemm_kernel": [1, 5], "exl3::transform_kernel": [1, 2],
        "triton_red_fused_rms_norm": [1, 1],
    }  # fmt: skip
    text = shown(step_profile.table([{"rows": 8, **found}]))
    assert "8 rows" in text and "3.0 (15%)" in text and "1.0 x, 5.0 us" in text
    with pytest.raises(ValueError, match="no kernels"):
        step_profile.summarise(events[:1], 1, 1)


def run(script: str, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, BENCH / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["engine", "serve"])
def test_a_checkpoint_is_measured_on_this_machine(mode, tmp_path, monkeypatch):
    """The commands of the documentation with a tiny model: invented weights, all the way."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert (
        run("random_checkpoint.py", "tiny", tmp_path / "m", "--bits", 4, "--holes").returncode == 0
    )
    done = run(
        "serving.py", f"exl3={tmp_path / 'm'}", "--mode", mode, "--concurrency", "1,4",
        "--input", 24, "--output", 6, "--prefill", 50, "--engine", '{"enforce_eager": true}',
        "--json", tmp_path / "lines", "--logs", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    points = [line for line in lines if "concurrency" in line]
    assert [point["requests"] for point in points] == [2, 4, 3]
    assert all(point["output_tokens_s"] > 0 and point["mean_ttft_ms"] > 0 for point in points)
    assert any(line.get("kv_tokens") for line in lines)
    assert "prefill 50: tokens/s" in run("serving.py", "--table", tmp_path / "lines").stdout


@pytest.mark.slow
def test_a_run_that_is_ended_leaves_no_process(tmp_path, monkeypatch):
    """As `timeout` ends it: SIGTERM to the program alone, in the middle of a point."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    random_checkpoint.make("tiny", tmp_path / "m", 4, holes=True)
    lines = tmp_path / "lines"
    process = subprocess.Popen(
        [
            *(sys.executable, BENCH / "serving.py", f"exl3={tmp_path / 'm'}", "--mode", "serve"),
            *("--concurrency", "4", "--output", "2000", "--engine", '{"enforce_eager": true}'),
            *("--json", lines, "--logs", tmp_path),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while not (lines.exists() and "start_s" in lines.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.5)
        started = {pid: procs.start_ticks(pid) for pid in procs.tree(process.pid)}
        assert len(started) >= 4, "the program, the arm, vLLM's server and its engine"
    finally:
        process.terminate()
    assert process.wait(120) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 10  # what was killed may take a moment to end
    while left := [pid for pid, ticks in started.items() if procs.start_ticks(pid) == ticks]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert '"output_tokens_s"' not in lines.read_text(), "it was ended before its first point"
