"""The Docker Engine, spoken to over its own socket.

Standard library only, since this runs on hosts with a bare Python. What is sent is JSON that we
built ourselves: no value passes through a shell or a command line. The engine's own error text is
kept, because it says best what is wrong with a container that it refuses to create.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import struct
import urllib.parse
from collections.abc import Iterator
from typing import Any

from .errors import HostError

DEFAULT_SOCKET = "/var/run/docker.sock"
# 20.10, the oldest engine that is tested; CDI devices came with 25.
OLDEST_API = (1, 41)
CDI_API = (1, 44)


class EngineError(HostError):
    """The engine refused a request; `status` is its HTTP status."""

    def __init__(self, status: int, message: str, fix: str = "") -> None:
        super().__init__(message, fix)
        self.status = status


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("docker", timeout=timeout_s)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def socket_path(docker_host: str | None = None) -> str:
    """Path of the engine's socket: the one asked for, else DOCKER_HOST, else the default.

    Raises HostError for an engine on another machine: containers are made where Ansible runs.
    """
    host = docker_host or os.environ.get("DOCKER_HOST") or f"unix://{DEFAULT_SOCKET}"
    if not host.startswith("unix://"):
        raise HostError(
            f"DOCKER_HOST is {host}, and only a local socket can be used.",
            "Put the other machine into the inventory instead; unset DOCKER_HOST here.",
        )
    return host.removeprefix("unix://")


class Engine:
    """One engine. Every method raises EngineError with the engine's own words."""

    def __init__(self, docker_host: str | None = None) -> None:
        self.socket = socket_path(docker_host)
        self._version: dict | None = None

    def __str__(self) -> str:
        return f"unix://{self.socket}"

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: dict | None = None,
        timeout_s: float | None = 60,
        versioned: bool = True,
    ) -> tuple[int, bytes]:
        """One request; (status, body). Raises HostError when nobody answers at the socket."""
        prefix = f"/v{self.version()['ApiVersion']}" if versioned else ""
        target = prefix + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        headers, data = {}, None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        connection = _UnixConnection(self.socket, timeout_s)
        try:
            connection.request(method, target, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except FileNotFoundError:
            raise HostError(
                f"no Docker engine: there is no socket {self.socket}.",
                "Install one (exl3_engine_manage: true), or use the native runtime.",
            ) from None
        except PermissionError:
            raise HostError(
                f"the Docker engine's socket {self.socket} may not be used by this user.",
                "Run the play with become, or put the user into the group docker.",
            ) from None
        except ConnectionRefusedError:
            raise HostError(
                f"the Docker engine does not run: nobody answers at {self.socket}.",
                "Start it: systemctl start docker.",
            ) from None
        except TimeoutError:
            raise HostError(
                f"the Docker engine at {self.socket} does not answer within {timeout_s:.0f} s "
                f"({method} {path}).",
                "See its log: journalctl -u docker.",
            ) from None
        except (ConnectionError, http.client.HTTPException) as error:
            raise HostError(
                f"the Docker engine at {self.socket} broke off ({method} {path}: {error}).",
                "It was restarted, or it crashed: journalctl -u docker. Then deploy again.",
            ) from None
        finally:
            connection.close()

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """One request that has to succeed; its JSON, or None where the answer is empty."""
        status, data = self.request(method, path, body, **options)
        if status >= 400:
            raise EngineError(status, _message(data) or f"{method} {path} answers {status}")
        return json.loads(data) if data.strip() else None

    def version(self) -> dict:
        """What the engine says about itself: Version, ApiVersion, Os, Arch, ..."""
        if self._version is None:
            found = self.call("GET", "/version", versioned=False)
            api = tuple(int(part) for part in found["ApiVersion"].split("."))
            if api < OLDEST_API:
                raise HostError(
                    f"the Docker engine {found.get('Version')} is too old (API "
                    f"{found['ApiVersion']}, needed {OLDEST_API[0]}.{OLDEST_API[1]}).",
                    "Install Docker 20.10 or newer; 25 or newer for GPUs.",
                )
            self._version = found
        return self._version

    def api(self) -> tuple[int, ...]:
        """The API version as numbers."""
        return tuple(int(part) for part in self.version()["ApiVersion"].split("."))

    def has_cdi(self) -> bool:
        """Whether CDI devices can be handed over: known since 25, switched on since 28.2."""
        return bool((self.call("GET", "/info") or {}).get("CDISpecDirs"))

    def image(self, reference: str) -> dict | None:
        """`docker image inspect`, None where the image is not there."""
        quoted = urllib.parse.quote(reference, safe="/:@")
        return self._found("GET", f"/images/{quoted}/json")

    def container(self, name: str) -> dict | None:
        """`docker inspect` of a container, None where there is none of that name."""
        return self._found("GET", f"/containers/{name}/json")

    def containers(self, label: str) -> list[dict]:
        """Every container with this label (`name=value`), running or not, the newest first."""
        filters = json.dumps({"label": [label]})
        return self.call("GET", "/containers/json", query={"all": "1", "filters": filters})

    def create(self, name: str, body: dict) -> str:
        """Create a container, which does not start it; its id."""
        return self.call("POST", "/containers/create", body, query={"name": name})["Id"]

    def start(self, name: str) -> None:
        """Start a container; one that runs already is left alone."""
        self.call("POST", f"/containers/{name}/start")

    def stop(self, name: str, grace_s: int) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; returns when it has ended."""
        query = {"t": str(grace_s)}
        self.call("POST", f"/containers/{name}/stop", query=query, timeout_s=grace_s + 60)

    def remove(self, name: str) -> bool:
        """Remove a container that does not run; False where there is none."""
        return self._found("DELETE", f"/containers/{name}", query={"v": "1"}) is not None

    def logs(self, name: str, tail: int | None = None, stamped: bool = False) -> list[str]:
        """Lines of a container's output, both streams in the order they were written."""
        query = {"stdout": "1", "stderr": "1", "tail": str(tail) if tail else "all"}
        query |= {"timestamps": "1"} if stamped else {}
        status, data = self.request("GET", f"/containers/{name}/logs", query=query)
        if status >= 400:
            raise EngineError(status, _message(data) or f"no log of {name}")
        text = b"".join(_frames(data)).decode(errors="replace")
        return text.splitlines()

    def pull(self, reference: str, timeout_s: float | None = None) -> None:
        """Fetch an image by digest. Raises EngineError with the registry's reason."""
        name, _, digest = reference.partition("@")
        query = {"fromImage": name, "tag": digest} if digest else {"fromImage": name}
        status, data = self.request("POST", "/images/create", query=query, timeout_s=timeout_s)
        if status >= 400:
            raise EngineError(status, _message(data) or f"pull of {reference} answers {status}")
        # The engine answers 200 before it begins; what went wrong later stands in the stream.
        for line in data.splitlines():
            with contextlib.suppress(ValueError):
                if "error" in (said := json.loads(line)):
                    raise EngineError(500, said["error"])

    def remove_image(self, reference: str) -> bool:
        """Remove an image nobody uses; False where it is not there."""
        quoted = urllib.parse.quote(reference, safe="/:@")
        return self._found("DELETE", f"/images/{quoted}") is not None

    def pids(self, name: str) -> list[int]:
        """Process ids (of the host) of a running container, its init first; empty if it rests."""
        found = self.container(name)
        if found is None or not found["State"]["Running"]:
            return []
        first = found["State"]["Pid"]
        status, data = self.request(
            "GET", f"/containers/{name}/top", query={"ps_args": "-eo pid,ppid"}
        )
        if status >= 400:
            return [first]
        table = json.loads(data)
        column = table["Titles"].index("PID")
        others = sorted(int(row[column]) for row in table["Processes"])
        return [first, *(pid for pid in others if pid != first)]

    def _found(self, method: str, path: str, **options: Any) -> Any:
        try:
            return self.call(method, path, **options) or {}
        except EngineError as error:
            if error.status == 404:
                return None
            raise


def _message(data: bytes) -> str:
    try:
        return json.loads(data)["message"].strip()
    except (ValueError, KeyError, TypeError, AttributeError):
        return data.decode(errors="replace").strip()[:500]


def _frames(data: bytes) -> Iterator[bytes]:
    """The payloads of the engine's multiplexed stream: 8 bytes of header before each."""
    at = 0
    while at + 8 <= len(data):
        stream, length = struct.unpack(">BxxxI", data[at : at + 8])
        if stream > 2:
            yield data[at:]
            return
        yield data[at + 8 : at + 8 + length]
        at += 8 + length
