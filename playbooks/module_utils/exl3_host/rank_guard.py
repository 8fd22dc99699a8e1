"""Start the ranks of one server on several hosts together, and stop all of them when one ends.

Run on every host as `python3 -m exl3_host.rank_guard --rank R --hosts N --meet ADDRESS:PORT ...
-- COMMAND...`, under the same supervision as a server on one host.

vLLM's own multi-node start has no roll call: a rank that comes too early waits for ever, and when
a rank dies the others sit in a collective while `/health` of the head still answers 200. So the
guards keep one TCP connection per worker host to the head. They compare what they are about to
serve, start the workers first and then the head, and beat every few seconds; when a command ends,
a connection breaks or a beat stays away, each guard ends its command and then itself with 1, and
the supervisors try again, a bounded number of times.

A worker has no API of its own. Its guard answers `/health`, `/v1/models` and `/metrics` on
`--listen` in its place: 200 while its command runs, the head's guard is there, and the head's
`/health` answers 200; else 503 with the reason. So status, readiness and monitoring treat all hosts
alike. Standard library only. The connection carries no secret and is not encrypted: it belongs on
the private link between the hosts, as all traffic of the ranks does.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

BEAT_S = 2.0
LOST_S = 20.0
"""Without a beat for this long the other host counts as gone: a cable, a freeze, a power cut."""
HEALTH_S = 3.0
MAX_LINE = 65536


class Stop(Exception):
    """The end of this run: `code` 0 when it was asked for, else 1, and why."""

    def __init__(self, why: str, code: int = 1) -> None:
        super().__init__(why)
        self.why, self.code = why, code


@dataclass
class Peer:
    """The other end of one connection, and the part of a line that has come so far."""

    link: socket.socket
    rank: int | None = None
    heard: float = field(default_factory=time.monotonic)
    buffer: bytes = b""
    started: bool = False

    def tell(self, **message: object) -> None:
        """Send one line. A peer that cannot take it is found by its missing beats."""
        try:
            self.link.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.heard = float("-inf")

    def hear(self) -> list[dict]:
        """All whole lines that have come. Raises Stop when the connection has ended."""
        try:
            data = self.link.recv(MAX_LINE)
        except OSError as error:
            raise Stop(f"{self} broke the connection: {error.strerror}") from None
        if not data or len(self.buffer) > MAX_LINE:
            raise Stop(f"{self} closed the connection")
        self.heard = time.monotonic()
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        try:
            return [message for line in lines if isinstance(message := json.loads(line), dict)]
        except ValueError:
            raise Stop(f"{self} does not speak our protocol") from None

    def __str__(self) -> str:
        return "a stranger" if self.rank is None else f"host {self.rank}"


class Guard:
    """One host's part. `parts` names what all hosts have to agree on: model, release, arguments."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.parts: dict[str, str] = json.loads(options.parts)
        self.child: subprocess.Popen | None = None
        self.head_serves = False
        self.asked_to_stop = False
        self.selector = selectors.DefaultSelector()
        self.peers: list[Peer] = []
        self.last_beat = self.last_health = 0.0
        self.wake, self.waker = socket.socketpair()
        self.wake.setblocking(False)
        self.selector.register(self.wake, selectors.EVENT_READ)

    def say(self, text: str) -> None:
        """One line for the log of the instance."""
        print(f"rank guard {self.options.rank}: {text}", flush=True)

    def run(self) -> int:
        """Until the end; the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            if self.options.rank == 0:
                self._lead()
            else:
                self._follow()
        except Stop as stop:
            self.say(stop.why)
            for peer in self.peers:
                peer.tell(kind="stop", why=stop.why, code=stop.code)
            self._end_child()
            return stop.code
        raise AssertionError("a run ends with Stop")

    # The head.

    def _lead(self) -> None:
        listener = self._listener()
        self.selector.register(listener, selectors.EVENT_READ)
        deadline = time.monotonic() + self.options.join_s
        wanted = self.options.hosts - 1
        self.say(f"waiting for {wanted} host(s) on {self.options.meet}")
        while len(self._known()) < wanted:
            if time.monotonic() > deadline:
                missing = sorted(set(range(1, wanted + 1)) - {p.rank for p in self._known()})
                raise Stop(f"host(s) {missing} did not come within {self.options.join_s:.0f} s")
            for source in self._wait():
                if source is listener:
                    self._welcome(listener)
                else:
                    self._roll_call(source)
        self.selector.unregister(listener)
        listener.close()
        for peer in [one for one in self.peers if one.rank is None]:
            self._forget(peer)
        self.say("all hosts are here and agree; the workers start")
        self._tell_all(kind="start")
        while not all(peer.started for peer in self.peers):
            self._step()
        self.say("the head starts")
        self._start_child()
        while True:
            self._step()
            self._look_at_health()

    def _listener(self) -> socket.socket:
        host, port = _address(self.options.meet)
        listener = socket.socket(socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise Stop(f"cannot listen on {self.options.meet}: {error.strerror}") from None
        listener.listen(16)
        return listener

    def _welcome(self, listener: socket.socket) -> None:
        link, _ = listener.accept()
        link.settimeout(LOST_S)
        peer = Peer(link)
        self.peers.append(peer)
        self.selector.register(link, selectors.EVENT_READ, peer)

    def _roll_call(self, peer: Peer) -> None:
        try:
            messages = peer.hear()
        except Stop as gone:
            self.say(f"{gone.why} before the start")
            self._forget(peer)
            return
        for message in messages:
            if message.get("kind") != "hello":
                continue
            rank, theirs = message.get("rank"), message.get("parts") or {}
            differ = [name for name, mine in self.parts.items() if theirs.get(name) != mine]
            if differ:
                found = "; ".join(
                    f"{name}: {theirs.get(name)} there, {self.parts[name]} on the head"
                    for name in differ
                )
                raise Stop(f"host {rank} would serve something else ({found})")
            if rank in {one.rank for one in self.peers} or rank not in range(1, self.options.hosts):
                raise Stop(f"two hosts say that they are host {rank} of {self.options.hosts}")
            peer.rank = rank
            self.say(f"host {rank} is here")

    def _known(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.rank is not None]

    def _forget(self, peer: Peer) -> None:
        self.selector.unregister(peer.link)
        peer.link.close()
        self.peers.remove(peer)

    def _look_at_health(self) -> None:
        if time.monotonic() - self.last_health < HEALTH_S:
            return
        self.last_health = time.monotonic()
        serves = _answers(self.options.health)
        if serves != self.head_serves:
            self.head_serves = serves
            self.say("the server answers" if serves else "the server does not answer any more")
            self._tell_all(kind="health", serves=serves)

    # A worker.

    def _follow(self) -> None:
        self._serve_health()
        peer = self._reach_head()
        peer.tell(kind="hello", rank=self.options.rank, parts=self.parts)
        while self.child is None:
            self._step()
        peer.tell(kind="started")
        while True:
            self._step()

    def _reach_head(self) -> Peer:
        deadline = time.monotonic() + self.options.join_s
        self.say(f"looking for the head on {self.options.meet}")
        while True:
            try:
                link = socket.create_connection(_address(self.options.meet), timeout=LOST_S)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    said = error.strerror or "no answer"
                    raise Stop(
                        f"the head does not answer on {self.options.meet} ({said})"
                    ) from None
            self._pause()
        peer = Peer(link, rank=0)
        self.peers.append(peer)
        self.selector.register(link, selectors.EVENT_READ, peer)
        return peer

    def _serve_health(self) -> None:
        guard = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body, kind = guard.answer(self.path)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        try:
            server = http.server.ThreadingHTTPServer(_address(self.options.listen), Handler)
        except OSError as error:
            raise Stop(f"cannot listen on {self.options.listen}: {error.strerror}") from None
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def answer(self, path: str) -> tuple[int, bytes, str]:
        """What the worker's port says: (status, body, content type)."""
        runs = self.child is not None and self.child.poll() is None
        good = runs and self.head_serves
        if path == "/metrics":
            text = (
                "# HELP exl3_rank_up Whether the rank of this host runs and the head serves.\n"
                "# TYPE exl3_rank_up gauge\n"
                f'exl3_rank_up{{rank="{self.options.rank}"}} {int(good)}\n'
            )
            return 200, text.encode(), "text/plain; version=0.0.4"
        if not good:
            why = "the head does not serve yet" if runs else "the rank does not run"
            return 503, json.dumps({"error": why}).encode(), "application/json"
        if path == "/v1/models":
            models = {"object": "list", "data": [{"id": self.options.served_name}]}
            return 200, json.dumps(models).encode(), "application/json"
        return (200 if path == "/health" else 404), b"{}", "application/json"

    # Both.

    def _step(self) -> None:
        """Wait a moment and act on what came. Raises Stop at the end of the run."""
        for peer in self._wait():
            for message in peer.hear():
                self._act(peer, message)

    def _act(self, peer: Peer, message: dict) -> None:
        kind = message.get("kind")
        if kind == "stop":
            # 1 even when that was asked for there: here it was not, so this host may come back.
            raise Stop(f"{peer} stops: {message.get('why')}")
        if kind == "start" and self.child is None:
            self._start_child()
        elif kind == "started":
            peer.started = True
        elif kind == "health":
            self.head_serves = bool(message.get("serves"))

    def _wait(self) -> list:
        """Sources that have something; also beats, and looks whether all still live."""
        events = self.selector.select(timeout=0.5)
        if self.asked_to_stop:
            raise Stop("stopped on request", 0)
        now = time.monotonic()
        if now - self.last_beat > BEAT_S:
            self.last_beat = now
            self._tell_all(kind="beat")
        for peer in self.peers:
            if now - peer.heard > LOST_S:
                raise Stop(f"{peer} has not been heard for {LOST_S:.0f} s")
        if self.child is not None and (code := self.child.poll()) is not None:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
            raise Stop(f"the rank of host {self.options.rank} {how}")
        return [key.data or key.fileobj for key, _ in events if key.fileobj is not self.wake]

    def _pause(self) -> None:
        time.sleep(0.5)
        if self.asked_to_stop:
            raise Stop("stopped on request", 0)

    def _tell_all(self, **message: object) -> None:
        for peer in self.peers:
            peer.tell(**message)

    def _start_child(self) -> None:
        try:
            self.child = subprocess.Popen(self.options.command)
        except OSError as error:
            raise Stop(f"{self.options.command[0]} cannot be run: {error.strerror}") from None

    def _end_child(self) -> None:
        if self.child is None or self.child.poll() is not None:
            return
        self.child.terminate()
        try:
            self.child.wait(self.options.grace_s)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()

    def _on_signal(self, *_: object) -> None:
        self.asked_to_stop = True
        self.waker.send(b"x")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _answers(url: str) -> bool:
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="rank_guard", allow_abbrev=False)
    made.add_argument("--rank", type=int, required=True, help="this host, 0 is the head")
    made.add_argument("--hosts", type=int, required=True, help="hosts in all")
    made.add_argument("--meet", required=True, help="ADDRESS:PORT of the head's guard")
    made.add_argument("--parts", required=True, help="JSON: what all hosts have to agree on")
    made.add_argument("--health", default="", help="head: URL that says that the server serves")
    made.add_argument("--listen", default="", help="worker: ADDRESS:PORT for its state")
    made.add_argument("--served-name", default="", help="worker: the model's name")
    made.add_argument("--join-s", type=float, default=900.0)
    made.add_argument("--grace-s", type=float, default=30.0)
    made.add_argument("command", nargs=argparse.REMAINDER)
    return made


def main() -> int:
    """Entry point."""
    options = parser().parse_args()
    if options.command[:1] == ["--"]:
        options.command = options.command[1:]
    return Guard(options).run()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # A thread that answers a last question must not hold the process up.
    os._exit(code)
