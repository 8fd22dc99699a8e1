"""Checkpoints on the Hub: headers over HTTP at a pinned commit, the cache when offline.

The Hub is a small server on this machine that answers what huggingface_hub asks; the client is the
real one. The server counts the bytes it sends, because reading only headers is the whole point.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from checkpoint_files import Stored, read_tensors, write_tensors

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BALLAST_BYTES = 64 << 20
FILES = ("config.json", "quantization_config.json", "model.safetensors")


class Hub(BaseHTTPRequestHandler):
    folder: Path
    sent_bytes = 0

    def log_message(self, *_):
        pass

    def entries(self) -> list[dict]:
        sizes = [(name, (self.folder / name).stat().st_size) for name in FILES]
        return [
            {"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in sizes
        ]

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            Hub.sent_bytes += len(body)

    def answer_json(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        wanted = unquote(self.rfile.read(length).decode())
        self.answer_json([e for e in self.entries() if e["path"] in wanted])

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/some/model"):
            if "/tree/" in path:
                return self.answer_json(self.entries())
            siblings = [{"rfilename": e["path"], "size": e["size"]} for e in self.entries()]
            return self.answer_json(
                {"id": "some/model", "modelId": "some/model", "sha": COMMIT, "siblings": siblings}
            )
        name = path.rpartition("/")[2]
        if f"/some/model/resolve/{COMMIT}/" in path and name in FILES:
            return self.answer_file((self.folder / name).read_bytes())
        return self.answer(404, b"{}", X_Error_Code="RepoNotFound")

    def answer_file(self, content: bytes) -> None:
        common = {"ETag": '"1"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        span = self.headers.get("Range", "").removeprefix("bytes=")
        if not span:
            return self.answer(200, content, **common)
        first, _, last = span.partition("-")
        begin, end = int(first), min(int(last or len(content)), len(content) - 1)
        place = f"bytes {begin}-{end}/{len(content)}"
        return self.answer(206, content[begin : end + 1], Content_Range=place, **common)

    do_HEAD = do_GET


@pytest.fixture
def hub(checkout: Path, tmp_path: Path):
    """Address of a Hub with one repository, some/model: a small model and 64 MiB of ballast."""
    folder = tmp_path / "repository"
    shutil.copytree(checkout / "tests" / "fixtures" / "tiny-llama-mul1-2.5", folder)
    tensors = read_tensors(folder / "model.safetensors")
    tensors["ballast"] = Stored("U8", (BALLAST_BYTES,), bytes(BALLAST_BYTES))
    write_tensors(folder / "model.safetensors", tensors)
    Hub.folder, Hub.sent_bytes = folder, 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def inspect(checkout: Path, cache: Path, *arguments: str, **environment: str):
    """Run in a process of its own, since huggingface_hub reads its environment once."""
    proxies = {"HTTP_PROXY": "", "http_proxy": "", "NO_PROXY": "*", "no_proxy": "*"}
    return subprocess.run(
        [sys.executable, "-m", "exl3_plugin.inspect", *arguments, "--json"],
        capture_output=True,
        text=True,
        cwd=checkout,
        env={**os.environ, **proxies, "HF_HOME": str(cache), "HF_TOKEN": "", **environment},
    )


def test_headers_over_http(checkout, hub, tmp_path):
    result = inspect(checkout, tmp_path / "cache", "some/model", HF_ENDPOINT=hub)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["revision"] == COMMIT and summary["source"] == "some/model"
    assert summary["bytes"] == 779_836 + BALLAST_BYTES
    assert list(summary["bits_histogram"]) == ["2.5", "4"]
    assert any("markers were not compared" in warning for warning in summary["warnings"])
    assert Hub.sent_bytes < BALLAST_BYTES / 4


def test_unknown_repository(checkout, hub, tmp_path):
    result = inspect(checkout, tmp_path, "some/other", HF_ENDPOINT=hub)
    assert result.returncode == 1
    assert "no folder some/other is here and the Hub refuses some/other" in result.stderr


def test_no_network(checkout, tmp_path):
    result = inspect(checkout, tmp_path, "some/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert result.returncode == 1
    assert "the Hub cannot be reached" in result.stderr and "some/model" in result.stderr
    assert "Traceback" not in result.stderr


def test_offline_reads_the_cache(checkout, tmp_path):
    result = inspect(checkout, tmp_path, "some/model", HF_HUB_OFFLINE="1")
    assert result.returncode == 1 and "is not in the local cache" in result.stderr
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in FILES:
        source = checkout / "tests" / "fixtures" / "tiny-llama-3inst-3.3" / name
        (snapshot / name).symlink_to(source)
    result = inspect(checkout, tmp_path, "some/model", HF_HUB_OFFLINE="1")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["revision"] == COMMIT
