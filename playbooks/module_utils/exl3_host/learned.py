"""What a start taught about memory: read from vLLM's own log, kept in the store, used by fit.

A record belongs to what it was measured on: model folder (which is named after source and
settings), profile, ranks, KV type, context length, budget, draft. The same configuration takes the
number of tokens as it stands; another context length or budget of the same model on the same
device still takes the weights and the bytes per token. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from .kv import GIB, KvCost
from .spec import read_json, write_json

SCHEMA = "exl3-learned/1"
FILE = "learned/kv.json"
KEEP = 200
# A page of another context length is rounded differently.
OTHER_LENGTH_SPREAD = 0.1

_POOL = re.compile(r"Available KV cache memory: ([0-9.]+) GiB")
_TOKENS = re.compile(r"([A-Z]+)(?: \+ host)? KV cache size: ([0-9,]+) tokens")
_REQUESTS = re.compile(r"Maximum concurrency for ([0-9,]+) tokens per request: ([0-9.]+)x")
_WEIGHTS = re.compile(r"Model loading took ([0-9.]+) (GiB|GB)(?: memory)? and")
_CPU_POOL = re.compile(r"\(([0-9.]+)/[0-9.]+\) GiB for KV cache on node")
_START = re.compile(r"Initializing a V1 LLM engine \(v([^)]+)\)")


@dataclass(frozen=True)
class Boot:
    """What one start printed; None where it did not.

    pool_gib: the smallest cache of all ranks. weights_gib: the largest rank.
    """

    tokens: int
    device: str
    max_model_len: int | None = None
    pool_gib: float | None = None
    weights_gib: float | None = None
    vllm: str | None = None


def read_boot(log: str) -> Boot | None:
    """The last start in a server's log; None where none came as far as its KV cache."""
    sizes = list(_TOKENS.finditer(log))
    if not sizes:
        return None
    last = sizes[-1]
    begins = list(_START.finditer(log, 0, last.start()))
    previous = sizes[-2].end() if len(sizes) > 1 else 0
    text = log[max(begins[-1].start() if begins else 0, previous) :]
    pools = [float(x) for x in _POOL.findall(text)] or [float(x) for x in _CPU_POOL.findall(text)]
    weights = [float(x) * (1 if u == "GiB" else 1e9 / GIB) for x, u in _WEIGHTS.findall(text)]
    request = _REQUESTS.search(log, last.start())
    return Boot(
        tokens=int(last[2].replace(",", "")),
        device=last[1].lower(),
        max_model_len=int(request[1].replace(",", "")) if request else None,
        pool_gib=min(pools) if pools else None,
        weights_gib=max(weights) if weights else None,
        vllm=begins[-1][1] if begins else None,
    )


def key_of(plan: dict) -> dict:
    """What a record belongs to, from a plan. Its profile names the class of hardware."""
    argv = plan["serve"]["argv"]
    budget = _option(argv, "gpu-memory-utilization")
    return {
        "model": Path(plan["model"]["dir"]).name,
        "profile": plan["profile"],
        "tp": int(_option(argv, "tensor-parallel-size") or 1),
        "pp": int(_option(argv, "pipeline-parallel-size") or 1),
        "kv_dtype": _option(argv, "kv-cache-dtype") or "auto",
        "dtype": _option(argv, "dtype") or "auto",
        "max_model_len": int(_option(argv, "max-model-len") or 0),
        "budget": budget or plan["serve"]["env"].get("VLLM_CPU_KVCACHE_SPACE"),
        "draft": _option(argv, "speculative-config"),
    }


def _option(argv: list[str], name: str) -> str | None:
    for index, word in enumerate(argv):
        if word == f"--{name}" and index + 1 < len(argv):
            return argv[index + 1]
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    return None


def record(store: Path, key: dict, boot: Boot, now: datetime | None = None) -> bool:
    """Keep what a start taught; returns whether anything new was learned."""
    figures = {
        "tokens": boot.tokens,
        "pool_gib": boot.pool_gib,
        "weights_gib": boot.weights_gib,
        "vllm": boot.vllm,
    }
    path = store / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = _entries(store)
        same = next((e for e in entries if e["key"] == key), None)
        if same is not None and {k: same[k] for k in figures} == figures:
            return False
        entries = [e for e in entries if e["key"] != key]
        when = (now or datetime.now(timezone.utc)).strftime("%Y-%m-%dT%H:%M:%SZ")
        entries.append({"key": key, "when": when, **figures})
        write_json(path, {"schema": SCHEMA, "entries": entries[-KEEP:]})
    return True


def learn(store: Path, plan: dict, log: str) -> Boot | None:
    """Read a log and keep its figures under the plan's key; None where the log tells nothing."""
    boot = read_boot(log)
    if boot is not None:
        record(store, key_of(plan), boot)
    return boot


def _entries(store: Path) -> list[dict]:
    found = read_json(store / FILE)
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        return []
    return [e for e in found.get("entries", []) if isinstance(e, dict) and "key" in e]


def exact(store: Path, key: dict) -> dict | None:
    """The record of the same configuration."""
    return next((e for e in reversed(_entries(store)) if e["key"] == key), None)


def similar(store: Path, key: dict) -> dict | None:
    """The newest record that differs in context length or budget alone."""
    free = ("max_model_len", "budget")
    fixed = {k: v for k, v in key.items() if k not in free}
    for entry in reversed(_entries(store)):
        if {k: v for k, v in entry["key"].items() if k not in free} == fixed:
            return entry
    return None


def cost_of(entry: dict) -> KvCost | None:
    """Bytes per token that a record stands for; None where it holds no size of the cache."""
    if not entry.get("pool_gib") or not entry.get("tokens"):
        return None
    each = entry["pool_gib"] * GIB / entry["tokens"]
    spread = OTHER_LENGTH_SPREAD
    return KvCost((each * (1 - spread), each * (1 + spread)), (0.0, 0.0), {})


def tail(path: Path, limit_bytes: int = 4 << 20) -> str:
    """The end of a log; empty where there is none."""
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        stream.seek(max(0, path.stat().st_size - limit_bytes))
        return stream.read().decode(errors="replace")
    return ""
