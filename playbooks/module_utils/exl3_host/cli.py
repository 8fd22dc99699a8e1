"""`exl3ctl`: what a person types. Exit codes: 0 good, 1 refused, 2 usage.

Results go to stdout, as a table or with `--json` as one JSON object; errors go to stderr, or with
`--json` to stdout as an object with the key `error`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import cli_calibrate, cli_fit, cli_host, cli_models, cli_recipe, cli_report, peers_cli, show
from . import facts as host_facts
from . import plan as planner
from .outcome import EXIT_GOOD, EXIT_REFUSED, checkout
from .outcome import run as _run
from .outcome import store_dir as _store

app = typer.Typer(
    name="exl3ctl",
    help="Serve EXL3 models: recipes, plans, checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
RecipeArgument = Annotated[str, typer.Argument(help="A recipe file, or a name in recipes/.")]
ProfileOption = Annotated[str | None, typer.Option(help="Profile to use; default: the first fit.")]
StoreOption = Annotated[
    Path | None, typer.Option(help="Model store; default: .exl3 of the checkout.")
]
FactsOption = Annotated[
    Path | None, typer.Option("--facts", help="Use this facts file instead of looking at the host.")
]
KvOption = Annotated[int | None, typer.Option(min=1, help="KV cache in GiB per rank.")]
LengthOption = Annotated[int | None, typer.Option(min=256, help="Longest context in tokens.")]
MapOption = Annotated[
    str | None, typer.Option(metavar="JSON", help="A map that wins over the recipe's.")
]
FreedOption = Annotated[
    float, typer.Option(min=0, help="GiB that the running instance returns when replaced.")
]


@app.command("facts")
def facts_command(store: StoreOption = None, as_json: JsonFlag = False) -> None:
    """Show what this host is."""

    def work() -> tuple[int, dict, Callable[[Console], None]]:
        found = host_facts.collect(store=_store(store))
        return EXIT_GOOD, found, lambda out: show.show_facts(found, out)

    _run(as_json, work)


@app.command("plan")
def plan_command(
    recipe: RecipeArgument,
    name: Annotated[str | None, typer.Option(help="Instance name; default: the recipe's.")] = None,
    profile: ProfileOption = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    store: StoreOption = None,
    venv: Annotated[
        Path | None, typer.Option(help="Virtual environment with vLLM; default: .venv.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the API key.")] = None,
    max_model_len: LengthOption = None,
    kv_cache_gib: KvOption = None,
    pinning: Annotated[str | None, typer.Option(help="auto, none, container, per_rank.")] = None,
    runtime: Annotated[str | None, typer.Option(help="native or docker.")] = None,
    default_runtime: Annotated[
        str, typer.Option(help="Where neither --runtime nor the recipe says.")
    ] = "native",
    image: Annotated[
        str | None, typer.Option(help="NAME@sha256:... instead of the recipe's image.")
    ] = None,
    container_user: Annotated[
        str, typer.Option(help="UID:GID inside the container.")
    ] = planner.DEFAULT_USER,
    container_network: Annotated[str, typer.Option(help="host or bridge.")] = "host",
    calibration_file: Annotated[
        Path | None, typer.Option(help="Measured profile of this host's device.")
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(help="auto, require, skip instead of the recipe's.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts that serve together.")] = 1,
    gpus: Annotated[str | None, typer.Option(help="UUIDs of the GPUs, with commas.")] = None,
    taken_gpus: Annotated[
        str | None, typer.Option(help="UUIDs that other instances have, with commas.")
    ] = None,
    gpu_nodes: Annotated[
        str | None, typer.Option(metavar="JSON", help="Memory node by UUID or PCI address.")
    ] = None,
    serve_args: MapOption = None,
    serve_env: MapOption = None,
    release: Annotated[str | None, typer.Option(help="Names the installed software.")] = None,
    freed_gib: FreedOption = 0.0,
    facts: FactsOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show every choice's reason.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Decide how a recipe is served here. Nothing is started; 1 where it would not fit."""

    def work() -> tuple[int, dict, Callable[[Console], None]]:
        loaded = cli_recipe.load(recipe)
        instance = planner.Instance(
            name=name or loaded.recipe.name,
            store=str(_store(store)),
            venv=str(_venv(venv)),
            port=port,
            host=host,
            profile=profile,
            api_key_file=None if api_key_file is None else str(api_key_file.absolute()),
            max_model_len=max_model_len,
            kv_cache_gib=kv_cache_gib,
            pinning_mode=pinning,
            runtime=runtime,
            default_runtime=default_runtime,
            image=image,
            container_user=container_user,
            container_network=container_network,
            calibration_file=None if calibration_file is None else str(calibration_file),
            calibration=calibration,
            nodes=nodes,
            gpus=_words(gpus),
            taken_gpus=_words(taken_gpus),
            gpu_nodes=_json_map(gpu_nodes, "--gpu-nodes"),
            args=_json_map(serve_args, "--serve-args"),
            env=_json_map(serve_env, "--serve-env"),
            release=release,
            freed_gib=freed_gib,
        )
        plan = planner.plan_here(loaded, instance, cli_fit.host_facts(facts, Path(instance.store)))
        code = EXIT_GOOD if plan["fit"]["ok"] else EXIT_REFUSED
        return code, plan, lambda out: show.show_plan(plan, explain, out)

    _run(as_json, work)


