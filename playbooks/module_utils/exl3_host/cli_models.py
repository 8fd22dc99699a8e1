"""`exl3ctl store list|verify|gc` and `exl3ctl bundle plan|make|verify|unpack`."""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from . import bundle, lock, outcome, show, sources, store
from .cli_recipe import load
from .errors import HostError
from .manifest import check_folder
from .outcome import EXIT_GOOD, EXIT_REFUSED
from .recipe import LoadedRecipe
from .venv import BUILD_TOOLS, PLANNER, VLLM

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
StoreOption = Annotated[
    Path | None, typer.Option("--store", help="Model store; default: .exl3 of the checkout.")
]
Folder = Annotated[Path, typer.Argument(help="The folder of the bundle.")]
Recipes = Annotated[list[str], typer.Argument(help="Recipe files, or names in recipes/.")]

store_app = typer.Typer(help="What lies in the model store.", no_args_is_help=True)
bundle_app = typer.Typer(
    help="Models, wheels and images for hosts without network.", no_args_is_help=True
)


def _lines(lines: list[str]):
    return lambda out: [out.print(Text(line), highlight=False) for line in lines]


def _row(one: dict) -> str:
    state = "finished" if one["finished"] else "partial"
    use = ", ".join(one["used_by"]) or "no plan"
    return f"{one['bytes'] / 1e9:9.2f} GB  {state:<8}  {one['name']}  ({use})"


@store_app.command("list")
def store_list(home: StoreOption = None, as_json: JsonFlag = False) -> None:
    """Model folders with size, state and the instances that use them."""

    def work() -> tuple:
        found = store.contents(outcome.store_dir(home))
        return EXIT_GOOD, {"models": found}, _lines([_row(one) for one in found] or ["empty"])

    outcome.run(as_json, work)


@store_app.command("verify")
def store_verify(home: StoreOption = None, as_json: JsonFlag = False) -> None:
    """Read every byte and compare it with the manifests; 1 where something is damaged."""

    def work() -> tuple:
        models = outcome.store_dir(home) / "models"
        wrong = {}
        names = [one["name"] for one in store.contents(models.parent) if one["finished"]]
        for name in names:
            found = check_folder(models / name, verify=True)
            if found:
                wrong[name] = found
        lines = [f"{name}: {wrong.get(name, 'every file verified')}" for name in names]
        code = EXIT_REFUSED if wrong else EXIT_GOOD
        return code, {"verified": names, "damaged": wrong}, _lines(lines or ["empty"])

    outcome.run(as_json, work)


