"""The playbooks with containers, run by ansible-playbook against this machine and a private engine.

Everything is real but the model server in the image; the same path with vLLM is the last test of
tests/docker/test_real_vllm.py.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import pytest
from exl3_host import containers, procs, service, spec, status
from site_files import Site, tree_hash

RECIPE = """\
schema: exl3-recipe/1
name: little
model: {{path: {model}, served_name: little}}
runtime: docker
image: {{name: small, digests: {{{platform}: "{image}"}}}}
profiles:
  cpu:
    match: {{device: cpu}}
    parallel: {{tp: 1}}
    memory: {{max_model_len: 256, kv_cache_gib: 1}}
serve:
  args: {args}
health:
  ready_timeout_s: 60
  stall_timeout_s: 30
  smoke: {{endpoint: chat, prompt: What is the capital of France?, max_tokens: 8,
    expect: (?i)paris}}
"""


class SmallSite(Site):
    """A site whose image holds the small server."""

    def __init__(self, folder: Path, checkout: Path, port: int, images: dict, docker_host: str):
        super().__init__(folder, checkout, port, docker_host)
        self.images = images
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        self.write_recipe()

    def write_recipe(self, image: str = "a", **args) -> None:
        words = {"image": self.images[image], "args": json.dumps(args)}
        self.recipe.write_text(RECIPE.format(model=self.model, platform=self.platform(), **words))


@pytest.fixture
def site(checkout, port, images, docker_host):
    # Not below pytest's own folder, which only its user may enter: the container's user reads it.
    folder = Path(tempfile.mkdtemp(prefix="exl3-site-", dir="/var/tmp"))
    folder.chmod(0o755)
    made = SmallSite(folder, checkout, port, images, docker_host)
    yield made
    service.remove(spec.Paths(made.store, "little"))
    shutil.rmtree(folder)


def names(client, state=None):
    found = containers.of_instance(client, "little")
    return [one["Names"][0].lstrip("/") for one in found if state in (None, one["State"])]


def images_of(docker) -> set[bytes]:
    return set(subprocess.run([*docker, "images", "-q"], capture_output=True).stdout.split())


def test_life_of_a_deployment(site, client, docker, capsys, requests_every_100_ms):
    before = tree_hash(site.folder)
    images_before = images_of(docker)

    assert site.changed("deploy", "--check", "--diff") > 0
    assert not site.store.exists() and names(client) == [], "check mode wrote something"
    assert site.changed("deploy") == 2
    began = time.monotonic()
    assert site.changed("deploy") == 0
    with capsys.disabled():
        print(f"\n  a deploy without changes took {time.monotonic() - began:.1f} s")
    assert site.changed("deploy", "--check", "--diff") == 0
    (first,) = names(client, "running")

    done = site.play("status")
    assert done.returncode == 0
    assert re.search(rf"little +serving +http://127.0.0.1:{site.port}", done.stdout)

    # A broken upgrade: the old server answers throughout.
    recipe = site.recipe.read_text()
    site.write_recipe("b", **{"raise": "the trellis is 17 wide"})
    with requests_every_100_ms as requests:
        done = site.play("upgrade")
    said = " ".join(done.stdout.split())
    assert done.returncode != 0 and "ValueError: the trellis is 17 wide" in said
    assert "did not pass its rehearsal" in said and "was not touched" in said
    assert requests.asked > 5 and requests.lost == []
    with capsys.disabled():
        print(f"  broken upgrade: {requests.asked} requests, {len(requests.lost)} lost")
    assert names(client) == [first]
    site.recipe.write_text(recipe)
    assert site.changed("deploy") <= 1  # the plan file goes back

    # A good one, and back.
    site.write_recipe("b", answer="It is Paris")
    done = site.play("upgrade", "--check", "--diff")
    assert done.returncode == 0 and '+    "It is Paris",' in done.stdout
    assert site.changed("upgrade") == 2
    (second,) = names(client, "running")
    assert second != first and site.changed("upgrade") == 0
    assert site.changed("rollback") == 1 and names(client, "running") == [first]
    assert site.changed("deploy") == 2 and names(client, "running") == [second]

    assert site.play("teardown").returncode == 0
    assert names(client) == [] and procs.listeners(site.port) == []
    assert "changed=0" in site.play("teardown").stdout
    site.recipe.write_text(recipe)
    assert site.play("teardown", "--tags", "data").returncode == 0
    assert tree_hash(site.folder) == before
    assert images_of(docker) == images_before


def wait_for(condition, process, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("the moment never came")


def kill_all(process: subprocess.Popen) -> None:
    """Kill the play with all it started, but not the servers, whose sessions are their own."""
    os.killpg(process.pid, signal.SIGKILL)
    for pid in procs.tree(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.stdout.close()
    process.wait()


MOMENTS = {
    # The new container serves on its spare port, the old one serves.
    "rehearsing": lambda site, client: client.containers(
        f"{containers.LABEL_INSTANCE}=little-rehearsal"
    ),
    # The old one is told to stop and drains; nothing has been started.
    "stopping": lambda site, client: (site.state() or {}).get("phase") == "stopping",
    # The new one was started and is not ready.
    "starting": lambda site, client: (
        [one["State"] == "running" for one in containers.of_instance(client, "little")]
        == [True, False]  # the newest comes first
        and not spec.Paths(site.store, "little").ready.exists()
    ),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_between_two_steps_the_next_run_ends_serving(site, client, moment):
    # Long enough to be met by a test that has to share its processor.
    drain = 8.0 if moment == "stopping" else 0.0
    site.write_recipe("a", drain=drain)
    site.serve()
    (old,) = names(client)
    slow = {"ready-after": 3.0} if moment != "stopping" else {}
    site.write_recipe("b", **slow)
    process = site.begin("upgrade", start_new_session=True)
    wait_for(lambda: MOMENTS[moment](site, client), process)
    kill_all(process)
    if moment == "rehearsing":
        assert names(client, "running") == [old]
    site.changed("upgrade")
    (new,) = names(client, "running")
    assert new != old and status.look(spec.Paths(site.store, "little")).state == "serving"
    assert client.containers(f"{containers.LABEL_INSTANCE}=little-rehearsal") == []
    assert not spec.Paths(site.store, "little").pending.exists()
    if moment == "starting":
        # What served before the interrupted play is what a rollback brings back.
        assert site.changed("rollback") == 1 and names(client, "running") == [old]


def test_killed_in_a_broken_upgrade_the_next_run_goes_back(site, client):
    """The play dies after the old server was stopped, and the new one turns out to be broken."""
    site.serve()
    (old,) = names(client)
    site.write_recipe("b", answer="Rome", **{"ready-after": 2.0})
    never = ("-e", "exl3_instance_rehearsal=never")
    process = site.begin("upgrade", *never, start_new_session=True)
    wait_for(lambda: MOMENTS["starting"](site, client), process)
    kill_all(process)
    done = site.play("upgrade", *never)
    said = " ".join(done.stdout.split())
    assert done.returncode != 0 and "it says 'Rome'" in said
    assert "The previous server was started again and serves" in said
    assert names(client, "running") == [old]


def test_an_image_that_cannot_be_had_is_refused_before_anything_stops(site, client, images):
    site.serve()
    (old,) = names(client)
    site.images = {**images, "b": "sha256:" + "1" * 64}
    site.write_recipe("b")
    done = site.play("deploy", "-e", '{"exl3_offline": true}')
    said = " ".join(done.stdout.split())
    assert done.returncode != 0
    assert f"offline, and image small@sha256:{'1' * 64} is not on this host" in said
    assert names(client, "running") == [old]


def test_what_operators_run(site, client, tmp_path, docker_host):
    """smoke, bench, ab_pin, calibrate, report: each as a playbook, on one container."""
    site.write_recipe("a")
    site.serve()
    said = " ".join(site.play("smoke").stdout.split())
    assert "asked 'What is the capital of France?' it says 'Paris.'" in said

    few = ("-e", "exl3_bench_requests=3", "-e", "exl3_bench_output_tokens=8")
    first = " ".join(site.play("bench", *few).stdout.split())
    assert "0 of 3 failed; the first run of this configuration" in first
    second = " ".join(site.play("bench", *few).stdout.split())
    assert "tokens per second against" in second

    once = {"exl3_ab_pin_starts": 1, "exl3_ab_pin_requests": 2, "exl3_ab_pin_output_tokens": 8}
    done = site.play("ab_pin", "-e", json.dumps(once))
    assert done.returncode == 0, done.stdout
    choice = spec.read_json(site.store / "choices" / "little.json")
    assert choice["mode"] in [row["mode"] for row in choice["rows"]]
    assert {row["mode"] for row in choice["rows"]} | set(choice["skipped"]) == {
        "none",
        "container",
        "per_rank",
    }
    # What won is what the next deploy plans.
    assert site.changed("deploy") <= 1 and site.changed("deploy") == 0

    said = " ".join(site.play("calibrate").stdout.split())
    assert "no GPU here: CPU kernels are not calibrated" in said

    assert site.play("report", "-e", f"exl3_report_dest={tmp_path}").returncode == 0
    with tarfile.open(tmp_path / "exl3-report-localhost.tar.gz") as archive:
        names = archive.getnames()
    assert "exl3-report/run/little/spec.json" in names and "exl3-report/engine.json" in names


def test_check_mode_shows_the_engines_settings_and_changes_none(site, tmp_path):
    path = tmp_path / "daemon.json"
    path.write_text('{"log-level": "warn"}\n')
    wish = {"exl3_engine_daemon_json": {"features": {"cdi": True}}}
    wish |= {"exl3_engine_daemon_path": str(path)}
    done = site.play("deploy", "--tags", "engine", "--check", "--diff", "-e", json.dumps(wish))
    assert done.returncode == 0 and '+    "cdi": true' in done.stdout, done.stdout
    assert '+  "log-level": "warn",' in done.stdout, "the foreign key stays, before ours"
    assert path.read_text() == '{"log-level": "warn"}\n'
