"""Images of an offline bundle with a real engine: saved, removed, loaded, compared."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
from exl3_host import bundle
from exl3_host.errors import HostError
from exl3_host.recipe import load_recipe


def make_image(docker: list[str], name: str, content: bytes) -> str:
    """An image with one file; its id."""
    layer = BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        info = tarfile.TarInfo("hello")
        info.size = len(content)
        archive.addfile(info, BytesIO(content))
    done = subprocess.run(
        [*docker, "import", "-", name], input=layer.getvalue(), capture_output=True, check=True
    )
    return done.stdout.decode().strip()


def test_images_travel_in_a_bundle(docker: list[str], tmp_path: Path) -> None:
    name = "exl3-bundled:1"
    image_id = make_image(docker, name, b"one")
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text("name: tiny\n")
    contents = bundle.Contents((recipe,), (), images=((name, image_id),), docker=tuple(docker))
    out = tmp_path / "bundle"
    made = bundle.make(contents, out, Path(sys.executable))
    assert made["images"] == [
        {"name": name, "id": image_id, "archive": "images/exl3-bundled_1.tar"}
    ]
    assert bundle.unpack(out, tmp_path / "store", docker=tuple(docker)) == (False, [])

    subprocess.run([*docker, "rmi", name], check=True, capture_output=True)
    steps = [f"image {name}"]
    assert bundle.unpack(out, tmp_path / "store", docker=tuple(docker)) == (True, steps)
    shown = subprocess.run(
        [*docker, "image", "inspect", name], check=True, capture_output=True, text=True
    )
    assert json.loads(shown.stdout)[0]["Id"] == image_id

    # Another image under the name: the bundle's one takes its place.
    make_image(docker, name, b"two")
    assert bundle.unpack(out, tmp_path / "store", docker=tuple(docker)) == (True, steps)
    with pytest.raises(HostError, match=r"the recipe pins exl3-bundled:1 at sha256:0000"):
        pinned = ((name, f"sha256:{'0' * 64}"),)
        bundle.make(
            bundle.Contents((recipe,), (), images=pinned, docker=tuple(docker)),
            tmp_path / "wrong",
            Path(sys.executable),
        )
    with pytest.raises(HostError, match="No such image"):
        bundle.make(
            bundle.Contents((recipe,), (), images=(("absent:1", None),), docker=tuple(docker)),
            tmp_path / "other",
            Path(sys.executable),
        )


def test_a_recipe_is_pinned_to_the_image_of_the_engine(
    docker: list[str], docker_host: str, checkout: Path, tmp_path: Path
) -> None:
    image_id = make_image(docker, "exl3-pinned:1", b"three")
    model = tmp_path / "model"
    shutil.copytree(checkout / "tests/fixtures/tiny-llama-mul1-2.5", model)
    recipe = tmp_path / "pinned.yaml"
    recipe.write_text(
        "schema: exl3-recipe/1\nname: pinned\nmodel: {path: model}\nruntime: docker\n"
        f"image: {{name: 'exl3-pinned:1', digests: {{linux/amd64: 'sha256:{'0' * 64}'}}}}\n"
        "profiles:\n  cpu:\n    match: {device: cpu}\n    parallel: {tp: 1}\n"
        "    memory: {max_model_len: 256, kv_cache_gib: 1}\n"
        "health: {ready_timeout_s: 60, smoke: {prompt: hello, max_tokens: 4}}\n"
    )
    command = [sys.executable, "-m", "exl3_host.cli", "recipe", "lock", str(recipe), "--image-id"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=checkout,
        env={**os.environ, "DOCKER_HOST": docker_host},
    )
    assert done.returncode == 0, done.stderr
    digests = load_recipe(recipe).recipe.image.digests
    assert image_id in (digests.amd64, digests.arm64)
