"""`exl3ctl fit`: does a recipe fit on this host, or on hardware that is not here?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import facts, fit_recipe, hardware, learned, outcome, show, sources
from . import plan as planner
from .cli_recipe import JsonFlag, RecipeArgument, load, recipes_data
from .errors import HostError
from .outcome import EXIT_GOOD, EXIT_REFUSED
from .recipe import LoadedRecipe
from .schema import GpuProfile


def fit_command(
    recipe: RecipeArgument,
    profile: Annotated[
        str | None, typer.Option(help="Profile to use; default: the first that fits this host.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Model store; default: .exl3 of the checkout.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=256, help="Longest context in tokens.")
    ] = None,
    kv_cache_gib: Annotated[
        int | None, typer.Option(min=1, help="KV cache in GiB per rank (CPU).")
    ] = None,
    freed_gib: Annotated[
        float, typer.Option(min=0, help="GiB that the running instance returns when replaced.")
    ] = 0.0,
    facts_file: Annotated[
        Path | None, typer.Option("--facts", help="Use this facts file instead of this host.")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option("--log", help="A server's log of this profile: keep what it tells first."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Does the model fit? Asked before anything is fetched; 1 where it does not."""

    def work() -> tuple:
        loaded = load(recipe)
        home = outcome.store_dir(store)
        host = host_facts(facts_file, home)
        name, chosen = _choose(loaded, host, profile)
        if not isinstance(chosen, GpuProfile):
            verdict = _cpu_fit(loaded, host, home, profile, max_model_len, kv_cache_gib, freed_gib)
        else:
            folder = Path(sources.model_dir(loaded, str(home)))
            key = fit_recipe.key_of_profile(loaded, name, chosen, folder, max_model_len)
            if log is not None:
                boot = learned.read_boot(learned.tail(log))
                if boot is None:
                    raise HostError(
                        f"{log} tells nothing about a KV cache.",
                        "Give the log of a server that came that far.",
                    )
                learned.record(home, key, boot)
            data = recipes_data()
            known = hardware.load_hardware(data).get(name) if data is not None else None
            verdict = fit_recipe.verdict(
                loaded,
                chosen,
                host,
                known,
                model_dir=folder,
                store=home,
                max_model_len=max_model_len,
                key=key,
                freed_gib=freed_gib,
            )
            if verdict is None:
                raise HostError(
                    f"The memory of '{name}' is not known: no such GPUs here, no such class in "
                    "recipes/profiles/hardware.yaml.",
                    "Ask on the host itself, or with --facts FILE of it.",
                )
        verdict = {"recipe": loaded.recipe.name, "profile": name, **verdict}
        code = EXIT_GOOD if verdict["ok"] else EXIT_REFUSED
        return code, verdict, lambda out: show.show_fit(verdict, out)

    outcome.run(as_json, work)


def _choose(loaded: LoadedRecipe, host: dict, wanted: str | None) -> tuple:
    """The profile that is asked for, else the first whose hardware is here."""
    profiles = loaded.recipe.profiles
    if wanted in profiles:
        return wanted, profiles[wanted]
    if wanted is None:
        for name, one in profiles.items():
            if isinstance(one, GpuProfile) and fit_recipe.memory_here(one, host) is not None:
                return name, one
        if all(isinstance(one, GpuProfile) for one in profiles.values()):
            raise HostError(
                f"This host has the GPUs of no profile of {loaded.recipe.name}.",
                f"Name one to ask about such hardware: --profile {' | '.join(profiles)}",
            )
    return planner.choose_profile(loaded, host, wanted)


def _cpu_fit(loaded, host, home, profile, max_model_len, kv_cache_gib, freed_gib) -> dict:
    instance = planner.Instance(
        name=loaded.recipe.name,
        store=str(home),
        venv=str(Path(sys.prefix)),
        profile=profile,
        max_model_len=max_model_len,
        kv_cache_gib=kv_cache_gib,
        freed_gib=freed_gib,
        api_key_file="/not-used" if loaded.recipe.secrets.api_key else None,
    )
    return planner.plan_here(loaded, instance, host)["fit"]


def host_facts(file: Path | None, store: Path) -> dict:
    """Facts of this host, or of a file that `exl3ctl facts --json` wrote. Raises HostError."""
    if file is None:
        return facts.collect(store=str(store))
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HostError(
            f"The facts file {file} cannot be read: {error}.", "Make one with: exl3ctl facts --json"
        ) from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != facts.SCHEMA:
        raise HostError(
            f"{file} is no facts file: schema is {schema!r}, expected '{facts.SCHEMA}'.",
            "Make one with: exl3ctl facts --json",
        )
    return found


def register(app: typer.Typer) -> None:
    """Add the command to exl3ctl."""
    app.command("fit")(fit_command)
