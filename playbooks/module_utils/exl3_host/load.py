"""Asks a running server as clients do, and measures what they would see.

Every prompt is different (prefix caching must not answer for the model), lengths are fixed, answers
run to their full length, and tokens are counted by the server (`include_usage`), not guessed from
chunks. Standard library only: it runs on the host of the server, beside it.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from dataclasses import asdict, dataclass, field

from .errors import HostError
from .wait import Endpoint

WORDS = ("river", "stone", "lantern", "copper", "valley", "winter", "signal", "garden", "market")
WORDS += ("thread", "window", "harbour", "feather", "engine", "mirror", "silver", "forest")
WORDS += ("letter", "candle", "bridge", "planet", "violin", "circle", "summer")
TIMEOUT_S = 600


@dataclass(frozen=True)
class Shape:
    """What is asked: `requests` prompts of about `input_words`, `output_tokens` each, `concurrency`
    at a time.
    """

    requests: int = 16
    concurrency: int = 4
    input_words: int = 100
    output_tokens: int = 64
    seed: int = 1


@dataclass
class Figures:
    """What clients saw. Times in ms; percentiles over requests."""

    requests: int
    failed: int
    seconds: float
    output_tokens: int
    output_tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    tpot_ms_p99: float
    errors: list[str] = field(default_factory=list)

    def as_dict(self) -> dict:
        return asdict(self)


def measure(endpoint: Endpoint, shape: Shape) -> Figures:
    """Run the load to its end. Raises HostError where not one request was answered."""
    todo = list(range(shape.requests))
    lock, rows, errors = threading.Lock(), [], []

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                number = todo.pop(0)
            try:
                row = _ask(endpoint, _prompt(shape, number), shape.output_tokens)
            except (OSError, http.client.HTTPException, ValueError) as error:
                with lock:
                    errors.append(f"{type(error).__name__}: {error}")
                continue
            with lock:
                rows.append(row)

    threads = [threading.Thread(target=work) for _ in range(max(1, shape.concurrency))]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    if not rows:
        said = errors[0] if errors else "nothing was asked"
        raise HostError(
            f"{endpoint.url} answered none of {shape.requests} requests: {said}.",
            "Look at the server's log; status.yml tells its state.",
        )
    tokens = sum(row["tokens"] for row in rows)
    each = [row["rest_ms"] / (row["tokens"] - 1) for row in rows if row["tokens"] > 1]
    first = [row["first_ms"] for row in rows]
    return Figures(
        requests=shape.requests,
        failed=len(errors),
        seconds=round(seconds, 3),
        output_tokens=tokens,
        output_tokens_per_s=round(tokens / seconds, 2),
        ttft_ms_p50=percentile(first, 50),
        ttft_ms_p99=percentile(first, 99),
        tpot_ms_p50=percentile(each, 50),
        tpot_ms_p99=percentile(each, 99),
        errors=sorted(set(errors))[:5],
    )


def percentile(values: list[float], percent: float) -> float:
    """The value that `percent` of all do not exceed (nearest rank); 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return round(ordered[int(rank) - 1], 3)


def _prompt(shape: Shape, number: int) -> str:
    source = random.Random(f"{shape.seed}/{number}")
    return " ".join(source.choice(WORDS) for _ in range(shape.input_words))


def _ask(endpoint: Endpoint, prompt: str, output_tokens: int) -> dict:
    """One streamed completion: milliseconds to the first token and of the rest, tokens."""
    body = {
        "model": endpoint.served_name,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json"}
    if endpoint.api_key_file:
        with open(endpoint.api_key_file) as secret:
            headers["Authorization"] = f"Bearer {secret.read().strip()}"
    address = endpoint.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        began = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {answer.read(200).decode(errors='replace')}")
        first = last = None
        tokens = 0
        for raw in answer:
            line = raw.strip()
            if not line.startswith(b"data:") or line == b"data: [DONE]":
                continue
            chunk = json.loads(line[5:])
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            if any(choice.get("text") for choice in chunk.get("choices", [])):
                last = time.monotonic()
                first = first or last
    finally:
        connection.close()
    if first is None or last is None or not tokens:
        raise ValueError("the stream held no token or no usage")
    return {
        "first_ms": (first - began) * 1000,
        "rest_ms": (last - first) * 1000,
        "tokens": tokens,
    }


def compare(now: dict, before: dict | None, noise: float = 0.05) -> str:
    """One sentence: faster, slower or the same as the last run of the same key."""
    if before is None:
        return "the first run of this configuration"
    ratio = now["output_tokens_per_s"] / before["output_tokens_per_s"]
    change = f"{ratio - 1:+.1%} tokens per second against {before['time']}"
    if abs(ratio - 1) <= noise:
        return f"as before ({change}, noise is {noise:.0%})"
    return f"{'faster' if ratio > 1 else 'SLOWER'} ({change})"
