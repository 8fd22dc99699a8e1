"""The looks that scripts/build-kernels takes at a library: do they see what is there?"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import cubins
import cuda_tools
import kernel_usage
import pytest
import torch

from tests.build import machine_code

PROBE = Path(__file__).parent / "probes" / "usage_probe.cu"
BUILT_FOR = "80,90,120+PTX"


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """The probe kernels in two shared libraries' worth of code, linked into one library."""
    folder = tmp_path_factory.mktemp("library")
    nvcc = cuda_tools.find_nvcc(exactly=machine_code.RELEASE)
    gencode = ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90"]
    gencode += ["-gencode=arch=compute_120,code=[sm_120,compute_120]"]
    objects = []
    for name in ("first", "second"):
        source = folder / f"{name}.cu"
        renamed = re.sub(r"__global__ void (\w+)", rf"__global__ void {name}_\1", PROBE.read_text())
        source.write_text(renamed)
        objects.append(source.with_suffix(".o"))
        command = [nvcc, "-c", *gencode, "-Xcompiler=-fPIC", source, "-o", objects[-1]]
        subprocess.run(command, check=True)
    target = folder / "library.so"
    # The runtime stays undefined: the library is read, never loaded.
    link = ["c++", "-shared", "-nodefaultlibs", "-Wl,-soname,libprobe.so", "-o", target, *objects]
    subprocess.run(link, check=True)
    return target


def test_architectures_are_read_as_nvidia_reads_them(library):
    cuobjdump = cuda_tools.find_tool("cuobjdump")
    listing = subprocess.run(
        [cuobjdump, "--list-elf", "--list-ptx", library], capture_output=True, text=True, check=True
    ).stdout
    theirs = sorted(re.findall(r"\.(sm_\d+)\.(cubin|ptx)$", listing, re.MULTILINE))
    ours = sorted(
        (f"sm_{code.architecture}", "ptx" if code.is_ptx else "cubin")
        for codes in cubins.containers(library.read_bytes())
        for code in codes
    )
    assert ours == theirs
    assert len(ours) == 8  # two sources, each for three devices and once more as PTX


@pytest.mark.parametrize(
    ("expected", "complaints"),
    [
        (BUILT_FOR, []),
        ("80,86,90,120+PTX", ["sm_86 is missing in 2 of 2 sources"]),
        ("80,90,120", ["compute_120 PTX is there and was not asked for"]),
        ("80,120+PTX", ["sm_90 is there and was not asked for"]),
    ],
)
def test_a_wrong_set_of_architectures_is_named(library, expected, complaints):
    found = cubins.problems(library.read_bytes(), cubins.parse_architectures(expected))
    assert found == complaints


def test_a_source_that_lacks_an_architecture_is_seen_behind_one_that_has_it(library):
    data = bytearray(library.read_bytes())
    text = bytes(data)
    begin = text.index((0xBA55ED50).to_bytes(4, "little"))
    # The first entry's architecture is 28 bytes into the entry, which follows 16 bytes of header.
    assert int.from_bytes(data[begin + 44 : begin + 48], "little") in (80, 90, 120)
    was = int.from_bytes(data[begin + 44 : begin + 48], "little")
    data[begin + 44 : begin + 48] = (89).to_bytes(4, "little")
    found = cubins.problems(bytes(data), cubins.parse_architectures(BUILT_FOR))
    assert f"sm_{was} is missing in 1 of 2 sources" in found
    assert "sm_89 is there and was not asked for" in found


def test_wheels_are_looked_into(library, tmp_path, capsys):
    wheel = tmp_path / "exl3_fleet-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("exl3_plugin/__init__.py", "")
    assert cubins.main([str(wheel)]) == 1
    assert "holds no exl3_plugin/_C_cuda.so" in capsys.readouterr().err
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.write(library, "exl3_plugin/_C_cuda.so")
    assert cubins.main([str(wheel), "--expect", BUILT_FOR]) == 0
    assert cubins.main([str(wheel), "--expect", "80,90"]) == 1
    assert "sm_120 is there and was not asked for" in capsys.readouterr().err


def test_other_files_are_refused_with_a_reason(tmp_path, capsys):
    text = tmp_path / "library.so"
    text.write_text("not a library, and long enough to hold the header of one" * 4)
    assert cubins.main([str(text)]) == 1
    assert "no 64-bit little-endian ELF file" in capsys.readouterr().err
    assert cubins.main([sys.executable]) == 1
    assert "no CUDA code" in capsys.readouterr().err


