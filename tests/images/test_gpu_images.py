"""The GPU images as far as a machine without a GPU can see: what is inside, what they say there.

An image of 10 GB takes a quarter of an hour to build, so none is built here: those that the engine
below build/docker holds are tested, the others are skipped, loudly. `scripts/build-images sm120
--engine build/docker --debootstrap` makes one; sm121 is for linux/arm64 and runs emulated.
"""

import json
import re
import subprocess
import sys
import warnings

import bake
import pytest

import images

# Machine code, and PTX that a driver translates for later cards.
CODE = {
    "sm120": {"elf": {"sm_120"}, "ptx": {"sm_120"}},
    "sm121": {"elf": {"sm_121"}, "ptx": set()},
    "hopper": {"elf": {"sm_90a"}, "ptx": set()},  # code for 9.0 that uses what is its own
}
ELF_MACHINE = {"linux/amd64": 62, "linux/arm64": 183}
LOCKED_DOWN = [
    *("--network", "none", "--read-only", "--cap-drop", "ALL", "--user", "12345:23456"),
    *("--security-opt", "no-new-privileges", "--tmpfs", "/tmp", "--tmpfs", "/cache"),
]
ABSENT = ("cc", "gcc", "g++", "c++", "clang", "cmake", "make", "nvcc", "git")
VENV = "/opt/exl3/venv"


class Image:
    """One image of the engine, and how to run it."""

    def __init__(self, flavour: str, docker: list[str], target: dict):
        self.flavour, self.docker, self.target = flavour, docker, target
        (self.platform,) = target["platforms"]
        (self.name,) = target["tags"]

    def run(self, *words, entrypoint=None, options=LOCKED_DOWN, text=True, check=True):
        command = [*self.docker, "run", "--rm", "--platform", self.platform, *options]
        command += ["--entrypoint", entrypoint] if entrypoint else []
        done = subprocess.run(
            [*command, self.name, *words], capture_output=True, text=text, timeout=900
        )
        assert not check or done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
        return done

    def file(self, path: str) -> bytes:
        return self.run(path, entrypoint="/bin/cat", text=False).stdout


@pytest.fixture(scope="module", params=sorted(CODE))
def gpu_image(request, docker_host, checkout):
    """One of the GPU images; skipped, loudly, where the engine has it not."""
    docker = ["docker", "-H", docker_host]
    targets = bake.targets(images.BAKE, bake.variables(images.VERSIONS, {}))
    found = Image(request.param, docker, targets[request.param])
    there = subprocess.run([*docker, "image", "inspect", found.name], capture_output=True)
    if there.returncode == 0 and found.platform != images.HERE:
        there = subprocess.run([checkout / "scripts/lib/emulate.sh"], capture_output=True)
    if there.returncode != 0:
        reason = f"THE {found.name} IMAGE IS NOT TESTED: build it first (docs/images.md)"
        warnings.warn(reason, stacklevel=2)
        pytest.skip(reason)
    return found


def test_labels_and_settings(gpu_image):
    inspected = subprocess.run(
        [*gpu_image.docker, "image", "inspect", gpu_image.name], capture_output=True, check=True
    )
    (body,) = json.loads(inspected.stdout)
    labels, config = body["Config"]["Labels"], body["Config"]
    assert f"{body['Os']}/{body['Architecture']}" == gpu_image.platform
    args = gpu_image.target["args"]
    for label, name in (
        ("flavour", "FLAVOUR"),
        ("architectures", "ARCHITECTURES"),
        ("vllm", "VLLM"),
        ("cuda", "CUDA"),
        ("driver_min", "DRIVER_MIN"),
    ):
        assert labels[f"exl3.{label}"] == args[name]
    assert re.fullmatch("[0-9a-f]{64}", labels["exl3.kernel_source_hash"])
    assert config["User"] == "2000:0" and config["Cmd"] == ["doctor"]
    env = dict(word.split("=", 1) for word in config["Env"])
    assert env["TRITON_PTXAS_PATH"] == "/opt/exl3/ptxas" and env["CC"] == "/opt/exl3/cc"
    # Which GPUs are seen is decided where a container starts.
    assert "NVIDIA_VISIBLE_DEVICES" not in env


