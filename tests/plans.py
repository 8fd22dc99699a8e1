"""Plans as the planner writes them, with nothing in them but what a start needs, and a port."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def free_port() -> int:
    """A port that nothing listens on."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def model_folder(place: Path) -> Path:
    """A folder that counts as a model."""
    model = place / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def small(model: Path, argv: list[str], port: int, **parts: object) -> dict:
    """A plan of instance `small`, unpinned, that asks for a real answer; `parts` are added."""
    return {
        "schema": "exl3-plan/1",
        "instance": "small",
        "recipe": {"name": "small"},
        "container": None,
        "model": {"dir": str(model), "served_name": "small"},
        "venv": {"dir": str(model.parent / "venv")},
        "serve": {
            "argv": argv,
            "env": {"GREETING": "hello world $HOME"},
            "host": "127.0.0.1",
            "port": port,
            "api_key_file": None,
        },
        "pin": {"mode": "none", "cpus": "0", "mems": None, "nodes": [], "numactl": []},
        "fit": {"ok": True, "needed_gib": 0.1, "available_gib": 1.0, "lines": []},
        "health": {
            "ready_timeout_s": 30,
            "stall_timeout_s": 20,
            "smoke": {"prompt": "Capital of France?", "max_tokens": 8, "expect": "Paris"},
        },
        "start": {"attempts": 1, "backoff_s": 0, "retry_on": []},
        **parts,
    }


def small_container(model: Path, words: list[str], port: int, image_id: str) -> dict:
    """The same in a container of an image of tests/docker/small_image.py."""
    machine = "arm64" if os.uname().machine == "aarch64" else "amd64"
    container = {
        "image": {"name": "small", "digest": image_id, "platform": f"linux/{machine}"},
        "user": "2000:0",
        "network": "host",
        "shm_gib": 1,
        "cpuset_cpus": None,
        "cpuset_mems": None,
        "gpus": [],
        "profile": None,
    }
    argv = ["vllm", "serve", "/models/model", "--port", str(port), *words]
    plan = small(model, argv, port, runtime="docker", container=container)
    return changed(plan, {"fit": {"available_gib": 4.0}})


def changed(plan: dict, changes: dict) -> dict:
    """The plan with maps merged one level deep, and other values replaced."""
    merged = {
        name: {**plan[name], **value} if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return {**plan, **merged}
