"""A private Docker engine, two images with the small server, and plans for them."""

import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request
import warnings
from pathlib import Path

import pytest
import small_image
from exl3_host import engine, service, spec

from tests import plans

DOCKERD = Path(__file__).parents[2] / "scripts" / "lib" / "dockerd.sh"


@pytest.fixture(scope="session")
def docker_host():
    """DOCKER_HOST of an engine of our own; skipped, loudly, where none can run."""
    # Short, since the path of a socket has room for 107 bytes; not in memory, for overlayfs.
    folder = Path(tempfile.mkdtemp(prefix="exl3-dockerd-", dir="/var/tmp"))
    done = subprocess.run([DOCKERD, "start", folder], capture_output=True, text=True)
    if done.returncode != 0:
        shutil.rmtree(folder)
        reason = f"NO DOCKER ENGINE, containers are NOT tested: {done.stderr.strip()[-300:]}"
        warnings.warn(reason, stacklevel=2)
        pytest.skip(reason)
    yield done.stdout.strip()
    subprocess.run([DOCKERD, "remove", folder], check=True)


@pytest.fixture(scope="session")
def docker(docker_host) -> list[str]:
    """The command line that reaches it."""
    return ["docker", "-H", docker_host]


@pytest.fixture(scope="session")
def images(docker) -> dict[str, str]:
    """Ids of two images that differ in one file, as two releases do."""
    return {name: small_image.make(docker, f"small:{name}", release=name) for name in ("a", "b")}


@pytest.fixture(scope="session")
def client(docker_host) -> engine.Engine:
    return engine.Engine(docker_host)


@pytest.fixture
def port() -> int:
    return plans.free_port()


@pytest.fixture
def store(docker_host):
    """An empty store; whatever runs out of it is stopped at the end, whoever started it."""
    folder = Path(tempfile.mkdtemp(prefix="exl3-store-", dir="/var/tmp"))
    yield folder
    for run in (folder / "run").glob("*"):
        service.remove(spec.Paths(folder, run.name))
    shutil.rmtree(folder)


@pytest.fixture
def options(docker_host):
    return service.Options(manager="supervisor", docker_host=docker_host)


@pytest.fixture
def make_plan(tmp_path, port, images):
    """A function that returns a plan for the small server in a container."""
    model = plans.model_folder(tmp_path)

    def make(*words: str, image: str = "a", **changes) -> dict:
        plan = plans.small_container(model, list(words), port, images[image])
        return plans.changed(plan, changes)

    return make


class Requests:
    """Asks a server every 100 ms until it is closed, and counts what got no answer."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}/v1/models"
        self.asked, self.lost = 0, []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while not self.ended.is_set():
            began = time.monotonic()
            self.asked += 1
            try:
                with opener.open(self.url, timeout=5) as answer:
                    assert answer.status == 200
                    answer.read()
            except Exception as error:
                self.lost.append(repr(error))
            self.ended.wait(max(0.0, 0.1 - (time.monotonic() - began)))

    def __enter__(self) -> "Requests":
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()
        self.thread.join()


@pytest.fixture
def requests_every_100_ms(port):
    return Requests(port)
