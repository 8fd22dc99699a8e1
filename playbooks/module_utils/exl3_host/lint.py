"""Checks of a recipe beyond its schema: arguments, parallel sizes, hardware, lock, memory.

All problems of a file are found in one reading, each with its line and column. A note is no
mistake: the recipe is legal, and something about it should be known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import fit_recipe, vllm_args
from .errors import HostError, Problem, RecipeError, nearest
from .hardware import Hardware, load_hardware
from .lock import UNPINNED, UNPINNED_DIGEST, lock_beside
from .recipe import LoadedRecipe, load_recipe
from .schema import CpuProfile, GpuProfile, profile_tag
from .yamltext import dotted, read_document

Found = tuple[tuple, str, str]


@dataclass(frozen=True)
class Context:
    """What a recipe is held against. args_file: an image's own list, instead of recipes/args."""

    hardware: dict[str, Hardware] = field(default_factory=dict)
    args_folder: Path | None = None
    args_file: Path | None = None

    @classmethod
    def of(cls, recipes: Path | None, args_file: Path | None = None) -> Context:
        """From a recipes folder. Raises HostError where its files are broken."""
        if recipes is None:
            return cls(args_file=args_file)
        return cls(load_hardware(recipes), recipes / "args", args_file)

    def arguments(self, wanted: str | None, device: str) -> dict | None:
        """The list of vLLM's arguments for a device, None where there is none."""
        if self.args_file is not None:
            return vllm_args.load(self.args_file)
        if self.args_folder is None or not self.args_folder.is_dir():
            return None
        return vllm_args.choose(self.args_folder, wanted, device)


def lint_file(path: Path, context: Context) -> tuple[LoadedRecipe | None, list[Problem], list[str]]:
    """(recipe or None, problems, notes) of a file; mistakes of all kinds are told together.

    Raises HostError where there is no such file, or a file of the context is broken.
    """
    try:
        loaded = load_recipe(path)
    except RecipeError as error:
        places = {(p.line, p.column) for p in error.problems}
        more = [p for p in _raw_arguments(path, context) if (p.line, p.column) not in places]
        return None, [*error.problems, *more], []
    return loaded, *lint(loaded, context)


def _raw_arguments(path: Path, context: Context) -> Iterator[Problem]:
    """Arguments of a file that breaks the schema elsewhere, as far as they can be found."""
    try:
        document = read_document(path.read_text(encoding="utf-8"), str(path))
    except (RecipeError, UnicodeDecodeError):
        return
    profiles = _inner(document.data, "profiles")
    wanted = _inner(document.data, "image", "needs").get("vllm")
    wanted = wanted if isinstance(wanted, str) else None
    tags = {name: profile_tag(value) for name, value in profiles.items()}
    first = next(iter(tags.values()), "cpu-profile")
    places = [(("serve", "args"), first)]
    places += [(("profiles", name, "args"), tag) for name, tag in tags.items()]
    for where, tag in places:
        listed = context.arguments(wanted, "cpu" if tag == "cpu-profile" else "cuda")
        for name, value in _inner(document.data, *where).items() if listed else ():
            found = vllm_args.problem_with(str(name), value, listed)
            if found and (*where, name) not in document.traps:
                line, column = document.place((*where, name), prefer_key=True)
                yield Problem(document.file, line, column, dotted((*where, name)), *found)


def _inner(data: object, *path: str) -> dict:
    """A map inside a document, empty where something else stands there."""
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def lint(loaded: LoadedRecipe, context: Context) -> tuple[list[Problem], list[str]]:
    """(problems, notes) of a recipe that passed its schema."""
    document = read_document(loaded.path.read_text(encoding="utf-8"), str(loaded.path))
    problems, notes = [], []
    for path, message, fix in _problems(loaded, context, notes):
        line, column = document.place(path, prefer_key=path in document.key_places)
        problems.append(Problem(document.file, line, column, dotted(path), message, fix))
    return problems, [f"{loaded.recipe.name}: {note}" for note in notes]


