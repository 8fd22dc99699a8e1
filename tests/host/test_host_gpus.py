"""GPUs as a host's programs and files tell them, and what is said where they do not."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from exl3_host import commands, facts, gpus, pci
from gpu_host import (
    GpuHost,
    PciDevice,
    answers_of,
    look,
    ok,
    query,
    uuid,
    write_gpu_host,
)
from known_hosts import known_host

HERE = Path(__file__).parent


def two_cards(**changes: object) -> GpuHost:
    """Two cards on two sockets whose nodes the firmware tells."""
    host = GpuHost(
        nodes={0: "0-15", 1: "16-31"},
        sockets={0: 0, 1: 1},
        devices=[
            PciDevice("0000:41:00.0", "pci0000:40", ["0000:40:01.0"], 0, root_cpus="0-15"),
            PciDevice("0000:81:00.0", "pci0000:80", ["0000:80:01.0"], 1, root_cpus="16-31"),
        ],
        names=["NVIDIA RTX PRO 6000 Blackwell"] * 2,
        topo="\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        "GPU0\t X \tSYS\t0-15\t0\t\tN/A\nGPU1\tSYS\t X \t16-31\t1\t\tN/A\n",
    )
    for name, value in changes.items():
        setattr(host, name, value)
    return host


def test_addresses_of_every_spelling() -> None:
    assert pci.address("00000000:06:00.0") == "0000:06:00.0"
    assert pci.address("0000000F:01:00.0") == "000f:01:00.0"
    assert pci.address("0000:F4:00.0\n") == "0000:f4:00.0"
    assert pci.address("00010000:E1:00.0") == "10000:e1:00.0", "a domain behind Intel's VMD"
    assert pci.address("GPU-1b2c") is None


def test_a_device_and_what_is_above_it(tmp_path: Path) -> None:
    host = two_cards()
    host.devices[0].files = {
        "current_link_speed": "2.5 GT/s PCIe",
        "max_link_speed": "32.0 GT/s PCIe",
        "current_link_width": "8",
        "max_link_width": "16",
    }
    host.devices[0].firmware_path = "\\_SB_.S0D1"
    root = write_gpu_host(tmp_path, host)
    found = pci.device(root, "0000:41:00.0")
    assert found == {
        "address": "0000:41:00.0",
        "numa_node": 0,
        "bridges": [{"address": "0000:40:01.0", "numa_node": 0}],
        "root": "pci0000:40",
        "root_cpus": "0-15",
        "socket_hint": 0,
        "link": {"width": 8, "width_max": 16, "speed": 2.5, "speed_max": 32.0},
    }
    assert pci.device(root, "0000:99:00.0") is None
    assert pci.scan(root)["gpus"] == ["0000:41:00.0", "0000:81:00.0"]


def test_minus_one_is_unknown_and_not_zero(tmp_path: Path) -> None:
    host = known_host("f21")
    found = look(tmp_path, host)["gpus"][0]["pci"]
    assert found["numa_node"] is None
    local = tmp_path / "sys/bus/pci/devices" / host.devices[0].address / "local_cpulist"
    assert local.read_text() == "0-111\n", "the kernel then lists every CPU"


def test_mig_instances(tmp_path: Path) -> None:
    listing = (
        f"GPU 0: NVIDIA A100-SXM4-80GB (UUID: {uuid(0)})\n"
        "  MIG 1g.10gb     Device  0: (UUID: MIG-00000000-0000-0000-0000-000000000001)\n"
        "  MIG 1g.10gb     Device  1: (UUID: MIG-00000000-0000-0000-0000-000000000002)\n"
        f"GPU 1: NVIDIA A100-SXM4-80GB (UUID: {uuid(1)})\n"
    )
    state = query(("index", *gpus.STATE))
    rows = "0, Enabled, 400.00, 16, 16, 0, Enabled\n1, Disabled, 400.00, 16, 16, 0, Enabled\n"
    host = two_cards(answers={"nvidia-smi -L": ok(listing), state: ok(rows)})
    first, second = look(tmp_path, host)["gpus"]
    assert [m["profile"] for m in first["mig"]] == ["1g.10gb", "1g.10gb"]
    assert first["mig"][1]["uuid"] == "MIG-00000000-0000-0000-0000-000000000002"
    assert second["mig"] is None


def test_a_field_that_an_old_driver_does_not_know(tmp_path: Path) -> None:
    whole = query(("index", *gpus.STATE))
    field = "ecc.errors.uncorrected.volatile.total"
    fewer = query(("index", *(f for f in gpus.STATE if f != field)))
    refusal = f'Field "{field}" is not a valid field to query.\n'
    host = two_cards(
        answers={
            whole: {"rc": 2, "out": refusal, "error": refusal},
            fewer: ok("0, [N/A], 600.00, 16, 16, Enabled\n1, [N/A], 600.00, 16, 16, Enabled\n"),
        }
    )
    first, _ = look(tmp_path, host)["gpus"]
    assert (first["power_limit_w"], first["ecc_uncorrected"]) == (600.0, None)


def test_a_lost_gpu_is_named(tmp_path: Path) -> None:
    identity = query(gpus.IDENTITY)
    host = two_cards()
    row = answers_of(host)[identity]["out"].splitlines()[0]
    host.answers = {identity: ok(row + "\n")}
    found = look(tmp_path, host)
    assert len(found["gpus"]) == 1
    (error,) = found["gpu_errors"]
    assert error.startswith("nvidia-smi lists 1 GPUs, 2 NVIDIA GPUs on the PCI bus; not listed: ")
    assert "0000:81:00.0" in error and "Xid" in error


def test_cards_without_a_driver(tmp_path: Path) -> None:
    host = two_cards()
    found = facts.collect(write_gpu_host(tmp_path, host), runner=commands.nothing)
    assert found["gpus"] == []
    (error,) = found["gpu_errors"]
    assert "2 NVIDIA GPUs on the PCI bus" in error and "Install or reload" in error


def test_no_gpu_at_all_is_no_error(tmp_path: Path) -> None:
    host = two_cards(devices=[], names=[])
    found = facts.collect(write_gpu_host(tmp_path, host), runner=commands.nothing)
    assert (found["gpus"], found["gpu_errors"]) == ([], [])


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({".dockerenv": ""}, "docker"),
        ({"run/.containerenv": ""}, "podman"),
        ({"proc/self/cgroup": "0::/kubepods.slice/pod1\n"}, "kubernetes"),
        ({"proc/1/environ": "PATH=/bin\0container=lxc\0"}, "lxc"),
        ({}, None),
    ],
)
def test_inside_a_container(tmp_path: Path, files: dict[str, str], kind: str | None) -> None:
    found = look(tmp_path, two_cards(extra=files))
    assert found["container"] == kind


def test_a_container_that_sees_fewer_cards_is_no_lost_gpu(tmp_path: Path) -> None:
    identity = query(gpus.IDENTITY)
    host = two_cards(extra={".dockerenv": ""})
    host.answers = {identity: ok(answers_of(host)[identity]["out"].splitlines()[0] + "\n")}
    assert look(tmp_path, host)["gpu_errors"] == []


@pytest.fixture
def fake_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """nvidia-smi on PATH, answering for two_cards."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nvidia-smi"
    shutil.copy(HERE / "fake_nvidia_smi.py", program)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps(answers_of(two_cards())))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("EXL3_FAKE_HOST", str(answers))
    return program


