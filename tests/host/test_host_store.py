"""The model store against a Hub on this machine: what is locked, interrupted, full, gated, shared.

The client is the real one, in processes of its own. Small disks and read-only mounts are real
mounts in a mount namespace.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import hub_server
import namespaces
import pytest
from exl3_host import fetch, lock, lock_make, store
from exl3_host.errors import HostError

REVISION = hub_server.COMMIT
BIG_BYTES = 3_000_000


@pytest.fixture
def repository(checkout: Path, tmp_path: Path) -> Path:
    """A small model and a large file, as a repository."""
    folder = tmp_path / "repository"
    shutil.copytree(checkout / "tests/fixtures/tiny-llama-mul1-2.5", folder)
    (folder / "golden.npz").unlink()
    (folder / "extra.bin").write_bytes(os.urandom(BIG_BYTES))
    return folder


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch):
    with hub_server.serve(repository) as one:
        monkeypatch.setenv("HF_ENDPOINT", one.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "5")
        yield one


def request(tmp_path: Path, locked: Path | None = None, **changes) -> store.Request:
    source = {"kind": "hub", "repo": hub_server.REPO, "revision": REVISION}
    values = {
        "source": source,
        "quantize": None,
        "folder": tmp_path / "store/models/little-0123",
        "store": tmp_path / "store",
        "python": Path(sys.executable),
        "lock": None if locked is None else lock_make.lock_folder(locked),
    }
    return store.Request(**{**values, **changes})


def test_what_is_locked_is_fetched_and_nothing_else(tmp_path, hub, repository) -> None:
    wanted = request(tmp_path, repository)
    (repository / "surprise.bin").write_bytes(b"added behind the lock's back")
    changed, steps = store.ensure(wanted)
    assert changed and steps[-1] == "writing the manifest"
    names = {p.name for p in wanted.folder.iterdir()}
    assert names == set(wanted.lock["files"]) | {store.MANIFEST}
    for name in wanted.lock["files"]:
        assert (wanted.folder / name).read_bytes() == (repository / name).read_bytes()
    # Another user reads it, and nobody writes it.
    assert {p.stat().st_mode & 0o777 for p in wanted.folder.iterdir()} == {0o444}
    assert wanted.folder.stat().st_mode & 0o777 == 0o755
    asked = len(hub.asked)
    assert store.ensure(wanted, verify=True) == (False, ["every file verified"])
    assert len(hub.asked) == asked, "a finished model asks nobody"


def test_a_wrong_digest_is_named_and_never_served(tmp_path, hub, repository) -> None:
    wanted = request(tmp_path, repository)
    honest = (repository / "extra.bin").read_bytes()
    hub.changed["extra.bin"] = honest[:-1] + b"!"
    with pytest.raises(HostError, match=r"not what the recipe is locked to: extra.bin has SHA-256"):
        store.ensure(wanted)
    assert not wanted.folder.exists() and not (wanted.partial / "extra.bin").exists()
    hub.changed.clear()
    assert store.ensure(wanted)[0] is True
    assert (wanted.folder / "extra.bin").read_bytes() == honest


def test_a_download_that_stands_still_is_taken_up_where_it_was(
    tmp_path, hub, repository, monkeypatch
) -> None:
    monkeypatch.setattr(fetch, "HUB_STALL_S", 3)
    hub.stall_once.set()
    wanted = request(tmp_path, repository)
    changed, steps = store.ensure(wanted)
    assert changed and any(step.endswith("attempt 2") for step in steps)
    assert store.check_folder(wanted.folder, verify=True) is None


def test_an_interrupted_download_goes_on(tmp_path, hub, repository) -> None:
    """The connection breaks in the middle of a file; the rest comes by range."""
    # The client writes down what it has every 10 MiB.
    (repository / "extra.bin").write_bytes(os.urandom(24 << 20))
    wanted = request(tmp_path, repository)
    hub.break_after = 22 << 20
    assert store.ensure(wanted)[0] is True
    assert hub.break_after is None and max(hub.begins, default=0) >= 10 << 20
    assert (wanted.folder / "extra.bin").read_bytes() == (repository / "extra.bin").read_bytes()


def test_nothing_arrives_at_all(tmp_path, repository, monkeypatch, hub) -> None:
    monkeypatch.setattr(fetch, "HUB_STALL_S", 1)
    monkeypatch.setattr(fetch, "HUB_ATTEMPTS", 1)
    hub.stall_once.set()
    with pytest.raises(HostError, match="nothing arrived for 1 s, 1 times"):
        store.ensure(request(tmp_path, repository))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"revision": "0" * 40}, r"is not locked: no commit is pinned.\nRun exl3ctl recipe lock"),
        ({"gated": True}, r"is gated: its licence has to be accepted.\nRead it on its page"),
        ({"repo": "someone/else"}, "is private, gated, or does not exist"),
        ({"revision": "f" * 40}, "has no commit ffff"),
    ],
)
def test_sources_that_are_refused(tmp_path, hub, changes: dict, message: str) -> None:
    source = {"kind": "hub", "repo": hub_server.REPO, "revision": REVISION, **changes}
    with pytest.raises(HostError, match=message):
        store.ensure(request(tmp_path, source=source))


def test_refusals_come_in_check_mode_too(tmp_path, hub) -> None:
    unpinned = {"kind": "hub", "repo": hub_server.REPO, "revision": "0" * 40}
    with pytest.raises(HostError, match="is not locked"):
        store.ensure(request(tmp_path, source=unpinned), is_check=True)
    with pytest.raises(HostError, match="needs a Hub token and no file is named"):
        store.ensure(request(tmp_path, needs_token=True), is_check=True)
    changed, steps = store.ensure(request(tmp_path), is_check=True)
    assert changed and steps == [f"would download into {tmp_path}/store/models/little-0123"]
    assert hub.asked == [] and not (tmp_path / "store").exists()


def test_offline_asks_nobody(tmp_path, hub) -> None:
    with pytest.raises(HostError, match=r"exl3_offline is set and someone/little is not in the"):
        store.ensure(request(tmp_path, offline=True))
    assert hub.asked == []


def test_a_token_file_is_private(tmp_path, hub) -> None:
    token = tmp_path / "token"
    for content, mode, message in (
        (None, 0, "cannot be read: No such file"),
        ("hf_x", 0o644, r"can be read by others \(mode 0644\).\nchmod 600"),
        ("\n", 0o600, "is empty"),
    ):
        if content is not None:
            token.write_text(content)
            token.chmod(mode)
        with pytest.raises(HostError, match=message):
            store.ensure(request(tmp_path, hf_token_file=str(token)))
    assert hub.asked == []


def test_a_secret_shows_nowhere(tmp_path, hub, repository, monkeypatch) -> None:
    """A gated model with a canary token: outputs, logs, files, arguments and environments."""
    canary = "hf_Canary" + os.urandom(12).hex()
    hub.token = canary
    monkeypatch.setenv("HF_TOKEN", "hf_another_token_of_the_caller")
    source = {"kind": "hub", "repo": hub_server.REPO, "revision": REVISION, "gated": True}
    options = {"source": source, "licenses": (hub_server.REPO,)}
    with pytest.raises(HostError, match=r"is gated\.\nAccept its licence"):
        store.ensure(request(tmp_path, repository, **options))
    token = tmp_path / "token"
    token.write_text(canary + "\n")
    token.chmod(0o600)
    seen, stop = [], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            for entry in Path("/proc").glob("[0-9]*"):
                for name in ("cmdline", "environ"):
                    try:
                        text = (entry / name).read_bytes()
                    except OSError:
                        continue
                    if canary.encode() in text:
                        seen.append(f"{entry.name}/{name}")
                    elif b"_HUB_DOWNLOAD" in text or b"snapshot_download" in text:
                        seen.append("downloader")
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    told: list[str] = []
    try:
        wanted = request(tmp_path, repository, hf_token_file=str(token), **options)
        changed, steps = store.ensure(wanted, tell=told.append)
    finally:
        stop.set()
        watcher.join()
    assert changed and set(seen) == {"downloader"}, "the watcher saw the program, and no token"
    assert not any(canary in text for text in (*steps, *told, wanted.log.read_text()))
    for path in [*tmp_path.joinpath("store").rglob("*"), *tmp_path.joinpath("hf").rglob("*")]:
        assert not path.is_file() or canary.encode() not in path.read_bytes(), path


IN_NAMESPACE = """
import json, os, sys
from pathlib import Path
from exl3_host import lock_make, store
from exl3_host.errors import HostError
given = json.loads(sys.argv[1])
folder = Path(given["store"])
request = store.Request(
    source={"kind": "hub", "repo": "someone/little", "revision": given["revision"]}, quantize=None,
    folder=folder / "models" / "little-0123", store=folder, python=Path(sys.executable),
    lock=lock_make.lock_folder(Path(given["locked"])) if given["locked"] else None)