@app.command("peers")
def peers_command(
    ranks: peers_cli.RanksOption = None,
    report: peers_cli.ReportOption = None,
    keep: peers_cli.KeepFlag = False,
    again: peers_cli.AgainFlag = False,
    want: peers_cli.WantedOption = "verify",
    backend: peers_cli.BackendOption = None,
    store: StoreOption = None,
    venv: Annotated[
        Path | None, typer.Option(help="Virtual environment with torch; default: .venv.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Do the GPUs reach each other's memory? Measured once, kept, and what is set because of it."""

    def work() -> tuple[int, dict, Callable[[Console], None]]:
        return peers_cli.work(
            ranks, report, again, want, backend, _store(store), _venv(venv), checkout(), keep
        )

    _run(as_json, work)


def _pass_through(name: str, what: str) -> None:
    def command(context: typer.Context) -> None:
        # The plugin is a neighbour, not a library of ours: it is reached as a command line.
        argv = [sys.executable, "-m", f"exl3_plugin.{name}", *context.args]
        sys.stdout.flush()
        os.execve(sys.executable, argv, _environment())

    command.__doc__ = what
    app.command(
        name,
        help=what,
        add_help_option=False,
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "allow_interspersed_args": False,
            "help_option_names": [],
        },
    )(command)


_pass_through("inspect", "What a checkpoint holds: modules, bits, sizes.")
_pass_through("quantize", "Turn a Hugging Face folder or GGUF file into an EXL3 checkpoint.")
_pass_through("verify", "Load a checkpoint in vLLM and compare it with reference outputs.")


def _environment() -> dict[str, str]:
    """Our environment, with the checkout importable where the package runs from one."""
    env = dict(os.environ)
    root = checkout()
    if root is not None and (root / "exl3_plugin").is_dir():
        paths = [str(root), str(root / "playbooks/module_utils")]
        old = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p not in paths]
        env["PYTHONPATH"] = os.pathsep.join(paths + old)
    return env


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word for word in (text or "").split(",") if word)


def _json_map(text: str | None, option: str) -> dict:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error} in {text}", param_hint=option) from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"a JSON map is expected, not {text}", param_hint=option)
    return value


def _venv(given: Path | None) -> Path:
    if given is not None:
        return given.expanduser().absolute()
    root = checkout()
    return root / ".venv" if root is not None else Path(sys.prefix)


cli_recipe.register(app)
cli_fit.register(app)
cli_models.register(app)
cli_host.register(app)
cli_report.register(app)
cli_calibrate.register(app)


def main() -> None:
    """Entry point of `exl3ctl`."""
    app(prog_name="exl3ctl")


if __name__ == "__main__":
    main()
