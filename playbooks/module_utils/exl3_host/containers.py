"""A plan becomes a container: what is sent to the engine, and how one is found, made and let go.

`body` is pure: the same plan gives the same JSON, whose fingerprint is the container's name and
label. Containers are never changed, only replaced. community.docker's module compares a running
container with wanted options field by field, never comes to rest on `cap_drop` and ulimits, and
removes the old container before the engine has seen the new one; that is why the engine is spoken
to directly here.

Inside, always the same places: the model read-only below /models, what is compiled in /cache, the
API key in /run/secrets, a calibration profile in /profile. Nothing else of the host is visible.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import seccomp
from .engine import CDI_API, Engine, EngineError
from .errors import HostError

GIB = 1 << 30
LABEL_INSTANCE, LABEL_CONFIG = "exl3.instance", "exl3.config"
LOG_MAX_SIZE, LOG_MAX_FILES = "50m", "5"
TMP_GIB = 4
PIDS_LIMIT = 16384
DEFAULT_USER = "2000:0"
API_KEY_INSIDE = "/run/secrets/vllm_api_key"
PROFILE_INSIDE = "/profile/calibration.json"
CACHE_INSIDE = "/cache"

# Everything that a library writes without being asked goes to the one writable volume.
CACHE_ENV = {
    "HOME": CACHE_INSIDE,
    "XDG_CACHE_HOME": f"{CACHE_INSIDE}/xdg",
    "VLLM_CACHE_ROOT": f"{CACHE_INSIDE}/vllm",
    "TORCHINDUCTOR_CACHE_DIR": f"{CACHE_INSIDE}/inductor",
    "TRITON_CACHE_DIR": f"{CACHE_INSIDE}/triton",
    "HF_HOME": f"{CACHE_INSIDE}/hf",
}


@dataclass(frozen=True)
class Folders:
    """Where an instance keeps, on the host, what its container sees."""

    cache: str
    secrets: str


def model_inside(folder: str) -> str:
    """Where a model folder of the host lies in the container."""
    return f"/models/{Path(folder).name}"


def cache_folder(store: str, digest: str, user: str) -> str:
    """What was compiled belongs to one image, for another it is stale, and to who wrote it."""
    return f"{store}/jit/{digest.removeprefix('sha256:')[:12]}-{user.partition(':')[0]}"


def stale_caches(store: Path, digests: set[str]) -> list[Path]:
    """Cache folders of images that no release of this store needs any more."""
    kept = {digest.removeprefix("sha256:")[:12] for digest in digests}
    return [
        path
        for path in sorted((store / "jit").glob("*-*"))
        if re.fullmatch(r"[0-9a-f]{12}-\d+", path.name) and path.name[:12] not in kept
    ]


def name_of(instance: str, config_hash: str) -> str:
    """`exl3-<instance>-<first 8 digits of the fingerprint>`."""
    return f"exl3-{instance}-{config_hash[:8]}"


def body(plan: dict, folders: Folders, grace_s: int) -> dict:
    """What the engine is asked to create, without the labels that hold its fingerprint."""
    box, serve = plan["container"], plan["serve"]
    mounts = [
        _mount(plan["model"]["dir"], model_inside(plan["model"]["dir"])),
        _mount(folders.cache, CACHE_INSIDE, writable=True),
    ]
    env = dict(serve["env"])
    if serve.get("api_key_file"):
        mounts.append(_mount(f"{folders.secrets}/vllm_api_key", API_KEY_INSIDE))
        env["VLLM_API_KEY_FILE"] = API_KEY_INSIDE
    if box.get("profile"):
        mounts.append(_mount(box["profile"], PROFILE_INSIDE))
        env["EXL3_PROFILE"] = PROFILE_INSIDE
    host: dict[str, Any] = {
        "Init": True,
        "NetworkMode": box["network"],
        "IpcMode": "private",
        "ShmSize": box["shm_gib"] * GIB,
        "ReadonlyRootfs": True,
        "Tmpfs": {"/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={TMP_GIB}g"},
        "Mounts": mounts,
        "CapDrop": ["ALL"],
        "Privileged": False,
        "SecurityOpt": [
            "no-new-privileges:true",
            f"seccomp={_canonical(seccomp.profile(box['image']['platform']))}",
        ],
        "PidsLimit": PIDS_LIMIT,
        # The unit or the supervisor counts restarts; the engine would forget them.
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {
            "Type": "json-file",
            "Config": {"max-size": LOG_MAX_SIZE, "max-file": LOG_MAX_FILES},
        },
    }
    exposed = {}
    if box["network"] == "bridge":
        port = f"{serve['port']}/tcp"
        exposed = {"ExposedPorts": {port: {}}}
        address = {"HostIp": serve["host"], "HostPort": str(serve["port"])}
        host["PortBindings"] = {port: [address]}
    if box.get("rdma"):
        # Verbs pin memory, and count it; CUDA's own pinned memory is not counted.
        host["Ulimits"] = [{"Name": "memlock", "Soft": -1, "Hard": -1}]
    if box.get("cpuset_cpus"):
        host["CpusetCpus"] = box["cpuset_cpus"]
    if box.get("cpuset_mems"):
        host["CpusetMems"] = box["cpuset_mems"]
    if box.get("gpus"):
        ids = [f"nvidia.com/gpu={uuid}" for uuid in box["gpus"]]
        host["DeviceRequests"] = [{"Driver": "cdi", "DeviceIDs": ids}]
    return {
        "Image": f"{box['image']['name']}@{box['image']['digest']}",
        "Cmd": list(serve["argv"]),
        "User": box["user"],
        "Env": [f"{name}={value}" for name, value in sorted(env.items())],
        "Healthcheck": {"StartPeriod": int(plan["health"]["ready_timeout_s"]) * 10**9},
        "StopTimeout": grace_s,
        **exposed,
        "HostConfig": host,
    }


def on_another_port(asked: dict, host: str, port: int) -> dict:
    """A copy of a body whose server is reached at another address, for a rehearsal."""
    copy = json.loads(json.dumps(asked))
    bindings = copy["HostConfig"].get("PortBindings")
    if bindings:
        for addresses in bindings.values():
            addresses[0] |= {"HostIp": host, "HostPort": str(port)}
        return copy
    words = copy["Cmd"]
    for option, value in (("--host", host), ("--port", str(port))):
        if option in words:
            words[words.index(option) + 1] = value
    return copy


def _mount(source: str, target: str, writable: bool = False) -> dict:
    # A mount of this kind fails where the source is missing; the older `Binds` would create it.
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": not writable}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def find_image(engine: Engine, name: str, digest: str) -> dict | None:
    """The image on this host: pulled under its digest, or loaded, when its id is the digest."""
    for reference in (f"{name}@{digest}", digest):
        found = engine.image(reference)
        if found is not None:
            return found
    # A mirror has another name in front, and the digest is what counts.
    for image in engine.call("GET", "/images/json"):
        if any(one.endswith(f"@{digest}") for one in image.get("RepoDigests") or []):
            return engine.image(image["Id"])
    return None


def require_image(engine: Engine, image: dict) -> dict:
    """`find_image` that raises HostError where there is none, or one for another platform."""
    found = find_image(engine, image["name"], image["digest"])
    if found is None:
        raise HostError(
            f"image {image['name']}@{image['digest']} is not on this host.",
            "Deploy without --tags so that it is pulled, or `docker load` it.",
        )
    platform = f"{found['Os']}/{found['Architecture']}"
    if platform != image["platform"]:
        raise HostError(
            f"image {image['name']}@{image['digest'][:19]} is for {platform}, this host is "
            f"{image['platform']}.",
            "Give the digest for this platform in image.digests of the recipe.",
        )
    return found


def fetch(engine: Engine, image: dict, registry: str, offline: bool) -> None:
    """Pull an image by digest, from a mirror where one is named. Raises HostError."""
    reference = f"{registry.rstrip('/')}/{image['name']}" if registry else image["name"]
    reference = f"{reference}@{image['digest']}"
    if offline:
        raise HostError(
            f"offline, and image {image['name']}@{image['digest']} is not on this host.",
            "Bring it with the bundle, or `docker load` it, and deploy again.",
        )
    try:
        engine.pull(reference)
    except EngineError as error:
        raise HostError(
            f"image {reference} could not be pulled: {error.message}.",
            "Check network, registry login and digest; a mirror is set with exl3_image_registry.",
        ) from None
    require_image(engine, image)


def check(engine: Engine, spec: dict, container: dict) -> None:
    """Refuse, before anything is made, what the engine would refuse late or not at all."""
    wanted = container["body"]["HostConfig"]
    if wanted.get("DeviceRequests") and engine.api() < CDI_API:
        raise HostError(
            f"GPUs are handed over as CDI devices, which Docker {engine.version()['Version']} "
            "cannot do.",
            "Install Docker 25 or newer (exl3_engine_manage: true).",
        )
    if wanted.get("DeviceRequests") and not engine.has_cdi():
        raise HostError(
            f"CDI devices are switched off in Docker {engine.version()['Version']}, so no GPU can "
            "be handed over.",
            'Set exl3_engine_gpus: true and deploy, or {"features": {"cdi": true}} in daemon.json.',
        )
    if shutil.which("docker", path=spec["env"].get("PATH")) is None:
        raise HostError(
            "the program docker is not in PATH.", "Install Docker's command line (docker.io)."
        )
    uid, gid = ids(container["body"]["User"])
    model = Path(wanted["Mounts"][0]["Source"])
    for path in (model, model / "config.json"):
        if not _readable(path, uid, gid):
            raise HostError(
                f"{path} cannot be read by user {uid}:{gid}, as which the container runs.",
                "Make the model readable (chmod -R a+rX), or set exl3_container_user.",
            )
    if os.geteuid() != 0 and uid != os.geteuid():
        raise HostError(
            f"the container runs as user {uid}, and only root can prepare folders for it.",
            f"Run the play with become, or set exl3_container_user: '{os.geteuid()}:0'.",
        )


def ids(user: str) -> tuple[int, int]:
    """UID and GID of `exl3_container_user`. Raises HostError for names."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", user)
    if found is None:
        raise HostError(
            f"exl3_container_user is '{user}'.", "Give numbers: 'UID:GID', for example '2000:0'."
        )
    return int(found[1]), int(found[2] or 0)


