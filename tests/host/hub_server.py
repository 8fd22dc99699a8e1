"""A Hub of one repository on this machine, for the real client.

Files of at least `LFS_BYTES` are listed as the Hub lists LFS files (with their SHA-256), others
with git's blob digest. Knobs: a gated repository, a file that is served changed, a download that
stands still or breaks once.
"""

import contextlib
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/little"
LFS_BYTES = 10_000


@dataclass
class Hub:
    """What the server answers with, and what it was asked."""

    folder: Path
    address: str = ""
    token: str | None = None
    changed: dict[str, bytes] = field(default_factory=dict)
    blob_ids: dict[str, str] = field(default_factory=dict)
    stall_once: threading.Event = field(default_factory=threading.Event)
    break_after: int | None = None
    released: threading.Event = field(default_factory=threading.Event)
    asked: list[str] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)

    def names(self) -> list[str]:
        return sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*.*"))

    def entry(self, name: str) -> dict:
        data = (self.folder / name).read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry = {"rfilename": name, "size": len(data), "blobId": self.blob_ids.get(name, blob)}
        if len(data) >= LFS_BYTES:
            digest = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
        return entry


@contextlib.contextmanager
def serve(folder: Path):
    """A running Hub; its address is in `Hub.address`."""
    hub = Hub(folder)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def give(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if len(body) > 4096 and hub.stall_once.is_set():
                hub.stall_once.clear()
                self.wfile.write(body[:4096])
                self.wfile.flush()
                hub.released.wait(30)
                return
            cut = hub.break_after
            if cut is not None and len(body) > cut:
                hub.break_after = None
                self.wfile.write(body[:cut])
                self.wfile.flush()
                self.connection.close()
                return
            self.wfile.write(body)

        def give_json(self, value: object) -> None:
            self.give(200, json.dumps(value).encode(), Content_Type="application/json")

        def do_POST(self):
            length = int(self.headers.get("Content-Length", 0))
            wanted = unquote(self.rfile.read(length).decode())
            entries = [hub.entry(n) for n in hub.names() if n in wanted]
            self.give_json([as_path(e) for e in entries])

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(path)
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.give(401, b"{}", X_Error_Code="GatedRepo")
            if path.startswith(f"/api/models/{REPO}"):
                revision = re.search(r"/(?:revision|tree)/([^/]+)", path)
                if revision and revision[1] not in ("main", COMMIT):
                    return self.give(404, b"{}", X_Error_Code="RevisionNotFound")
                entries = [hub.entry(n) for n in hub.names()]
                if "/tree/" in path:
                    return self.give_json([as_path(e) for e in entries])
                return self.give_json(
                    {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": entries}
                )
            found = re.fullmatch(rf"/{REPO}/resolve/(?:main|{COMMIT})/(.+)", path)
            if found is None or found[1] not in hub.names():
                code = "EntryNotFound" if found else "RepoNotFound"
                return self.give(404, b"{}", X_Error_Code=code)
            return self.give_file(found[1])

        def give_file(self, name: str) -> None:
            listed = (hub.folder / name).read_bytes()
            content = hub.changed.get(name, listed)
            etag = hashlib.sha256(content).hexdigest()
            common = {"ETag": f'"{etag}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
            span = self.headers.get("Range", "").removeprefix("bytes=")
            if not span or self.command == "HEAD":
                return self.give(200, content, **common)
            first, _, last = span.partition("-")
            begin, end = int(first), min(int(last or len(content)), len(content) - 1)
            hub.begins.append(begin)
            place = f"bytes {begin}-{end}/{len(content)}"
            return self.give(206, content[begin : end + 1], Content_Range=place, **common)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()


def as_path(entry: dict) -> dict:
    """An entry of a repository listing as an entry of a tree listing."""
    out = {"type": "file", "path": entry["rfilename"], "size": entry["size"]}
    out["oid"] = entry["blobId"]
    if "lfs" in entry:
        out["lfs"] = {"oid": entry["lfs"]["sha256"], "size": entry["size"], "pointerSize": 130}
    return out
