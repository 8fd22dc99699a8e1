"""Does a model fit on these GPUs? Asked before anything is fetched.

    pool   = utilization x memory - weights per rank - vLLM itself        (all intervals)
    tokens = pool / bytes per token

vLLM takes `utilization` of a device and refuses to start when that much is not free; on unified
memory the host lives in the same memory, so MemAvailable limits it. A figure learned from an
earlier start of the same configuration replaces the estimate. Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .kv import KvCost

GIB = 2**30
# vLLM beside weights and cache on a 96 GB card: 5.0 to 5.5 GiB reported for GLM-5.3-Flash at 8,192
# batched tokens, 2.5 GiB for Qwen3.6-35B-A3B.
OVERHEAD_GIB, OVERHEAD_PER_DOUBLING, OVERHEAD_TOKENS = 4.0, 0.5, 2048
OVERHEAD_SPREAD = (0.5, 1.3)
STATED_SPREAD_GIB = 0.75
UNSHARDED = 0.05
# A profile's kv_bytes_per_token is one person's figure for one context length.
STATED_KV_SPREAD = (0.9, 1.25)
DEFAULT_BATCHED_TOKENS = 8192
HIGHEST_UTILIZATION = 0.95


@dataclass(frozen=True)
class GpuRequest:
    """What is to be started on each rank. GiB; `total_gib` is one device's memory.

    available_gib and reserve_gib count on unified memory only: MemAvailable, and what stays for
    the host. weights: (least, most) on one rank. cost: None where nothing is known.
    """

    tp: int
    utilization: float
    max_model_len: int
    total_gib: float
    weights: tuple[float, float] | None
    weights_source: str
    pp: int = 1
    kv_dtype: str = "auto"
    cost: KvCost | None = None
    min_kv_tokens: int = 0
    overhead_gib: float | None = None
    batched_tokens: int = DEFAULT_BATCHED_TOKENS
    available_gib: float | None = None
    reserve_gib: float = 0.0
    unified: bool = False
    learned_tokens: int | None = None
    learned_from: str = ""


def overhead(request: GpuRequest) -> tuple[float, float]:
    """(least, most) GiB of a rank that are neither weights nor cache."""
    if request.overhead_gib is not None:
        stated = request.overhead_gib
        return max(0.0, stated - STATED_SPREAD_GIB), stated + STATED_SPREAD_GIB
    doublings = max(0.0, math.log2(request.batched_tokens / OVERHEAD_TOKENS))
    middle = OVERHEAD_GIB + OVERHEAD_PER_DOUBLING * doublings
    return middle * OVERHEAD_SPREAD[0], middle * OVERHEAD_SPREAD[1]


def stated_cost(bytes_per_token: int) -> KvCost:
    """The cost that a recipe states itself."""
    least, most = STATED_KV_SPREAD
    return KvCost((bytes_per_token * least, bytes_per_token * most), (0.0, 0.0), {})


def spread_weights(total_bytes: int, tp: int, pp: int = 1) -> tuple[float, float]:
    """(least, most) GiB per rank where only the size of all files is known."""
    share = total_bytes / GIB / (tp * pp)
    whole = total_bytes / GIB * UNSHARDED if tp > 1 else 0.0
    return share, share + whole


def check(request: GpuRequest) -> dict:
    """The verdict, with the keys of `fit.check` and `kv_tokens`, (fewest, most) or None."""
    lines, reasons, warnings = [], [], []
    budget = request.utilization * request.total_gib
    kind = "unified memory" if request.unified else "GPU memory"
    lines.append(
        f"budget {budget:.2f} GiB per rank ({request.utilization:g} of {request.total_gib:.2f} GiB "
        f"{kind})"
    )
    reasons += _free_enough(request, budget, lines)
    if request.weights is None:
        lines.append("weights not known; lock the recipe to have them counted")
    else:
        lines.append(f"weights {_span(request.weights)} GiB per rank ({request.weights_source})")
    vllm = overhead(request)
    source = "from the recipe" if request.overhead_gib is not None else "estimated"
    lines.append(f"vLLM itself {_span(vllm)} GiB per rank ({source})")
    weights, pool = request.weights or (0.0, 0.0), _pool(request)
    lines.append(f"left for the KV cache {_span(pool)} GiB per rank")
    tokens = _tokens(request, pool, lines)
    if pool[1] <= 0:
        reasons.append(
            f"weights and vLLM take {weights[0] + vllm[0]:.2f} GiB per rank and {budget:.2f} GiB "
            "are there: nothing is left for the KV cache"
        )
    elif tokens is not None:
        wanted = max(request.max_model_len, request.min_kv_tokens)
        asked = "max_model_len" if wanted == request.max_model_len else "min_kv_tokens"
        if tokens[1] < wanted:
            reasons.append(
                f"the KV cache holds at most {tokens[1]:,} tokens and {asked} is {wanted:,}"
            )
        elif tokens[0] < wanted:
            warnings.append(
                f"the KV cache may hold only {tokens[0]:,} tokens, {asked} is {wanted:,}; the "
                "first start will tell"
            )
    elif pool[0] <= 0:
        warnings.append("it may not fit: the estimate's upper end leaves no room for the cache")
    lines += [f"warning: {warning}" for warning in warnings]
    needed = weights[0] + vllm[0]
    return {
        "ok": not reasons,
        "needed_gib": round(needed, 2),
        "available_gib": round(budget, 2),
        "lines": lines,
        "reasons": reasons,
        "would_fit": _suggest(request) if reasons else [],
        "kv_tokens": None if tokens is None else list(tokens),
    }


def _pool(request: GpuRequest) -> tuple[float, float]:
    """(least, most) GiB that are left for the KV cache of one rank."""
    budget = request.utilization * request.total_gib
    weights, vllm = request.weights or (0.0, 0.0), overhead(request)
    return budget - weights[1] - vllm[1], budget - weights[0] - vllm[0]


def _free_enough(request: GpuRequest, budget: float, lines: list[str]) -> list[str]:
    """vLLM refuses to start where its budget is not free."""
    if request.available_gib is None:
        return []
    what = "MemAvailable" if request.unified else "free on the GPU"
    lines.append(f"{what} {request.available_gib:.2f} GiB")
    if request.reserve_gib:
        lines.append(f"left for the host {request.reserve_gib:.2f} GiB")
    room = request.available_gib - request.reserve_gib
    if budget <= room:
        return []
    kept = f" with {request.reserve_gib:g} GiB for the host" if request.reserve_gib else ""
    return [f"vLLM would take {budget:.2f} GiB and {max(room, 0):.2f} GiB are to be had{kept}"]


def _tokens(
    request: GpuRequest, pool: tuple[float, float], lines: list[str]
) -> tuple[int, int] | None:
    if request.learned_tokens is not None:
        lines.append(f"KV cache {request.learned_tokens:,} tokens ({request.learned_from})")
        return request.learned_tokens, request.learned_tokens
    if request.cost is None:
        lines.append("tokens not known before the first start: the architecture is not understood")
        return None
    least = request.cost.tokens(pool[0] * GIB, request.max_model_len)[0]
    most = request.cost.tokens(pool[1] * GIB, request.max_model_len)[1]
    cost = request.cost.token
    each = f"{cost[0]:,.0f}" if cost[0] == cost[1] else f"{cost[0]:,.0f} to {cost[1]:,.0f}"
    kinds = ", ".join(f"{n} {kind}" for kind, n in request.cost.kinds.items())
    lines.append(
        f"KV cache {least:,} to {most:,} tokens ({each} bytes per token and rank"
        + (f"; layers: {kinds})" if kinds else ")")
    )
    lines.extend(request.cost.notes)
    return least, most


def _suggest(request: GpuRequest) -> list[str]:
    """Changes that would make it fit, the mildest first; each one was tried."""
    base = replace(request, learned_tokens=None)
    if request.learned_tokens is not None and (room := _pool(request)[1]) > 0:
        # What a start showed holds for the changes as well.
        each = room * GIB / request.learned_tokens
        base = replace(base, cost=KvCost((each, each), (0.0, 0.0), {}))
    out = []
    if request.available_gib is not None and request.utilization * request.total_gib > (
        room := request.available_gib - request.reserve_gib
    ):
        lower = math.floor(room / request.total_gib * 100) / 100
        if lower >= 0.1 and _good(replace(base, utilization=lower)):
            out.append(f"utilization: {lower:g}")
    halved = request.max_model_len
    while (halved := halved // 2) >= 1024:
        if _good(replace(base, max_model_len=halved, min_kv_tokens=0)):
            out.append(f"max_model_len: {halved}" + _and_min(request, halved))
            break
    cost = base.cost
    if request.kv_dtype in ("auto", "bf16") and cost is not None:
        half = replace(cost, token=(cost.token[0] / 2, cost.token[1] / 2))
        if _good(replace(base, cost=half, kv_dtype="fp8")):
            out.append("kv_cache_dtype: fp8")
    if request.utilization < HIGHEST_UTILIZATION and not request.unified:
        higher = next(
            (
                u / 100
                for u in range(50, 96)
                if u / 100 > request.utilization and _good(replace(base, utilization=u / 100))
            ),
            None,
        )
        if higher:
            out.append(f"utilization: {higher:g}")
    if request.weights is not None:
        for tp in (request.tp * 2, request.tp * 4):
            factor = request.tp / tp
            smaller = (request.weights[0] * factor, request.weights[1] * factor * 1.1)
            if tp <= 8 and _good(replace(base, tp=tp, weights=smaller)):
                out.append(f"tp: {tp}, on {tp} such GPUs")
                break
        out += _fewer_bits(base)
    return out


def _and_min(request: GpuRequest, length: int) -> str:
    return " and a lower min_kv_tokens" if request.min_kv_tokens > length else ""


def _fewer_bits(base: GpuRequest) -> list[str]:
    """The largest share of the present weights that would fit, in steps of a twentieth."""
    assert base.weights is not None
    for twentieths in range(19, 5, -1):
        share = twentieths / 20
        if _good(replace(base, weights=(base.weights[0] * share, base.weights[1] * share))):
            return [
                f"a checkpoint with fewer bits per weight: {share:.0%} of this one's size, "
                f"{base.weights[1] * share:.1f} GiB per rank"
            ]
    return []


def _good(request: GpuRequest) -> bool:
    """Whether a changed request would be started, without looking for suggestions again."""
    budget = request.utilization * request.total_gib
    if _free_enough(request, budget, []):
        return False
    pool = _pool(request)
    if pool[1] <= 0:
        return False
    tokens = _tokens(request, pool, [])
    return tokens is None or tokens[1] >= max(request.max_model_len, request.min_kv_tokens)


def _span(pair: tuple[float, float]) -> str:
    low, high = f"{pair[0]:.2f}", f"{pair[1]:.2f}"
    return low if low == high else f"{low} to {high}"
