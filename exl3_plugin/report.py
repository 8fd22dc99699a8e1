"""What became of each module of a checkpoint on one rank, for the log and as a JSON file.

The record is filled while layers are created and completed, whatever loader vLLM uses, and written
once the last EXL3 layer is done.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from exl3_plugin import ops
from exl3_plugin.format import bits_from_words
from exl3_plugin.tuning import HALVES_FAMILY, MUL1_FAMILY, Profile

if TYPE_CHECKING:
    from exl3_plugin.checkpoint import Checkpoint, Module
    from exl3_plugin.loading import Held
    from exl3_plugin.selftest import Result

logger = init_logger("vllm.exl3")

VERSION = 1
PLAN_ROWS = (1, 32, 512)
"""Row counts whose kernels the report names."""


def plan_of(
    layer: torch.nn.Module, rows: int, device: ops.Device, profile: Profile | None
) -> ops.Plan:
    """The plan by which the CUDA op multiplies a layer, as the op itself finds it.

    One call has one plan: all columns of a fused layer count, and its first matrix's rate.
    """
    held: Held = layer.exl3
    codebook, words = held.shards[:2]
    k, n = layer.suh.shape[1], layer.svh.shape[0]
    bits, name = bits_from_words(words), ops.CODEBOOKS[codebook]
    options = ops.configure()
    found = None
    if profile is not None and not options["batch_invariant"]:
        family = MUL1_FAMILY if name == "mul1" else HALVES_FAMILY
        found = profile.find(rows, k, n, int(2 * bits), family)
    if found is None:
        return ops.plan(device, rows, k, n, bits, name)
    exact = options["exact"] or found.rows > 16
    return found._replace(form=ops.EXACT) if exact else found


def describe_plan(plan: ops.Plan) -> str:
    """In words: "dense", "stream, fast, 132 blocks", or "gemm, 8 rows, fast, 264 blocks"."""
    if plan.kernel == ops.DENSE:
        return "dense"
    form = "fast" if plan.form == ops.FAST else "exact"
    blocks = f", {plan.blocks} blocks" if plan.blocks else ""
    if plan.kernel == ops.STREAM:
        return f"stream, {form}{blocks}"
    return f"gemm, {plan.rows} rows, {form}{blocks}"


class LoadRecord:
    """What one process has loaded of one checkpoint.

    `tested` and `results` belong to the self-test; `profile` is the one in force.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        path: str | None,
        *,
        self_test: bool,
        profile: Profile | None = None,
    ):
        self.checkpoint = checkpoint
        self.path = path
        self.self_test = self_test
        self.profile = profile
        self.tested: set[tuple] = set()
        self.results: list[Result] = []
        self._pending: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._plain: list[tuple[str, weakref.ref, list[str]]] = []
        self._layers: dict[str, list[dict[str, Any]]] = {}

    def expect(self, layer: torch.nn.Module) -> None:
        """An EXL3 layer was created and will be loaded."""
        self._pending.add(layer)

    def plain(
        self, layer: torch.nn.Module, prefix: str, members: Sequence[tuple[str, Module | None]]
    ) -> None:
        """A layer is left to vLLM's own methods."""
        names = [module.name for _, module in members if module is not None]
        self._plain.append((prefix or type(layer).__name__, weakref.ref(layer), names))

    def loaded(self, layer: torch.nn.Module, prefix: str, became: str) -> None:
        """An EXL3 layer is complete. The last one writes the report and ends the self-test."""
        self._layers[prefix] = _entries(layer, prefix, became, self.profile)
        self._pending.discard(layer)
        if self._pending:
            return
        if self.results:
            from exl3_plugin.selftest import summary

            logger.info("%s", summary(self.results))
        if self.path is not None:
            rank, ranks = _rank()
            path = Path(self.path if ranks == 1 else f"{self.path}.rank{rank}")
            write(path, self.contents(layer, rank, ranks))

    def contents(self, layer: torch.nn.Module, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
        """The report; `layer` is any EXL3 layer, which tells device and dtype."""
        modules = [entry for entries in self._layers.values() for entry in entries]
        for prefix, reference, names in self._plain:
            other = reference()
            if other is not None:
                modules.append(_plain_entry(other, prefix, names))
        totals: dict[str, int] = {}
        for entry in modules:
            totals[entry["became"]] = totals.get(entry["became"], 0) + entry["bytes"]
        device = next(layer.parameters(recurse=False)).device
        return {
            "version": VERSION,
            "checkpoint": str(self.checkpoint.path),
            "rank": rank,
            "ranks": ranks,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "dtype": str(layer.exl3.dtype).removeprefix("torch."),
            "profile": None if self.profile is None else self.profile.created,
            "self_test": [vars(result) for result in self.results] if self.self_test else None,
            "bytes": totals,
            "modules": modules,
        }


def _entries(
    layer: torch.nn.Module, prefix: str, became: str, profile: Profile | None
) -> list[dict[str, Any]]:
    """One entry for each stored module of an EXL3 layer, as far as it lies on this rank."""
    from exl3_plugin.moe import HeldExperts, report_entries

    held: Held = layer.exl3
    if isinstance(held, HeldExperts):
        return report_entries(layer, prefix, became)
    rows, plans = held.layout.rows, None
    if layer.trellis.is_cuda:
        device = ops.cuda_device(layer.trellis.device)
        plans = {str(m): describe_plan(plan_of(layer, m, device, profile)) for m in PLAN_ROWS}
    entries = []
    for index, (member, module) in enumerate(zip(held.layout.members, held.modules)):
        cuts = [s.columns for s in held.layout.segments if s.member == index]
        loaded, used = sum(c.loaded for c in cuts), sum(c.size for c in cuts)
        entry = {"module": module.name, "layer": prefix}
        if member.kind == "exl3":
            entry |= {
                "became": became,
                "bits": bits_from_words(member.words),
                "codebook": member.codebook,
                "k": rows.loaded,
                "n": loaded,
                "padding": {"k": rows.loaded - rows.size, "n": loaded - used},
                "bytes": rows.loaded * loaded // 256 * member.words * 2
                + 2 * (rows.loaded * len(cuts) + loaded),
                "plans": plans,
            }
        else:
            entry |= {
                "became": "plain",
                "k": rows.size,
                "n": used,
                "bytes": rows.size * used * held.dtype.itemsize,
            }
        entries.append(entry)
    return entries


def _plain_entry(layer: torch.nn.Module, prefix: str, names: list[str]) -> dict[str, Any]:
    nbytes = sum(p.numel() * p.element_size() for p in layer.parameters(recurse=False))
    return {"module": ", ".join(names) or None, "layer": prefix, "became": "plain", "bytes": nbytes}


def _rank() -> tuple[int, int]:
    from vllm.distributed import model_parallel_is_initialized
    from vllm.distributed.parallel_state import get_world_group

    if not model_parallel_is_initialized():
        return 0, 1
    group = get_world_group()
    return group.rank_in_group, group.world_size


def write(path: Path, contents: dict[str, Any]) -> None:
    """Write the file at once or not at all, a line for each module."""
    head = {name: value for name, value in contents.items() if name != "modules"}
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in contents["modules"])
    text = json.dumps(head, indent=1)[:-2] + f',\n "modules": [\n{lines}\n ]\n}}\n'
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    temporary.write_text(text)
    temporary.replace(path)
