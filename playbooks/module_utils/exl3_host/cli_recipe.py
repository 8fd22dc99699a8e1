"""`exl3ctl recipe lint|show|diff|schema|lock`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from . import hardware, lint, lock, outcome, recipe_edit, show
from .errors import HostError, Problem, RecipeError, count
from .fetch import check_token_file
from .outcome import EXIT_GOOD, EXIT_REFUSED
from .recipe import LoadedRecipe, find_recipe, load_recipe, summary
from .schema import json_schema
from .yamltext import read_document

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
RecipeArgument = Annotated[str, typer.Argument(help="A recipe file, or a name in recipes/.")]

recipe_app = typer.Typer(help="Check, show and pin recipes.", no_args_is_help=True)


def recipe_folders() -> list[Path]:
    """Where recipe names are looked up: the working directory's recipes, then the checkout's."""
    folders = [Path.cwd() / "recipes"]
    root = outcome.checkout()
    if root is not None and root / "recipes" not in folders:
        folders.append(root / "recipes")
    return [f for f in folders if f.is_dir()]


def recipes_data() -> Path | None:
    """The recipes folder that holds hardware.yaml and the argument lists, or None."""
    return next((f for f in recipe_folders() if (f / hardware.FILE).is_file()), None)


def load(name: str) -> LoadedRecipe:
    """A recipe by name or path. Raises HostError."""
    return load_recipe(find_recipe(name, recipe_folders()))


@recipe_app.command("lint")
def recipe_lint(
    files: Annotated[list[str], typer.Argument(help="Recipe files, or names in recipes/.")],
    args_file: Annotated[
        Path | None, typer.Option("--args", help="An image's args.json instead of recipes/args.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check recipes; every mistake is shown with line, column and fix."""

    def work() -> tuple:
        context = lint.Context.of(recipes_data(), args_file)
        good: list[LoadedRecipe] = []
        problems, notes = [], []
        for file in files:
            try:
                path = find_recipe(file, recipe_folders())
                loaded, found, said = lint.lint_file(path, context)
                problems += found
                notes += said
                good += [] if found else [loaded]
            except HostError as error:
                problems.append(Problem(file, 0, 0, "", error.message, error.fix))
        result = {
            "recipes": [
                {"name": r.recipe.name, "path": str(r.path), "sha256": r.sha256} for r in good
            ],
            "notes": notes,
        }

        def present_notes() -> None:
            for note in notes:
                show.stderr().print(Text(f"note: {note}"), highlight=False)

        if not problems:

            def present_good(out) -> None:
                present_notes()
                out.print(summary(good), highlight=False)

            return EXIT_GOOD, result, present_good
        error = RecipeError(problems)

        def present(_out) -> None:
            show.refusal(error)
            present_notes()
            show.stderr().print(
                f"{count(len(error.problems), 'error')}. Nothing was changed.", highlight=False
            )

        return EXIT_REFUSED, result | error.as_dict(), present

    outcome.run(as_json, work)


@recipe_app.command("show")
def recipe_show(recipe: RecipeArgument, as_json: JsonFlag = False) -> None:
    """Show a recipe with every default filled in."""

    def work() -> tuple:
        loaded = load(recipe)
        body = loaded.recipe.model_dump(by_alias=True, mode="json", exclude_none=True)

        def present(out) -> None:
            from ruamel.yaml import YAML

            text = StringIO()
            YAML().dump(body, text)
            out.print(f"# {loaded.path}", text.getvalue(), sep="\n", highlight=False, markup=False)

        return EXIT_GOOD, {"path": str(loaded.path), "sha256": loaded.sha256, **body}, present

    outcome.run(as_json, work)


@recipe_app.command("diff")
def recipe_diff(
    old: RecipeArgument,
    new: Annotated[str, typer.Argument(help="The recipe to compare it with.")],
    as_json: JsonFlag = False,
) -> None:
    """What differs between two recipes, defaults filled in; 1 where something does."""

    def work() -> tuple:
        bodies = [load(name).recipe.model_dump(by_alias=True, mode="json") for name in (old, new)]
        before, after = (_flat(body) for body in bodies)
        changes = {
            key: [before.get(key), after.get(key)]
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)
        }

        def present(out) -> None:
            for key, (was, now) in changes.items():
                out.print(Text(f"{key}: {json.dumps(was)} -> {json.dumps(now)}"), highlight=False)
            if not changes:
                out.print("nothing differs", highlight=False)

        return EXIT_REFUSED if changes else EXIT_GOOD, {"changes": changes}, present

    outcome.run(as_json, work)


def _flat(value: object, path: str = "") -> dict[str, object]:
    """Plain values and lists of a recipe by their dotted path."""
    if not isinstance(value, dict):
        return {path: value}
    out = {}
    for key, inner in value.items():
        out |= _flat(inner, f"{path}.{key}" if path else str(key))
    return out


@recipe_app.command("schema")
def recipe_schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    print(json.dumps(json_schema(), indent=2))


