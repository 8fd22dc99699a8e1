"""What is looked at before anything loads. Each check raises Refusal with one line, or returns."""

from __future__ import annotations

import difflib
import json
import os
import re
import tempfile
from pathlib import Path

from exl3_image import Refusal, about, cache_root
from exl3_image.cards import Card, Sight, version

SHM_PER_RANK_MIB = 256
"""Least shared memory a rank needs: NCCL's host buffers and vLLM's message queues. Docker gives a
container 64 MiB, with which several ranks end in a bus error."""


def cards(build: dict, sight: Sight, ranks: int) -> tuple[Card, ...]:
    """The cards that will be used, in order. A CPU image uses none."""
    if build["flavour"] == "cpu":
        return ()
    if not sight.cards:
        raise Refusal(
            f"no GPU: this is the {build['flavour']} image and {sight.why_none}. Start the "
            "container with --gpus all, or with CDI --device nvidia.com/gpu=all."
        )
    if len(sight.cards) < ranks:
        raise Refusal(
            f"{ranks} GPUs are needed and the container sees {len(sight.cards)}: pass more with "
            "--gpus, or choose a profile with a smaller tp."
        )
    used = sight.cards[:ranks]
    for card in used:
        driver(build, card)
    for card in used:
        right_image(build, card)
    kinds = {card.kind for card in used}
    if len(kinds) > 1:
        listed = "; ".join(f"GPU {c.index} {c.name}, sm {c.sm}, {_memory(c)}" for c in used)
        raise Refusal(
            f"GPUs of different kinds cannot share a model: {listed}. Pass equal ones by UUID: "
            "--gpus '\"device=GPU-...,GPU-...\"' or --device nvidia.com/gpu=GPU-..."
        )
    return used


def _memory(card: Card) -> str:
    return "shared memory" if card.memory_mib is None else f"{round(card.memory_mib / 1024)} GiB"


def driver(build: dict, card: Card) -> None:
    """The host's driver is new enough for the image's CUDA."""
    if version(card.driver) < version(build["driver_min"]):
        raise Refusal(
            f"the driver is {card.driver}; CUDA {build['cuda']} of this image needs "
            f"{build['driver_min']} or newer. Update the host's driver."
        )


def right_image(build: dict, card: Card) -> None:
    """The image's kernels run on the card."""
    if about.runs_on(about.architectures(build["architectures"]), card.capability):
        return
    other = about.image_for(card.capability, build["images"])
    use = f"use the {other} image" if other else "there is no image for it"
    raise Refusal(
        f"wrong image: GPU {card.index} is a {card.name} (sm {card.sm}) and this image holds "
        f"kernels for {build['architectures']}: {use}."
    )


def writable(place: Path, what: str, fix: str) -> None:
    """A file can be made in a folder."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise Refusal(
            f"{what} {place} cannot be written by UID {os.getuid()}, GID {os.getgid()} "
            f"({error.strerror}): {fix}."
        ) from None


def places() -> None:
    """The two writable places."""
    writable(
        Path(tempfile.gettempdir() if os.environ.get("TMPDIR") is None else os.environ["TMPDIR"]),
        "the temporary folder",
        "with a read-only root pass --tmpfs /tmp",
    )
    writable(
        cache_root(),
        "the cache",
        "mount a volume there that this user may write (-v exl3-cache:/cache), or pass "
        "--tmpfs /cache:mode=1777",
    )


def shared_memory(ranks: int, wanted_gib: int | None = None, shm: Path = Path("/dev/shm")) -> None:
    """/dev/shm is large enough for the ranks, or for what the recipe asks for."""
    if ranks < 2:
        return
    status = os.statvfs(shm)
    total_mib = status.f_blocks * status.f_frsize // 2**20
    need_mib = max(SHM_PER_RANK_MIB * ranks, 1024 * (wanted_gib or 0))
    if total_mib < need_mib:
        raise Refusal(
            f"/dev/shm has {total_mib} MiB and {ranks} ranks need {need_mib} MiB: start the "
            f"container with --shm-size {max(1, -(-need_mib // 1024))}g."
        )


def model(folder: Path) -> dict:
    """The model is there, whole; returns its config.json."""
    if not folder.is_dir():
        raise Refusal(
            f"the model is not in the store: there is no folder {folder}. Mount the store's models "
            f"folder read-only (-v STORE/models:{folder.parent}:ro) and prepare the model with the "
            "deploy playbook."
        )
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise Refusal(f"{folder} holds no model: config.json cannot be read ({error}).") from None
    weights = list(folder.glob("*.safetensors"))
    if not weights:
        raise Refusal(f"{folder} holds no weights: it has config.json and no *.safetensors.")
    for file in weights:
        if not os.access(file, os.R_OK):
            raise Refusal(
                f"{file} cannot be read by UID {os.getuid()}, GID {os.getgid()}: the store's files "
                "must be readable by the user of the container (chmod -R a+rX)."
            )
    return config


def model_class(build: dict, config: dict, folder: Path) -> None:
    """vLLM inside knows one of the classes that the model names."""
    named = config.get("architectures") or []
    known = about.load("models.json")["architectures"]
    if any(name in known for name in named):
        return
    close = difflib.get_close_matches(named[0], known, 1) if named else []
    hint = f" The closest it knows is {close[0]}." if close else ""
    raise Refusal(
        f"this image cannot serve {folder}: it is a {' or '.join(named) or 'nameless class'}, "
        f"which vLLM {build['vllm']} does not know.{hint}"
    )


def arguments(build: dict, argv: list[str]) -> None:
    """Every option exists in the vLLM inside, and no secret is among them."""
    known = about.load("args.json")["arguments"]
    for word in argv:
        match = re.match(r"--([a-zA-Z0-9][\w.-]*)", word)
        if not match:
            continue
        name = match[1].replace("_", "-").partition(".")[0]
        if name == "api-key":
            raise Refusal(
                "--api-key would show the key to everyone who may list processes: mount it as a "
                "file and name that in VLLM_API_KEY_FILE."
            )
        positive = name.removeprefix("no-")
        if name in known or (positive in known and known[positive].get("negative")):
            continue
        close = difflib.get_close_matches(name, list(known), 1)
        hint = f"; did you mean --{close[0]}?" if close else "."
        raise Refusal(f"vLLM {build['vllm']} of this image has no --{name}{hint}")