def test_kernels_are_for_these_cards_and_no_other(gpu_image, checkout, tmp_path):
    """NVIDIA's cuobjdump is the judge; build.json has to agree with it."""
    library = tmp_path / "_C_cuda.so"
    site = gpu_image.run("-c", f"echo {VENV}/lib/python3*/site-packages", entrypoint="/bin/sh")
    library.write_bytes(gpu_image.file(f"{site.stdout.strip()}/exl3_plugin/_C_cuda.so"))
    assert int.from_bytes(library.read_bytes()[18:20], "little") == ELF_MACHINE[gpu_image.platform]
    tools = [sys.executable, checkout / "scripts/lib/cuda_tools.py", "cuobjdump"]
    cuobjdump = subprocess.run(
        [*tools, "--under", checkout / "build/kernels/tools"], capture_output=True, text=True
    ).stdout.strip()
    assert cuobjdump, "cuobjdump is a part of requirements/kernels.txt"
    wanted = CODE[gpu_image.flavour]
    for kind, ending in (("elf", "cubin"), ("ptx", "ptx")):
        done = subprocess.run(
            [cuobjdump, f"--list-{kind}", library], capture_output=True, text=True
        )
        found = set(re.findall(rf"\.(sm_\d+[a-z]?)\.{ending}", done.stdout))
        assert found == wanted[kind], done.stdout + done.stderr
    build = json.loads(gpu_image.file("/opt/exl3/build.json"))
    portable = {f"{code.replace('sm', 'compute')} PTX" for code in wanted["ptx"]}
    capabilities = {name.rstrip("a") for name in wanted["elf"]}
    assert set(build["cubins"]) == capabilities | portable
    assert build["platform"] == gpu_image.platform
    assert build["kernel_source_hash"].encode() in library.read_bytes()


def test_doctor_says_that_there_is_no_gpu(gpu_image):
    """All else is well: the plugin registers and its CPU operator is exact."""
    done = gpu_image.run("doctor", "--json", check=False)
    assert done.returncode == 1
    answers = {answer["name"]: answer for answer in json.loads(done.stdout)}
    assert {name for name, answer in answers.items() if answer["state"] == "bad"} == {"gpu"}
    assert answers["gpu"]["text"].startswith("no GPU (no nvidia-smi in the container)")
    assert "--gpus all" in answers["gpu"]["text"]
    assert "CPU operator exact" in answers["plugin"]["text"]
    assert "UID 12345, GID 23456" in answers["user"]["text"]


def test_a_server_without_a_gpu_is_refused_in_one_line(gpu_image, checkout):
    fixture = checkout / "tests/fixtures/tiny-llama-mul1-2.5"
    options = [*LOCKED_DOWN, "--volume", f"{fixture}:/models/tiny:ro"]
    for words in (["vllm", "serve", "/models/tiny"], ["serve", "qwen3.8-27b-exl3-5.5bpw"]):
        done = gpu_image.run(*words, options=options, check=False)
        assert done.returncode == 1 and not done.stdout
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: ") and "--gpus all" in line


def test_vllms_own_help(gpu_image):
    """The parser of the vLLM inside, with the plugin's quantisation method."""
    said = gpu_image.run("vllm", "serve", "--help=all").stdout
    assert "--tensor-parallel-size" in said and "--shutdown-timeout" in said
    version = gpu_image.run("version").stdout
    assert version.startswith(f"exl3-fleet 0.1.0 ({gpu_image.flavour} image, vLLM 0.33.0, CUDA")


def test_tools_that_run_at_a_start(gpu_image):
    """ptxas and numactl run, and Triton's driver module is there for the Triton that is there."""
    script = f"""
      set -eu
      /opt/exl3/ptxas --version
      command -v numactl
      cd {VENV}/lib/python3*/site-packages/triton/backends/nvidia
      sum=$(sha256sum < driver.c | cut -d' ' -f1)
      test -s /opt/exl3/prebuilt/$sum.so
      /opt/exl3/cc driver.c -O3 -shared -o /tmp/module.so
      cmp /tmp/module.so /opt/exl3/prebuilt/$sum.so
    """
    said = gpu_image.run("-c", script, entrypoint="/bin/sh").stdout
    assert re.search(r"release 13\.\d", said)


def test_no_compiler_and_no_trace_of_the_build(gpu_image):
    script = (
        f"for name in {' '.join(ABSENT)}; do command -v $name || true; done; "
        "ls -d /src /wheels /checks /locks /stub /root/.cache /etc/pip.conf 2> /dev/null || true; "
        "find / -xdev -name CMakeCache.txt; find /opt -perm /6000"
    )
    options = ("--network", "none", "--user", "0")
    assert gpu_image.run("-c", script, entrypoint="/bin/sh", options=options).stdout == ""


def test_bill_of_materials_is_the_lock(gpu_image, checkout):
    sbom = json.loads(gpu_image.file("/opt/exl3/sbom.json"))
    found = {part["name"].lower().replace("_", "-"): part["version"] for part in sbom["components"]}
    processor = gpu_image.platform.partition("/")[2]
    lock = (checkout / f"images/locks/cuda-{processor}.txt").read_text().splitlines()
    locked = dict(row.split(" ")[0].split("==") for row in lock if not row.startswith("#"))
    assert {n: v for n, v in locked.items() if found.get(n) != v} == {}
    licences = gpu_image.file("/opt/exl3/licences.txt").decode().splitlines()
    assert len(licences) >= len(sbom["components"])
    assert all(len(row.split("\t")) == 3 and row.split("\t")[2] for row in licences)
