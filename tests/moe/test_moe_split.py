"""How the CUDA route for few tokens deals out its work: nothing is lost or there twice."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_step_is_found_once(tmp_path):
    """The kernel's own split, played on the CPU for 1,500 shapes: what warps and positions leave is
    where the next kernel looks, and fits the shared memory that the host asks for."""
    probe, source = tmp_path / "probe", Path(__file__).parent / "probes" / "split_probe.cpp"
    command = ["c++", "-std=c++20", "-O2", "-Wall", "-Werror", "-I", ROOT / "csrc", source, "-o"]
    subprocess.run([*command, probe], check=True)
    done = subprocess.run([probe], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1500\n"), done.stdout + done.stderr
