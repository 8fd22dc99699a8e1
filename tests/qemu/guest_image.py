"""A two-socket machine under QEMU's own emulation, with this checkout's exl3_host and a Python.

The initrd holds busybox, numactl, the Python that runs the tests with the modules it imports, the
host logic, and guest_script.py, which looks, pins and proves on the live kernel and writes one
JSON object to the second serial port.
"""

from __future__ import annotations

import gzip
import json
import os
import py_compile
import shutil
import stat
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "playbooks/module_utils/exl3_host"
MODULES = (
    "capture",
    "commands",
    "facts",
    "gpupin",
    "gpus",
    "measure",
    "numa",
    "pinning",
    "proof",
    "topology",
)
# Node 0 and node 1 have eight CPUs each, node 2 has memory and no CPU. The device below px0 is on
# node 0, below px1 on node 1; of px2 the firmware says nothing.
MACHINE = """
-M q35 -accel tcg,thread=multi -cpu Nehalem -smp 16,sockets=2,cores=4,threads=2 -m 896
-object memory-backend-ram,id=m0,size=384M
-object memory-backend-ram,id=m1,size=384M
-object memory-backend-ram,id=m2,size=128M
-numa node,nodeid=0,cpus=0-7,memdev=m0
-numa node,nodeid=1,cpus=8-15,memdev=m1
-numa node,nodeid=2,memdev=m2
-numa dist,src=0,dst=1,val=32 -numa dist,src=0,dst=2,val=40 -numa dist,src=1,dst=2,val=40
-device pxb-pcie,id=px0,bus_nr=64,bus=pcie.0,numa_node=0
-device pcie-root-port,id=rp0,bus=px0,chassis=1 -device edu,bus=rp0
-device pxb-pcie,id=px1,bus_nr=128,bus=pcie.0,numa_node=1
-device pcie-root-port,id=rp1,bus=px1,chassis=2 -device edu,bus=rp1
-device pxb-pcie,id=px2,bus_nr=192,bus=pcie.0
-device pcie-root-port,id=rp2,bus=px2,chassis=3 -device edu,bus=rp2
-display none -no-reboot -nic none
"""
INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mkdir -p /dev/shm
/bin/busybox mount -t tmpfs shm /dev/shm
/bin/busybox mount -t cgroup2 cgroup /sys/fs/cgroup
echo 0 > /sys/devices/system/cpu/cpu3/online
export PATH=/usr/bin:/bin PYTHONHOME=@PREFIX@ PYTHONPATH=/guest PYTHONDONTWRITEBYTECODE=1
@PYTHON@ -S -X frozen_modules=on /guest/guest_script.py > /dev/ttyS1 2> /tmp/errors
/bin/busybox cat /tmp/errors
/bin/busybox poweroff -f
"""


def missing() -> str | None:
    """Why no guest can be started here, or None."""
    for tool, package in (
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("busybox", "busybox-static"),
        ("numactl", "numactl"),
    ):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (package {package})"
    if os.uname().machine != "x86_64":
        return "the guest is x86_64 and takes its Python from this machine"
    try:
        kernel()
    except subprocess.CalledProcessError as error:
        return f"no guest kernel: {error.stderr.strip()[-200:]}"
    return None


def kernel() -> Path:
    """A Debian cloud kernel."""
    done = subprocess.run(
        [str(CHECKOUT / "scripts/lib/guest-kernel.sh")], capture_output=True, text=True, check=True
    )
    return Path(done.stdout.strip().splitlines()[-1])


def build(folder: Path) -> Path:
    """Make the initrd below `folder`."""
    root = folder / "root"
    python = Path(os.path.realpath(sys.executable))
    _program(root, python)
    _program(root, Path(shutil.which("numactl") or ""))
    _program(root, Path(shutil.which("busybox") or ""), "bin/busybox")
    _modules(root, python)
    guest = root / "guest"
    (guest / "exl3_host").mkdir(parents=True)
    for source in PACKAGE.glob("*.py"):
        _compiled(source, guest / "exl3_host" / source.name)
    _compiled(CHECKOUT / "bench/node_probe.py", guest / "node_probe.py")
    for name in ("guest_script", "guest_probe", "guest_worker"):
        _compiled(Path(__file__).with_name(f"{name}.py"), guest / f"{name}.py")
    init = INIT.replace("@PYTHON@", str(python)).replace("@PREFIX@", sys.base_prefix)
    (root / "init").write_text(init)
    (root / "init").chmod(0o755)
    image = folder / "initrd.gz"
    with gzip.open(image, "wb", compresslevel=1) as out:
        _cpio(root, out)
    return image


def run(folder: Path, timeout_s: float = 480) -> dict:
    """Boot, let the script run, power off; what the script found."""
    image = build(folder)
    console, answer = folder / "console.txt", folder / "answer.json"
    command = ["qemu-system-x86_64", *MACHINE.split()]
    command += ["-serial", f"file:{console}", "-serial", f"file:{answer}"]
    command += ["-kernel", str(kernel()), "-initrd", str(image)]
    command += ["-append", "console=ttyS0 quiet panic=-1 numa_balancing=disable"]
    subprocess.run(command, stdin=subprocess.DEVNULL, timeout=timeout_s, check=True)
    text = answer.read_text(errors="replace").replace("\r", "")
    try:
        return json.loads(text[text.index("{") :])
    except ValueError:
        said = console.read_text(errors="replace")[-3000:]
        raise AssertionError(f"the guest gave no answer; its console:\n{said}") from None


def _program(root: Path, program: Path, name: str | None = None) -> None:
    """A program and the libraries that it is linked with."""
    _copy(program, root / (name or str(program).lstrip("/")))
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        for word in line.split():
            if word.startswith("/"):
                _copy(Path(word), root / word.lstrip("/"))


def _modules(root: Path, python: Path) -> None:
    """The parts of the standard library that guest_script.py and the host logic import."""
    names = ", ".join(f"exl3_host.{m}" for m in MODULES)
    code = f"import {names}, node_probe, threading, mmap, json, sys, encodings.ascii\n"
    code += "print(json.dumps([m.__file__ for m in sys.modules.values()"
    code += " if getattr(m, '__file__', None)]))"
    env = {"PYTHONPATH": f"{PACKAGE.parent}:{CHECKOUT / 'bench'}", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [str(python), "-S", "-c", code], env=env, capture_output=True, text=True, check=True
    )
    for name in json.loads(done.stdout):
        source = Path(name)
        if not source.is_relative_to(sys.base_prefix):
            continue
        target = root / str(source).lstrip("/")
        if source.suffix == ".py":
            _compiled(source, target)
        else:
            _program(root, source)
    library = Path(os.__file__).parent
    # getpath looks for these two to find its prefix.
    _copy(library / "os.py", root / str(library / "os.py").lstrip("/"))
    (root / str(library / "lib-dynload").lstrip("/")).mkdir(parents=True, exist_ok=True)


def _compiled(source: Path, target: Path) -> None:
    """A source file and its byte code, which the guest trusts without looking at times."""
    _copy(source, target)
    cache = target.parent / "__pycache__" / f"{target.stem}.{sys.implementation.cache_tag}.pyc"
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(
        str(source), cfile=str(cache), dfile=f"/{target.name}", invalidation_mode=mode, doraise=True
    )


def _copy(source: Path, target: Path) -> None:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(os.path.realpath(source), target)


def _cpio(root: Path, out) -> None:
    """The tree in the `newc` format that the kernel unpacks; no cpio program is needed."""
    names = sorted(p.relative_to(root) for p in root.rglob("*"))
    for number, name in enumerate(names, start=1):
        path = root / name
        data = b"" if path.is_dir() else path.read_bytes()
        mode = stat.S_IFDIR | 0o755 if path.is_dir() else stat.S_IFREG | 0o755
        _record(out, str(name), number, mode, data)
    _record(out, "TRAILER!!!", 0, 0, b"")


def _record(out, name: str, inode: int, mode: int, data: bytes) -> None:
    raw = name.encode() + b"\0"
    fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(raw), 0)
    header = b"070701" + b"".join(b"%08x" % f for f in fields)
    out.write(header + raw + b"\0" * (-(len(header) + len(raw)) % 4))
    out.write(data + b"\0" * (-len(data) % 4))
