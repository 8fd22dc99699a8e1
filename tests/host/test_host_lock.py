"""`recipe lock`: the files of a folder and of a Hub repository, written into a recipe."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hub_server
import pytest
from exl3_host import lock, lock_make, recipe_edit
from exl3_host.errors import HostError
from exl3_host.recipe import load_recipe
from ruamel.yaml import YAML

RECIPE = """\
schema: exl3-recipe/1
name: little
model:
  repo: someone/little # who made it
  revision: "0000000000000000000000000000000000000000"   # pinned by lock
  weights_bytes: 1
runtime: docker
image: {name: exl3-fleet, digests: {linux/amd64: "sha256:%s"}}
profiles:
  rtx_5090_x1:
    match: {compute_capability: "12.0", gpus_per_node: 1, nodes: 1}
    parallel: {tp: 1}
    memory: {utilization: 0.9, max_model_len: 1024}
health: {ready_timeout_s: 600, smoke: {prompt: hello, max_tokens: 4}}
""" % ("0" * 64)


@pytest.fixture
def model(checkout: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(checkout / "tests/fixtures/tiny-llama-mul1-2.5", folder)
    (folder / "golden.npz").unlink()
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "little.yaml"
    path.write_text(RECIPE)
    return path


def exl3ctl(checkout: Path, *arguments: object, **environment: str):
    """In a process of its own, since the Hub's client reads its environment once."""
    return subprocess.run(
        [sys.executable, "-m", "exl3_host.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=checkout,
        env={**os.environ, "NO_PROXY": "*", "HF_TOKEN": "", "HF_HUB_DISABLE_XET": "1"}
        | environment,
        timeout=120,
    )


def by_hand(folder: Path) -> dict:
    """Sizes and digests as `sha256sum` would give them."""
    return {
        p.name: {
            "bytes": p.stat().st_size,
            "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
        }
        for p in folder.iterdir()
    }


def test_a_folder(model: Path) -> None:
    from safetensors import safe_open

    (model / ".git").mkdir()
    (model / ".git" / "config").write_text("not the model's")
    found = lock_make.lock_folder(model)
    shutil.rmtree(model / ".git")
    assert found["files"] == by_hand(model)
    with safe_open(model / "model.safetensors", "pt") as tensors:
        size = sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118
    assert found["model"]["weights_bytes"] == sum(found["model"]["classes"].values()) == size
    assert found["model"]["config"]["num_key_value_heads"] == 2
    assert json.loads(lock.as_text(found)) == found
    assert lock.compare(model, found) == []
    (model / "model.safetensors").write_bytes(b"x")
    (model / "config.json").unlink()
    assert [w.split(" ")[0] for w in lock.compare(model, found)] == [
        "config.json",
        "model.safetensors",
    ]
    with pytest.raises(HostError, match=r"has no config\.json"):
        lock_make.lock_folder(model)


def test_a_repository_of_the_hub(checkout: Path, model: Path, recipe: Path, tmp_path: Path) -> None:
    with hub_server.serve(model) as hub:
        environment = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "cache")}
        first = exl3ctl(checkout, "recipe", "lock", recipe, "--json", **environment)
        assert first.returncode == 0, first.stderr + first.stdout
        said = json.loads(first.stdout)
        again = exl3ctl(checkout, "recipe", "lock", recipe, "--check", **environment)
        assert (again.returncode, "nothing is new" in again.stdout) == (0, True), again.stdout
    assert said["revision"] == hub_server.COMMIT and said["files"] == 6
    assert said["changed"] == [str(recipe), str(tmp_path / "little.files.json")]
    found = json.loads((tmp_path / "little.files.json").read_text())
    assert found["files"] == by_hand(model)
    # Headers come by range: the weights themselves were not fetched.
    assert not list((tmp_path / "cache").rglob("model.safetensors"))
    text = recipe.read_text()
    assert f"revision: {hub_server.COMMIT}   # pinned by lock" in text
    assert "repo: someone/little # who made it" in text
    loaded = load_recipe(recipe).recipe.model
    assert loaded.file_lock == "little.files.json"
    assert loaded.weights_bytes == found["model"]["weights_bytes"] > 100_000
    (tmp_path / "little.files.json").unlink()
    with hub_server.serve(model) as hub:
        environment["HF_ENDPOINT"] = hub.address
        new = exl3ctl(checkout, "recipe", "lock", recipe, "--check", **environment)
    assert new.returncode == 1 and "would change" in new.stdout
    assert not (tmp_path / "little.files.json").exists()


