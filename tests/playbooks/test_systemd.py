"""Unit files: what systemd would make of them. Nothing here boots or asks a running systemd."""

import shutil
import subprocess
import sys

import pytest
from exl3_host import systemd


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("plain", '"plain"'),
        ("two words", '"two words"'),
        ("100%", '"100%%"'),
        ("$HOME", '"$$HOME"'),
        ('say "hi"', '"say \\"hi\\""'),
        ("back\\slash", '"back\\\\slash"'),
    ],
)
def test_words_of_a_command_are_taken_literally(word, quoted):
    assert systemd.quote(word) == quoted


def test_unit_file_is_accepted_by_systemd(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    limits = {"burst": 3, "interval_s": 3600, "backoff_s": 10, "grace_s": 60}
    command = [sys.executable, "-I", "/etc/hostname", "a $HOME 100% word"]
    unit = tmp_path / "exl3-small.service"
    unit.write_text(systemd.unit_text("small", command, limits))
    checked = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True
    )
    assert str(unit) not in checked.stderr and "exl3-small" not in checked.stderr, checked.stderr


def test_the_unit_of_a_container_waits_for_its_engine():
    limits = {"burst": 3, "interval_s": 3600, "backoff_s": 10, "grace_s": 60}
    plain = systemd.unit_text("small", ["/bin/true"], limits)
    boxed = systemd.unit_text("small", ["/bin/true"], {**limits, "container": {"name": "x"}})
    assert "docker" not in plain
    assert "After=network.target docker.service\nWants=docker.service\n" in boxed
    for text in (plain, boxed):
        assert "StartLimitBurst=3\n" in text and "Restart=always\n" in text
