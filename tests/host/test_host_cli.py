"""`exl3ctl` as a person types it: a process, its output and its exit code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
DEFAULT = "smollm2-135m-exl3-6bpw"
BAD = """\
schema: exl3-recipe/1
name: bad
model: {repo: a/b, revision: main}
profiles:
  cpu:
    match: {device: cpu}
    parallel: {tp: 1}
    memory: {max_model_len: 2048, kv_cache_gb: 1}
health: {ready_timeout_s: 60, smoke: {prompt: off, max_tokens: 4}}
"""


@pytest.fixture
def exl3ctl(checkout: Path):
    """Run the real command line in the checkout."""
    paths = [str(checkout), str(checkout / "playbooks/module_utils")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200", "NO_COLOR": "1"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "exl3_host.cli", *words],
            cwd=checkout,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def test_lint_good_recipes(exl3ctl, checkout: Path) -> None:
    files = [str(f) for f in sorted((checkout / "recipes").glob("*.yaml"))]
    done = exl3ctl("recipe", "lint", *files)
    assert done.returncode == 0, done.stderr
    assert f"{len(files)} recipe" in done.stdout


def test_lint_tells_every_mistake_and_the_good_ones_do_not_hide_it(exl3ctl, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(BAD)
    done = exl3ctl("recipe", "lint", DEFAULT, str(bad), str(tmp_path / "none.yaml"))
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"{bad}:3:30")
    assert "'main' is a branch or tag, which moves. Pin the commit" in lines[0]
    assert lines[1].startswith(f"{bad}:8:35")
    assert "unknown key 'kv_cache_gb'. Did you mean 'kv_cache_gib'?" in lines[1]
    assert lines[2].startswith(f"{bad}:9:47")
    assert "There is no recipe file" in lines[3]
    assert lines[4] == "4 errors. Nothing was changed."

    done = exl3ctl("recipe", "lint", "--json", DEFAULT, str(bad))
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert result["error"] == "3 errors in the recipe"
    positions = [(p["line"], p["column"]) for p in result["problems"]]
    assert positions == [(3, 30), (8, 35), (9, 47)]
    assert [r["name"] for r in result["recipes"]] == [DEFAULT]


def test_show_fills_in_the_defaults_and_is_a_recipe_again(exl3ctl, tmp_path: Path) -> None:
    done = exl3ctl("recipe", "show", DEFAULT)
    assert done.returncode == 0, done.stderr
    assert "mode: auto" in done.stdout
    again = tmp_path / f"{DEFAULT}.yaml"
    again.write_text(done.stdout)
    assert exl3ctl("recipe", "lint", str(again)).returncode == 0


def test_plan(exl3ctl, tmp_path: Path) -> None:
    words = ["plan", DEFAULT, "--facts", str(DATA / "facts-two-cores.json")]
    words += ["--store", str(tmp_path), "--port", "8123", "--venv", "/opt/v", "--name", "chat"]
    done = exl3ctl(*words, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["instance"] == "chat"
    assert plan["serve"]["argv"][:2] == ["/opt/v/bin/vllm", "serve"]
    assert plan["serve"]["port"] == 8123
    assert plan["model"]["dir"].startswith(f"{tmp_path}/models/{DEFAULT}-")
    assert list(tmp_path.iterdir()) == [], "planning changes nothing"

    done = exl3ctl(*words, "--explain")
    assert done.returncode == 0, done.stderr
    assert "one memory node, nothing to choose" in done.stdout
    assert "this CPU computes in bf16" in done.stdout
    assert "  --max-model-len 2048 \\" in done.stdout


def test_overrides_of_the_instance(exl3ctl) -> None:
    words = ["plan", DEFAULT, "--facts", str(DATA / "facts-two-cores.json"), "--json"]
    done = exl3ctl(*words, "--serve-args", '{"max-num-seqs": 4}', "--serve-env", '{"A": "b"}')
    assert done.returncode == 0, done.stderr
    serve = json.loads(done.stdout)["serve"]
    assert serve["argv"][-2:] == ["--max-num-seqs", "4"]
    assert serve["env"]["A"] == "b"
    done = exl3ctl(*words, "--serve-args", '{"api-key": "x"}')
    assert done.returncode == 1
    assert "args.api-key of the instance" in json.loads(done.stdout)["error"]
    for wrong in ("{", "[1]"):
        assert exl3ctl(*words, "--serve-args", wrong).returncode == 2


def test_plan_on_this_host(exl3ctl) -> None:
    done = exl3ctl("plan", DEFAULT, "--json")
    answer = json.loads(done.stdout)
    if "error" in answer:
        # A host below the recipe's memory_gib_min.
        assert "fits this host" in answer["error"]
    fits = answer.get("fit", {"ok": False})["ok"]
    assert done.returncode == (0 if fits else 1)


def test_too_little_memory_is_refused_with_figures(exl3ctl) -> None:
    facts = ["--facts", str(DATA / "facts-two-cores.json"), "--kv-cache-gib", "30"]
    done = exl3ctl("fit", DEFAULT, *facts)
    assert done.returncode == 1
    assert "33.16 GiB needed, 20.00 GiB available" in done.stderr
    assert "try: kv_cache_gib: 16" in done.stderr
    done = exl3ctl("fit", DEFAULT, *facts, "--json")
    assert done.returncode == 1
    verdict = json.loads(done.stdout)
    assert (verdict["needed_gib"], verdict["available_gib"]) == (33.16, 20.0)
    assert exl3ctl("plan", DEFAULT, *facts).returncode == 1
    assert exl3ctl("fit", DEFAULT, *facts, "--freed-gib", "14").returncode == 0


def test_facts(exl3ctl, tmp_path: Path) -> None:
    done = exl3ctl("facts", "--json", "--store", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == "exl3-facts/1"
    assert found["disk"]["path"] == str(tmp_path)
    file = tmp_path / "facts.json"
    file.write_text(done.stdout)
    again = exl3ctl("plan", DEFAULT, "--facts", str(file), "--json")
    assert again.stdout == exl3ctl("plan", DEFAULT, "--facts", str(file), "--json").stdout
    assert "CPUs" in exl3ctl("facts").stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "smollm2-135m-exl3-6bp"], f"Did you mean '{DEFAULT}'?"),
        (["plan", DEFAULT, "--profile", "gpu"], "has no profile 'gpu'"),
        (["plan", DEFAULT, "--facts", "/nowhere.json"], "cannot be read"),
        (["plan", DEFAULT, "--facts", "pyproject.toml"], "cannot be read"),
        (["plan", DEFAULT, "--name", "No Name"], "is no instance name"),
        (["plan", DEFAULT, "--pinning", "maybe"], "is not known"),
        (["recipe", "show", "nothing-like-it"], "There is no recipe"),
    ],
)
def test_refusals_exit_with_one(exl3ctl, words: list[str], says: str) -> None:
    done = exl3ctl(*words)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    done = exl3ctl(*words, "--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert says in f"{answer['error']} {answer['fix']}"


@pytest.mark.parametrize(
    "words",
    [
        ["plan"],
        ["plam"],
        ["recipe", "lint"],
        ["plan", DEFAULT, "--port", "http"],
        ["plan", DEFAULT, "--port", "70000"],
        ["plan", DEFAULT, "--kv-cache-gib", "0"],
        ["fit", DEFAULT, "--no-such-option"],
    ],
)
def test_usage_errors_exit_with_two(exl3ctl, words: list[str]) -> None:
    done = exl3ctl(*words)
    assert done.returncode == 2
    assert "exl3ctl" in done.stderr


def test_the_plugins_tools_get_their_arguments_unchanged(exl3ctl, reference_data: Path) -> None:
    folder = str(reference_data / "tiny" / "tiny-llama-mcg4")
    done = exl3ctl("inspect", folder, "--json")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)
    assert exl3ctl("inspect", "/no/such/folder").returncode == 1
    assert exl3ctl("inspect", folder, "--no-such-option").returncode == 2
    done = exl3ctl("quantize", "--help")
    assert done.returncode == 0
    assert "--head-bits" in done.stdout, "help comes from the tool itself"


def test_the_script_runs_in_a_checkout_and_says_when_it_cannot(
    checkout: Path, tmp_path: Path
) -> None:
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts/exl3ctl"
    shutil.copy(checkout / "scripts/exl3ctl", script)
    done = subprocess.run([script, "facts"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "run scripts/quickstart or scripts/test first" in done.stderr

    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    shutil.copytree(checkout / "playbooks/module_utils", tmp_path / "playbooks/module_utils")
    shutil.copytree(checkout / "recipes", tmp_path / "recipes")
    link = tmp_path / "link"
    link.symlink_to(script)
    site = os.pathsep.join(p for p in sys.path if "site-packages" in p)
    done = subprocess.run(
        [link, "recipe", "lint", DEFAULT],
        cwd="/",
        env={**os.environ, "PYTHONPATH": site},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 recipe ok" in done.stdout
