"""Offline bundles: made, verified, unpacked; damaged, interrupted and incomplete ones."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import namespaces
import pytest
from exl3_host import bundle, manifest
from exl3_host.errors import HostError


@pytest.fixture
def model(checkout: Path, tmp_path: Path) -> Path:
    """A finished model in a store."""
    folder = tmp_path / "store/models/tiny-0123"
    shutil.copytree(checkout / "tests/fixtures/tiny-llama-mul1-2.5", folder)
    manifest.write_manifest(folder, {"source": {"kind": "hub"}, "quantize": None})
    return folder


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A folder with one small wheel."""
    folder = tmp_path / "links"
    folder.mkdir()
    info = "little_tool-1.0.dist-info"
    with zipfile.ZipFile(folder / "little_tool-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("little_tool.py", "x = 1\n")
        head = "Metadata-Version: 2.1\nName: little-tool\nVersion: 1.0\n"
        archive.writestr(f"{info}/METADATA", head)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text("name: tiny\n")
    (tmp_path / "tiny.files.json").write_text("{}")
    return path


@pytest.fixture
def made(tmp_path: Path, model: Path, wheel: Path, recipe: Path, monkeypatch) -> Path:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    out = tmp_path / "bundle"
    contents = bundle.Contents(
        (recipe,), (model,), requirements=("little-tool==1.0",), find_links=(str(wheel),)
    )
    bundle.make(contents, out, Path(sys.executable))
    return out


def tree(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.rglob("*")
        if p.is_file()
    }


def test_a_bundle_holds_everything_with_its_digest(made: Path, model: Path) -> None:
    listed = json.loads((made / "bundle.json").read_text())
    there = tree(made)
    del there["bundle.json"]
    assert {n: f["sha256"] for n, f in listed["files"].items()} == there
    assert {"recipes/tiny.yaml", "recipes/tiny.files.json"} <= set(there)
    assert "wheels/little_tool-1.0-py3-none-any.whl" in there
    assert tree(made / "models" / model.name) == tree(model)
    assert listed["models"] == ["tiny-0123"] and listed["recipes"] == ["tiny"]
    assert bundle.verify(made) == []
    with pytest.raises(HostError, match="is a finished bundle already"):
        bundle.make(bundle.Contents((), ()), made, Path(sys.executable))


def test_unpacked_once_and_then_left_alone(made: Path, model: Path, tmp_path: Path) -> None:
    new = tmp_path / "elsewhere"
    assert bundle.unpack(made, new, is_check=True) == (True, ["model tiny-0123"])
    assert not new.exists()
    assert bundle.unpack(made, new) == (True, ["model tiny-0123"])
    assert tree(new / "models/tiny-0123") == tree(model)
    assert manifest.check_folder(new / "models/tiny-0123", verify=True) is None
    assert bundle.unpack(made, new) == (False, [])


@pytest.mark.parametrize("kind", ["flipped", "short", "missing", "added", "outside"])
def test_a_damaged_bundle_is_refused_whole(made: Path, tmp_path: Path, kind: str) -> None:
    path = made / "models/tiny-0123/model.safetensors"
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    if kind == "flipped":
        data[-1] ^= 1
        path.write_bytes(data)
        message = "model.safetensors has SHA-256"
    elif kind == "short":
        path.write_bytes(data[:-1])
        message = f"has {len(data) - 1} bytes, expected {len(data)}"
    elif kind == "missing":
        path.unlink()
        message = "model.safetensors is missing"
    elif kind == "added":
        (made / "wheels/evil-1.0-py3-none-any.whl").write_bytes(b"x")
        message = "wheels/evil-1.0-py3-none-any.whl is not in the manifest"
    else:
        listed = json.loads((made / "bundle.json").read_text())
        listed["files"]["../outside"] = {"bytes": 0, "sha256": "0" * 64}
        (made / "bundle.json").write_text(json.dumps(listed))
        message = "../outside lies outside the bundle"
    assert len(bundle.verify(made)) == 1 and message in bundle.verify(made)[0]
    new = tmp_path / "elsewhere"
    with pytest.raises(HostError, match="is damaged"):
        bundle.unpack(made, new)
    assert not new.exists(), "nothing half done"


def test_what_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"is no finished bundle: it has no bundle\.json"):
        bundle.verify(tmp_path)
    (tmp_path / "bundle.json").write_text('{"schema": "exl3-bundle/9"}')
    with pytest.raises(HostError, match="is no finished bundle"):
        bundle.unpack(tmp_path, tmp_path / "store")


