"""Images of an offline bundle with a real engine: saved, removed, loaded, compared."""

import json
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
from exl3_host import bundle
from exl3_host.errors import HostError


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
    contents = bundle.Contents((recipe,), (), images=(name,), docker=tuple(docker))
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
    with pytest.raises(HostError, match="No such image"):
        bundle.make(
            bundle.Contents((recipe,), (), images=("absent:1",), docker=tuple(docker)),
            tmp_path / "other",
            Path(sys.executable),
        )
