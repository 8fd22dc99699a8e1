"""`python -m exl3_plugin.inspect`: what it prints, its JSON and its exit codes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_files import Editable, read_tensors


def inspect(checkout: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "exl3_plugin.inspect", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=checkout)


@pytest.fixture(scope="module")
def three_rates(checkout: Path) -> Path:
    return checkout / "tests" / "fixtures" / "tiny-llama-3inst-3.3"


def test_json(checkout, three_rates):
    result = inspect(checkout, three_rates, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    summary = json.loads(result.stdout)

    # Counted by hand from the model's config: 2 layers, hidden 256, 640 wide, 2 of 4 kv heads.
    attention = 2 * (256 * 256 * 2 + 256 * 128 * 2)
    mlp = 2 * 3 * 256 * 640
    head = 256 * 512
    assert summary["bits_histogram"] == {"3": mlp, "4": attention, "5": head}
    mean = (3 * mlp + 4 * attention + 5 * head) / (mlp + attention + head)
    assert summary["average_bits"]["exl3"] == pytest.approx(mean)
    assert summary["weights"] == mlp + attention + head + 512 * 256 + 5 * 256
    assert summary["bytes"] == sum(c["bytes"] for c in summary["classes"]) == 931_328
    assert summary["average_bits"]["all"] == pytest.approx(8 * 931_328 / summary["weights"])
    assert summary["warnings"] == [] and summary["files"] == ["model.safetensors"]
    classes = {c["name"]: c for c in summary["classes"]}
    down = classes["model.layers.*.mlp.down_proj"]
    assert (down["count"], down["kind"], down["bits"], down["codebook"]) == (2, "exl3", 3, "3inst")
    assert (down["k"], down["n"], down["k_true"]) == (640, 256, 640)
    assert [c["name"] for c in summary["classes"] if c["kind"] == "plain"] == [
        "model.embed_tokens",
        "model.layers.*.input_layernorm",
        "model.layers.*.post_attention_layernorm",
        "model.norm",
    ]


def test_table(checkout, three_rates):
    result = inspect(checkout, three_rates, "--tp", 2)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    row = next(line for line in lines if "mlp.down_proj" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "model.layers.*.mlp.down_proj", "2", "exl3", "3", "3inst", "640 x 256", "", "123.5 KiB",
    ]  # fmt: skip
    assert "Not quantised" in result.stdout and "model.embed_tokens" in result.stdout
    assert "average 3.435 bits over the EXL3 weights, 4.544 over everything" in result.stdout
    assert "tensor parallel size 2: every layer can be divided" in result.stdout


def test_padding_and_warnings_are_shown(checkout, three_rates, tmp_path):
    path = tmp_path / "padded"
    shutil.copytree(three_rates, path)
    config = json.loads((path / "config.json").read_text())
    model = Editable(path, read_tensors(path / "model.safetensors"), config)
    model.config["intermediate_size"] = 600
    model.write_index({"lm_head.suh": "model.safetensors"})
    model.save()
    result = inspect(checkout, path)
    assert result.returncode == 0
    assert "k 600 to 640" in result.stdout and "n 600 to 640" in result.stdout
    assert "warning: model.safetensors.index.json is stale" in result.stdout


def test_exit_codes(checkout, three_rates, tmp_path):
    refused = inspect(checkout, tmp_path / "nothing", "--json")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == (
        f"refused: folder {tmp_path / 'nothing'} is not there; give the folder of a checkpoint or "
        "a Hub repository as owner/name\n"
    )
    undividable = inspect(checkout, three_rates, "--tp", 3)
    assert undividable.returncode == 1
    assert "cannot be divided among 3 ranks" in undividable.stderr
    assert inspect(checkout).returncode == 2
    assert inspect(checkout, three_rates, "--tp", 0).returncode == 2
    assert inspect(checkout, three_rates, "--nonsense").returncode == 2


def test_needs_neither_torch_nor_vllm(checkout, three_rates):
    program = (
        "import sys; sys.modules.update(torch=None, vllm=None, transformers=None);"
        "from exl3_plugin.checkpoint import read_checkpoint;"
        "from exl3_plugin.inspect import summarise;"
        f"print(summarise(read_checkpoint({str(three_rates)!r}))['tensors'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=checkout
    )
    assert (result.stdout, result.stderr) == ("51\n", "")
