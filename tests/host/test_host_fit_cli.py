"""`exl3ctl fit`: on this host, on captured hosts, on hardware of the list, after a start."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_host import look
from known_hosts import known_host

GLM = "glm-5.3-flash-exl3-4bpw"


@pytest.fixture
def fit(checkout: Path, tmp_path: Path):
    """A function that runs the command: (exit code, answer)."""

    def run(*words: object) -> tuple[int, dict]:
        command = [sys.executable, "-m", "exl3_host.cli", "fit", *map(str, words), "--json"]
        done = subprocess.run(
            [*command, "--store", str(tmp_path / "store")],
            capture_output=True,
            text=True,
            cwd=checkout,
            timeout=60,
        )
        return done.returncode, json.loads(done.stdout)

    return run


@pytest.fixture
def eight_cards(tmp_path: Path) -> Path:
    """Facts of a real host with 8 RTX PRO 6000, as `exl3ctl facts --json` prints them."""
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(look(tmp_path / "host", known_host("f01"))))
    return path


def test_the_first_profile_whose_cards_are_here(fit, eight_cards: Path) -> None:
    code, answer = fit(GLM, "--facts", eight_cards)
    assert (code, answer["profile"], answer["ok"]) == (0, "rtx_pro_6000_x4", True)
    assert answer["lines"][0] == "memory of this host"
    # 1.8 million tokens were reported for this profile.
    assert answer["kv_tokens"][0] < 1_800_000 < answer["kv_tokens"][1]


def test_the_log_of_a_start_is_believed(fit, eight_cards: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("nothing yet\n")
    code, answer = fit(GLM, "--facts", eight_cards, "--log", log)
    assert code == 1 and answer["error"].endswith("tells nothing about a KV cache.")
    log.write_text("INFO GPU KV cache size: 1,799,168 tokens\n")
    code, answer = fit(GLM, "--facts", eight_cards, "--log", log)
    assert code == 0 and answer["kv_tokens"] == [1799168, 1799168]
    code, answer = fit(GLM, "--facts", eight_cards)
    assert answer["kv_tokens"] == [1799168, 1799168], "kept in the store"
    code, answer = fit(GLM, "--facts", eight_cards, "--max-model-len", 65536)
    assert answer["kv_tokens"] != [1799168, 1799168], "another configuration"


def test_a_context_that_is_too_long(fit) -> None:
    code, answer = fit(GLM, "--profile", "rtx_pro_6000_x2", "--max-model-len", 1048576)
    assert code == 1 and not answer["ok"]
    assert answer["reasons"][0].endswith("max_model_len is 1,048,576")
    assert "max_model_len: 262144" in answer["would_fit"]


def test_hardware_that_nobody_knows(fit, checkout: Path, tmp_path: Path) -> None:
    code, answer = fit(GLM, "--profile", "rtx_pro_6000_x3")
    assert code == 1 and answer["fix"] == "Did you mean 'rtx_pro_6000_x4'?"
    text = (checkout / f"recipes/{GLM}.yaml").read_text().replace("dgx_spark_x2:", "my_box:")
    (tmp_path / f"{GLM}.yaml").write_text(text)
    code, answer = fit(tmp_path / f"{GLM}.yaml", "--profile", "my_box")
    assert code == 1 and "The memory of 'my_box' is not known" in answer["error"]


def test_a_lock_makes_the_figures_exact(fit, checkout: Path, tmp_path: Path) -> None:
    """A locked recipe takes weights and layout from its lock: sums by hand from config.json."""
    model = tmp_path / "model"
    shutil.copytree(checkout / "tests/fixtures/tiny-llama-mul1-2.5", model)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        "schema: exl3-recipe/1\nname: tiny\nmodel: {repo: some/tiny, revision: "
        f"{'a' * 40}}}\nprofiles:\n  rtx_5090_x1:\n"
        '    match: {compute_capability: "12.0", gpus_per_node: 1, nodes: 1}\n'
        "    parallel: {tp: 1}\n    memory: {utilization: 0.5, max_model_len: 1024}\n"
        "health: {ready_timeout_s: 60, smoke: {prompt: hello, max_tokens: 4}}\n"
    )
    code, before = fit(recipe, "--profile", "rtx_5090_x1")
    assert code == 0 and before["kv_tokens"] is None
    lock = [sys.executable, "-m", "exl3_host.cli", "recipe", "lock", str(recipe)]
    done = subprocess.run([*lock, "--folder", str(model)], cwd=checkout, capture_output=True)
    assert done.returncode == 0, done.stderr
    code, after = fit(recipe, "--profile", "rtx_5090_x1")
    # 2 layers x 2 x 2 heads x 64 x 2 bytes; half of 31.84 GiB less 2.5 to 6.5 GiB of vLLM's own
    # (5 GiB at 8,192 tokens a step, half of it to 1.3 times), and less than a MiB of weights.
    least, most = after["kv_tokens"]
    assert abs(least - (15.92 - 6.5) * 2**30 / 1024) < 1024
    assert abs(most - (15.92 - 2.5) * 2**30 / 1024) < 1024
    assert any("(the lock)" in line for line in after["lines"])
