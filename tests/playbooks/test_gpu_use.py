"""Who holds the GPUs: a program that answers as nvidia-smi and nvidia-ctk do, real processes."""

import subprocess
import sys

import pytest
from exl3_host import gpu_use
from exl3_host.errors import HostError

ONE, TWO = (f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in (1, 2))
# Answers exactly what is asked for here; anything else fails the test.
FAKE = """\
#!/bin/sh
folder=$(dirname "$0")
plain="--format=csv,noheader,nounits"
case "$*" in
  "--query-compute-apps=gpu_uuid,pid,used_memory $plain") cat "$folder/apps" ;;
  "--query-gpu=uuid,memory.used $plain") cat "$folder/memory" ;;
  "cdi list") cat "$folder/cdi" ;;
  *) echo "unknown: $*" >&2; exit 2 ;;
esac
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder first in PATH with both programs; the test writes what they answer."""
    for name in ("nvidia-smi", "nvidia-ctk"):
        (tmp_path / name).write_text(FAKE)
        (tmp_path / name).chmod(0o755)
    for name in ("apps", "memory", "cdi"):
        (tmp_path / name).write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


@pytest.fixture
def stranger():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_somebody_else_on_the_gpu_is_named(tools, stranger):
    (tools / "apps").write_text(f"{ONE}, {stranger.pid}, 81234\n{TWO}, 1, [N/A]\n")
    with pytest.raises(HostError) as caught:
        gpu_use.refuse_foreign([ONE], own=[])
    said = str(caught.value)
    assert f"pid {stranger.pid}" in said and "81234 MiB" in said and "time.sleep(60)" in said
    gpu_use.refuse_foreign([ONE], own=[stranger.pid])
    gpu_use.refuse_foreign([], own=[])
    with pytest.raises(HostError, match="pid 1 "):
        gpu_use.refuse_foreign([TWO], own=[])


def test_memory_that_comes_back_is_waited_for(tools, stranger):
    (tools / "apps").write_text(f"{ONE}, {stranger.pid}, 81234\n")
    left = gpu_use.wait_free([ONE], [stranger.pid], timeout_s=0.1)
    assert [one.pid for one in left] == [stranger.pid]
    # A process that is gone and still listed: the driver has not given its memory back yet.
    stranger.kill()
    stranger.wait()
    assert [one.pid for one in gpu_use.wait_free([ONE], [], timeout_s=0.1)] == [stranger.pid]
    (tools / "apps").write_text("")
    assert gpu_use.wait_free([ONE], [], timeout_s=0.1) == []


def test_memory_in_use_tells_that_something_goes_on(tools):
    (tools / "memory").write_text(f"{ONE}, 512\n{TWO}, 90000\n")
    assert gpu_use.memory_mib([ONE, TWO]) == (512, 90000)
    (tools / "memory").write_text(f"{ONE}, [N/A]\n")
    assert gpu_use.memory_mib([ONE]) == ()


def test_a_gpu_that_the_cdi_list_lacks_is_refused_with_the_way_out(tools):
    (tools / "cdi").write_text(f"nvidia.com/gpu=0\nnvidia.com/gpu={ONE}\nnvidia.com/gpu=all\n")
    gpu_use.require_cdi([ONE])
    with pytest.raises(HostError, match=f"has no {TWO}") as caught:
        gpu_use.require_cdi([ONE, TWO])
    assert "systemctl restart nvidia-cdi-refresh" in caught.value.fix


def test_without_nvidias_programs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_use.holders([ONE]) == [] and gpu_use.memory_mib([ONE]) == ()
    gpu_use.require_cdi([])
    with pytest.raises(HostError, match="nvidia-ctk is not there"):
        gpu_use.require_cdi([ONE])