@recipe_app.command("lock")
def recipe_lock(
    recipe: RecipeArgument,
    revision: Annotated[
        str | None, typer.Option(help="Commit, tag or branch to pin; default: the recipe's.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Read the model from this folder instead of the Hub.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with a Hub token.")] = None,
    image: Annotated[
        bool, typer.Option("--image", help="Pin the digest of the image in the local engine.")
    ] = False,
    image_id: Annotated[
        bool, typer.Option("--image-id", help="Pin its id, for hosts without network.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; 1 if anything is new.")] = (
        False
    ),
    as_json: JsonFlag = False,
) -> None:
    """Pin a recipe: commit, size and SHA-256 of every file; with --image the image's digest."""

    def work() -> tuple:
        path = find_recipe(recipe, recipe_folders())
        text = path.read_text(encoding="utf-8")
        model = (read_document(text, str(path)).data or {}).get("model")
        if not isinstance(model, dict):
            raise HostError(f"{path} has no model.", "See docs/recipes.md for a recipe.")
        found = _make_lock(model, path, revision, folder, token_file)
        values: dict = {}
        if found["source"]["kind"] == "hub":
            values["model", "revision"] = found["source"]["revision"]
        values["model", "file_lock"] = path.name.removesuffix(".yaml") + lock.SUFFIX
        values["model", "weights_bytes"] = found["model"]["weights_bytes"]
        if image or image_id:
            values |= _image_digest(read_document(text, str(path)).data, image_id)
        after = recipe_edit.set_values(text, values)
        lock_path = path.with_name(values["model", "file_lock"])
        before = lock_path.read_text(encoding="utf-8") if lock_path.is_file() else ""
        changed = [
            str(p)
            for p, is_new in ((path, after != text), (lock_path, lock.as_text(found) != before))
            if is_new
        ]
        if not check:
            lock_path.write_text(lock.as_text(found), encoding="utf-8")
            path.write_text(after, encoding="utf-8")
        result = {
            "changed": changed,
            "files": len(found["files"]),
            "bytes": lock.total_bytes(found),
            "weights_bytes": found["model"]["weights_bytes"],
            "revision": found["source"].get("revision"),
        }

        def present(out) -> None:
            verb = "would change" if check else "changed"
            what = f"{verb} {', '.join(changed)}" if changed else "nothing is new"
            size = lock.total_bytes(found) / 1e9
            out.print(
                f"{count(len(found['files']), 'file')}, {size:.2f} GB: {what}", highlight=False
            )

        return EXIT_REFUSED if check and changed else EXIT_GOOD, result, present

    outcome.run(as_json, work)


def _make_lock(
    model: dict, path: Path, revision: str | None, folder: Path | None, token_file: Path | None
) -> dict:
    # The Hub's client takes a second to load.
    from . import lock_make

    tell = _teller()
    if folder is not None:
        found = lock_make.lock_folder(folder, tell)
        if model.get("repo"):
            # The files are those of a commit only if somebody says which.
            commit = revision or model.get("revision")
            if not re.fullmatch(r"[0-9a-f]{40}", str(commit)) or commit == lock.UNPINNED:
                raise HostError(
                    "Which commit these files are of is not known.", "Add --revision <40 hex>."
                )
            found["source"] = {"kind": "hub", "repo": model["repo"], "revision": commit}
        return found
    if model.get("path"):
        place = Path(str(model["path"])).expanduser()
        return lock_make.lock_folder(place if place.is_absolute() else path.parent / place, tell)
    if not model.get("repo"):
        raise HostError(
            "There is nothing to lock: a file of a package is pinned by its SHA-256.",
            "Lock recipes with model.repo or model.path.",
        )
    wanted = revision or model.get("revision")
    if wanted is None or wanted == lock.UNPINNED:
        wanted = "main"
    token = None
    if token_file is not None:
        check_token_file(str(token_file))
        token = token_file.read_text(encoding="utf-8").strip()
    return lock_make.lock_hub(str(model["repo"]), str(wanted), token, tell)


def _teller():
    """Progress on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(text, file=sys.stderr)


def _image_digest(data: dict, by_id: bool) -> dict:
    """The digest of the image as the local engine has it, or its id, for the local platform."""
    name = (data.get("image") or {}).get("name")
    if not name:
        raise HostError("The recipe names no image.", "Add image: {name, digests}.")
    command = ["docker", "image", "inspect", "--format", "{{json .}}", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(f"docker cannot be asked: {error}.", "Start the engine.") from None
    if done.returncode != 0:
        raise HostError(f"The engine has no image '{name}'.", "Build or pull it first.")
    found = json.loads(done.stdout)
    digests = [d.rpartition("@")[2] for d in found.get("RepoDigests") or []]
    platform = f"linux/{found['Architecture']}"
    return {("image", "digests", platform): digests[0] if digests and not by_id else found["Id"]}


def register(app: typer.Typer) -> None:
    """Add the commands to exl3ctl."""
    app.add_typer(recipe_app, name="recipe")
