"""A stand-in for /opt/exl3 of a GPU image, so that its entry point can be asked without one.

What the image's build writes is written here by hand; vLLM is a program that tells how it was
called. The real image and the real vLLM are in test_cpu_image.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
BUILD = {
    "schema": "exl3-build/1",
    "flavour": "sm120",
    "platform": "linux/amd64",
    "architectures": "120+PTX",
    "cubins": ["compute_120 PTX", "sm_120"],
    "images": {"sm120": "120+PTX", "sm121": "121", "hopper": "90"},
    "plugin": "0.1.0",
    "vllm": "0.33.0",
    "torch": "2.14.0",
    "cuda": "13.0",
    "driver_min": "580.65.06",
    "kernel_source_hash": "0" * 64,
    "extras": ["numactl"],
    "wheels": 200,
    "key": "0123456789ab",
}
VLLM = """\
#!{python}
import json, os, sys
print(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ)}}))
sys.exit(int(os.environ.get("FAKE_STATUS", "0")))
"""
RTX = ("GPU-aa", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0", "580.126.09", "97887")


def card(index: int, kind: tuple = RTX, **changes: str) -> str:
    """One line as nvidia-smi prints it."""
    names = ("uuid", "name", "compute_cap", "driver", "memory")
    values = {**dict(zip(names, kind)), **changes}
    values["uuid"] = f"{values['uuid']}{index}"
    return ", ".join([str(index), *values.values()])


@dataclass
class Home:
    """The stand-in, and what the container around it would have."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("image/venv/bin", "image/recipes", "bin", "cache", "tmp", "models"):
            (self.root / name).mkdir(parents=True)
        self.build()
        shutil.copy(CHECKOUT / "recipes/args/vllm-0.33.0.json", self.image / "args.json")
        known = ["LlamaForCausalLM", "Qwen3ForCausalLM"]
        models = {"schema": "exl3-models/1", "vllm": "0.33.0", "architectures": known}
        (self.image / "models.json").write_text(json.dumps(models))
        program = self.image / "venv/bin/vllm"
        program.write_text(VLLM.format(python=sys.executable))
        program.chmod(0o755)

    @property
    def image(self) -> Path:
        return self.root / "image"

    def build(self, **changes: object) -> None:
        (self.image / "build.json").write_text(json.dumps({**BUILD, **changes}))

    def cards(self, *lines: str, says: str = "", status: int = 0) -> None:
        """An nvidia-smi that prints these lines."""
        program = self.root / "bin" / "nvidia-smi"
        text = "\n".join([*lines, says]).strip()
        program.write_text(f"#!/bin/sh\ncat << 'END'\n{text}\nEND\nexit {status}\n")
        program.chmod(0o755)

    def model(self, name: str = "m", architecture: str = "LlamaForCausalLM") -> Path:
        """A folder that looks like a model."""
        folder = self.root / "models" / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        (folder / "model.safetensors").write_bytes(b"")
        return folder

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess:
        """The entry point with this command."""
        environment = {
            "PATH": f"{self.root / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": f"{CHECKOUT / 'images'}:{CHECKOUT / 'playbooks/module_utils'}",
            "EXL3_IMAGE_HOME": str(self.image),
            "EXL3_CACHE": str(self.root / "cache"),
            "EXL3_MODELS": str(self.root / "models"),
            "TMPDIR": str(self.root / "tmp"),
            "EXL3_REVISION": "f" * 40,
            **self.env,
            **env,
        }
        return subprocess.run(
            [sys.executable, "-m", "exl3_image", *words],
            capture_output=True,
            text=True,
            env=environment,
            timeout=60,
        )

    def refusal(self, *words: str, **env: str) -> str:
        """The one line with which a command is refused."""
        done = self.run(*words, **env)
        assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
        assert not done.stdout, done.stdout
        return lines[0].removeprefix("error: ")