def _problems(loaded: LoadedRecipe, context: Context, notes: list[str]) -> Iterator[Found]:
    recipe = loaded.recipe
    yield from _model(loaded, notes)
    try:
        lock = lock_beside(loaded.path)
    except HostError as error:
        yield ("model",), error.message, error.fix
        return
    yield from _lock(loaded, lock)
    for name, profile in recipe.profiles.items():
        yield from _arguments(loaded, name, profile, context, notes)
        yield from _length(loaded, name, profile, lock)
        if isinstance(profile, GpuProfile):
            yield from _ranks(name, profile, lock)
            yield from _hardware(loaded, name, profile, context)


def _model(loaded: LoadedRecipe, notes: list[str]) -> Iterator[Found]:
    recipe = loaded.recipe
    if recipe.model.revision == UNPINNED:
        notes.append(f"not locked yet; pin it with: exl3ctl recipe lock {recipe.name}")
    if recipe.model.gated and not recipe.secrets.hf_token:
        yield (
            ("model", "gated"),
            "A gated model cannot be fetched without a token.",
            "Add secrets: {hf_token: true}.",
        )
    digests = recipe.image.digests if recipe.image else None
    for platform in ("amd64", "arm64"):
        if digests is not None and getattr(digests, platform) == UNPINNED_DIGEST:
            notes.append(f"the image for linux/{platform} is not pinned yet")
    for index, retry in enumerate(recipe.start.retry_on):
        if retry.pattern in (".*", ".+", ".", ""):
            yield (
                ("start", "retry_on", index, "pattern"),
                "This pattern matches every failure.",
                "Name the one failure that a plain restart cures.",
            )


def _lock(loaded: LoadedRecipe, lock: dict | None) -> Iterator[Found]:
    model = loaded.recipe.model
    beside = f"{loaded.recipe.name}.files.json"
    if model.file_lock is not None and model.file_lock != beside:
        yield (
            ("model", "file_lock"),
            f"'{model.file_lock}' belongs to another recipe.",
            f"Write file_lock: {beside}.",
        )
    if lock is None:
        if model.file_lock is not None:
            yield (
                ("model", "file_lock"),
                f"There is no {beside} beside the recipe.",
                f"Make it with: exl3ctl recipe lock {loaded.recipe.name}",
            )
        return
    source = lock["source"]
    if source["kind"] == "hub" and (source["repo"], source["revision"]) != (
        model.repo,
        model.revision,
    ):
        yield (
            ("model", "revision"),
            f"The lock was made of {source['repo']} at {source['revision'][:12]}.",
            f"Lock again: exl3ctl recipe lock {loaded.recipe.name}",
        )
    stated, found = model.weights_bytes, lock["model"]["weights_bytes"]
    if stated is not None and model.quantize is None and abs(stated - found) > found // 50:
        yield (
            ("model", "weights_bytes"),
            f"{stated} is not what the lock counts: {found}.",
            f"Write weights_bytes: {found}.",
        )


def _arguments(
    loaded: LoadedRecipe,
    name: str,
    profile: CpuProfile | GpuProfile,
    context: Context,
    notes: list[str],
) -> Iterator[Found]:
    image = loaded.recipe.image
    wanted = image.needs.vllm if image else None
    device = "cpu" if isinstance(profile, CpuProfile) else "cuda"
    listed = context.arguments(wanted, device)
    if listed is None:
        what = f"vLLM {wanted}" if wanted else "vLLM"
        note = f"no argument list of {what} is there, so arguments were not checked"
        if note not in notes:
            notes.append(note)
        return
    for where, args in (
        (("serve", "args"), loaded.recipe.serve.args),
        (("profiles", name, "args"), profile.args),
    ):
        first = name == next(iter(loaded.recipe.profiles))
        for key, value in args.items():
            found = vllm_args.problem_with(key, value, listed)
            # What stands in serve.args is told once, not once for each profile.
            if found and (where[0] == "profiles" or first):
                yield (*where, key), *found
            note = f"vLLM {listed['vllm']} calls '{key}' deprecated"
            if listed["arguments"].get(key, {}).get("deprecated") and note not in notes:
                notes.append(note)


