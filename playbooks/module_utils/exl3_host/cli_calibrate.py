"""`exl3ctl calibrate`: measure each type of GPU of this host once, and keep the profile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import calibration, facts
from .errors import HostError
from .outcome import EXIT_GOOD, checkout, run, store_dir


def register(app: typer.Typer) -> None:
    """Add the command to `exl3ctl`."""

    @app.command("calibrate")
    def calibrate_command(
        store: Annotated[
            Path | None, typer.Option(help="Model store; default: .exl3 of the checkout.")
        ] = None,
        python: Annotated[Path, typer.Option(help="A Python with torch and the plugin.")] = Path(
            sys.executable
        ),
        software: Annotated[
            str, typer.Option(help="Names the release: image digest, or release of a plan.")
        ] = "none",
        model: Annotated[
            Path | None, typer.Option(help="A model, whose experts are measured too.")
        ] = None,
        tensor_parallel_size: Annotated[int, typer.Option(help="GPUs that share it.", min=1)] = 1,
        enable_expert_parallel: Annotated[
            bool, typer.Option("--enable-expert-parallel", help="They share whole experts.")
        ] = False,
        force: Annotated[bool, typer.Option("--force", help="Measure again.")] = False,
        argument: Annotated[
            list[str] | None, typer.Option(help="Further argument of bench/calibrate.py; repeat.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Measure each type of GPU of this host once; plans find the profile."""

        def work() -> tuple[int, dict, Callable[[Console], None]]:
            root, place = checkout(), store_dir(store)
            if root is None:
                raise HostError("there is no checkout here.", "Run exl3ctl from a checkout.")
            served = None
            if model is not None:
                folder = str(model.resolve())
                served = calibration.Model(folder, tensor_parallel_size, enable_expert_parallel)
            changed, told = calibration.measure(
                place,
                facts.collect(store=place),
                software,
                calibration.native_command(python, root, served),
                force,
                tuple(argument or ()),
                model=served,
            )
            result = {"changed": changed, "done": told, "folder": str(place / "calibration")}
            return EXIT_GOOD, result, lambda out: out.print("\n".join(told), highlight=False)

        run(as_json, work)


def main() -> None:
    """This command alone, for a host that has typer and rich and not the planner's packages."""
    app = typer.Typer(add_completion=False, no_args_is_help=True)
    app.callback()(lambda: None)
    register(app)
    app(prog_name="python -m exl3_host.cli_calibrate")


if __name__ == "__main__":
    main()
