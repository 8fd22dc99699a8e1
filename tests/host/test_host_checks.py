"""Findings of a preflight, and exl3ctl topology and preflight as a person runs them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from exl3_host import capture, checks, cli, commands, facts, measure, plan, topology
from exl3_host.errors import HostError
from exl3_host.instance import Instance
from exl3_host.recipe import load_recipe
from gpu_host import answers_of, look, ok, query, uuid, write_gpu_host
from known_hosts import known_host
from test_host_gpus import fake_smi, two_cards  # noqa: F401  the fixture
from typer.testing import CliRunner

from exl3_host import gpus as gpu_facts  # isort: skip


def findings(tmp_path: Path, host, answers: dict | None = None, **more: object) -> dict:
    found = look(tmp_path / "host", host)
    runner = commands.replay({"dmesg": ok(""), **(answers or {})})
    return {f["id"]: f for f in checks.run(found, runner, root=tmp_path / "host", **more)}


def test_a_good_host(tmp_path: Path) -> None:
    found = findings(tmp_path, two_cards(), driver_min="575.57.08")
    # Programs of another host are not known, and without numactl nothing is pinned natively.
    assert found.pop("numactl")["fix"] == "Install the package numactl."
    assert {f["status"] for f in found.values()} == {"ok"}
    assert found["gpu-node"]["found"] == "the node of every GPU is known (0, 1)"


@pytest.mark.parametrize(
    ("changes", "check", "status", "text"),
    [
        ({"driver": "550.54.15"}, "driver", "blocked", "driver 550.54.15, 580 or newer is needed"),
        ({"names": ["NVIDIA A", "NVIDIA B"]}, "gpu-kinds", "warning", "1 x NVIDIA A"),
        ({"offline": "31"}, "cpus", "warning", "offline 31: left out of every pin"),
        ({"extra": {".dockerenv": ""}}, "container", "warning", "inside a container (docker)"),
        (
            {"extra": {"proc/sys/kernel/numa_balancing": "1"}},
            "numa-balancing",
            "warning",
            "moves pages between nodes",
        ),
        ({"extra": {"etc/dgx-release": "DGX"}}, "vendor-managed", "ok", "the vendor manages"),
    ],
)
def test_one_thing_that_is_off(
    tmp_path: Path, changes: dict, check: str, status: str, text: str
) -> None:
    found = findings(tmp_path, two_cards(**changes), driver_min="580")[check]
    assert found["status"] == status and text in found["found"]


def test_ecc_links_and_persistence(tmp_path: Path) -> None:
    state = query(("index", *gpu_facts.STATE))
    rows = "0, Disabled, 600.00, 8, 16, 3, Disabled\n1, Disabled, 600.00, 16, 16, 0, Disabled\n"
    host = two_cards(answers={state: ok(rows)})
    host.devices[0].files = {"current_link_width": "8", "max_link_width": "16"}
    found = findings(tmp_path, host)
    assert found["ecc"]["status"] == "blocked" and found["ecc"]["found"].endswith("on GPU 0")
    assert found["pcie-width"]["found"] == "0000:41:00.0 x8 of x16"
    assert found["persistence"]["fix"] == "Enable the service nvidia-persistenced."


@pytest.mark.parametrize(
    ("log", "status"),
    [
        ("NVRM: Xid (PCI:0000:41:00): 79, pid=1, GPU has fallen off the bus.\n", "blocked"),
        ("NVRM: Xid (PCI:0000:41:00): 13, Graphics Exception\n", "warning"),
        ("nothing\n", "ok"),
    ],
)
def test_xid_errors_of_this_boot(tmp_path: Path, log: str, status: str) -> None:
    assert findings(tmp_path, two_cards(), {"dmesg": ok(log)})["xid"]["status"] == status


def test_a_kernel_log_that_may_not_be_read_is_unknown(tmp_path: Path) -> None:
    denied = {"rc": 1, "out": "", "error": "dmesg: read kernel buffer failed"}
    found = findings(tmp_path, two_cards(), {"dmesg": denied})
    assert found["xid"]["status"] == "unknown"
    verdict = checks.verdict(list(found.values()))
    assert verdict["ok"] and "xid" in verdict["warnings"]


def test_engine_and_cdi(tmp_path: Path) -> None:
    version = "docker version --format {{.Server.Version}}"
    listing = f"INFO Found 1 CDI devices\nnvidia.com/gpu={uuid(0)}\n"
    answers = {version: ok("20.10.24\n"), "nvidia-ctk cdi list": ok(listing)}
    host = two_cards()
    found = look(tmp_path, host)
    found["tools"]["docker"] = "/usr/bin/docker"
    runner = commands.replay(answers)
    told = {f["id"]: f for f in checks.run(found, runner, root=tmp_path, runtime="docker")}
    assert told["engine"]["found"] == "Docker engine 20.10.24, GPUs by CDI need 25"
    assert told["cdi"]["status"] == "blocked" and uuid(1) in told["cdi"]["found"]
    assert "nvidia-ctk cdi generate" in told["cdi"]["fix"]
    assert told["engine"]["status"] == "blocked"
    # 25 to 28.1 know CDI devices and have them switched off.
    dirs = "docker info --format {{json .CDISpecDirs}}"
    for listed, status in (("[]", "blocked"), ("null", "blocked"), ('["/etc/cdi"]', "ok")):
        runner = commands.replay({version: ok("27.5.1\n"), dirs: ok(listed + "\n")})
        told = {f["id"]: f for f in checks.run(found, runner, root=tmp_path, runtime="docker")}
        assert told["engine"]["status"] == status, listed
    bare = {
        f["id"]: f for f in checks.run(found, commands.nothing, root=tmp_path, runtime="docker")
    }
    assert bare["cdi"]["fix"] == "Install the NVIDIA Container Toolkit."
    assert bare["engine"]["status"] == "blocked"


@pytest.mark.parametrize(
    ("version", "least", "older"),
    [
        ("575.57.08", "580", True),
        ("580.126.09", "580.95.05", False),
        ("580.95.05", "580.126", True),
        ("580", "580", False),
        ("27.0.1", "27", False),
    ],
)
def test_versions(version: str, least: str, older: bool) -> None:
    assert checks.older(version, least) is older


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, result.output


def test_topology_and_preflight_of_this_machine(tmp_path: Path) -> None:
    code, text = invoke("topology", "--json", "--store", str(tmp_path))
    answer = json.loads(text)
    assert code == 0 and answer["schema"] == topology.SCHEMA
    assert len(answer["nodes"]) == len(facts.collect()["numa"]["nodes"])
    code, text = invoke("preflight", "--json", "--store", str(tmp_path))
    verdict = json.loads(text)
    assert code == (0 if verdict["ok"] else 1)
    assert {"driver", "cpus", "disk"} <= {c["id"] for c in verdict["checks"]}
    code, text = invoke("preflight", "--store", str(tmp_path), "--driver-min", "1")
    assert "driver" in text


def captured(tmp_path: Path, name: str) -> Path:
    """A capture of a known host, taken from its files by the program itself."""
    host = known_host(name)
    answers: dict[str, dict] = {}
    runner = commands.record(commands.replay(answers_of(host)), answers)
    root = write_gpu_host(tmp_path / "root", host)
    found = facts.collect(root, runner=runner)
    file = tmp_path / "capture.json"
    file.write_text(json.dumps(capture.take(answers, found["tools"], root)))
    return file


@pytest.mark.parametrize("name", ["f01", "f03", "f12", "f14"])
def test_a_capture_gives_the_same_facts(tmp_path: Path, name: str) -> None:
    body = json.loads(captured(tmp_path, name).read_text())
    root, runner = capture.unpack(body, tmp_path / "again")
    here = look(tmp_path / "first", known_host(name))
    again = facts.collect(root, runner=runner)
    assert again == here


def test_a_capture_is_drawn(tmp_path: Path) -> None:
    code, text = invoke("topology", "--from", str(captured(tmp_path, "f01")))
    assert code == 0
    for part in (
        "64-127,192-238,240-255",
        "0000:f5:00.0",
        "topo (high)",
        "2-63,66-127,130-191,194-238,240-255",
        "per_rank",
    ):
        assert part in text, part
    code, text = invoke("topology", "--from", str(captured(tmp_path / "b", "f06")))
    assert code == 0 and "unknown" in text and "gpu_nodes" in text


def test_what_you_know_is_taken_from_the_command_line(tmp_path: Path) -> None:
    file = captured(tmp_path, "f06")
    told = json.dumps({uuid(i): i // 4 for i in range(8)})
    code, text = invoke("topology", "--json", "--from", str(file), "--gpu-nodes", told)
    assert code == 0
    answer = json.loads(text)
    assert [g["node"] for g in answer["gpus"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert answer["pins"][2]["mode"] == "container"
    code, text = invoke("topology", "--json", "--from", str(file), "--gpu-nodes", '{"GPU-x": 0}')
    assert code == 1 and "names the GPU GPU-x" in json.loads(text)["error"]
    assert invoke("topology", "--gpu-nodes", "[1]")[0] == 2
    assert invoke("topology", "--from", str(file), "--measure")[0] == 2
    assert invoke("topology", "--runtime", "podman")[0] == 2


def test_a_capture_holds_no_identifier(tmp_path: Path, fake_smi: Path) -> None:  # noqa: F811
    real = "GPU-1b2c3d4e-5f60-7182-93a4-b5c6d7e8f901"
    text = json.dumps(
        {
            "a": real,
            "b": f"{real} MIG-1b2c3d4e-5f60-7182-93a4-b5c6d7e8f902",
            "c": "ab" * 32,
            "d": "/kubepods-pod1b2c3d4e_5f60_7182_93a4_b5c6d7e8f903.slice",
        }
    )
    clean = capture.anonymous(text)
    assert "b5c6d7e8f90" not in clean and "abab" not in clean
    assert clean.count(uuid(0)) == 2
    file = tmp_path / "me.json"
    code, _ = invoke("topology", "--save", str(file), "--store", str(tmp_path))
    body = json.loads(file.read_text())
    assert code == 0 and body["schema"] == capture.SCHEMA
    assert "nvidia-smi topo -m" in body["commands"]
    names = "\n".join(body["files"])
    assert "hostname" not in names and "serial" not in names and "uuid" not in names


def test_a_capture_that_leads_outside_is_refused(tmp_path: Path) -> None:
    # Never a file of the machine: without the check that is tested here it would be overwritten.
    for name in (str(tmp_path / "outside"), "../outside"):
        body = {"schema": capture.SCHEMA, "files": {name: ""}, "links": {}, "commands": {}}
        with pytest.raises(HostError, match="leads outside"):
            capture.unpack(body, tmp_path / "inside")
    assert not (tmp_path / "outside").exists()
    with pytest.raises(HostError, match="no capture of a host"):
        capture.unpack({"schema": "x"}, tmp_path)


def test_measuring_without_a_gpu_says_why(tmp_path: Path) -> None:
    if facts.collect()["gpus"]:
        pytest.skip("this machine has a GPU")
    code, text = invoke("topology", "--measure", "--json", "--store", str(tmp_path))
    assert code == 1 and json.loads(text)["error"] == "There is no GPU to measure."


def test_probes_that_fail_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    found = look(tmp_path, two_cards())
    probe = tmp_path / "probe.py"
    probe.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(HostError, match="The probe on node 0 ended with exit status 3"):
        measure.run(found, sys.executable, probe)
    probe.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(measure, "START_TIMEOUT_S", 0.3)
    with pytest.raises(HostError, match=r"gave no answer within 0\.3 s"):
        measure.run(found, sys.executable, probe)


def test_gpus_in_use_are_not_measured(tmp_path: Path) -> None:
    question = "nvidia-smi --query-compute-apps=pid,process_name --format=csv,noheader"
    runner = commands.replay({question: ok("4711, VLLM::Worker_TP0\n")})
    with pytest.raises(HostError, match="in use by 4711, VLLM::Worker_TP0"):
        measure.run(look(tmp_path, two_cards()), "python", "probe", runner=runner)


def test_the_tool_is_quick(tmp_path: Path, checkout: Path) -> None:
    host = known_host("f01")
    root = write_gpu_host(tmp_path, host)
    begin = time.perf_counter()
    found = facts.collect(root, runner=commands.replay(answers_of(host)))
    middle = time.perf_counter()
    loaded = load_recipe(checkout / "recipes/glm-5.3-flash-exl3-4bpw.yaml")
    instance = Instance("glm", "/var/lib/exl3", "/opt/exl3/.venv")
    made = plan.make_plan(loaded, {**found, "arch": "x86_64"}, instance)
    end = time.perf_counter()
    print(f"8 GPUs, 255 CPUs: facts {middle - begin:.3f} s, plan {end - middle:.3f} s")
    assert made["pin"]["gpus"] == [uuid(i) for i in range(4)]
