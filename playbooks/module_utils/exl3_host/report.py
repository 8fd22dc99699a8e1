"""One archive for a bug report: what the host is, what was planned, what runs, what was logged.

Everything is text and passes through the redaction before it is written: tokens and keys, host and
user names, addresses, serial numbers and the tails of GPU UUIDs. A list of its files goes first, so
that a person can look before sending it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import io
import json
import os
import platform
import re
import socket
import tarfile
import time
from pathlib import Path

from . import engine_host, facts, hints, spec, status
from .errors import HostError
from .redact import redact, redact_text

LOG_BYTES = 256 * 1024
_UUID = re.compile(r"\b(GPU|MIG)-([0-9a-fA-F]{8})-[0-9a-fA-F-]{22,27}")
_IPV4 = re.compile(r"\b(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}\b(?!\.\d)")
_IPV6 = re.compile(r"\b(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}\b")
_MAC = re.compile(r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b")
_SERIAL = re.compile(r"(?i)(serial(?: number)?[\"']?\s*[:=]\s*[\"']?)([\w-]{6,})")


def anonymous(text: str, names: tuple[str, ...], secrets: tuple[str, ...]) -> str:
    """`text` without secrets and without what tells whose host it is."""
    text = redact_text(text, secrets)
    text = _UUID.sub(r"\1-\2-…", text)
    text = _MAC.sub("<mac>", text)
    text = _IPV6.sub("<ipv6>", text)
    text = _IPV4.sub("<ipv4>", text)
    text = _SERIAL.sub(r"\1<serial>", text)
    for name in names:
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", "<name>", text)
    return text


def names_here() -> tuple[str, ...]:
    """Names of this host and user that are worth hiding; `root` and `localhost` are not."""
    found = {socket.gethostname(), socket.getfqdn(), platform.node()}
    found |= {one.partition(".")[0] for one in found}
    with contextlib.suppress(KeyError, OSError):
        found.add(getpass.getuser())
    dull = {"", "root", "localhost", "localhost.localdomain", "vm", "debian", "ubuntu"}
    return tuple(sorted((one for one in found - dull if len(one) > 2), key=len, reverse=True))


def collect(store: Path, checkout: Path) -> dict[str, str]:
    """Name to text of everything that belongs to a report, not redacted yet."""
    files = {
        "facts.json": _text(facts.collect(store=store)),
        "engine.json": _text(engine_host.look()),
        "versions.json": _text(_versions(checkout)),
    }
    names = sorted(path.name for path in (store / "run").glob("*"))
    rows = [dataclasses.asdict(status.look(spec.Paths(store, name))) for name in names]
    files["status.json"] = _text(rows)
    for folder in ("plans", "peers", "choices", "calibration", "bench"):
        for path in sorted((store / folder).rglob("*.json")):
            files[str(path.relative_to(store))] = _read(path)
    for name in names:
        paths = spec.Paths(store, name)
        for path in (paths.spec, paths.state, paths.ready, paths.pending):
            if path.is_file():
                files[f"run/{name}/{path.name}"] = _read(path)
        for one in spec.releases(paths):
            brief = {key: one[key] for key in ("number", "id", "time", "image", "venv")}
            files[f"run/{name}/releases/{one['number']}.json"] = _text(brief)
    for path in sorted((store / "logs").rglob("*.log")):
        text = _tail(path)
        files[str(path.relative_to(store))] = text
        known = hints.match(hints.last_start(text.splitlines()))
        if known:
            files[f"{path.relative_to(store)}.hint"] = f"{known[0].id}: {known[0]}\n"
    return files


def write(store: Path, checkout: Path, out: Path) -> list[str]:
    """Write the archive; the names in it. Raises HostError where it cannot be written."""
    secrets = _secrets(store)
    names = names_here()
    files = {}
    for name, text in collect(store, checkout).items():
        if name.endswith(".json"):
            with contextlib.suppress(ValueError):
                text = _text(redact(json.loads(text), secrets))
        files[name] = anonymous(text, names, secrets)
    listing = "".join(f"{len(text):>9}  {name}\n" for name, text in sorted(files.items()))
    files = {"CONTENTS": listing, **files}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(out, "w:gz") as archive:
            for name, text in files.items():
                data = text.encode()
                info = tarfile.TarInfo(f"exl3-report/{name}")
                info.size, info.mode, info.mtime = len(data), 0o644, int(time.time())
                archive.addfile(info, io.BytesIO(data))
    except OSError as error:
        raise HostError(
            f"the report {out} cannot be written: {error.strerror}.", "Name another place."
        ) from None
    return list(files)


def _secrets(store: Path) -> tuple[str, ...]:
    """Keys that servers here were given, to be masked wherever they stand."""
    found = set()
    for path in (store / "run").glob("*/spec.json"):
        one = spec.read_json(path) or {}
        files = list((one.get("secret_env") or {}).values())
        files.append((one.get("container") or {}).get("api_key_file"))
        for file in filter(None, files):
            try:
                found.add(Path(file).read_text().strip())
            except OSError:
                continue
    return tuple(sorted(found - {""}))


def _versions(checkout: Path) -> dict:
    commit = checkout / ".git" / "HEAD"
    head = commit.read_text().strip() if commit.is_file() else None
    if head and head.startswith("ref: "):
        ref = checkout / ".git" / head[5:]
        head = ref.read_text().strip() if ref.is_file() else head
    return {"commit": head, "python": platform.python_version(), "kernel": platform.release()}


def _text(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=True, default=str) + "\n"


def _read(path: Path) -> str:
    return path.read_text(errors="replace")


def _tail(path: Path) -> str:
    with open(path, "rb") as log:
        size = os.fstat(log.fileno()).st_size
        log.seek(max(0, size - LOG_BYTES))
        return log.read().decode(errors="replace")
