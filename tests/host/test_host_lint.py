"""Lint beyond the schema: arguments of vLLM, ranks, hardware, lock and memory, with places."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from exl3_host import lint, vllm_args
from exl3_host.errors import HostError
from exl3_host.hardware import load_hardware
from exl3_host.recipe import load_recipe
from exl3_host.schema import GpuProfile

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RECIPE = f"""\
schema: exl3-recipe/1
name: good
model:
  repo: someone/good
  revision: {COMMIT}
  weights_bytes: 20000000000
runtime: docker
image: {{name: exl3-fleet, digests: {{linux/amd64: "sha256:{"1" * 64}"}}}}
serve:
  args: {{max-num-seqs: 8}}
profiles:
  rtx_5090_x2:
    match: {{compute_capability: "12.0", gpus_per_node: 2, nodes: 1}}
    parallel: {{tp: 2}}
    memory: {{utilization: 0.9, max_model_len: 4096, kv_bytes_per_token: 65536}}
    comm: {{shm_gib: 8}}
health: {{ready_timeout_s: 600, smoke: {{prompt: hello, max_tokens: 4}}}}
"""


@pytest.fixture
def context(checkout: Path) -> lint.Context:
    return lint.Context.of(checkout / "recipes")


@pytest.fixture
def found(tmp_path: Path, context: lint.Context):
    """A function that lints a changed recipe: [(line, column, path, message, fix)], notes."""

    def run(old: str = "", new: str = "") -> tuple[list[tuple], list[str]]:
        assert not old or RECIPE.count(old) == 1
        (tmp_path / "good.yaml").write_text(RECIPE.replace(old, new) if old else RECIPE)
        problems, notes = lint.lint(load_recipe(tmp_path / "good.yaml"), context)
        return [(p.line, p.column, p.path, p.message, p.fix) for p in problems], notes

    return run


def test_the_recipes_of_this_project(checkout: Path, context: lint.Context) -> None:
    files = sorted((checkout / "recipes").glob("*.yaml"))
    names = {path.stem for path in files}
    assert {"qwen3.8-27b-exl3-5.5bpw", "qwen3.6-35b-a3b-exl3-4bpw"} <= names
    for path in files:
        loaded = load_recipe(path)
        assert lint.lint(loaded, context)[0] == []
        for profile in loaded.recipe.profiles.values():
            assert profile.evidence is not None
    glm = load_recipe(checkout / "recipes/glm-5.3-flash-exl3-4bpw.yaml").recipe
    assert {"rtx_pro_6000_x4", "rtx_pro_6000_x2", "dgx_spark_x2"} <= set(glm.profiles)


def test_a_good_recipe(found) -> None:
    assert found() == ([], [])


@pytest.mark.parametrize(
    ("old", "new", "at", "path", "message", "fix"),
    [
        (
            "max-num-seqs: 8",
            "max-num-seqz: 8",
            (10, 10),
            "serve.args.max-num-seqz",
            "vLLM 0.33.0 has no argument 'max-num-seqz'.",
            "Did you mean 'max-num-seqs'?",
        ),
        (
            "max-num-seqs: 8",
            "max-num-seqs: eight",
            (10, 10),
            "serve.args.max-num-seqs",
            "'eight' is not possible for 'max-num-seqs'.",
            "Expected a whole number.",
        ),
        (
            "max-num-seqs: 8",
            "all2all-backend: naiv",
            (10, 10),
            "serve.args.all2all-backend",
            "'naiv' is not possible for 'all2all-backend'.",
            "Did you mean 'naive'?",
        ),
        (
            "max-num-seqs: 8",
            "enforce-eager: 1",
            (10, 10),
            "serve.args.enforce-eager",
            "'enforce-eager' is a flag and takes no value.",
            "Write true or false.",
        ),
        (
            "parallel: {tp: 2}",
            "parallel: {tp: 2, pp: 2}",
            (14, 5),
            "profiles.rtx_5090_x2.parallel",
            "tp x pp x dp is 4, and 1 node(s) of 2 GPU(s) are 2.",
            "Make the product 2.",
        ),
        (
            "    comm: {shm_gib: 8}\n",
            "",
            (12, 3),
            "profiles.rtx_5090_x2",
            "Ranks of one host talk through shared memory, and comm.shm_gib is not given.",
            "Add comm: {shm_gib: 8}; a container has 64 MiB otherwise.",
        ),
        (
            "  rtx_5090_x2:",
            "  rtx_5090x2:",
            (12, 3),
            "profiles.rtx_5090x2",
            "hardware.yaml has no class 'rtx_5090x2'.",
            "Did you mean 'rtx_5090_x2'?",
        ),
        (
            'compute_capability: "12.0"',
            'compute_capability: "9.0"',
            (13, 5),
            "profiles.rtx_5090_x2.match",
            "compute_capability is 9.0, hardware.yaml says 12.0.",
            "Use the id of another class.",
        ),
        (
            "  weights_bytes: 20000000000\n",
            "  weights_bytes: 20000000000\n  gated: true\n",
            (7, 3),
            "model.gated",
            "A gated model cannot be fetched without a token.",
            "Add secrets: {hf_token: true}.",
        ),
        (
            "  weights_bytes: 20000000000\n",
            "  weights_bytes: 20000000000\n  min_context: 8192\n",
            (16, 32),
            "profiles.rtx_5090_x2.memory.max_model_len",
            "4096 is below model.min_context, 8192.",
            "Raise it.",
        ),
        (
            "  weights_bytes: 20000000000\n",
            "  weights_bytes: 20000000000\n  file_lock: good.files.json\n",
            (7, 3),
            "model.file_lock",
            "There is no good.files.json beside the recipe.",
            "Make it with: exl3ctl recipe lock good",
        ),
        (
            "health:",
            "start: {attempts: 2, retry_on: [{id: any, pattern: '.*'}]}\nhealth:",
            (17, 43),
            "start.retry_on[0].pattern",
            "This pattern matches every failure.",
            "Name the one failure that a plain restart cures.",
        ),
    ],
)
def test_one_mistake(found, old, new, at, path, message, fix) -> None:
    problems, _notes = found(old, new)
    assert problems == [(*at, path, message, fix)]


def test_a_model_that_does_not_fit(found) -> None:
    problems, _ = found("weights_bytes: 20000000000", "weights_bytes: 90000000000")
    assert [p[:3] for p in problems] == [(15, 5, "profiles.rtx_5090_x2.memory")]
    message, fix = problems[0][3:]
    assert message.startswith("It does not fit on 2 x NVIDIA GeForce RTX 5090: weights and vLLM")
    assert "tp: 4, on 4 such GPUs" in fix and "fewer bits per weight" in fix


def test_several_mistakes_are_told_at_once(tmp_path: Path, checkout: Path) -> None:
    text = RECIPE.replace("max-num-seqs: 8", "max-num-seqz: 8, block-size: big").replace(
        "parallel: {tp: 2}", "parallel: {tp: 4}"
    )
    (tmp_path / "good.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "exl3_host.cli", "recipe", "lint", str(tmp_path / "good.yaml")],
        capture_output=True,
        text=True,
        cwd=checkout,
    )
    assert done.returncode == 1 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert [re.search(r"good.yaml:(\d+:\d+)", line)[1] for line in lines[:3]] == [
        "10:10",
        "10:27",
        "14:5",
    ]
    assert lines[-1] == "3 errors. Nothing was changed."


def test_mistakes_of_the_schema_hide_no_others(tmp_path: Path, context: lint.Context) -> None:
    text = RECIPE.replace("max-num-seqs: 8", "max-num-seqz: 8, port: 1, dtype: off")
    path = tmp_path / "good.yaml"
    path.write_text(text.replace("ready_timeout_s: 600", "ready_timeout: 600"))
    loaded, problems, _ = lint.lint_file(path, context)
    assert loaded is None
    told = {(p.line, p.column): p.message for p in problems}
    assert told == {
        (10, 10): "vLLM 0.33.0 has no argument 'max-num-seqz'.",
        (10, 27): "'port' may not be set here.",
        (10, 43): "YAML readers disagree about 'off': a word or False.",
        (17, 10): "unknown key 'ready_timeout'.",
    }
    path.write_text("- not a map\n")
    assert [p.message for p in lint.lint_file(path, context)[1]] == ["A map is expected."]
    path.write_text("serve: {args: 1}\nprofiles: []\n")
    assert lint.lint_file(path, context)[0] is None


def test_an_image_has_the_last_word(tmp_path: Path, checkout: Path) -> None:
    listed = {"schema": vllm_args.SCHEMA, "vllm": "9.9.9", "arguments": {}}
    (tmp_path / "args.json").write_text(json.dumps(listed))
    (tmp_path / "good.yaml").write_text(RECIPE)
    context = lint.Context.of(checkout / "recipes", tmp_path / "args.json")
    problems, _ = lint.lint(load_recipe(tmp_path / "good.yaml"), context)
    assert [p.message for p in problems] == ["vLLM 9.9.9 has no argument 'max-num-seqs'."]
    (tmp_path / "args.json").write_text('{"schema": "other"}')
    with pytest.raises(HostError, match="is no argument list"):
        lint.lint(load_recipe(tmp_path / "good.yaml"), context)


def test_what_is_not_pinned_is_a_note(found) -> None:
    problems, notes = found(COMMIT, f'"{"0" * 40}"')
    assert problems == []
    assert notes == ["good: not locked yet; pin it with: exl3ctl recipe lock good"]


def lock_file(**changes) -> str:
    model = {"weights_bytes": 20000000000, "classes": {"sharded": 20000000000}, "config": {}}
    source = {"kind": "hub", "repo": "someone/good", "revision": COMMIT}
    body = {"schema": "exl3-lock/1", "source": source, "files": {}, "model": model}
    for name, value in changes.items():
        (model if name in model else source)[name] = value
    return json.dumps(body)


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        (
            {"revision": "f" * 40},
            "model.revision",
            "The lock was made of someone/good at ffffffffffff.",
        ),
        (
            {"weights_bytes": 10},
            "model.weights_bytes",
            "20000000000 is not what the lock counts: 10.",
        ),
        (
            {"config": {"num_attention_heads": 9, "num_key_value_heads": 3}},
            "profiles.rtx_5090_x2.parallel.tp",
            "2 ranks cannot share 9 attention heads.",
        ),
        (
            {"config": {"max_position_embeddings": 2048}},
            "profiles.rtx_5090_x2.memory.max_model_len",
            "4096 is above what the model was made for, 2048.",
        ),
    ],
)
def test_a_lock_that_contradicts(found, tmp_path, changes, path, message) -> None:
    (tmp_path / "good.files.json").write_text(lock_file(**changes))
    problems, _ = found()
    assert (path, message) in [p[2:4] for p in problems]
    (tmp_path / "good.files.json").write_text("{")
    assert "is no JSON" in found()[0][0][3]


def test_argument_lists_agree_with_the_installed_vllm(checkout: Path, tmp_path: Path) -> None:
    """The committed list is what the generator says here, byte for byte."""
    out = tmp_path / "args.json"
    done = subprocess.run(
        [sys.executable, "-m", "exl3_host.vllm_args", "--out", str(out)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    version = json.loads(out.read_text())["vllm"]
    committed = checkout / "recipes/args" / f"vllm-{version.replace('+', '-')}.json"
    assert committed.is_file(), f"make {committed.name} with python -m exl3_host.vllm_args"
    assert out.read_text() == committed.read_text()


def test_a_parser_is_asked_not_copied() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tag", nargs="?")
    parser.add_argument("--level", "-l", type=int)
    parser.add_argument("--share", type=float)
    parser.add_argument("--many", nargs="+", type=int)
    parser.add_argument("--data", type=json.loads)
    parser.add_argument("--word", choices=["a", "b"])
    parser.add_argument("--pair", action=argparse.BooleanOptionalAction)
    parser.add_argument("--only-on", action="store_true", help="Deprecated: no effect.")
    listed = vllm_args.collect(parser, "1.2.3")
    assert set(listed["arguments"]) == {
        "level", "share", "many", "data", "word", "pair", "only-on",
    }  # fmt: skip
    assert json.loads(vllm_args.as_text(listed)) == listed

    def wrong(name: str, value: object) -> str | None:
        found = vllm_args.problem_with(name, value, listed)
        return None if found is None else " ".join(found)

    for name, value in [
        ("level", 1), ("level", "1"), ("share", 1), ("share", 0.5), ("many", [1, 2]), ("many", 1),
        ("data", {"a": 1}), ("word", "a"), ("pair", True), ("pair", False), ("no-pair", True),
        ("only-on", True),
    ]:  # fmt: skip
        assert wrong(name, value) is None, name
    assert wrong("level", 1.5) == "'1.5' is not possible for 'level'. Expected a whole number."
    assert wrong("level", True) == "'level' is no flag. Expected a whole number."
    assert wrong("level", {"a": 1}) == "A map is not possible for 'level'. Expected a whole number."
    assert wrong("level", [1]) == ("'level' takes one value, not a list. Expected a whole number.")
    assert wrong("many", [1, "x"]) == "'x' is not possible for 'many'. Expected a whole number."
    assert wrong("word", "c") == "'c' is not possible for 'word'. Use one of: a, b."
    assert wrong("only-on", False).startswith("'only-on' cannot be switched off")
    assert wrong("no-only-on", True).startswith("vLLM 1.2.3 has no argument 'no-only-on'.")
    assert listed["arguments"]["only-on"]["deprecated"]
    assert not listed["arguments"]["level"]["deprecated"]


def test_the_list_is_chosen_by_release_and_device(checkout: Path, tmp_path: Path) -> None:
    folder = checkout / "recipes/args"
    assert vllm_args.choose(folder, None, "cuda")["vllm"] == "0.33.0"
    assert vllm_args.choose(folder, "0.32.0", "cuda")["vllm"] == "0.32.0+cpu"
    assert vllm_args.choose(folder, None, "cpu")["vllm"] == "0.32.0+cpu"
    assert vllm_args.choose(folder, "0.31.0", "cpu") is None
    assert vllm_args.choose(tmp_path, None, "cpu") is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_gib: 95.59 # 97,887 MiB", "memory_gib: 0", "memory_gib"),
        ("link: none\n", "link: off\n", "YAML readers disagree about 'off'"),
        ("gpu: NVIDIA RTX PRO 6000 Blackwell\n", "gpus: x\n", "gpus"),
    ],
)
def test_a_broken_hardware_file(checkout: Path, tmp_path: Path, old, new, message) -> None:
    shutil.copytree(checkout / "recipes/profiles", tmp_path / "profiles")
    path = tmp_path / "profiles/hardware.yaml"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(HostError, match=message):
        load_hardware(tmp_path)
    assert load_hardware(tmp_path / "none") == {}


def test_every_gpu_class_says_where_its_figures_are_from(checkout: Path) -> None:
    for name, hardware in load_hardware(checkout / "recipes").items():
        assert hardware.evidence.source, name
        assert hardware.match.unified_memory == (hardware.available_gib is not None), name
        assert GpuProfile.model_fields["match"].annotation is type(hardware.match)


@pytest.mark.parametrize("name", ["disable-expert-parallel", "enable-custom-all-reduce"])
def test_the_other_spelling_of_a_denied_argument(found, name: str) -> None:
    from exl3_host.errors import RecipeError

    with pytest.raises(RecipeError, match=f"'{name}' may not be set here"):
        found("max-num-seqs: 8", f"{name}: true")
