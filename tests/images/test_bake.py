"""The files that images are made from: one place for versions, digests everywhere."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings

import bake
import pytest

import images

TARGETS = {
    "cpu": (["linux/amd64", "linux/arm64"], "none"),
    "sm120": (["linux/amd64"], "120+PTX"),
    "sm121": (["linux/arm64"], "121"),
    "hopper": (["linux/amd64"], "90"),
}


@pytest.fixture(scope="module")
def dockerfile(checkout):
    return (checkout / "images/Dockerfile").read_text()


@pytest.fixture(scope="module")
def targets():
    return bake.targets(images.BAKE, bake.variables(images.VERSIONS, {}))


def test_targets(targets):
    found = {n: (t["platforms"], t["args"]["ARCHITECTURES"]) for n, t in targets.items()}
    assert found == TARGETS
    assert {name: t["tags"] for name, t in targets.items()} == {
        name: [f"exl3-fleet:{name}"] for name in TARGETS
    }
    assert all(t["dockerfile"] == "images/Dockerfile" for t in targets.values())


def test_buildx_reads_the_files_as_we_do(checkout):
    """`docker buildx bake --print` is the judge of what the two files mean."""
    found = subprocess.run(
        [checkout / "scripts/lib/buildx.sh"], capture_output=True, text=True, cwd=checkout
    )
    if found.returncode != 0:
        reason = f"NO BUILDX, the bake file is NOT compared: {found.stderr.strip()[-300:]}"
        warnings.warn(reason, stacklevel=2)
        pytest.skip(reason)
    env = {**os.environ, **images.environment(), "REGISTRY": "registry.example.org/team/"}
    files = ("-f", images.VERSIONS, "-f", images.BAKE)
    for group, names in (("default", list(TARGETS)), ("cuda", ["sm120", "sm121", "hopper"])):
        command = [found.stdout.strip(), "bake", *files, "--print", group]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=checkout)
        assert done.returncode == 0, done.stderr
        theirs = json.loads(done.stdout)["target"]
        ours = bake.targets(images.BAKE, bake.variables(images.VERSIONS, env))
        assert theirs == {name: ours[name] for name in names}
    # What is pushed carries both attestations.
    assert {tuple(target["attest"]) for target in theirs.values()} == {
        ("type=sbom", "type=provenance,mode=max")
    }


def test_every_argument_is_declared_on_both_sides(targets, dockerfile):
    declared = set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))
    given = {name for target in targets.values() for name in target["args"]}
    assert given <= declared
    assert declared - given == {"TARGETARCH"}


def test_bases_are_pinned_by_digest_and_nothing_else_says_a_version(targets, dockerfile):
    for target in targets.values():
        for name in ("BASE_IMAGE", "BUILDER_IMAGE"):
            assert re.fullmatch(r"[\w./:-]+@sha256:[0-9a-f]{64}", target["args"][name])
    for line in dockerfile.splitlines():
        if line.startswith("FROM"):
            name = line.split()[-3] if " AS " in line else line.split()[1]
            assert re.fullmatch(r"\$\{\w+\}|scratch|[a-z-]+(\$\{UNPACK_BY\})?", name), line


def test_locks_hold_what_the_versions_say(checkout, targets):
    """Every wheel has a hash, and vLLM is the one that versions.json names."""
    for name, platforms in (("cpu", ["amd64"]), ("cuda", ["amd64", "arm64"])):
        vllm = next(t["args"]["VLLM"] for t in targets.values() if t["args"]["LOCK"] == name)
        for platform in platforms:
            text = (checkout / f"images/locks/{name}-{platform}.txt").read_text()
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            pinned = re.compile(r"[a-z0-9._-]+==\S+ --hash=sha256:[0-9a-f]{64}")
            assert all(pinned.fullmatch(line) for line in lines)
            assert any(line.startswith(f"{vllm} ") for line in lines)


def test_what_our_wheel_needs_is_locked(checkout):
    """The image installs our wheel without dependencies, so a new one must be in the locks."""
    import lock_wheels
    from packaging.requirements import Requirement

    for path in (checkout / "images/locks").glob("*.txt"):
        rows = [r.split(" ")[0] for r in path.read_text().splitlines() if not r.startswith("#")]
        locked = dict(row.split("==") for row in rows)
        for text in lock_wheels.requirements(path.name.partition("-")[0]):
            wanted = Requirement(text)
            name = wanted.name.lower().replace("_", "-")
            assert wanted.specifier.contains(locked[name], prereleases=True), (path.name, text)


def test_a_variable_nobody_declared_is_named(tmp_path):
    file = tmp_path / "docker-bake.hcl"
    file.write_text('target "x" {\n tags = ["${NOWHERE}"]\n}\n')
    with pytest.raises(bake.BakeError, match=r"target x uses NOWHERE"):
        bake.targets(file, {})
    file.write_text('target "x" {\n inherits = ["y"]\n tags = ["a"]\n}\n')
    with pytest.raises(bake.BakeError, match=r"inherits from 'y'"):
        bake.targets(file, {})
    file.write_text('target "x" {\n matrix = {\n  a = [{ b = "1" }]\n  c = []\n }\n}\n')
    with pytest.raises(bake.BakeError, match=r"matrix of target x has 2 variables"):
        bake.targets(file, {})


def test_the_environment_wins(tmp_path):
    values = bake.variables(images.VERSIONS, {"REGISTRY": "example.org/"})
    assert bake.targets(images.BAKE, values)["cpu"]["tags"] == ["example.org/exl3-fleet:cpu"]


def test_commands_are_printed(checkout):
    done = subprocess.run(
        [checkout / "scripts/build-images", "--print", "sm121", "hopper"],
        capture_output=True,
        text=True,
        check=True,
    )
    arm, hopper = done.stdout.splitlines()
    assert "--platform linux/arm64" in arm and "ARCHITECTURES=121" in arm
    assert ("UNPACK_BY=builder" in arm) == (images.HERE != "linux/arm64")
    assert ("UNPACK_BY=runtime" in hopper) == (images.HERE == "linux/amd64")
    assert "--platform" not in hopper.replace("BUILDPLATFORM", "") or "arm64" not in hopper
    assert "--target cuda" in hopper
    for words, said in (
        (["nothing"], "there is no target nothing; there are cpu"),
        (["sm120", "--platform", "linux/arm64"], "target sm120 is for linux/amd64"),
    ):
        done = subprocess.run(
            [checkout / "scripts/build-images", "--print", *words], capture_output=True, text=True
        )
        assert done.returncode == 1 and said in done.stderr


def test_environment_for_bake(checkout):
    """`eval "$(scripts/build-images --environment)"`: what a shell then knows."""
    script = 'eval "$(scripts/build-images --environment)"; echo "$PLUGIN $SOURCE_HASH $CREATED"'
    done = subprocess.run(
        ["bash", "-euc", script], cwd=checkout, capture_output=True, text=True, check=True
    )
    plugin, digest, created = done.stdout.split()
    assert re.fullmatch(r"\d+\.\d+\.\d+", plugin) and re.fullmatch("[0-9a-f]{64}", digest)
    assert created.endswith("Z")
    declared = json.loads((checkout / "images/versions.json").read_text())["variable"]
    assert set(images.environment()) <= set(declared)


def test_source_hash_is_the_one_that_is_compiled_in(checkout, tmp_path):
    """CMake computes it for the library, Python for the label."""
    cmake = f"{sys.prefix}/bin/cmake"
    header = tmp_path / "hash.h"
    script = checkout / "csrc/source_hash.cmake"
    command = [cmake, f"-DOUTPUT={header}", f"-DROOT={checkout}", "-P", str(script)]
    subprocess.run(command, check=True, capture_output=True)
    assert images.source_hash() in header.read_text()


def test_dockerfile_is_clean(checkout):
    program = f"{sys.prefix}/bin/hadolint"
    done = subprocess.run([program, checkout / "images/Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_context_leaves_out_what_is_not_copied(checkout, dockerfile):
    """A file outside the allowed ones changes no layer."""
    lines = (checkout / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    allowed = [line[1:] for line in lines if line.startswith("!")]
    for line in dockerfile.splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert any(source == a or source.startswith(f"{a}/") for a in allowed), source


def test_calibrate_finds_all_it_imports(checkout, dockerfile, tmp_path):
    """Nothing but what the image copies, and the packages in it."""
    home = tmp_path / "opt/exl3"
    for line in dockerfile.splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            *sources, to = line.split()[1:]
            to = tmp_path / to.removeprefix("/")
            for source in sources:
                if (checkout / source).is_dir():
                    shutil.copytree(checkout / source, to, dirs_exist_ok=True)
                else:
                    to.mkdir(parents=True, exist_ok=True)
                    shutil.copy(checkout / source, to)
    site = tmp_path / "site"
    site.mkdir()
    (site / "exl3_plugin").symlink_to(checkout / "exl3_plugin")
    command = [sys.executable, home / "bench/calibrate.py", "--help"]
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0 and "--experts" in done.stdout, done.stderr


def test_versions_are_json_that_bake_reads(checkout):
    """A JSON file of bake declares variables with defaults, which are strings."""
    body = json.loads((checkout / "images/versions.json").read_text())
    assert set(body) == {"variable"}
    assert all(set(v) == {"default"} for v in body["variable"].values())
    assert all(isinstance(v["default"], str) for v in body["variable"].values())