def _length(
    loaded: LoadedRecipe, name: str, profile: CpuProfile | GpuProfile, lock: dict | None
) -> Iterator[Found]:
    length, model = profile.memory.max_model_len, loaded.recipe.model
    where = ("profiles", name, "memory", "max_model_len")
    if model.min_context is not None and length < model.min_context:
        yield where, f"{length} is below model.min_context, {model.min_context}.", "Raise it."
    longest = lock["model"]["config"].get("max_position_embeddings") if lock else None
    if {"hf-overrides", "rope-scaling"} & ({*loaded.recipe.serve.args} | {*profile.args}):
        # Stretched positions are the recipe's own business.
        longest = None
    if longest is not None and length > longest:
        yield where, f"{length} is above what the model was made for, {longest}.", "Lower it."


def _ranks(name: str, profile: GpuProfile, lock: dict | None) -> Iterator[Found]:
    sizes, match = profile.parallel, profile.match
    ranks, gpus = sizes.tp * sizes.pp * sizes.dp, match.gpus_per_node * match.nodes
    where = ("profiles", name, "parallel")
    if ranks != gpus:
        yield (
            where,
            f"tp x pp x dp is {ranks}, and {match.nodes} node(s) of {match.gpus_per_node} GPU(s) "
            f"are {gpus}.",
            f"Make the product {gpus}.",
        )
    if sizes.tp > 1 and profile.comm.shm_gib is None and match.gpus_per_node > 1:
        yield (
            ("profiles", name),
            "Ranks of one host talk through shared memory, and comm.shm_gib is not given.",
            "Add comm: {shm_gib: 8}; a container has 64 MiB otherwise.",
        )
    if match.unified_memory and profile.memory.host_reserve_gib is None:
        yield (
            ("profiles", name, "memory"),
            "On unified memory the host lives in the same memory.",
            "Add host_reserve_gib: 12, so that it is not starved.",
        )
    config = lock["model"]["config"] if lock else {}
    for key, noun in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "KV heads"),
    ):
        heads = config.get(key)
        if not heads or (config.get("kv_lora_rank") and key == "num_key_value_heads"):
            continue
        divides = heads % sizes.tp == 0 or (key == "num_key_value_heads" and sizes.tp % heads == 0)
        if not divides:
            good = [n for n in (1, 2, 3, 4, 6, 8) if heads % n == 0 and n <= 8]
            yield (
                (*where, "tp"),
                f"{sizes.tp} ranks cannot share {heads} {noun}.",
                f"Use one of: {', '.join(map(str, good))}.",
            )


def _hardware(
    loaded: LoadedRecipe, name: str, profile: GpuProfile, context: Context
) -> Iterator[Found]:
    if not context.hardware:
        return
    known = context.hardware.get(name)
    if known is None:
        close = nearest(name, list(context.hardware))
        hint = f"Did you mean '{close}'?" if close else f"Known: {', '.join(context.hardware)}."
        yield ("profiles", name), f"hardware.yaml has no class '{name}'.", hint
        return
    differs = known.differs(profile.match)
    if differs:
        yield ("profiles", name, "match"), f"{differs}.", "Use the id of another class."
        return
    verdict = fit_recipe.verdict(loaded, profile, None, known)
    if verdict is not None and not verdict["ok"]:
        fixes = "; or ".join(verdict["would_fit"])
        yield (
            ("profiles", name, "memory"),
            f"It does not fit on {known.gpu}: {'; '.join(verdict['reasons'])}.",
            f"What would: {fixes}." if fixes else "Use larger hardware.",
        )
