"""An image with the small server, made of this machine's own Python: no registry, no network.

The interpreter, its standard library and the libraries both are linked with, in a tar that
`docker import` takes: about a second and 60 MB.
"""

import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

SMALL_SERVER = Path(__file__).parents[1] / "playbooks" / "small_server.py"

# What an image of ours does before it becomes the server: the key comes from a file.
ENTRY = """\
import os, runpy, sys
key = os.environ.pop("VLLM_API_KEY_FILE", None)
if key:
    os.environ["VLLM_API_KEY"] = open(key).read().strip()
sys.argv = ["/small_server.py", *sys.argv[1:]]
runpy.run_path("/small_server.py", run_name="__main__")
"""
SKIPPED = {"test", "idlelib", "tkinter", "ensurepip", "lib2to3", "__pycache__", "site-packages"}
SKIPPED |= {"dist-packages", "turtledemo", "distutils"}


def _libraries(binary: Path) -> set[str]:
    said = subprocess.run(["ldd", str(binary)], capture_output=True, text=True).stdout
    return set(re.findall(r"(/\S+\.so\S*)", said))


def make(docker: list[str], tag: str, **extra: str) -> str:
    """Import the image; its id. `extra` are files that make two images differ."""
    python = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    stdlib = Path(sysconfig.get_path("stdlib"))
    modules = [p for p in (stdlib / "lib-dynload").glob("*.so") if "tkinter" not in p.name]
    needed = {lib for binary in (python, *modules) for lib in _libraries(binary)}
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:

        def text(name: str, content: str) -> None:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content.encode()), 0o644
            tar.addfile(info, io.BytesIO(content.encode()))

        def drop(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
            return None if SKIPPED & set(Path(info.name).parts) else info

        for folder in ("tmp", "dev/shm", "proc", "sys", "etc"):
            info = tarfile.TarInfo(folder)
            # runc gives a tmpfs the mode of the folder below it.
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(info)
        tar.add(python, arcname=str(python).lstrip("/"))
        tar.add(stdlib, arcname=str(stdlib).lstrip("/"), filter=drop)
        for library in sorted(needed):
            tar.add(os.path.realpath(library), arcname=library.lstrip("/"))
        text("entry.py", ENTRY)
        text("small_server.py", SMALL_SERVER.read_text())
        for name, content in extra.items():
            text(name, content)
    entry = json.dumps([str(python), "-I", "/entry.py"])
    command = [*docker, "import", "--change", f"ENTRYPOINT {entry}"]
    command += ["--change", "ENV PYTHONUNBUFFERED=1", "-", tag]
    done = subprocess.run(command, input=archive.getvalue(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()
