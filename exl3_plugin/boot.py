"""What a worker does around loading: kernels and plans before the first layer, checks after each.

`prepare` runs once in every process that builds a model, before memory is taken, so that a missing
library, a GPU without machine code or a stale profile stops the start with its own message.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from exl3_plugin import env, loading, ops, selftest, tuning
from exl3_plugin.report import LoadRecord

if TYPE_CHECKING:
    from exl3_plugin.checkpoint import Checkpoint

logger = init_logger("vllm.exl3")


class RanksDisagree(RuntimeError):
    """The ranks of one model would not compute with the same kernels and plans."""


def prepare(checkpoint: Checkpoint) -> LoadRecord:
    """Load the kernels of this process's device and settle how they choose.

    Returns:
        The record of what is loaded from now on.

    Raises:
        LibraryError: no kernels for this device; says what is there and what to install.
        ProfileError: `EXL3_PROFILE` cannot be read, or belongs to another device, driver or build.
        RanksDisagree: another rank refused, or has other plans, options or kernels.
        ValueError: a variable of the environment means nothing.
    """
    report = env.get("EXL3_LOAD_REPORT")
    if report is not None and not Path(report).absolute().parent.is_dir():
        raise ValueError(
            f"EXL3_LOAD_REPORT={report}: there is no folder {Path(report).absolute().parent}; "
            "create it"
        )
    wanted = env.get("EXL3_SELF_TEST")
    if not current_platform.is_cuda():
        _require_kernels()
        return LoadRecord(checkpoint, report, self_test=bool(wanted))

    index = torch.cuda.current_device()
    profile = error = None
    try:
        ops.require_cuda(index)
        profile = tuning.use_profile(index)
    except (ops.LibraryError, tuning.ProfileError) as refusal:
        error = refusal
    _agree(_choices(profile) if error is None else {"error": f"{error}"})
    if error is not None:
        raise error
    if profile is not None:
        logger.info("EXL3: plans of %s, measured %s", env.get("EXL3_PROFILE"), profile.created)
    return LoadRecord(checkpoint, report, self_test=wanted is not False, profile=profile)


def _require_kernels() -> None:
    """Load the library, and refuse a platform it has no kernels for."""
    ops.load()
    key = current_platform.dispatch_key
    if not torch._C._dispatch_has_kernel_for_dispatch_key("exl3::linear", key):
        raise ops.LibraryError(
            f"this build of exl3-fleet has no EXL3 kernels for {key}; vLLM runs on "
            f"{current_platform.device_type}. Serve on the CPU, or install a build that has them"
        )


def _choices(profile: tuning.Profile | None) -> dict[str, Any]:
    """All that decides how a product is computed, apart from the device's size."""
    table = [] if profile is None else [profile.table(), profile.expert_table()]
    return {
        "plans of EXL3_PROFILE": hashlib.sha256(json.dumps(table).encode()).hexdigest()[:16],
        "options": ops.configure(),
        "EXL3_FUSE": env.get("EXL3_FUSE"),
        "sources of the kernels": json.loads(torch.ops.exl3.cuda_build_info())["source_hash"],
    }


def _agree(mine: dict[str, Any]) -> None:
    """Refuse to start where ranks differ: layers that each rank computes whole must be equal.

    A rank that refuses for reasons of its own says so here as well, so that none waits for it.
    """
    from vllm.distributed import model_parallel_is_initialized
    from vllm.distributed.parallel_state import get_world_group

    if not model_parallel_is_initialized() or get_world_group().world_size == 1:
        return
    group = get_world_group()
    everyone: list[dict[str, Any]] = [{}] * group.world_size
    torch.distributed.all_gather_object(everyone, mine, group=group.cpu_group)
    refuse_disagreement(everyone)


def refuse_disagreement(everyone: list[dict[str, Any]]) -> None:
    """Raise RanksDisagree where one rank's choices are not those of rank 0."""
    for rank, other in enumerate(everyone):
        if "error" in other:
            raise RanksDisagree(f"rank {rank} refused to start: {other['error']}")
    for rank, other in enumerate(everyone):
        for name, value in other.items():
            if value != everyone[0][name]:
                raise RanksDisagree(
                    f"rank {rank} differs from rank 0 in {name}: {value}, there "
                    f"{everyone[0][name]}. Give every rank the same environment, the same files "
                    "and the same exl3-fleet"
                )


def complete(
    layer: torch.nn.Module, prefix: str, record: LoadRecord, *, became: str = "exl3"
) -> None:
    """After a layer's tensors are loaded: refuse gaps, bring it into kernel order, test it.

    A layer that was completed and has not been loaded anew is left alone.

    Raises:
        LoadError: not all of it was loaded.
        SelfTestError: the kernels are wrong on this layer's weights.
    """
    if loading.is_finished(layer):
        return
    loading.finish(layer, prefix)
    # The truth is taken from the words as stored, so that a wrong order shows too.
    test = selftest.prepare(layer, prefix, record.tested) if record.self_test else None
    loading.to_kernel_order(layer)
    if test is not None:
        record.results.append(selftest.run(layer, test, record.profile))
    record.loaded(layer, prefix, became)
