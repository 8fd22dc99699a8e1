"""The whole way in a container with nothing replaced: our CPU image, vLLM, plugin, kernels.

The image is built where it is missing, from cached wheels where there are some; the checkpoint is a
tiny one of tests/fixtures. That vLLM compiles in it too is shown by tests/images/test_cpu_image.py.
"""

import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
import warnings
from pathlib import Path

import pytest
from exl3_host import containers, engine, procs
from site_files import Site, tree_hash

FIXTURE = "tests/fixtures/tiny-llama-mul1-2.5"
IMAGE = "exl3-fleet:cpu"
RECIPE = """\
schema: exl3-recipe/1
name: little
model: {{path: {model}, served_name: tiny}}
runtime: docker
image: {{name: exl3-fleet, digests: {{{platform}: "{image}"}}}}
profiles:
  cpu:
    match: {{device: cpu}}
    parallel: {{tp: 1}}
    memory: {{max_model_len: {length}, kv_cache_gib: 1}}
serve:
  args: {{enforce-eager: true}}
health:
  ready_timeout_s: 400
  stall_timeout_s: 200
  smoke: {{endpoint: completion, prompt: The trellis, max_tokens: 4}}
"""


@pytest.fixture(scope="module")
def cpu_engine(checkout):
    """An engine that holds our CPU image; skipped, loudly, where neither can be had."""
    folder = checkout / "build" / "docker"
    dockerd = checkout / "scripts" / "lib" / "dockerd.sh"
    was_running = (folder / "pid").exists()
    done = subprocess.run([dockerd, "start", folder], capture_output=True, text=True)
    if done.returncode == 0:
        found = engine.Engine(done.stdout.strip())
        if found.image(IMAGE) is None:
            build = ["scripts/build-images", "cpu", "--engine", str(folder), "--debootstrap"]
            done = subprocess.run(build, cwd=checkout, capture_output=True, text=True)
    if done.returncode != 0:
        reason = f"NO CPU IMAGE, vLLM in a container is NOT tested: {done.stderr.strip()[-400:]}"
        warnings.warn(reason, stacklevel=2)
        pytest.skip(reason)
    yield found
    if not was_running:
        subprocess.run([dockerd, "stop", folder], check=True)


class VllmSite(Site):
    """A site that serves the tiny checkpoint."""

    def __init__(self, folder: Path, checkout: Path, port: int, cpu_engine: engine.Engine):
        super().__init__(folder, checkout, port, str(cpu_engine))
        self.image = cpu_engine.image(IMAGE)["Id"]
        shutil.copytree(checkout / FIXTURE, self.model)
        self.write_recipe(256)

    def write_recipe(self, length: int, model: Path | None = None) -> None:
        words = {"model": model or self.model, "image": self.image, "length": length}
        self.recipe.write_text(RECIPE.format(platform=self.platform(), **words))

    def complete(self) -> str:
        body = {"model": "tiny", "prompt": "The trellis", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["text"]


def names(client, state=None):
    found = containers.of_instance(client, "little")
    return [one["Names"][0].lstrip("/") for one in found if state in (None, one["State"])]


def test_vllm_in_a_container_from_first_deploy_to_teardown(
    checkout, port, cpu_engine, capsys, requests_every_100_ms
):
    folder = Path(tempfile.mkdtemp(prefix="exl3-site-", dir="/var/tmp"))
    folder.chmod(0o755)
    site = VllmSite(folder, checkout, port, cpu_engine)
    told = []

    def timed(what, *arguments):
        began = time.monotonic()
        result = site.changed(*arguments)
        told.append(f"{what} {time.monotonic() - began:.0f} s")
        return result

    try:
        before = tree_hash(folder)
        assert timed("first deploy", "deploy") == 2
        answer = site.complete()
        assert timed("no change", "deploy") == 0
        (first,) = names(cpu_engine, "running")

        # A checkpoint whose last tensor bytes are gone: found out at loading, not before.
        broken = folder / "broken"
        shutil.copytree(site.model, broken)
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4096])
        site.write_recipe(256, broken)
        with requests_every_100_ms as requests:
            done = site.play("upgrade")
        said = " ".join(done.stdout.split())
        assert done.returncode != 0 and "did not pass its rehearsal" in said, done.stdout
        assert "was not touched" in said and "Error" in said
        told.append(f"broken upgrade: {requests.asked} requests, {len(requests.lost)} lost")
        assert requests.asked > 20 and requests.lost == []
        assert names(cpu_engine) == [first] and site.complete() == answer

        site.write_recipe(512)
        never = ("-e", "exl3_instance_rehearsal=never")
        assert timed("upgrade", "upgrade", *never) == 2
        assert site.complete() == answer and names(cpu_engine, "running") != [first]
        assert timed("rollback", "rollback") == 1
        assert site.complete() == answer and names(cpu_engine, "running") == [first]

        site.write_recipe(256)
        assert site.play("teardown", "--tags", "instance,data").returncode == 0
        shutil.rmtree(broken)
        assert names(cpu_engine) == [] and procs.listeners(port) == []
        assert tree_hash(folder) == before
    finally:
        with capsys.disabled():
            print(f"\n  {', '.join(told)}")
        site.play("teardown")
        shutil.rmtree(folder)
