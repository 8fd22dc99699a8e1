"""`doctor`: can this container serve here? One line a question; exit 1 where one is answered no."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from exl3_image import HOME, Refusal, about, cards, checks, models_root

# Runs apart: a library that cannot be loaded must not take the doctor with it.
_PLUGIN = """
import importlib.metadata as m, json, sys
import numpy as np, torch
points = [p for p in m.entry_points(group="vllm.general_plugins") if p.name == "exl3"]
points[0].load()()
from vllm.model_executor.layers.quantization import get_quantization_config
get_quantization_config("exl3")
from exl3_plugin import format, ops
ops.load()
rng = np.random.default_rng(0)
trellis = rng.integers(-2**15, 2**15, (8, 8, 16 * 4), dtype=np.int16)
want = format.decode_inner(trellis, "mul1")
got = ops.reconstruct(torch.from_numpy(trellis), "mul1").numpy()
if not np.array_equal(got.view(np.uint16), want.view(np.uint16)):
    sys.exit("the CPU operator and the format's own decoder disagree")
print(json.dumps({"isa": ops.cpu_isa(), "torch": torch.__version__}))
"""


@dataclass(frozen=True)
class Answer:
    """One question: `state` is ok, warn or bad."""

    name: str
    state: str
    text: str


def main(words: list[str]) -> int:
    """Ask everything; print a table or, with --json, a list."""
    answers = examine()
    if "--json" in words:
        print(json.dumps([asdict(answer) for answer in answers], indent=1))
    else:
        for answer in answers:
            print(f"{answer.state:<5}{answer.name:<12}{answer.text}")
    return 1 if any(answer.state == "bad" for answer in answers) else 0


def examine() -> list[Answer]:
    """All answers, in the order in which a start would meet them."""
    build = about.build()
    sight = cards.look()
    return [
        Answer("image", "ok", about.line(build)),
        gpus(build, sight),
        plugin(),
        kernels(build),
        _tried("writable", checks.places, "the temporary folder and the cache"),
        shared_memory(),
        memory_policy(),
        models(),
        Answer("user", "ok", f"UID {os.getuid()}, GID {os.getgid()}; {_root()}"),
    ]


def gpus(build: dict, sight: cards.Sight) -> Answer:
    """Which cards there are, and whether this image is for them."""
    if build["flavour"] == "cpu":
        return Answer("gpu", "ok", "the cpu image uses none")
    if not sight.cards:
        return Answer(
            "gpu",
            "bad",
            f"no GPU ({sight.why_none}); start with --gpus all or --device nvidia.com/gpu=all",
        )
    listed = "; ".join(f"{c.index} {c.name} sm {c.sm} driver {c.driver}" for c in sight.cards)
    return _tried("gpu", lambda: checks.cards(build, sight, len(sight.cards)), listed)


def plugin() -> Answer:
    """vLLM finds the plugin, and its CPU operator agrees with the format's decoder bit for bit."""
    command = [sys.executable, "-I", "-c", _PLUGIN]
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        return Answer("plugin", "bad", lines[-1] if lines else f"exit status {done.returncode}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Answer(
        "plugin", "ok", f"registered; CPU operator exact ({found['isa']}); torch {found['torch']}"
    )


def kernels(build: dict) -> Answer:
    """The kernels inside are those that the image promises (read from the file, without a GPU)."""
    if build["flavour"] == "cpu":
        return Answer("kernels", "ok", "CPU only")
    held = ", ".join(build["cubins"])
    return Answer("kernels", "ok", f"{held}; sources {build['kernel_source_hash'][:12]}")


def shared_memory() -> Answer:
    """How many ranks /dev/shm is large enough for."""
    status = os.statvfs("/dev/shm")
    mib = status.f_blocks * status.f_frsize // 2**20
    ranks = mib // checks.SHM_PER_RANK_MIB
    if ranks < 2:
        return Answer("shm", "warn", f"/dev/shm has {mib} MiB: enough for one rank; --shm-size 4g")
    return Answer("shm", "ok", f"/dev/shm has {mib} MiB")


def memory_policy() -> Answer:
    """Whether numactl may bind memory, which the engine's default seccomp profile forbids."""
    done = subprocess.run(["numactl", "--show"], capture_output=True, text=True)
    if done.returncode == 0 and "not permitted" not in done.stderr:
        return Answer("numa", "ok", "memory can be bound")
    return Answer(
        "numa", "warn", "memory cannot be bound in here (seccomp); a cpuset of the container can"
    )


def models() -> Answer:
    """What lies in the store."""
    root = models_root()
    found = sorted(p.parent.name for p in root.glob("*/config.json")) if root.is_dir() else []
    if not found:
        return Answer("models", "warn", f"{root} holds no model; mount the store there")
    return Answer("models", "ok", ", ".join(found))


def _root() -> str:
    try:
        probe = Path(HOME / ".probe")
        probe.touch()
        probe.unlink()
    except OSError:
        return "the root is read-only for it"
    return "the software can be changed by this user; --read-only is safer"


def _tried(name: str, check: Callable[[], object], good: str) -> Answer:
    try:
        check()
    except Refusal as refusal:
        return Answer(name, "bad", str(refusal))
    return Answer(name, "ok", good)
