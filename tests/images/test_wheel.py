"""What leaves the build machine is looked at: faults planted in a wheel are found, each by name."""

import dataclasses
import os
import subprocess
import sys
import zipfile

import pytest
import wheel_check

SOURCE = """
#include <cstdio>
#include <string>
std::string greet(const char* name) { std::puts(name); return std::string(name) + "!"; }
"""
ENVIRONMENT = {**os.environ, "SOURCE_DATE_EPOCH": "315532800", "EXL3_CUDA": "OFF"}


def readelf(path, option):
    done = subprocess.run(["readelf", "-W", option, path], capture_output=True, text=True)
    return done.stdout


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A small library that names torch's, as ours do."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "empty.cpp").write_text("")
    (folder / "greet.cpp").write_text(SOURCE)
    link = ["g++", "-shared", "-fPIC", "-o"]
    subprocess.run([*link, "libtorch.so", "empty.cpp"], check=True, cwd=folder)
    own = [*link, "_C_cpu.so", "greet.cpp", "-Wl,--no-as-needed", "-L.", "-ltorch"]
    subprocess.run(own, check=True, cwd=folder)
    return folder / "_C_cpu.so"


@pytest.fixture(scope="module")
def wheel(checkout, library, tmp_path_factory):
    """A wheel of this checkout, packed twice around the library."""
    made = []
    for name in ("first", "second"):
        out = tmp_path_factory.mktemp(name)
        env = {**ENVIRONMENT, "EXL3_CPU_LIBRARY": str(library)}
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"]
        subprocess.run([*command, "--wheel-dir", out, checkout], check=True, env=env)
        (path,) = out.glob("*.whl")
        tag = f"manylinux_2_34_{os.uname().machine}"
        command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, path]
        subprocess.run(command, check=True, capture_output=True, env=env)
        made.append(next(out.glob("*.whl")))
    return made


def test_facts_agree_with_readelf(library):
    """binutils is the independent reader."""
    facts = wheel_check.read(library.read_bytes())
    assert facts.machine == os.uname().machine
    dynamic = readelf(library, "-d")
    assert all(f"[{name}]" in dynamic for name in facts.needed)
    assert dynamic.count("(NEEDED)") == len(facts.needed)
    versions = readelf(library, "-V")
    for prefix, newest in facts.versions.items():
        assert f"{prefix}_{'.'.join(map(str, newest))}" in versions
    glibc = facts.versions["GLIBC"]
    found = {
        tuple(map(int, word[6:].split(".")))
        for word in versions.replace(",", " ").split()
        if word.startswith("GLIBC_") and word[6:].replace(".", "").isdigit()
    }
    assert glibc == max(found)


def test_a_good_wheel_is_good(wheel):
    told, wrong = wheel_check.wheel_problems(wheel[0], os.uname().machine, (2, 34), None)
    assert not wrong, wrong
    assert len(told) == 1 and "needs" in told[0]


def test_the_same_sources_give_the_same_bytes(wheel):
    assert wheel[0].read_bytes() == wheel[1].read_bytes()


def test_each_fault_is_named(library):
    good = wheel_check.read(library.read_bytes())
    other = "aarch64" if good.machine == "x86_64" else "x86_64"
    machine = good.machine
    for changes, said in (
        ({"machine": other}, f"is for {other}, expected {machine}"),
        ({"versions": {"GLIBC": (2, 38)}}, "wants GLIBC_2.38; the wheel promises 2.34"),
        ({"versions": {"GCC": (12, 0, 0)}}, "wants GCC_12.0.0"),
        ({"needed": (*good.needed, "libcudart.so.13")}, "names libcudart.so.13"),
        ({"needed": ("libc.so.6",)}, "does not name libtorch.so"),
        ({"search_path": "/home/me/torch"}, "looks for libraries in /home/me/torch"),
    ):
        bad = dataclasses.replace(good, **changes)
        (found,) = wheel_check.library_problems(bad, machine, (2, 34))
        assert said in found
    assert wheel_check.library_problems(good, machine, (2, 34)) == []


def test_a_wheel_with_the_wrong_parts(wheel, tmp_path):
    said = wheel_check.wheel_problems(wheel[0], os.uname().machine, (2, 34), "90")[1]
    assert any("expected ['exl3_plugin/_C_cpu.so', 'exl3_plugin/_C_cuda.so']" in s for s in said)
    said = wheel_check.wheel_problems(wheel[0], os.uname().machine, (2, 1), None)[1]
    assert any("is not tagged py3-none-manylinux_2_1_" in text for text in said)
    assert any("wants GLIBC_2." in text for text in said)
    bare = tmp_path / wheel[0].name
    with zipfile.ZipFile(wheel[0]) as source, zipfile.ZipFile(bare, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, b"" if name.endswith("entry_points.txt") else data)
    said = wheel_check.wheel_problems(bare, os.uname().machine, (2, 34), None)[1]
    assert any("lacks exl3 = exl3_plugin:register" in text for text in said)
    assert wheel_check.main([str(bare), "--machine", os.uname().machine]) == 1


def test_build_wheel_refuses_nonsense(checkout):
    for words, said in (
        (["--platform", "riscv"], "--platform riscv: expected amd64 or arm64"),
        (["--cuda", "sm_90"], "--cuda sm_90: expected none or a list like"),
        (["--jobs", "0"], "--jobs 0: expected a number"),
        (["--fast"], "unknown argument --fast"),
    ):
        done = subprocess.run(
            [checkout / "scripts/build-wheel", *words], capture_output=True, text=True
        )
        assert done.returncode == 1 and said in done.stderr