def test_what_the_hub_refuses(checkout: Path, model: Path, recipe: Path, tmp_path: Path) -> None:
    environment = {"HF_HOME": str(tmp_path / "cache")}

    def refused(*options: str) -> str:
        done = exl3ctl(
            checkout, "recipe", "lock", recipe, *options, HF_ENDPOINT=hub.address, **environment
        )
        assert done.returncode == 1 and recipe.read_text() == before, done.stdout
        return done.stderr

    before = recipe.read_text()
    with hub_server.serve(model) as hub:
        assert "has no revision 'v9'" in refused("--revision", "v9")
        hub.blob_ids["config.json"] = "1" * 40
        assert "config.json has git digest" in refused()
        hub.blob_ids.clear()
        hub.token = "hf_" + "canary" * 4
        assert "someone/little is gated" in refused()
        secret = tmp_path / "token"
        secret.write_text(hub.token + "\n")
        secret.chmod(0o644)
        assert "can be read by others (mode 0644)" in refused("--token-file", str(secret))
        secret.chmod(0o600)
        done = exl3ctl(
            checkout,
            "recipe",
            "lock",
            recipe,
            "--token-file",
            str(secret),
            HF_ENDPOINT=hub.address,
            **environment,
        )
        assert done.returncode == 0, done.stderr
        assert hub.token not in done.stdout + done.stderr
    recipe.write_text(before)
    hub.address = "http://127.0.0.1:9"
    assert "The Hub could not be asked" in refused()


def test_a_local_copy_of_a_repository(checkout: Path, model: Path, recipe: Path) -> None:
    unsaid = exl3ctl(checkout, "recipe", "lock", recipe, "--folder", model)
    assert unsaid.returncode == 1 and "Add --revision <40 hex>" in unsaid.stderr
    done = exl3ctl(
        checkout, "recipe", "lock", recipe, "--folder", model, "--revision", hub_server.COMMIT
    )
    assert done.returncode == 0, done.stderr
    assert load_recipe(recipe).recipe.model.revision == hub_server.COMMIT


def test_two_recipes_are_compared(checkout: Path, recipe: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    text = recipe.read_text().replace("name: little", "name: other")
    other.write_text(text.replace("utilization: 0.9,", "utilization: 0.8,"))
    done = exl3ctl(checkout, "recipe", "diff", recipe, other)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        'name: "little" -> "other"',
        "profiles.rtx_5090_x1.memory.utilization: 0.9 -> 0.8",
    ]
    same = exl3ctl(checkout, "recipe", "diff", recipe, recipe)
    assert (same.returncode, same.stdout) == (0, "nothing differs\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "is no lock file"),
        ('{"schema": "exl3-lock/2", "files": {}}', "is no lock file"),
        ('{"schema": "exl3-lock/1", "files": {"../x": {"sha256": "%s"}}}' % ("0" * 64), "'../x'"),
        ('{"schema": "exl3-lock/1", "files": {"x": {"sha256": "abc"}}}', "'x'"),
    ],
)
def test_a_broken_lock(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.files.json"
    path.write_text(content)
    with pytest.raises(HostError, match=message):
        lock.read_lock(path)
    assert lock.lock_beside(tmp_path / "absent.yaml") is None


@pytest.mark.parametrize(
    ("text", "values", "after"),
    [
        ("a:\n  b: 1 # why\n  c: 2\n", {("a", "b"): 7}, "a:\n  b: 7 # why\n  c: 2\n"),
        ("a: {b: 1}\n", {("a", "c"): "x"}, "a: {b: 1, c: x}\n"),
        ("a:\n    b: 1\nz: 0\n", {("a", "n"): "x"}, "a:\n    n: x\n    b: 1\nz: 0\n"),
        ('a: {r: "00"}\n', {("a", "r"): "12"}, 'a: {r: "12"}\n'),
        ("é: ü\na: {b: 1}\n", {("a", "b"): 2}, "é: ü\na: {b: 2}\n"),
    ],
)
def test_only_the_value_changes(text: str, values: dict, after: str) -> None:
    changed = recipe_edit.set_values(text, values)
    assert changed == after
    assert YAML(typ="safe").load(changed) is not None


def test_a_value_without_a_map() -> None:
    with pytest.raises(HostError, match="has no map 'b'"):
        recipe_edit.set_values("a: 1\n", {("b", "c"): 1})
    with pytest.raises(HostError, match=r"'a\.b' is no plain value"):
        recipe_edit.set_values("a: {b: [1]}\n", {("a", "b"): 1})
