"""How CUDA routes deal out their work: nothing is lost or there twice."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def played(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A probe, compiled and run."""
    source, probe = Path(__file__).parent / "probes" / f"{name}.cpp", folder / name
    command = ["c++", "-std=c++20", "-O2", "-Wall", "-Werror", "-I", ROOT / "csrc", source, "-o"]
    subprocess.run([*command, probe], check=True)
    return subprocess.run([probe], capture_output=True, text=True, check=False)


def test_every_step_is_found_once(tmp_path):
    """Few tokens: the kernel's own split, played on the CPU for 1,500 shapes: what warps and
    positions leave is where the next kernel looks, and fits the shared memory that the host asks
    for."""
    done = played("split_probe", tmp_path)
    assert (done.returncode, done.stdout) == (0, "1500\n"), done.stdout + done.stderr


def test_every_tile_is_in_one_part(tmp_path):
    """Warpgroups: experts of up to 2,099 tiles, in even parts of four at most."""
    done = played("parts_probe", tmp_path)
    assert (done.returncode, done.stdout) == (0, "2100\n"), done.stdout + done.stderr