def test_the_real_program_is_run(fake_smi: Path) -> None:
    answer = commands.run_here(["nvidia-smi", "topo", "-m"])
    assert answer.ok and "GPU1" in answer.out
    unknown = commands.run_here(["nvidia-smi", "-q"])
    assert (unknown.rc, unknown.error) == (2, "fake nvidia-smi: unknown question nvidia-smi -q")


def test_a_driver_that_hangs_or_is_gone(
    fake_smi: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EXL3_FAKE_SMI", "hang")
    answer = commands.run_here(["nvidia-smi", "-L"], timeout_s=0.5)
    assert answer.rc is None and answer.error == "nvidia-smi gave no answer within 0.5 s"
    monkeypatch.setenv("EXL3_FAKE_SMI", "no-driver")
    root = write_gpu_host(tmp_path / "host", two_cards())
    found = facts.collect(root, runner=commands.run_here)
    assert found["gpus"] == []
    assert "couldn't communicate with the NVIDIA driver" in found["gpu_errors"][0]


NVML_SOURCE = r"""
#include <string.h>
typedef void* device;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device* d) { *d = (device)(long)(i + 1); return 0; }
int nvmlDeviceGetUUID(device d, char* text, unsigned size) {
    strncpy(text, d == (device)1 ? "GPU-a" : "GPU-b", size);
    return 0;
}
int nvmlDeviceGetMemoryAffinity(device d, unsigned words, unsigned long* set, unsigned scope) {
    if (scope != 0) return 2;
    memset(set, 0, words * sizeof *set);
    set[0] = d == (device)1 ? 2 : 0;       /* node 1 */
    set[1] = d == (device)1 ? 0 : 8;       /* node 67 */
    return 0;
}
int nvmlDeviceGetNumaNodeId(device d, unsigned* node) {
    if (d == (device)1) return 3;
    *node = 2;
    return 0;
}
"""


def test_nvml_is_asked_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)],
        input=NVML_SOURCE,
        text=True,
        check=True,
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    answer = commands.run_here([commands.NVML])
    assert answer.ok, answer.error
    assert json.loads(answer.out) == [
        {"uuid": "GPU-a", "nodes": [1], "memory_node": None},
        {"uuid": "GPU-b", "nodes": [67], "memory_node": 2},
    ]


def test_without_nvml_there_is_an_answer_too() -> None:
    answer = commands.run_here([commands.NVML])
    assert answer.rc == 3 and "libnvidia-ml" in answer.error


def test_nvml_s_memory_node_is_no_affinity(tmp_path: Path) -> None:
    told = [{"uuid": uuid(0), "nodes": [1], "memory_node": 2}]
    host = two_cards(answers={"nvml": ok(json.dumps(told))})
    first, second = look(tmp_path, host)["gpus"]
    assert (first["nvml_nodes"], first["memory_node"], first["coherent"]) == ([1], 2, True)
    assert (second["nvml_nodes"], second["memory_node"], second["coherent"]) == (None, None, False)


def test_this_machine_can_be_asked() -> None:
    found = facts.collect()
    assert isinstance(found["gpus"], list)
    if shutil.which("nvidia-smi") is None:
        assert found["gpus"] == []
    assert sys.platform == "linux"
