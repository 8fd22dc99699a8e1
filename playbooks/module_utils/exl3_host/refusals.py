"""What is refused before a start, while the server that runs still serves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from . import containers, gpu_use, preflight, procs
from .errors import HostError
from .runner import gpus_of
from .spec import Paths, engine_of, own_pids, read_json


def refuse_unfit(plan: dict) -> None:
    """Raise HostError when the plan says that memory is too small.

    The planner counts the memory of a server that is to be replaced as free.
    """
    fit = plan.get("fit") or {"ok": True}
    if fit["ok"]:
        return
    have = fit.get("available_gib")
    figures = f"{fit['needed_gib']:.1f} GiB needed"
    figures += "" if have is None else f", {have:.1f} GiB available"
    reasons = [f"because {one}" for one in fit.get("reasons", [])]
    ways = "; or ".join(fit.get("would_fit", []))
    raise HostError(
        "\n".join([f"not enough memory: {figures}.", *fit.get("lines", []), *reasons]),
        f"Free memory, or: {ways}." if ways else "Free memory or choose a smaller model.",
    )


def validate(plan: dict, spec: dict, paths: Paths, is_check: bool) -> None:
    """Refuse what would fail, while the old server still serves. Raises HostError."""
    mine = own_pids(paths)
    host, port = spec["endpoint"]["host"], spec["endpoint"]["port"]
    foreign = [one for one in procs.conflicting(host, port) if one.pid not in mine]
    if mine and (read_json(paths.spec) or {}).get("endpoint", {}).get("port") == port:
        foreign = [one for one in foreign if one.pid is not None]
    if foreign:
        raise HostError(
            f"port {port} is in use: {foreign[0]}.",
            f"Stop that program or give instance {paths.instance!r} another port.",
            port=port,
            owner=foreign[0].pid,
        )
    refuse_unfit(plan)
    preflight.check_room(paths.store)
    if is_check:
        return
    model = Path(plan["model"]["dir"])
    if not (model / "config.json").is_file():
        raise HostError(
            f"model folder {model} is not there or has no config.json.",
            "Check model.path in the recipe, or deploy without --tags so that the store is filled.",
        )
    key_file = plan["serve"].get("api_key_file")
    if key_file and not os.access(key_file, os.R_OK):
        raise HostError(
            f"VLLM_API_KEY should come from {key_file}, which cannot be read.",
            "Write the secret there (mode 0600, one line), or leave secrets out of the recipe.",
        )
    if spec.get("container"):
        engine = engine_of(spec)
        containers.check(engine, spec, spec["container"])
        containers.require_image(engine, spec["container"]["image"])
        gpu_use.require_cdi(gpus_of(spec))
        gpu_use.refuse_foreign(gpus_of(spec), mine)
        return
    program = spec["argv"][0]
    for word, what in ((program, "program"), (plan["serve"]["argv"][0], "server program")):
        if shutil.which(word, path=spec["env"].get("PATH")) is None:
            raise HostError(f"{what} {word} is not there or may not be run.", "Deploy the venv.")
