"""An offline bundle: models, wheels, images and recipes in one folder with one manifest.

    bundle.json          exl3-bundle/1: recipes, models, images, and size and SHA-256 of every file
    recipes/             the recipes and their locks
    models/NAME/         model folders as the store names them
    wheels/              for exl3_find_links
    images/NAME.tar      what `docker save` writes

The manifest is written last. Everything is verified before anything is unpacked. Standard library
only, so that a host without network and packages can unpack.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .errors import HostError
from .fetch import disk_full
from .lock import sha256_of
from .manifest import MANIFEST, check_folder
from .spec import read_json, write_json

SCHEMA = "exl3-bundle/1"
FILE = "bundle.json"
PARTS = ("images", "models", "recipes", "wheels")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Contents:
    """What goes into a bundle.

    models: finished folders of a store. images: (name, pinned digest) as the engine has them; a
    loaded image is found by its id, so the digest has to be that. requirements: pip requirements,
    or files of them, to fetch with everything they need.
    """

    recipes: tuple[Path, ...]
    models: tuple[Path, ...]
    images: tuple[tuple[str, str | None], ...] = ()
    requirements: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    docker: tuple[str, ...] = field(default=("docker",))


def make(contents: Contents, out: Path, python: Path, tell: Tell = lambda text: None) -> dict:
    """Write a bundle, going on with an interrupted one; its manifest. Raises HostError."""
    if (out / FILE).is_file():
        raise HostError(f"{out} is a finished bundle already.", "Choose another folder.")
    try:
        return _make(contents, out, python, tell)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(out) from None
        raise


def _make(contents: Contents, out: Path, python: Path, tell: Tell) -> dict:
    for part in PARTS:
        (out / part).mkdir(parents=True, exist_ok=True)
    for recipe in contents.recipes:
        shutil.copy(recipe, out / "recipes" / recipe.name)
        lock = recipe.with_name(recipe.name.removesuffix(".yaml") + ".files.json")
        if lock.is_file():
            shutil.copy(lock, out / "recipes" / lock.name)
    for model in contents.models:
        tell(f"adding model {model.name}")
        wrong = check_folder(model, verify=False)
        if wrong:
            raise HostError(f"damaged model: {wrong}.", f"Delete {model} and fetch it again.")
        copy_model(model, out / "models" / model.name)
    if contents.requirements:
        tell("fetching wheels")
        _download(contents, out / "wheels", python)
    images = [_save(contents.docker, *one, out / "images", tell) for one in contents.images]
    tell("writing the manifest")
    files = {}
    for path in _files(out):
        name = path.relative_to(out).as_posix()
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    for model in contents.models:
        _same_as_manifest(model.name, read_json(out / "models" / model.name / MANIFEST), files)
    manifest = {
        "schema": SCHEMA,
        "recipes": [recipe.name.removesuffix(".yaml") for recipe in contents.recipes],
        "models": [model.name for model in contents.models],
        "images": images,
        "files": files,
    }
    write_json(out / FILE, manifest)
    return manifest


def _same_as_manifest(name: str, manifest: dict, files: dict) -> None:
    """What was copied is what the store wrote down when the model was made."""
    for file, facts in manifest["files"].items():
        if files.get(f"models/{name}/{file}") != facts:
            raise HostError(
                f"damaged model: {name}/{file} differs from its manifest.",
                f"Delete {name} in the store and fetch it again.",
            )


def copy_model(source: Path, target: Path) -> None:
    """A finished model folder under another name; complete or absent, as in the store."""
    if target.exists():
        return
    partial = target.with_name(f".partial-{target.name}")
    for path in sorted(source.rglob("*")):
        place = partial / path.relative_to(source)
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif not place.is_file() or place.stat().st_size != path.stat().st_size:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            shutil.copyfile(path, place)
            place.chmod(0o444)
    partial.chmod(0o755)
    os.replace(partial, target)


def _download(contents: Contents, folder: Path, python: Path) -> None:
    command = [str(python), "-m", "pip", "download", "--no-input", "--progress-bar", "off"]
    command += ["--dest", str(folder)]
    for links in contents.find_links:
        command += ["--find-links", links]
    for requirement in contents.requirements:
        is_file = Path(requirement).is_file()
        command += ["--requirement", requirement] if is_file else [requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise HostError(f"the wheels could not be fetched:\n{tail}", "Correct --requirement.")


def _docker(docker: Iterable[str], *arguments: str) -> str:
    command = [*docker, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise HostError(
            f"{command[0]} cannot be run: {error.strerror}.", "Install and start the engine."
        ) from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise HostError(f"{' '.join(command)}: {said[-1] if said else 'failed'}.", "")
    return done.stdout.strip()


def _save(docker: Iterable[str], name: str, pinned: str | None, folder: Path, tell: Tell) -> dict:
    tell(f"saving image {name}")
    image_id = _docker(docker, "image", "inspect", "--format", "{{.Id}}", name)
    if pinned is not None and pinned != image_id:
        raise HostError(
            f"the recipe pins {name} at {pinned[:19]}..., the engine has {image_id[:19]}....",
            "A loaded image is found by its id: exl3ctl recipe lock NAME --image-id",
        )
    archive = folder / (name.replace("/", "_").replace(":", "_").replace("@", "_") + ".tar")
    _docker(docker, "save", "--output", str(archive), name)
    return {"name": name, "id": image_id, "archive": f"images/{archive.name}"}


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / FILE)


def read(folder: Path) -> dict:
    """The manifest of a bundle. Raises HostError where there is none."""
    manifest = read_json(folder / FILE) if (folder / FILE).is_file() else None
    if manifest is None or manifest.get("schema") != SCHEMA:
        raise HostError(
            f"{folder} is no finished bundle: it has no {FILE} of {SCHEMA}.",
            "Copy the whole folder, or make it again: exl3ctl bundle make.",
        )
    return manifest


def verify(folder: Path, tell: Tell = lambda text: None) -> list[str]:
    """What is wrong with a bundle, every byte read; empty when nothing is. Raises HostError."""
    manifest, wrong = read(folder), []
    for name, facts in manifest["files"].items():
        path = folder / name
        if name.startswith("/") or ".." in name.split("/"):
            wrong.append(f"{name} lies outside the bundle")
        elif not path.is_file():
            wrong.append(f"{name} is missing")
        elif (size := path.stat().st_size) != facts["bytes"]:
            wrong.append(f"{name} has {size} bytes, expected {facts['bytes']}")
        else:
            tell(f"reading {name}")
            if (found := sha256_of(path)) != facts["sha256"]:
                wrong.append(
                    f"{name} has SHA-256 {found[:12]}..., expected {facts['sha256'][:12]}..."
                )
    known = set(manifest["files"])
    names = [path.relative_to(folder).as_posix() for path in _files(folder)]
    wrong += [f"{name} is not in the manifest" for name in names if name not in known]
    return wrong


def unpack(
    folder: Path,
    store: Path,
    is_check: bool = False,
    docker: tuple[str, ...] | None = ("docker",),
    tell: Tell = lambda text: None,
) -> tuple[bool, list[str]]:
    """Bring a bundle's models into a store and its images into the engine.

    Returns (changed, steps). Everything is verified first; what is there already stays. `docker`
    is the engine's command, None leaves images alone. Raises HostError.
    """
    manifest = read(folder)
    todo = [name for name in manifest["models"] if not (store / "models" / name).is_dir()]
    images = [] if docker is None else manifest["images"]
    images = [one for one in images if _image_id(docker, one["name"]) != one["id"]]
    for name in manifest["models"]:
        wrong = None if name in todo else check_folder(store / "models" / name, verify=False)
        if wrong:
            raise HostError(f"damaged model: {wrong}.", "Delete that folder and unpack again.")
    steps = [f"model {name}" for name in todo] + [f"image {one['name']}" for one in images]
    if is_check or not steps:
        return bool(steps), steps
    wrong = verify(folder, tell)
    if wrong:
        raise HostError(
            f"the bundle {folder} is damaged: {'; '.join(wrong[:5])}.", "Copy it again, whole."
        )
    (store / "models").mkdir(parents=True, exist_ok=True)
    _check_room(folder, manifest, todo, store)
    for name in todo:
        tell(f"unpacking model {name}")
        copy_model(folder / "models" / name, store / "models" / name)
    for one in images:
        tell(f"loading image {one['name']}")
        _docker(docker, "load", "--input", str(folder / one["archive"]))
        found = _image_id(docker, one["name"])
        if found != one["id"]:
            raise HostError(
                f"image {one['name']} is {found} after loading, expected {one['id']}.",
                "Remove the image and unpack again.",
            )
    return True, steps


def _image_id(docker: Iterable[str], name: str) -> str | None:
    try:
        return _docker(docker, "image", "inspect", "--format", "{{.Id}}", name)
    except HostError as error:
        if "cannot be run" in error.message:
            raise
        return None


def _check_room(folder: Path, manifest: dict, models: list[str], store: Path) -> None:
    needed = sum(
        facts["bytes"]
        for name, facts in manifest["files"].items()
        if name.startswith("models/") and name.split("/")[1] in models
    )
    free = shutil.disk_usage(store).free
    if free < needed:
        raise HostError(
            f"the bundle's models take {needed / 1e9:.2f} GB and {store} has {free / 1e9:.2f} GB "
            "free.",
            "Free space (exl3ctl store gc), or put the store on a larger disk.",
        )


def summary(manifest: dict) -> list[str]:
    """One line per part: how many files, how many bytes."""
    out = []
    for part in PARTS:
        sizes = [f["bytes"] for n, f in manifest["files"].items() if n.startswith(f"{part}/")]
        if sizes:
            out.append(f"{part}: {len(sizes)} files, {sum(sizes) / 1e9:.3f} GB")
    return out
