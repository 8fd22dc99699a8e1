"""Hands this machine's pip settings to an image build, without a trace of them in the image.

`relay()` writes a pip.conf and a CA bundle that the build mounts as secrets. Indexes by URL go
through as they are. Folders of wheels (find-links, file:// indexes) lie outside of the build, so
they are served on a loopback port for as long as it runs; builds use the host's network.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

PASSED = (
    "index-url",
    "extra-index-url",
    "find-links",
    "trusted-host",
    "default-timeout",
    "retries",
)
CA = "/run/secrets/ca"


def settings() -> dict[str, list[str]]:
    """pip's settings of this machine, from its files and its environment; the latter win."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    found: dict[str, list[str]] = {}
    for line in sorted(done.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = value.strip("'\"").replace("\\n", " ").split()
    return found


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None:
        """A download is no news."""


def _local(place: str) -> Path | None:
    if place.startswith("file://"):
        return Path(unquote(urlparse(place).path))
    return Path(place) if place.startswith(("/", "./", "../")) else None


@contextlib.contextmanager
def relay(folder: Path) -> Iterator[list[str]]:
    """Arguments for `docker build` that bring pip.conf and ca into it; servers end with the block.

    Wheels beside a file:// index (../files) must be reachable too, so its parent is served.
    """
    found, servers, lines = settings(), [], ["[global]"]
    trusted: set[str] = set()
    for name in PASSED:
        values = []
        for place in found.get(name, []):
            path = _local(place)
            if path is None:
                values.append(place)
                continue
            root = path.parent if place.startswith("file://") else path
            handler = functools.partial(_Quiet, directory=str(root))
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            servers.append(server)
            tail = "" if root == path else f"{path.name}/"
            values.append(f"http://127.0.0.1:{server.server_port}/{tail}")
            trusted.add("127.0.0.1")
        if name == "trusted-host":
            values += sorted(trusted)
        if values:
            lines.append(f"{name} = {' '.join(values)}")
    ca = found.get("cert", [os.environ.get("SSL_CERT_FILE", "")])[0]
    secrets = []
    if ca and Path(ca).is_file():
        lines.append(f"cert = {CA}")
        secrets += ["--secret", f"id=ca,src={ca}"]
    conf = folder / "pip.conf"
    conf.write_text("\n".join(lines) + "\n")
    conf.chmod(0o600)
    try:
        yield [*secrets, "--secret", f"id=pip,src={conf}"]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
