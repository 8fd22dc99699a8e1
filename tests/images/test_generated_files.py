"""What the build itself checks about an image: its size."""

import os
import tempfile
from pathlib import Path

import pytest
from exl3_image import generate


def test_size_is_that_of_all_files(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "b").write_bytes(b"x" * 2345)
    os.truncate(tmp_path / "below" / "b", 5000)
    (tmp_path / "link").symlink_to("below/b")
    assert generate.size_bytes(tmp_path) == 1000 + 5000 + len("below/b")


def test_other_file_systems_are_no_part_of_it():
    """/dev/shm is one of its own below /dev, in every container too."""
    if os.stat("/dev").st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("/dev/shm is no file system of its own here")
    before = generate.size_bytes(Path("/dev"))
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(b"x" * 2**20)
        file.flush()
        assert generate.size_bytes(Path("/dev/shm")) >= 2**20
        assert generate.size_bytes(Path("/dev")) - before < 2**20


def test_five_percent_over_the_budget_are_allowed(monkeypatch, capsys):
    monkeypatch.setattr(generate, "size_bytes", lambda: 1_050_000_000)
    generate.budget(1000)
    assert capsys.readouterr().out == "size: 1050 MB, budget 1000 MB\n"
    monkeypatch.setattr(generate, "size_bytes", lambda: 1_051_000_000)
    with pytest.raises(SystemExit, match="holds 1051 MB, more than 5 % over its budget of 1000"):
        generate.budget(1000)