def test_an_interrupted_copy_goes_on(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / model.name
    partial = target.with_name(f".partial-{model.name}")
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    (partial / "config.json").write_bytes((model / "config.json").read_bytes())
    bundle.copy_model(model, target)
    assert tree(target) == tree(model) and not partial.exists()


def test_a_damaged_store_makes_no_bundle(model: Path, recipe: Path, tmp_path: Path) -> None:
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    out = tmp_path / "bundle"
    with pytest.raises(HostError, match=r"model.safetensors differs from its manifest"):
        bundle.make(bundle.Contents((recipe,), (model,)), out, Path(sys.executable))
    assert not (out / "bundle.json").exists()


def test_wheels_that_cannot_be_had(recipe: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    contents = bundle.Contents((recipe,), (), requirements=("absent-tool==9",))
    with pytest.raises(HostError, match=r"the wheels could not be fetched:\n[^$]*absent-tool==9"):
        bundle.make(contents, tmp_path / "bundle", Path(sys.executable))


def test_an_engine_that_is_not_there(recipe: Path, tmp_path: Path) -> None:
    contents = bundle.Contents((recipe,), (), images=(("x", None),), docker=("/nowhere/docker",))
    with pytest.raises(HostError, match="/nowhere/docker cannot be run"):
        bundle.make(contents, tmp_path / "bundle", Path(sys.executable))


def exl3ctl(checkout: Path, *arguments: object):
    return subprocess.run(
        [sys.executable, "-m", "exl3_host.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=checkout,
        timeout=60,
    )


def test_the_commands(made: Path, checkout: Path, tmp_path: Path, model: Path) -> None:
    done = exl3ctl(checkout, "bundle", "verify", made)
    assert done.returncode == 0 and "every file verified" in done.stdout
    home = tmp_path / "new"
    done = exl3ctl(checkout, "bundle", "unpack", made, "--store", home, "--json")
    assert json.loads(done.stdout)["steps"] == ["model tiny-0123"], done.stderr
    done = exl3ctl(checkout, "store", "verify", "--store", home)
    assert (done.returncode, done.stdout) == (0, "tiny-0123: every file verified\n")
    done = exl3ctl(checkout, "store", "gc", "--store", home)
    assert "tiny-0123" in done.stdout and "add --delete" in done.stdout
    done = exl3ctl(checkout, "store", "list", "--store", home)
    assert "finished" in done.stdout and "no plan" in done.stdout
    damaged = home / "models/tiny-0123/config.json"
    damaged.chmod(0o644)
    damaged.write_text(damaged.read_text().replace("true", "fals"))
    done = exl3ctl(checkout, "store", "verify", "--store", home)
    assert done.returncode == 1 and "config.json has SHA-256" in done.stdout
    done = exl3ctl(checkout, "store", "gc", "--delete", "--store", home)
    assert not (home / "models/tiny-0123").exists()


def test_unpacking_needs_no_network(made: Path, checkout: Path, tmp_path: Path) -> None:
    """In a network namespace without any route, not even to this machine."""
    namespace = namespaces.prefix("net")
    home = tmp_path / "new"
    for words in (["bundle", "unpack", made], ["store", "verify"]):
        command = [sys.executable, "-m", "exl3_host.cli", *map(str, words), "--store", str(home)]
        done = subprocess.run([*namespace, *command], capture_output=True, text=True, cwd=checkout)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "tiny-0123: every file verified\n"


def test_the_playbook(made: Path, checkout: Path, tmp_path: Path, model: Path) -> None:
    home = tmp_path / "new"

    def play(*options: str) -> tuple[int, str]:
        done = subprocess.run(
            [
                Path(sys.executable).with_name("ansible-playbook"),
                checkout / "playbooks/bundle.yml",
                "-i",
                checkout / "playbooks/inventories/localhost",
                "-e",
                f"exl3_store_dir={home}",
                *options,
            ],
            capture_output=True,
            text=True,
            cwd=checkout,
            env={**os.environ, "ANSIBLE_CONFIG": str(checkout / "playbooks/ansible.cfg")},
            timeout=120,
        )
        return done.returncode, done.stdout + done.stderr

    status, said = play()
    assert status != 0 and "Say where the bundle lies" in said
    where = ("-e", f"exl3_bundle_dir={made}")
    status, said = play(*where, "--check", "--diff")
    assert status == 0 and "model tiny-0123" in said and not home.exists(), said
    status, said = play(*where)
    assert status == 0 and "changed=1" in said, said
    assert tree(home / "models/tiny-0123") == tree(model)
    status, said = play(*where)
    assert status == 0 and "changed=0" in said, said
