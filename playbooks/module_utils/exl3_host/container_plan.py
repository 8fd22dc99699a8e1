"""The part of a plan that only containers have: image, shared memory, CPU set, GPUs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from . import cpus as cpu_lists
from .arguments import Note
from .containers import CACHE_ENV, DEFAULT_USER, model_inside
from .errors import HostError
from .schema import CpuProfile, GpuProfile

if TYPE_CHECKING:
    from .instance import Instance
    from .recipe import LoadedRecipe

__all__ = [
    "CACHE_ENV",
    "DEFAULT_USER",
    "listen_address",
    "model_inside",
    "pinning_facts",
    "section",
]

GIB = 2**30
PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
# NCCL and vLLM's message queues need little for one rank; 64 MiB, the engine's default, is what
# ends several ranks with a bus error.
SHM_ONE_RANK_GIB, SHM_PER_RANK_GIB = 1, 2


def pinning_facts(facts: dict) -> dict:
    """The facts that `pinning.decide` may reckon with: the engine binds, no numactl is needed."""
    return {**facts, "tools": {**facts["tools"], "numactl": "cpuset"}}


def listen_address(container: dict | None, host: str) -> str:
    """Where the server itself listens: behind a bridge, the engine decides who reaches it."""
    return "0.0.0.0" if container is not None and container["network"] == "bridge" else host


def section(
    loaded: LoadedRecipe,
    facts: dict,
    instance: Instance,
    profile: CpuProfile | GpuProfile,
    pin: dict,
    note: Note,
) -> dict:
    """`container` of a plan; every choice goes to `note` with its reason. Raises HostError."""
    image = image_of(loaded, facts, instance)
    note("image", f"{image['name']}@{image['digest'][:19]}", _image_reason(instance, image))
    shm = _checked_shm(profile, facts, note)
    cpuset, mems = _cpuset(facts, pin)
    note("pinning", f"cpuset {cpuset or 'none'}, memory {mems or 'not bound'}", pin["reason"])
    return {
        "image": image,
        "user": instance.container_user,
        "network": instance.container_network,
        "shm_gib": shm,
        "cpuset_cpus": cpuset,
        "cpuset_mems": mems,
        "gpus": list(pin.get("gpus", ())),
        "rdma": isinstance(profile, GpuProfile) and profile.comm.fabric == "roce",
        "profile": instance.calibration_file,
    }


def image_of(loaded: LoadedRecipe, facts: dict, instance: Instance) -> dict:
    """{name, digest, platform}: the instance's image, else the recipe's for this processor."""
    platform = PLATFORMS.get(facts["arch"])
    if platform is None:
        raise HostError(f"There are no images for {facts['arch']}.", "Use the native runtime.")
    if instance.image is not None:
        name, at, digest = instance.image.partition("@")
        if not at or not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise HostError(
                f"The image '{instance.image}' is not pinned: a tag moves.",
                "Write NAME@sha256:<64 hex>; `docker image inspect` prints the digest.",
            )
        return {"name": name, "digest": digest, "platform": platform}
    image = loaded.recipe.image
    if image is None:
        raise HostError(
            f"Recipe {loaded.recipe.name} names no image, and the runtime is docker.",
            "Add image with its digests to the recipe, set image of the instance, or use the "
            "native runtime.",
        )
    digest = image.digests.amd64 if platform == "linux/amd64" else image.digests.arm64
    if digest is None:
        raise HostError(
            f"Recipe {loaded.recipe.name} has no image for {platform}.",
            f"Add image.digests.{platform} ({loaded.path}).",
        )
    return {"name": image.name, "digest": digest, "platform": platform}


def _image_reason(instance: Instance, image: dict) -> str:
    source = "the instance names it" if instance.image else "the recipe's"
    return f"{source}, for {image['platform']}"


def shm_gib(profile: CpuProfile | GpuProfile) -> int:
    """Size of /dev/shm: the profile's, else by the number of ranks."""
    asked = profile.comm.shm_gib if isinstance(profile, GpuProfile) else None
    tp = profile.parallel.tp
    return asked or (SHM_ONE_RANK_GIB if tp == 1 else SHM_PER_RANK_GIB * tp)


def _checked_shm(profile: CpuProfile | GpuProfile, facts: dict, note: Note) -> int:
    chosen, tp = shm_gib(profile), profile.parallel.tp
    asked = isinstance(profile, GpuProfile) and profile.comm.shm_gib
    total_gib = (facts["memory"]["total_bytes"] or 0) / GIB
    if total_gib and chosen > total_gib / 2:
        raise HostError(
            f"shm_gib {chosen} is more than half of this host's {total_gib:.1f} GiB of memory.",
            "Lower comm.shm_gib in the recipe.",
        )
    note("shm_gib", chosen, "the profile's" if asked else f"for {tp} rank{'s' * (tp > 1)}")
    return chosen


def _cpuset(facts: dict, pin: dict) -> tuple[str | None, str | None]:
    """What the engine is told; a node list that leaves no node out binds nothing."""
    if pin["mode"] == "none":
        return None, None
    every = cpu_lists.format_list(cpu_lists.cpu_nodes(facts))
    mems = pin["mems"]
    return pin["cpus"], None if mems == every and "gpus" not in pin else mems
