"""The archive for bug reports: complete, and free of what is nobody's business."""

import json
import tarfile

import pytest
from exl3_host import report, service


def read(path):
    with tarfile.open(path) as archive:
        return {
            one.name.removeprefix("exl3-report/"): archive.extractfile(one).read().decode()
            for one in archive
        }


CANARIES = {
    "hf_0123456789abcdefghij": "token of a hub",
    "10.20.30.40": "address",
    "fe80:1:2:3:4:5:6:7": "address",
    "52:54:00:12:34:56": "MAC",
    "4f3c-1111-2222-333344445555": "tail of a UUID",
    "SN1234567890": "serial number",
    "gpu-box-7": "name of the host",
    "alice": "name of the user",
}
LOG = """\
starting for alice@gpu-box-7.example.org with HF_TOKEN=hf_0123456789abcdefghij
GPU-0a1b2c3d-4f3c-1111-2222-333344445555 at 10.20.30.40, listens on 127.0.0.1:8000 and 0.0.0.0
link fe80:1:2:3:4:5:6:7 mac 52:54:00:12:34:56 Serial Number: SN1234567890
vLLM 0.32.0 took 1.2.3 s; RuntimeError: No CUDA GPUs are available
"""


def test_what_is_hidden_and_what_stays(monkeypatch):
    text = report.anonymous(LOG, ("gpu-box-7.example.org", "gpu-box-7", "alice"), ())
    assert [word for word in CANARIES if word in text] == []
    for kept in ("GPU-0a1b2c3d-", "127.0.0.1:8000", "0.0.0.0", "vLLM 0.32.0", "1.2.3 s"):
        assert kept in text
    assert "RuntimeError: No CUDA GPUs are available" in text


def test_the_report_of_a_running_server(store, make_plan, tmp_path, checkout):
    key = tmp_path / "key"
    key.write_text("canary-51ca\n")
    options = service.Options(manager="supervisor")
    service.ensure(make_plan(serve={"api_key_file": str(key)}), store, options)
    log = store / "logs" / "small" / "server.log"
    log.write_text(log.read_text() + LOG + "it was called with canary-51ca\n")
    out = tmp_path / "report.tar.gz"
    names = report.write(store, checkout, out)
    files = read(out)
    assert set(names) == set(files) and names[0] == "CONTENTS"
    assert all(name in files["CONTENTS"] for name in names[1:])
    whole = "\n".join(files.values())
    assert "canary-51ca" not in whole and "hf_0123456789abcdefghij" not in whole
    assert json.loads(files["facts.json"])["schema"] == "exl3-facts/1"
    assert json.loads(files["status.json"])[0]["state"] == "serving"
    assert json.loads(files["run/small/spec.json"])["endpoint"]["served_name"] == "small"
    assert files["logs/small/server.log.hint"].startswith("no-gpu:")


def test_a_place_that_cannot_be_written_is_named(store, checkout, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(report.HostError, match="cannot be written"):
        report.write(store, checkout, tmp_path / "file" / "report.tar.gz")
