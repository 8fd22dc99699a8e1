"""GPUs as CDI devices, on an engine that knows them. The cards are made up, the engine is not.

What the engine does with our requests does not depend on the vendor: it looks a device's name up in
the lists of a folder and gives the container what stands there. The lists here are what
`nvidia-ctk cdi generate` writes for two cards, with device nodes that every machine has.
"""

import json
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import pytest
import small_image
from exl3_host import containers, engine, engine_host, hints, procs, service, spec
from exl3_host.errors import HostError

from tests import plans

LIB = Path(__file__).parents[2] / "scripts" / "lib"
ONE, TWO = (f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in (1, 2))
# The program that reads the lists back, which is in no Debian archive.
NVIDIA_CTK = """\
#!/usr/bin/env python3
import json, pathlib, sys
assert sys.argv[1:] == ["cdi", "list"], sys.argv
for path in sorted(pathlib.Path(__file__).parent.glob("cdi/*.json")):
    listed = json.loads(path.read_text())
    for device in listed["devices"]:
        print(f"{listed['kind']}={device['name']}")
"""


class Host:
    """An engine of release 25 or later with a folder of CDI lists of its own."""

    def __init__(self, folder: Path, programs: str):
        self.folder, self.settings = folder, folder / "daemon.json"
        self.environment = {**os.environ, "PATH": f"{folder}:{programs}:{os.environ['PATH']}"}
        (folder / "cdi").mkdir()
        (folder / "nvidia-ctk").write_text(NVIDIA_CTK)
        (folder / "nvidia-ctk").chmod(0o755)

    def _do(self, action: str, *words: str | Path) -> str:
        command = [LIB / "dockerd.sh", action, self.folder, *words]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def restart(self) -> engine.Engine:
        self._do("stop")
        return engine.Engine(self._do("start", "--cdi-spec-dir", self.folder / "cdi"))

    def list_devices(self, *uuids: str) -> None:
        """What the driver's tool writes: a name, device nodes and variables for each card."""
        devices = [
            {
                "name": uuid,
                "containerEdits": {
                    "deviceNodes": [{"path": f"/dev/nvidia{uuid[-1]}", "hostPath": "/dev/zero"}],
                    "env": [f"CARD_{uuid[-1]}={uuid}"],
                },
            }
            for uuid in uuids
        ]
        made = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}
        (self.folder / "cdi" / "nvidia.json").write_text(json.dumps(made))


@pytest.fixture(scope="module")
def host():
    fetched = subprocess.run([LIB / "newer-dockerd.sh"], capture_output=True, text=True)
    if fetched.returncode != 0 or os.geteuid() != 0:
        reason = f"NO ENGINE WITH CDI, GPUs in containers are NOT tested: {fetched.stderr.strip()}"
        warnings.warn(reason, stacklevel=2)
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="exl3-cdi-", dir="/var/tmp"))
    found = Host(folder, fetched.stdout.strip())
    yield found
    found._do("remove")


@pytest.fixture
def store():
    folder = Path(tempfile.mkdtemp(prefix="exl3-store-", dir="/var/tmp"))
    yield folder
    for run in (folder / "run").glob("*"):
        service.remove(spec.Paths(folder, run.name))
    shutil.rmtree(folder)


def test_gpus_are_handed_over_by_name(host, store, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", host.environment["PATH"])
    client = host.restart()
    docker = ["docker", "-H", str(client)]
    options = service.Options(manager="supervisor", docker_host=str(client))
    image = small_image.make(docker, "small:a", release="a")
    model = plans.model_folder(tmp_path)

    def plan(*gpus: str) -> dict:
        made = plans.small_container(model, [], plans.free_port(), image)
        return plans.changed(made, {"container": {"gpus": list(gpus)}})

    # An engine as it is installed, before 28.2: it knows CDI devices and has them switched off.
    found = engine_host.look(has_gpus=True)
    assert found["action"] == "none" and client.version()["Version"].startswith(found["version"])
    host.list_devices(ONE, TWO)
    if not client.has_cdi():
        with pytest.raises(HostError, match=r"CDI devices are switched off in Docker \d+") as said:
            service.ensure(plan(TWO), store, options)
        assert "exl3_engine_gpus: true" in str(said.value)
        assert containers.of_instance(client, "small") == []
        # What the role `exl3_engine` then does.
        wanted = engine_host.wanted_settings(found, {}, has_gpus=True)
        assert engine_host.apply_settings(host.settings, wanted)[0]
        client = host.restart()
    assert client.has_cdi()

    served = plan(TWO)
    assert service.ensure(served, store, options).answer == "Paris."
    (box,) = containers.of_instance(client, "small")
    (pid, *_) = client.pids(box["Id"])
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    assert f"CARD_2={TWO}" in variables and not any(v.startswith("CARD_1") for v in variables)
    assert [p.name for p in Path(f"/proc/{pid}/root/dev").glob("nvidia*")] == ["nvidia2"]
    # The device rules let this user, who has no capabilities, use it.
    python = client.container(box["Id"])["Config"]["Entrypoint"][0]
    code = "print(open('/dev/nvidia2', 'rb').read(3))"
    done = subprocess.run(
        [*docker, "exec", box["Id"], python, "-I", "-c", code], capture_output=True, text=True
    )
    assert done.stdout.strip() == r"b'\x00\x00\x00'", done.stderr
    assert not service.ensure(served, store, options).changed

    # A driver was updated and the list not: said before anything is made.
    host.list_devices(TWO)
    with pytest.raises(HostError, match=f"the list of CDI devices has no {ONE}") as said:
        service.ensure(plan(ONE), store, options)
    assert "nvidia-cdi-refresh" in str(said.value) and procs.start_ticks(pid) is not None

    # The list goes while a container rests: the engine's own words lead to the same advice.
    service.halt(spec.Paths(store, "small"))
    host.list_devices()
    with pytest.raises(engine.EngineError) as refused:
        client.start(box["Id"])
    hint, line = hints.match([str(refused.value)])
    assert hint.id == "cdi-missing" and TWO in line