try:
    print(json.dumps(store.ensure(request, verify=True)[0]))
except HostError as error:
    print(json.dumps([error.message, error.fix, sorted(p.name for p in folder.iterdir())]))
"""


def in_namespace(mount: str, folder: Path, locked: Path | None = None):
    """`store.ensure` in a mount namespace where `mount` has been run; its answer."""
    given = {"store": str(folder), "revision": REVISION, "locked": locked and str(locked)}
    script = f'{mount} && exec "$@"'
    command = [*namespaces.prefix("mount"), "sh", "-c", script, "sh"]
    command += [sys.executable, "-c", IN_NAMESPACE, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_disk_that_is_too_small(tmp_path, hub, repository) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    message, fix, _ = in_namespace(f"mount -t tmpfs -o size=2m x {folder}", folder, repository)
    assert message.startswith("someone/little takes 0.00 GB and the store")
    assert "exl3ctl store gc" in fix
    assert not any("/resolve/" in path for path in hub.asked), "nothing was fetched"


def test_a_disk_that_fills_up(tmp_path, hub) -> None:
    """Without a lock the size is not known before; what arrived stays, and nothing is served."""
    folder = tmp_path / "store"
    folder.mkdir()
    message, fix, there = in_namespace(f"mount -t tmpfs -o size=2m x {folder}", folder)
    assert message.startswith(f"the disk of the store {folder} is full")
    assert "goes on where it was" in fix and there == ["logs", "models"]


def test_a_store_that_is_shared_read_only(tmp_path, hub, repository) -> None:
    wanted = request(tmp_path, repository)
    store.ensure(wanted)
    read_only = (
        f"mount --bind {wanted.store} {wanted.store} && mount -o remount,bind,ro {wanted.store}"
    )
    assert in_namespace(read_only, wanted.store) is False, "the model is there: nothing to do"
    shutil.move(wanted.folder, tmp_path / "elsewhere")
    message, fix, _ = in_namespace(read_only, wanted.store)
    assert "may not be written here (Read-only file system)" in message
    assert "Fetch the model on the host that owns the store" in fix


def test_the_lock_beside_a_recipe_is_used(tmp_path, repository) -> None:
    recipe = tmp_path / "good.yaml"
    recipe.write_text("name: good\n")
    plan = {
        "recipe": {"path": str(recipe)},
        "model": {
            "source": {"kind": "hub", "repo": "someone/little", "revision": REVISION},
            "quantize": None,
            "dir": str(tmp_path / "store/models/x"),
        },
        "venv": {"dir": "/venv"},
    }
    assert store.request_from_plan(plan, tmp_path / "store").lock is None
    found = lock_make.lock_folder(repository)
    found["source"] = {"kind": "hub", "repo": "someone/little", "revision": REVISION}
    (tmp_path / "good.files.json").write_text(lock.as_text(found))
    assert store.request_from_plan(plan, tmp_path / "store").lock == found
    plan["model"]["source"]["revision"] = "f" * 40
    with pytest.raises(HostError, match="Lock it again"):
        store.request_from_plan(plan, tmp_path / "store")


def test_a_local_folder_is_held_against_its_lock(tmp_path, repository) -> None:
    recipe = tmp_path / "good.yaml"
    recipe.write_text("name: good\n")
    (tmp_path / "good.files.json").write_text(lock.as_text(lock_make.lock_folder(repository)))
    plan = {
        "recipe": {"path": str(recipe)},
        "model": {
            "source": {"kind": "path", "path": str(repository)},
            "quantize": None,
            "dir": str(repository),
        },
        "venv": {"dir": "/venv"},
    }
    wanted = store.request_from_plan(plan, tmp_path / "store")
    assert store.ensure(wanted, verify=True) == (False, [])
    path = repository / "extra.bin"
    path.write_bytes(os.urandom(BIG_BYTES))
    assert store.ensure(wanted) == (False, []), "the quick look compares sizes only"
    with pytest.raises(HostError, match=r"not what the recipe is locked to: extra.bin has SHA"):
        store.ensure(wanted, verify=True)
    path.unlink()
    with pytest.raises(HostError, match=r"extra.bin is missing"):
        store.ensure(wanted)


def test_garbage_is_what_no_plan_names(tmp_path) -> None:
    home = tmp_path / "store"
    for name in ("used-1", "old-1", ".partial-old-2"):
        folder = home / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        if not name.startswith("."):
            store.write_manifest(folder, {"source": {"kind": "path"}})
    (home / "plans").mkdir()
    plan = {"instance": "chat", "model": {"dir": str(home / "models/used-1")}}
    (home / "plans/chat.json").write_text(json.dumps(plan))
    rows = {one["name"]: (one["finished"], one["used_by"]) for one in store.contents(home)}
    assert rows == {
        "used-1": (True, ["chat"]),
        "old-1": (True, []),
        ".partial-old-2": (False, []),
    }
    garbage = ["old-1", ".partial-old-2"]
    assert sorted(g["name"] for g in store.collect_garbage(home)) == sorted(garbage)
    assert (home / "models/old-1").exists(), "only listed"
    store.collect_garbage(home, is_check=False)
    assert [p.name for p in (home / "models").iterdir()] == ["used-1"]
