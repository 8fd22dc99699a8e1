"""`exl3ctl report`: an archive for a bug report, without secrets and names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import report
from .outcome import EXIT_GOOD, checkout, run, store_dir


def register(app: typer.Typer) -> None:
    """Add the command to `exl3ctl`."""

    @app.command("report")
    def report_command(
        out: Annotated[Path, typer.Option(help="The archive.")] = Path("exl3-report.tar.gz"),
        store: Annotated[
            Path | None, typer.Option(help="Model store; default: .exl3 of the checkout.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Put facts, plans, state and the ends of logs into one archive, redacted."""

        def work() -> tuple[int, dict, Callable[[Console], None]]:
            files = report.write(store_dir(store), checkout() or Path.cwd(), out)

            def present(console: Console) -> None:
                console.print(f"{out}: {len(files)} files", highlight=False)
                console.print("Look at its file CONTENTS before you send it.", highlight=False)

            return EXIT_GOOD, {"path": str(out), "files": files}, present

        run(as_json, work)
