"""The engine role: daemon.json is merged and given back, vendors' systems are left alone."""

import json
from pathlib import Path

import pytest
from exl3_host import engine_host
from exl3_host.errors import HostError

FOREIGN = (
    '{\n  "log-level": "warn",\n  "features": {"buildkit": true},\n  "dns": ["10.0.0.53"]\n}\n'
)
OURS = {"features": {"cdi": True}, "log-level": "info", "max-concurrent-downloads": 2}


def test_foreign_keys_stay_and_ours_go_again(tmp_path):
    path = tmp_path / "daemon.json"
    path.write_text(FOREIGN)
    before = json.loads(FOREIGN)
    changed, _, after = engine_host.apply_settings(path, OURS)
    found = json.loads(path.read_text())
    assert changed and json.loads(after) == found
    assert found["dns"] == ["10.0.0.53"] and found["features"] == {"buildkit": True, "cdi": True}
    assert list(found)[:3] == ["log-level", "features", "dns"], "the order of others' keys stays"
    assert not engine_host.apply_settings(path, OURS)[0]
    # Other wishes later: what the first ones had replaced is not forgotten.
    engine_host.apply_settings(path, {"log-level": "error"})
    assert json.loads(path.read_text()) == {**before, "log-level": "error"}
    assert engine_host.apply_settings(path, {})[0]
    assert json.loads(path.read_text()) == before
    assert [one.name for one in tmp_path.iterdir()] == ["daemon.json"]
    assert not engine_host.apply_settings(path, {})[0]


def test_a_file_that_was_not_there_is_not_there_afterwards(tmp_path):
    path = tmp_path / "etc" / "daemon.json"
    engine_host.apply_settings(path, OURS)
    assert path.exists()
    engine_host.apply_settings(path, {})
    assert list(path.parent.iterdir()) == []


def test_check_mode_writes_nothing(tmp_path):
    path = tmp_path / "daemon.json"
    changed, before, after = engine_host.apply_settings(path, OURS, is_check=True)
    assert changed and before == "{}\n" and '"cdi": true' in after and not path.exists()


def test_a_broken_file_is_refused_untouched(tmp_path):
    path = tmp_path / "daemon.json"
    path.write_text('{"dns": [')
    with pytest.raises(HostError, match="is no JSON"):
        engine_host.apply_settings(path, OURS)
    assert path.read_text() == '{"dns": ['


def test_a_key_that_a_unit_sets_is_refused(tmp_path):
    (tmp_path / "docker.service.d").mkdir()
    unit = tmp_path / "docker.service.d" / "override.conf"
    unit.write_text("[Service]\nExecStart=\nExecStart=/usr/bin/dockerd --log-level=debug\n")
    with pytest.raises(HostError, match=r"override\.conf sets --log-level on the command line"):
        engine_host.refuse_flags(tmp_path / "daemon.json", OURS, tmp_path)
    engine_host.refuse_flags(tmp_path / "daemon.json", {"features": {}}, tmp_path)


def host(tmp_path: Path, **files: str) -> str:
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/").replace("_", "-")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path)


def test_a_vendors_system_is_left_alone(tmp_path):
    root = host(tmp_path, etc__dgx_release='DGX_NAME="DGX Spark"\n')
    found = engine_host.look(root, has_gpus=True)
    assert found["vendor"] == "DGX Spark" and found["action"] == "refuse"
    assert "managed by its vendor" in found["reason"] and found["toolkit_action"] == "none"
    asked_for = engine_host.look(root, has_gpus=True, manage="true")
    assert asked_for["action"] == "install"


def test_a_snap_is_named(tmp_path):
    root = host(tmp_path, snap__bin__docker="")
    found = engine_host.look(root)
    assert found["action"] == "refuse" and "snap remove docker" in found["reason"]


def test_an_empty_host_gets_an_engine_unless_told_otherwise(tmp_path):
    root = host(tmp_path, etc__os_release='ID=debian\nVERSION_CODENAME="bookworm"\n')
    found = engine_host.look(root, has_gpus=True)
    assert found["action"] == "install" and found["toolkit_action"] == "install"
    assert (found["distribution"], found["codename"]) == ("debian", "bookworm")
    never = engine_host.look(root, manage="false")
    assert never["action"] == "refuse" and "set exl3_engine_manage" in never["reason"]


def test_a_repository_that_is_there_is_found(tmp_path):
    """Two entries for one repository with different keys make apt refuse both."""
    lists = "etc__apt__sources.list.d"
    root = host(
        tmp_path,
        **{
            f"{lists}__docker.list": "deb https://download.docker.com/linux/debian x stable",
            f"{lists}__nv.sources": "URIs: https://nvidia.github.io/libnvidia-container/stable/deb",
        },
    )
    found = engine_host.look(root, has_gpus=True)
    assert found["has_repository"] and found["has_toolkit_repository"]
    assert not engine_host.look(str(tmp_path / "empty"))["has_repository"]


def test_an_engine_too_old_for_gpus_is_not_replaced(monkeypatch):
    monkeypatch.setattr(engine_host, "_version", lambda command, root: "20.10.24")
    assert engine_host.look()["action"] == "none"
    found = engine_host.look(has_gpus=True)
    assert found["action"] == "refuse" and "not replaced by us" in found["reason"]
    # The same when the system's own packages have just brought it.
    with pytest.raises(HostError, match=r"25\.0 for GPUs or newer is needed") as caught:
        engine_host.wanted_settings(found, {}, has_gpus=True)
    assert "exl3_engine_repository: true" in str(caught.value)


@pytest.mark.parametrize(
    ("version", "switched"),
    [("25.0.5", True), ("27.5.1", True), ("28.1.1", True), ("28.2.0", False), ("29.0.1", False)],
)
def test_cdi_devices_are_switched_on_where_docker_has_them_off(version, switched, monkeypatch):
    monkeypatch.setattr(engine_host, "_version", lambda command, root: version)
    found = engine_host.look(has_gpus=True)
    ours = {"features": {"buildkit": True}, "dns": ["10.0.0.53"]}
    wanted = engine_host.wanted_settings(found, ours, has_gpus=True)
    assert wanted["features"] == {"buildkit": True} | ({"cdi": True} if switched else {})
    assert engine_host.wanted_settings(found, ours, has_gpus=False) == ours
    # Who says no is obeyed; a vendor's settings are the vendor's.
    no = {"features": {"cdi": False}}
    assert engine_host.wanted_settings(found, no, has_gpus=True) == no
    vendors = {**found, "vendor": "DGX Spark"}
    assert engine_host.wanted_settings(vendors, ours, has_gpus=True) == ours
