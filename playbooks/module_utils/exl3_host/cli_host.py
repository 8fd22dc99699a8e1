"""`exl3ctl topology`, `preflight` and `prove-pin`: they look and change nothing."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import capture, checks, commands, draw, measure, outcome, proof, topology
from . import facts as host_facts
from .errors import HostError

NodesOption = Annotated[
    str | None,
    typer.Option("--gpu-nodes", metavar="JSON", help="Nodes that you know: {GPU uuid: node}."),
]
FromOption = Annotated[
    Path | None, typer.Option("--from", help="Look at a captured host instead of this one.")
]
SaveOption = Annotated[
    Path | None, typer.Option("--save", help="Write a capture of this host, ids removed.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the commands to exl3ctl."""

    @app.command("topology")
    def topology_command(
        as_json: JsonFlag = False,
        measured: Annotated[
            bool, typer.Option("--measure", help="Measure the node of each GPU (about a minute).")
        ] = False,
        gpu_nodes: NodesOption = None,
        capture_file: FromOption = None,
        save: SaveOption = None,
        runtime: Annotated[str, typer.Option(help="docker or native.")] = "docker",
        store: Annotated[Path | None, typer.Option(help="Where measurements are kept.")] = None,
        seconds: Annotated[float, typer.Option(min=0.05, help="Length of loaded copies.")] = 0.5,
    ) -> None:
        """Nodes, GPUs, who says where each is, links, and the pin for each number of ranks."""

        def work() -> tuple[int, dict, Callable[[Console], None]]:
            manual = _map(gpu_nodes)
            found = _look(capture_file, save)
            known, raw = _measured(found, measured, outcome.store_dir(store), seconds)
            answer = topology.describe(found, manual, known, runtime=runtime)
            if raw is not None:
                answer["measured"] = known
                answer["samples"] = raw
            return 0, answer, lambda out: draw.show_topology(answer, out)

        outcome.run(as_json, work)

    @app.command("preflight")
    def preflight_command(
        as_json: JsonFlag = False,
        store: Annotated[Path | None, typer.Option(help="Model store, for its disk.")] = None,
        runtime: Annotated[str, typer.Option(help="docker or native.")] = "native",
        driver_min: Annotated[str | None, typer.Option(help="Oldest driver that will do.")] = None,
        strict: Annotated[bool, typer.Option("--strict", help="Refuse warnings too.")] = False,
    ) -> None:
        """Is this host fit to serve? Exit 1 where something is blocked."""

        def work() -> tuple[int, dict, Callable[[Console], None]]:
            found = host_facts.collect()
            place = outcome.store_dir(store)
            findings = checks.run(
                found, commands.run_here, store=place, runtime=runtime, driver_min=driver_min
            )
            answer = checks.verdict(findings)
            bad = not answer["ok"] or (strict and bool(answer["warnings"]))
            return int(bad), answer, lambda out: draw.show_findings(answer, out)

        outcome.run(as_json, work)

    @app.command("prove-pin")
    def prove_pin_command(
        pid: Annotated[int, typer.Option(help="First process of the server.")],
        plan: Annotated[Path, typer.Option(help="The plan, or its pin alone, as JSON.")],
        as_json: JsonFlag = False,
    ) -> None:
        """Does a running server keep to the pin of its plan? Exit 1 where it does not."""

        def work() -> tuple[int, dict, Callable[[Console], None]]:
            answer = proof.prove(_pin(plan), pid)
            return int(not answer["ok"]), answer, lambda out: draw.show_proof(answer, out)

        outcome.run(as_json, work)


def _look(file: Path | None, save: Path | None) -> dict:
    """Facts of this host or of a captured one."""
    if file is None:
        answers: dict[str, dict] = {}
        found = host_facts.collect(runner=commands.record(commands.run_here, answers))
        if save is not None:
            text = json.dumps(capture.take(answers, found["tools"]), indent=1, sort_keys=True)
            save.write_text(text + "\n", encoding="utf-8")
        return found
    if save is not None:
        raise typer.BadParameter("a captured host cannot be captured again", param_hint="--save")
    with tempfile.TemporaryDirectory(prefix="exl3-host-") as folder:
        body = _json(file)
        root, runner = capture.unpack(body, Path(folder))
        return {**host_facts.collect(root, runner=runner), "tools": body["tools"]}


def _measured(
    found: dict, wanted: bool, store: Path, seconds: float
) -> tuple[dict | None, dict | None]:
    """What an earlier measurement of this host told, or a new one: decisions and raw samples."""
    kept = store / measure.KEPT
    if not wanted:
        return measure.load(kept, found), None
    checkout = outcome.checkout()
    probe = None if checkout is None else checkout / "bench/node_probe.py"
    if probe is None or not probe.exists():
        raise HostError("bench/node_probe.py is not here.", "Measure from a checkout.")
    if not found["gpus"]:
        raise HostError("There is no GPU to measure.", "exl3ctl preflight says why.")
    told = measure.run(found, sys.executable, probe, seconds=seconds)
    known = measure.decide(found, told["samples"])
    measure.save(kept, found, known)
    return known, told


def _map(text: str | None) -> dict | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error} in {text}", param_hint="--gpu-nodes") from None
    if not isinstance(value, dict):
        raise typer.BadParameter("a JSON map is expected", param_hint="--gpu-nodes")
    return value


def _pin(file: Path) -> dict:
    body = _json(file)
    pin = body.get("pin", body)
    lost = [k for k in ("mode", "cpus", "mems", "numactl") if k not in pin]
    if lost:
        raise HostError(
            f"{file} holds no plan: pin has no {', '.join(lost)}.",
            "Give the plan of the instance: plans/NAME.json in the store.",
        )
    return pin


def _json(file: Path) -> dict:
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HostError(f"{file} cannot be read: {error}.") from None
    if not isinstance(body, dict):
        raise HostError(f"{file} holds no JSON object.")
    return body


def main() -> None:
    """These commands alone, for a host that has typer and rich and not the planner's packages."""
    app = typer.Typer(add_completion=False, no_args_is_help=True)
    register(app)
    app(prog_name="python -m exl3_host.cli_host")


if __name__ == "__main__":
    main()