@store_app.command("gc")
def store_gc(
    home: StoreOption = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete; otherwise only list.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Model folders that no plan names: list them, or delete them with --delete."""

    def work() -> tuple:
        found = store.collect_garbage(outcome.store_dir(home), is_check=not delete)
        total = sum(one["bytes"] for one in found) / 1e9
        verb = "deleted" if delete else "would be deleted (add --delete)"
        lines = [*[_row(one) for one in found], f"{total:.2f} GB {verb}"]
        return EXIT_GOOD, {"deleted": delete, "models": found}, _lines(lines)

    outcome.run(as_json, work)


def _wanted(loaded: LoadedRecipe, home: Path) -> store.Request:
    """The model of a recipe, as the playbooks would ask for it."""
    text = sources.calibration_file(loaded)
    digest = hashlib.sha256(text.read_bytes()).hexdigest() if text is not None else None
    source, quantize = sources.model_source(loaded), sources.quantization(loaded, digest)
    if source["kind"] == "path" and quantize is None:
        raise HostError(
            f"The model of {loaded.recipe.name} is the folder {source['path']} of this machine.",
            "Copy it by hand, or name a repository in the recipe.",
        )
    return store.Request(
        source=source,
        quantize=quantize,
        folder=Path(sources.model_dir(loaded, str(home), digest)),
        store=home,
        python=Path(sys.executable),
        lock=lock.lock_beside(loaded.path) if source["kind"] == "hub" else None,
    )


def _requirements(loaded: list[LoadedRecipe], given: list[str] | None) -> tuple[str, ...]:
    """What the playbooks install on a host, unless it is said otherwise."""
    if given:
        return tuple(given)
    root = outcome.checkout()
    out = [str(root / "requirements/controller.txt")] if root is not None else []
    out += PLANNER
    if any(one.recipe.runtime == "native" for one in loaded):
        out += [VLLM, *BUILD_TOOLS, "gguf"]
    return tuple(out)


def _in_container(loaded: LoadedRecipe) -> bool:
    return loaded.recipe.runtime == "docker" and loaded.recipe.image is not None


def _image(loaded: LoadedRecipe) -> tuple[str, str | None]:
    """Name and pinned digest of a recipe's image for this processor. Raises HostError."""
    image, arm = loaded.recipe.image, platform.machine() in ("aarch64", "arm64")
    digest = image.digests.arm64 if arm else image.digests.amd64
    if digest is None or digest == lock.UNPINNED_DIGEST:
        raise HostError(
            f"The image of {loaded.recipe.name} is not pinned for this processor.",
            f"Run exl3ctl recipe lock {loaded.recipe.name} --image-id first, or --no-images.",
        )
    return image.name, digest


@bundle_app.command("plan")
def bundle_plan(recipes: Recipes, home: StoreOption = None, as_json: JsonFlag = False) -> None:
    """What a bundle of these recipes would hold, and what has to be fetched for it."""

    def work() -> tuple:
        place, models, images, lines = outcome.store_dir(home), [], [], []
        loaded = [load(name) for name in recipes]
        for one in loaded:
            request = _wanted(one, place)
            there = store.present(request)
            size = _size(request) if there else _locked_size(request)
            models.append({"name": request.folder.name, "there": there, "bytes": size})
            said = "unknown size" if size is None else f"{size / 1e9:.2f} GB"
            lines.append(
                f"model {request.folder.name}: {said}, {'in the store' if there else 'to fetch'}"
            )
            if _in_container(one):
                images.append(one.recipe.image.name)
        lines += [f"image {name}" for name in sorted(set(images))]
        lines += [f"wheels of {r}" for r in _requirements(loaded, None)]
        return EXIT_GOOD, {"models": models, "images": sorted(set(images))}, _lines(lines)

    outcome.run(as_json, work)


def _size(request: store.Request) -> int:
    return sum(p.stat().st_size for p in request.folder.rglob("*") if p.is_file())


def _locked_size(request: store.Request) -> int | None:
    return lock.total_bytes(request.lock) if request.lock is not None else None


@bundle_app.command("make")
def bundle_make(
    recipes: Recipes,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    home: StoreOption = None,
    requirement: Annotated[
        list[str] | None,
        typer.Option(help="Requirement or file of them; default: what hosts need."),
    ] = None,
    find_links: Annotated[list[str] | None, typer.Option(help="Folder with wheels.")] = None,
    wheels: Annotated[bool, typer.Option(help="Put wheels into the bundle.")] = True,
    images: Annotated[bool, typer.Option(help="Put images into the bundle.")] = True,
    as_json: JsonFlag = False,
) -> None:
    """Write a bundle: models (fetched where they are missing), wheels, images, one manifest."""

    def work() -> tuple:
        place = outcome.store_dir(home)
        loaded = [load(name) for name in recipes]
        tell = _tell()
        folders = []
        for one in loaded:
            request = _wanted(one, place)
            store.ensure(request, tell=tell)
            if request.folder not in folders:
                folders.append(request.folder)
        pinned = sorted({_image(one) for one in loaded if images and _in_container(one)})
        if pinned and shutil.which("docker") is None:
            raise HostError(
                f"There is no docker here to save {', '.join(name for name, _ in pinned)} with.",
                "Install it, or leave images out: --no-images.",
            )
        contents = bundle.Contents(
            recipes=tuple(one.path for one in loaded),
            models=tuple(folders),
            images=tuple(pinned),
            requirements=_requirements(loaded, requirement) if wheels else (),
            find_links=tuple(find_links or ()),
        )
        manifest = bundle.make(contents, out.absolute(), Path(sys.executable), tell)
        lines = [*bundle.summary(manifest), f"bundle {out}"]
        result = {k: v for k, v in manifest.items() if k != "files"}
        return EXIT_GOOD, {"bundle": str(out.absolute()), **result}, _lines(lines)

    outcome.run(as_json, work)


@bundle_app.command("verify")
def bundle_verify(folder: Folder, as_json: JsonFlag = False) -> None:
    """Read every byte of a bundle; 1 where something is damaged."""

    def work() -> tuple:
        wrong = bundle.verify(folder)
        lines = wrong or [*bundle.summary(bundle.read(folder)), "every file verified"]
        return EXIT_REFUSED if wrong else EXIT_GOOD, {"damaged": wrong}, _lines(lines)

    outcome.run(as_json, work)


@bundle_app.command("unpack")
def bundle_unpack(
    folder: Folder,
    home: StoreOption = None,
    images: Annotated[bool, typer.Option(help="Load the images into the engine.")] = True,
    as_json: JsonFlag = False,
) -> None:
    """Bring a bundle's models into the store and its images into the engine, verified first."""

    def work() -> tuple:
        docker = ("docker",) if images and bundle.read(folder)["images"] else None
        changed, steps = bundle.unpack(folder, outcome.store_dir(home), docker=docker, tell=_tell())
        wheels = folder.absolute() / "wheels"
        lines = [*(steps or ["nothing new"]), f"exl3_offline: true, exl3_find_links: [{wheels}]"]
        result = {"changed": changed, "steps": steps, "find_links": str(wheels)}
        return EXIT_GOOD, result, _lines(lines)

    outcome.run(as_json, work)


def _tell():
    """Progress on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: show.stderr().print(Text(text), highlight=False)


def register(app: typer.Typer) -> None:
    """Add the commands to exl3ctl."""
    app.add_typer(store_app, name="store")
    app.add_typer(bundle_app, name="bundle")
