"""Whole conversions of a tiny model, as a user runs them: from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import dense_eval
import pytest
import small_models
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from exl3_plugin.checkpoint import read_checkpoint
from exl3_plugin.quantize import cli, store

BITS = 3.3


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "exl3_plugin.quantize", *map(str, arguments)]


def run(*arguments: object) -> str:
    """Run the quantiser; returns what it printed, both streams."""
    import exl3_plugin

    root = str(Path(exl3_plugin.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def refused(*arguments: object, code: int = 1) -> str:
    """Run what must fail, in this process; returns what it said."""
    result = CliRunner().invoke(cli.app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result.output


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    small_models.llama(folder)
    return folder


@pytest.fixture(scope="session")
def converted(source, tmp_path_factory) -> Path:
    """The model at 3.3 bits, self-calibrated, converted without interruption."""
    out = tmp_path_factory.mktemp("converted") / "out"
    text = run(source, out, "--bits", BITS, "--self-calibration", 4, *COLUMNS, "--json")
    result = json.loads(text[text.index("{") : text.rindex("}") + 1])
    print(f"{result['tiles_per_second_per_core']:.0f} tiles per second per core")
    assert result["modules"] == 15
    assert result["modules_resumed"] == 0
    return out


COLUMNS = ("--calibration-columns", 64)


def test_the_checkpoint_reads_as_asked(converted, source):
    checkpoint = read_checkpoint(converted)
    linears = {name: m for name, m in checkpoint.modules.items() if m.kind == "exl3"}
    assert len(linears) == 15
    assert {module.codebook for module in linears.values()} == {"mul1"}
    assert linears["lm_head"].bits == 6
    decoder = [module for name, module in linears.items() if name != "lm_head"]
    assert {module.bits for module in decoder} == {3.0, 3.5}
    weights = sum(module.k * module.n for module in decoder)
    mean = sum(module.bits * module.k * module.n for module in decoder) / weights
    assert BITS - 0.06 < mean <= BITS
    key = linears["model.layers.0.self_attn.k_proj"]
    assert (key.k, key.n) == (256, 128)
    query = linears["model.layers.0.self_attn.q_proj"]
    assert query.bits == key.bits
    assert not (converted / ".partial").exists()
    original = load_file(source / "model.safetensors")
    written = load_file(converted / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert written[name].dtype == torch.bfloat16
        assert torch.equal(written[name], original[name])
    assert written["lm_head.mul1"].shape == ()
    assert int(written["lm_head.mul1"]) == -2082680531


def test_the_json_files_say_what_the_tensors_say(converted, source):
    config = json.loads((converted / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "exl3"
    assert (quantization["bits"], quantization["head_bits"]) == (BITS, 6)
    assert quantization["calibration"] == {"rows": 4, "cols": 64}
    detailed = json.loads((converted / "quantization_config.json").read_text())
    storage = detailed.pop("tensor_storage")
    assert detailed == quantization
    tensors = load_file(converted / "model.safetensors")
    listed = {}
    for module, entry in storage.items():
        listed |= entry["stored_tensors"]
        if entry.get("quant_format") == "exl3":
            words = tensors[f"{module}.trellis"].shape[-1]
            assert entry["bits_per_weight"] == words / 16
            assert entry["mul1_multiplier"] == 0x83DCD12D
    assert {name: entry["shape"] for name, entry in listed.items()} == {
        name: list(tensor.shape) for name, tensor in tensors.items()
    }
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (converted / name).read_bytes() == (source / name).read_bytes()


def test_the_model_is_better_than_plain_rounding_would_be(converted, source):
    """Against the original weights plus white noise of the size that these rates have.

    0.0174, 0.0088 and 0.0003 are the relative errors of a Gaussian source at 3, 3.5 and 6 bits in
    the format document; error feedback must do better than noise of that size.
    """
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    noisy = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(256, (1, 128), generator=generator)
    state, modules = dense_eval.dense_state(converted), read_checkpoint(converted).modules
    for name, weight in noisy.model.layers.named_parameters():
        if weight.ndim != 2:
            continue
        true = weight.detach().clone()
        module = f"model.layers.{name.removesuffix('.weight')}"
        size = {3.0: 0.0174, 3.5: 0.0088}[modules[module].bits]
        noise = torch.randn(true.shape, generator=generator) * true.square().mean().sqrt()
        weight.data += noise * size**0.5
        error = state[f"{module}.weight"][: true.shape[0], : true.shape[1]] - true
        # Feedback trades some plain error for less where activations are.
        assert float(error.square().sum() / true.square().sum()) < 2 * size, name

    def off(model) -> float:
        return float((model(tokens).logits - expected).norm() / expected.norm())

    with torch.no_grad():
        expected = original(tokens).logits
        found, plain = off(dense_eval.dense_model(converted)), off(noisy)
    print(f"relative error of the logits: {found:.3f}, plain rounding {plain:.3f}")
    assert found < plain


def test_padding_is_exactly_zero(converted):
    state = dense_eval.dense_state(converted)
    assert not state["model.layers.1.self_attn.k_proj.weight"][64:].any()
    assert not state["model.layers.1.mlp.down_proj.weight"][192:].any()


def test_a_killed_conversion_continues_to_the_same_bytes(converted, source, tmp_path):
    out = tmp_path / "out"
    arguments = (source, out, "--bits", BITS, "--self-calibration", 4, *COLUMNS)
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    modules = out / store.PARTIAL / "modules"
    try:
        # Four finished modules: in the middle of the first layer.
        deadline = time.monotonic() + 300
        while len(list(modules.glob("*.safetensors"))) < 4 and process.poll() is None:
            assert time.monotonic() < deadline, "no progress in five minutes"
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, "the conversion ended before it could be killed"
    assert not (out / "config.json").exists()
    # What a kill in the middle of a write leaves behind.
    (modules / "model.layers.1.mlp.up_proj.safetensors.new").write_bytes(b"half a file")

    said = refused(source, out, "--bits", 4, "--self-calibration", 4, *COLUMNS)
    assert "bits was 3.3, now 4.0" in said
    assert "--restart" in said
    continued = run(*arguments)
    assert "of 15 modules are done already" in continued
    assert files_of(out) == files_of(converted)


def test_text_calibration_shards_and_an_existing_output(source, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(small_models.TEXT)
    out = tmp_path / "out"
    options = ("--bits", 8, "--head-bits", 8, "--codebook", "mcg")
    calibration = ("--calibration", text, "--calibration-rows", 3, *COLUMNS)
    run(source, out, *options, *calibration, "--shard-gib", 0.0002)
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 1
    index = json.loads((out / "model.safetensors.index.json").read_text())
    located = {name: file.name for file in shards for name in load_file(file)}
    assert index["weight_map"] == located
    assert {m.codebook for m in read_checkpoint(out).modules.values() if m.kind == "exl3"} == {
        "mcg"
    }
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["calibration"] == {"rows": 3, "cols": 64}

    before = files_of(out)
    assert "already holds a model" in refused(source, out, "--bits", 8)
    assert files_of(out) == before
    # One file replaces the old shards.
    run(source, out, "--bits", 8, "--head-bits", 8, "--overwrite")
    assert [file.name for file in out.glob("model*")] == ["model.safetensors"]
    assert "mul1" in json.loads((out / "config.json").read_text())["quantization_config"].values()


def test_what_cannot_be_done_is_refused_before_anything_is_written(source, tmp_path):
    out = tmp_path / "out"
    assert "does not exist" in refused(tmp_path / "nowhere", out, "--bits", 4)
    assert "same folder" in refused(source, source, "--bits", 4)
    assert "--head-bits 2.5 does not exist with codebook mcg" in refused(
        source, out, "--bits", 4, "--head-bits", 2.5, "--codebook", "mcg"
    )
    assert "already quantised (exl3)" in refused(_quantised(tmp_path), out, "--bits", 4)
    assert not out.exists()
    refused(source, out, code=2)
    refused(source, out, "--bits", 9, code=2)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    assert "not empty" in refused(source, foreign, "--bits", 4)
    assert [file.name for file in foreign.iterdir()] == ["notes.txt"]


def _quantised(tmp_path: Path) -> Path:
    folder = tmp_path / "quantised"
    folder.mkdir()
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "exl3"}}')
    return folder


def test_damaged_weights_are_named(source, tmp_path):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (damaged / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, damaged / "model.safetensors")
    said = refused(damaged, tmp_path / "out", "--bits", 4)
    assert "model.layers.0.mlp.down_proj.weight holds 1 values that are NaN" in said
    assert not (tmp_path / "out" / "config.json").exists()

    content = (source / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(content[: len(content) // 2])
    said = refused(damaged, tmp_path / "out2", "--bits", 4)
    assert "model.safetensors cannot be read (truncated?)" in said


def test_short_calibration_text_is_refused(source, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("too short")
    said = refused(source, tmp_path / "out", "--bits", 4, "--calibration", text)
    assert "has 9 tokens, fewer than one row of 1024" in said


def test_fused_and_stacked_tensors_come_out_split(tmp_path):
    """At 8 bits every part must be recognisable as the rows it was cut from."""
    folder, out = tmp_path / "fused", tmp_path / "out"
    folder.mkdir()
    small_models.llama(folder, num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "llama4_text"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    expected: dict[str, torch.Tensor] = {}

    def take(name: str) -> torch.Tensor:
        expected[name] = tensors.pop(f"{name}.weight")
        return expected[name]

    attention = "model.layers.0.self_attn"
    parts = [take(f"{attention}.{leaf}_proj") for leaf in "qkv"]
    tensors[f"{attention}.qkv_proj.weight"] = torch.cat(parts)
    bias = torch.randn(320)
    tensors[f"{attention}.qkv_proj.bias"] = bias
    # Llama 4 stacks its experts inputs first; the second expert is the first one doubled.
    experts = "model.layers.0.feed_forward.experts"
    mlp = "model.layers.0.mlp"
    gate, up, down = (take(f"{mlp}.{leaf}_proj") for leaf in ("gate", "up", "down"))
    both = torch.cat([gate, up]).T
    tensors[f"{experts}.gate_up_proj"] = torch.stack([both, 2 * both]).contiguous()
    tensors[f"{experts}.down_proj"] = torch.stack([down.T, 2 * down.T]).contiguous()
    for leaf, weight in (("gate", gate), ("up", up), ("down", down)):
        del expected[f"{mlp}.{leaf}_proj"]
        expected[f"{experts}.0.{leaf}_proj"] = weight
        expected[f"{experts}.1.{leaf}_proj"] = 2 * weight
    save_file(tensors, folder / "model.safetensors")

    run(folder, out, "--bits", 8, "--head-bits", 8)
    state = dense_eval.dense_state(out)
    for name, weight in expected.items():
        rows, columns = weight.shape
        error = state[f"{name}.weight"][:rows, :columns] - weight.float()
        assert float(error.norm() / weight.float().norm()) < 0.01, name
    biases = torch.cat([state[f"{attention}.{leaf}_proj.bias"] for leaf in "qkv"])
    assert torch.equal(biases, bias.half().float())
    assert not any("qkv_proj" in name or "gate_up" in name for name in state)