def _readable(path: Path, uid: int, gid: int) -> bool:
    try:
        info = path.stat()
    except OSError:
        return False
    need = 0o5 if stat.S_ISDIR(info.st_mode) else 0o4
    shift = 6 if info.st_uid == uid else 3 if info.st_gid == gid else 0
    return uid == 0 or (info.st_mode >> shift) & need == need


def prepare(container: dict, api_key_file: str | None) -> None:
    """Make what the container mounts: its cache, and a copy of the API key that its user can read.

    The copy is mode 0400 in a folder that only root and this user enter.
    """
    mounts = {
        one["Target"]: Path(one["Source"]) for one in container["body"]["HostConfig"]["Mounts"]
    }
    uid, gid = ids(container["body"]["User"])
    cache = mounts[CACHE_INSIDE]
    cache.mkdir(parents=True, exist_ok=True)
    give(cache, uid, gid, 0o770)
    if api_key_file:
        secret = mounts[API_KEY_INSIDE]
        secret.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        give(secret.parent, uid, gid, 0o500)
        draft = secret.with_name("draft")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        with os.fdopen(descriptor, "w") as out:
            out.write(Path(api_key_file).read_text().strip() + "\n")
        give(draft, uid, gid, 0o400)
        os.replace(draft, secret)


def give(path: Path, uid: int, gid: int, mode: int) -> None:
    """Set owner, where we may, and mode."""
    if os.geteuid() == 0:
        os.chown(path, uid, gid)
    os.chmod(path, mode)


