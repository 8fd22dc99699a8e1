"""Run while an image is built: writes what the image knows about itself, and checks it.

  python -I -m exl3_image.generate --checks /checks     args.json, models.json, build.json
  python -I -m exl3_image.generate --budget-mb N        fails when the image grew by more than 5 %

build.json, `exl3-build/1`:
    flavour, platform, architectures (what was asked for), cubins (what the library holds), images
    (architectures of every flavour), plugin, vllm, torch, cuda, driver_min, kernel_source_hash,
    extras, wheels (how many), key (names everything that compiled code depends on)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from exl3_image import HOME

SITE = next(HOME.glob("venv/lib/python3*/site-packages"), None)
GROWTH = 1.05
PTXAS = "nvidia/cu13/bin/ptxas"


def repair() -> None:
    """What vLLM for CPUs needs after pip (see exl3_host.repairs); a ptxas that is new enough."""
    from exl3_host import repairs

    repairs.vllm_metadata(SITE)
    if (SITE / PTXAS).exists():
        (HOME / "ptxas").symlink_to(SITE / PTXAS)


def arguments() -> None:
    """args.json, by the plugin's neighbour that knows vLLM's parser."""
    command = [sys.executable, "-I", "-m", "exl3_host.vllm_args", "--out", str(HOME / "args.json")]
    subprocess.run(command, check=True)


def models() -> None:
    """models.json: the classes that the vLLM inside knows."""
    from vllm.model_executor.models.registry import ModelRegistry

    known = sorted(ModelRegistry.get_supported_archs())
    body = {"schema": "exl3-models/1", "vllm": metadata.version("vllm"), "architectures": known}
    (HOME / "models.json").write_text(json.dumps(body, indent=1) + "\n")


def libraries(checks: Path) -> tuple[list[str], str]:
    """(architectures inside, hash over our libraries). Ends the build where they are not right."""
    sys.path.insert(0, str(checks))
    import cubins

    total, held = hashlib.sha256(), []
    for path in sorted((SITE / "exl3_plugin").glob("_C_*.so")):
        total.update(path.read_bytes())
    library = SITE / "exl3_plugin" / "_C_cuda.so"
    asked = os.environ["ARCHITECTURES"]
    if asked == "none":
        if library.exists():
            sys.exit(f"{library} is in an image without CUDA")
        return held, total.hexdigest()
    data = library.read_bytes()
    wrong = cubins.problems(data, cubins.parse_architectures(asked))
    if os.environ["SOURCE_HASH"].encode() not in data and os.environ["SOURCE_HASH"] != "unknown":
        wrong.append(f"it was not compiled from the sources with hash {os.environ['SOURCE_HASH']}")
    if wrong:
        sys.exit(f"{library}: {'; '.join(wrong)}")
    held = sorted({str(code) for codes in cubins.containers(data) for code in codes})
    return held, total.hexdigest()


def build(checks: Path) -> None:
    """build.json."""
    cubins, libraries_hash = libraries(checks)
    variables = json.loads((HOME / "versions.json").read_text())["variable"]
    flavours = {"sm120": "ARCH_SM120", "sm121": "ARCH_SM121", "hopper": "ARCH_HOPPER"}
    body = {
        "schema": "exl3-build/1",
        "flavour": os.environ["FLAVOUR"],
        "platform": {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}[platform.machine()],
        "architectures": os.environ["ARCHITECTURES"],
        "cubins": cubins,
        "images": {name: variables[variable]["default"] for name, variable in flavours.items()},
        "plugin": metadata.version("exl3-fleet"),
        "vllm": metadata.version("vllm"),
        "torch": metadata.version("torch"),
        "cuda": os.environ["CUDA"],
        "driver_min": os.environ["DRIVER_MIN"],
        "kernel_source_hash": os.environ["SOURCE_HASH"],
        "extras": extras(),
        "wheels": sum(1 for _ in metadata.distributions()),
    }
    named = [body[name] for name in ("flavour", "plugin", "vllm", "torch")]
    body["key"] = hashlib.sha256("\n".join([*named, libraries_hash]).encode()).hexdigest()[:12]
    (HOME / "build.json").write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")


def extras() -> list[str]:
    """What recipes may ask for in image.needs.extras and is there."""
    found = {
        "numactl": shutil.which("numactl") is not None,
        "ib": any(Path("/usr/lib").glob("*/libibverbs.so.1")),
        "ray": any(d.metadata["Name"] == "ray" for d in metadata.distributions()),
    }
    return sorted(name for name, there in found.items() if there)


def size_bytes(root: Path = Path("/")) -> int:
    """Bytes of all files of the image; other file systems (proc, mounts) are left out."""
    device, total = root.stat().st_dev, 0
    for folder, names, files in os.walk(root):
        names[:] = [n for n in names if os.lstat(f"{folder}/{n}").st_dev == device]
        for name in files:
            status = os.lstat(f"{folder}/{name}")
            total += status.st_size if status.st_dev == device else 0
    return total


def budget(mb: int) -> None:
    """Ends the build where the image is more than 5 % over its budget."""
    found = size_bytes() / 1e6
    print(f"size: {found:.0f} MB, budget {mb} MB")
    if found > GROWTH * mb:
        sys.exit(
            f"the image holds {found:.0f} MB, more than 5 % over its budget of {mb} MB: find what "
            "grew (docs/images.md, size), or raise BUDGET_MB in images/versions.json and say why"
        )


def main() -> None:
    """Command line of the build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checks", type=Path)
    parser.add_argument("--budget-mb", type=int)
    options = parser.parse_args()
    if options.budget_mb is not None:
        budget(options.budget_mb)
        return
    repair()
    arguments()
    models()
    build(options.checks)


if __name__ == "__main__":
    main()
