"""Is it serving? Readiness in stages, each with its own message, and the reason when it never
comes.

process -> port -> /health -> /v1/models lists the name -> a real completion. A server that prints
nothing for `stall_timeout_s` seconds is given up before the whole deadline has passed: loading a
big model takes long, but not silently.
"""

import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from . import hints

STAGES = ("process", "port", "health", "models", "completion")
TAIL_LINES = 80
# A server that is quick is asked again soon, one that loads for minutes once a second.
FIRST_POLL_S, POLL_S = 0.1, 1.0


@dataclass(frozen=True)
class Endpoint:
    """Where a server answers and what it should answer with."""

    host: str
    port: int
    served_name: str
    api_key_file: str | None = None
    smoke: dict | None = None

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}"


class Log(Protocol):
    """What a server prints, wherever it is kept; `str()` of it tells a person where."""

    def mark(self) -> object:
        """A value that changes whenever the log grows."""

    def lines(self) -> list[str]:
        """All that is kept of it."""


class FileLog:
    """A log in a file of this host."""

    def __init__(self, path: str):
        self.path = path

    def __str__(self) -> str:
        return self.path

    def mark(self) -> int:
        try:
            with open(self.path, "rb") as text:
                return text.seek(0, 2)
        except FileNotFoundError:
            return -1

    def lines(self) -> list[str]:
        try:
            with open(self.path, errors="replace") as text:
                return text.read().splitlines()
        except FileNotFoundError:
            return []


class NotReady(RuntimeError):
    """A server did not become ready: the stage, the reason, what to do, and the end of the log."""

    def __init__(self, stage: str, reason: str, log: Log):
        self.stage, self.reason, self.log = stage, reason, str(log)
        lines = log.lines()
        started = hints.last_start(lines)
        known = hints.match(started)
        # A usage message is no exception: then the line with the known pattern is the reason.
        self.exception = hints.first_exception(started) or (known and known[1])
        self.hint = known and known[0]
        self.tail = started[-TAIL_LINES:]
        said = f": {self.exception}" if self.exception else ""
        advice = f" {self.hint}" if self.hint else ""
        super().__init__(f"{reason}{said}.{advice} Full log: {log}")


@dataclass
class Progress:
    """What a wait found: seconds at which each stage was reached, and the answer it got."""

    reached: dict[str, float] = field(default_factory=dict)
    answer: str | None = None


def _request(endpoint: Endpoint, path: str, body: dict | None, timeout_s: float) -> tuple[int, str]:
    headers = {"Content-Type": "application/json"}
    if endpoint.api_key_file:
        with open(endpoint.api_key_file) as secret:
            headers["Authorization"] = f"Bearer {secret.read().strip()}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(endpoint.url + path, data=data, headers=headers)
    # A proxy set for downloads must not be asked for an address on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (OSError, TimeoutError) as error:
        return 0, str(error)


def port_open(endpoint: Endpoint) -> bool:
    """Whether something accepts connections there."""
    host = endpoint.url.removeprefix("http://").rpartition(":")[0].strip("[]")
    try:
        with socket.create_connection((host, endpoint.port), timeout=2):
            return True
    except OSError:
        return False


def healthy(endpoint: Endpoint, timeout_s: float = 5) -> tuple[bool, str]:
    """`/health` and the served name; (False, why) when either is wrong."""
    status, text = _request(endpoint, "/health", None, timeout_s)
    if status != 200:
        return False, f"/health answers {status or text}"
    status, text = _request(endpoint, "/v1/models", None, timeout_s)
    if status != 200:
        return False, f"/v1/models answers {status or text}: {text[:200]}"
    try:
        names = [model["id"] for model in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError):
        return False, f"/v1/models answers something that is no model list: {text[:200]}"
    if endpoint.served_name not in names:
        return False, f"/v1/models lists {names}, expected {endpoint.served_name!r}"
    return True, "serving"


def complete(
    endpoint: Endpoint, prompt: str, max_tokens: int, timeout_s: float, kind: str = "chat"
) -> str:
    """The model's greedy answer to one prompt; `kind` is "chat" or "completion".

    Raises RuntimeError when the server answers anything but a completion.
    """
    body = {"model": endpoint.served_name, "max_tokens": max_tokens, "temperature": 0}
    if kind == "chat":
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        path = "/v1/completions"
        body["prompt"] = prompt
    status, text = _request(endpoint, path, body, timeout_s)
    if status != 200:
        raise RuntimeError(f"{path} answers {status or 'nothing'}: {text[:300]}")
    choice = json.loads(text)["choices"][0]
    return (choice["message"]["content"] or "") if kind == "chat" else choice["text"]


def wait_ready(
    endpoint: Endpoint,
    alive: Callable[[], str | None],
    log: Log,
    ready_timeout_s: float,
    stall_timeout_s: float | None,
    tell: Callable[[str], None] = lambda text: None,
    activity: Callable[[], object] = lambda: None,
) -> Progress:
    """Wait until the server answers a real request.

    `alive` returns None while the process runs, else what became of it. `activity` returns a value
    that changes while something goes on that no log tells, such as GPU memory filling up. Raises
    `NotReady`.
    """
    began = last_growth = time.monotonic()
    pause = FIRST_POLL_S
    progress, seen, stage, why = Progress(), None, 0, "not started"
    while True:
        now = time.monotonic()
        ended = alive()
        if ended:
            raise NotReady(STAGES[stage], f"the server {ended}", log)
        now_seen = (log.mark(), activity())
        if now_seen != seen:
            seen, last_growth = now_seen, now
        if now - began > ready_timeout_s:
            reason = f"not ready after {ready_timeout_s:.0f} s, waiting for {STAGES[stage]} ({why})"
            raise NotReady(STAGES[stage], reason, log)
        if stall_timeout_s and stage <= 2 and now - last_growth > stall_timeout_s:
            silence = f"nothing in the log for {stall_timeout_s:.0f} s"
            reason = f"stalled: {silence}, waiting for {STAGES[stage]}"
            raise NotReady(STAGES[stage], reason, log)
        done, why = _try_stage(STAGES[stage], endpoint, progress, ready_timeout_s - (now - began))
        if done:
            progress.reached[STAGES[stage]] = round(time.monotonic() - began, 1)
            tell(f"{STAGES[stage]} after {progress.reached[STAGES[stage]]} s")
            stage += 1
            if stage == len(STAGES):
                return progress
            continue
        if STAGES[stage] == "completion" or why.startswith("/v1/models lists"):
            # More waiting does not change a wrong answer or a wrong name.
            raise NotReady(STAGES[stage], why, log)
        time.sleep(pause)
        pause = min(POLL_S, 1.5 * pause)


def _try_stage(stage: str, endpoint: Endpoint, progress: Progress, left_s: float):
    if stage == "process":
        return True, "running"
    if stage == "port":
        return port_open(endpoint), f"nothing listens on port {endpoint.port}"
    if stage == "health":
        status, text = _request(endpoint, "/health", None, 5)
        return status == 200, f"/health answers {status or text}"
    if stage == "models":
        return healthy(endpoint)
    if not endpoint.smoke:
        return True, "no smoke test in the recipe"
    smoke = endpoint.smoke
    try:
        answer = complete(
            endpoint,
            smoke["prompt"],
            smoke["max_tokens"],
            max(left_s, 10),
            smoke.get("endpoint") or "chat",
        )
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        return False, str(error)
    progress.answer = answer.strip()
    expect = smoke.get("expect")
    if not expect or re.search(expect, answer):
        return True, "as expected"
    return False, f"asked {smoke['prompt']!r} it says {answer!r}, expected /{expect}/"