def test_libraries_that_would_have_to_be_found_are_read_as_the_linker_reads_them():
    path = Path(torch.__file__).parent / "lib" / "libtorch.so"
    dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True)
    theirs = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic.stdout)
    assert cubins.needed(path.read_bytes()) == theirs != []


def test_a_kernel_with_a_stack_frame_is_refused(library):
    usages = kernel_usage.read_usage(library, cuda_tools.find_tool("cuobjdump"))
    assert len(usages) == 3 * 2 * 3  # kernels, sources, devices
    assert {usage.architecture for usage in usages} == {80, 90, 120}
    wrong = kernel_usage.problems(usages)
    assert len(wrong) == 2 * 3
    assert all("needs_a_frame" in text and "bytes of stack a thread" in text for text in wrong)
    shared = {usage.shared_bytes for usage in usages if usage.kernel.endswith("shares")}
    assert shared == {4096}  # 1024 floats


def test_registers_and_shared_memory_have_their_caps():
    usage = kernel_usage.Usage(120, "kernel", 128, 0, 99 * 1024)
    assert kernel_usage.problems([usage], most_registers=128) == []
    assert "128 registers, at most 127" in kernel_usage.problems([usage], most_registers=127)[0]
    larger = kernel_usage.Usage(120, "kernel", 128, 0, 99 * 1024 + 16)
    assert "101392 bytes of shared memory, 101376 exist" in kernel_usage.problems([larger])[0]


def write_sources(root: Path) -> None:
    for name in ("format/a.cuh", "device/b.cuh", "linear/c.cu", "ops/cuda_d.cpp", "ops/cpu_e.cpp"):
        path = root / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"// {name}\n")


def source_hash(root: Path) -> str:
    header = root / "hash.h"
    script = machine_code.ROOT / "csrc" / "source_hash.cmake"
    beside_python = Path(sys.executable).with_name("cmake")
    cmake = beside_python if beside_python.exists() else "cmake"
    command = [cmake, f"-DOUTPUT={header}", f"-DROOT={root}", "-P", script]
    subprocess.run(command, check=True)
    return re.fullmatch(r'#define EXL3_SOURCE_HASH "(\w{64})"\n', header.read_text())[1]


def test_the_source_hash_covers_the_kernels_and_nothing_else(tmp_path):
    write_sources(tmp_path)
    names = ["csrc/device/b.cuh", "csrc/format/a.cuh", "csrc/linear/c.cu", "csrc/ops/cuda_d.cpp"]
    digests = [hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in names]
    listing = "".join(f"{name} {digest}\n" for name, digest in zip(names, digests, strict=True))
    first = source_hash(tmp_path)
    assert first == hashlib.sha256(listing.encode()).hexdigest()
    (tmp_path / "csrc/ops/cpu_e.cpp").write_text("// changed\n")
    assert source_hash(tmp_path) == first
    (tmp_path / "csrc/device/b.cuh").write_text("// changed\n")
    second = source_hash(tmp_path)
    assert second != first
    (tmp_path / "csrc/linear/c.cu").rename(tmp_path / "csrc/linear/d.cu")
    assert source_hash(tmp_path) not in (first, second)


def test_the_library_tells_what_it_was_built_for(tmp_path):
    (tmp_path / "exl3_source_hash.h").write_text(f'#define EXL3_SOURCE_HASH "{"ab" * 32}"\n')
    target, torch_folder = tmp_path / "build.so", Path(torch.__file__).parent
    definitions = ['EXL3_ARCHITECTURES="80,120"', 'EXL3_PTX="120"', 'EXL3_NVCC_VERSION="13.0.88"']
    command = ["c++", "-std=c++20", "-shared", "-fPIC", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    command += [f"-D{text}" for text in definitions]
    command += ["-isystem", str(torch_folder / "include"), "-I", str(tmp_path)]
    command += [str(machine_code.ROOT / "csrc" / "ops" / "cuda_build.cpp"), "-o", str(target)]
    command += ["-Wl,--no-as-needed", str(torch_folder / "lib" / "libtorch_cpu.so")]
    subprocess.run(command, check=True)
    script = f"""import torch
torch.ops.load_library({str(target)!r})
print(torch.ops.exl3.cuda_build_info())
print(torch.ops.exl3.cuda_architectures())"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    info, architectures = done.stdout.splitlines()
    assert json.loads(info) == {
        "source_hash": "ab" * 32,
        "architectures": [80, 120],
        "ptx": [120],
        "nvcc": "13.0.88",
    }
    assert json.loads(architectures) == [80, 120]