def create(engine: Engine, container: dict, config_hash: str, suffix: str = "") -> str:
    """Create the container of a spec, which does not start it; its name.

    One of the same name that was never started is a leftover of an interrupted play and made anew;
    one that has run is kept, since its configuration is the same by name. Raises HostError in the
    engine's own words when it refuses.
    """
    name = container["name"] + suffix
    image = require_image(engine, container["image"])
    found = engine.container(name)
    if found is not None:
        same = (found["Config"].get("Labels") or {}).get(LABEL_CONFIG) == config_hash
        if same and found["State"]["Status"] != "created" and not suffix:
            return name
        drop(engine, name, 10)
    asked = {**container["body"], "Image": image["Id"]}
    asked["Labels"] = {**container["labels"], LABEL_CONFIG: config_hash}
    try:
        engine.create(name, asked)
    except EngineError as error:
        raise HostError(
            f"the engine refuses container {name}: {error.message}.", _advice(error)
        ) from None
    return name


def _advice(error: EngineError) -> str:
    text = error.message.lower()
    if "requested cpus are not available" in text or "requested memory nodes" in text:
        return "The CPU list comes from another host: correct the pinning, or set it to none."
    if "cdi" in text or "device driver" in text:
        return "Look at `nvidia-ctk cdi list`; `systemctl restart nvidia-cdi-refresh` renews it."
    if "bind source path does not exist" in text:
        return "Deploy without --tags so that the store is filled."
    return "Nothing was changed; what ran before still runs."


def drop(engine: Engine, name: str, grace_s: int) -> bool:
    """Stop a container if it runs and remove it; whether there was one."""
    found = engine.container(name)
    if found is None:
        return False
    if found["State"]["Running"]:
        engine.stop(name, grace_s)
    return engine.remove(name)


def of_instance(engine: Engine, instance: str) -> list[dict]:
    """Every container of an instance, the newest first."""
    found = engine.containers(f"{LABEL_INSTANCE}={instance}")
    return sorted(found, key=lambda one: -one["Created"])


class ContainerLog:
    """The log of a container that no supervisor watches, in the shape `wait` asks for."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name

    def __str__(self) -> str:
        return f"docker logs {self.name}"

    def mark(self) -> str:
        """Changes whenever the log grows."""
        last = self.engine.logs(self.name, tail=1, stamped=True)
        return last[-1] if last else ""

    def lines(self) -> list[str]:
        """All of it."""
        return self.engine.logs(self.name)


def alive_check(engine: Engine, name: str):
    """A function that tells what became of a container, None while it runs."""

    def check() -> str | None:
        found = engine.container(name)
        if found is None:
            return "was removed"
        state = found["State"]
        if state["Running"]:
            return None
        oom = ", out of memory" if state.get("OOMKilled") else ""
        return f"ended with exit status {state['ExitCode']}{oom}"

    return check
