"""Which routed experts a checkpoint holds, and whether they can be served; from headers alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exl3_plugin.headers import CheckpointError, some
from exl3_plugin.shards import OTHER_MODELS
from exl3_plugin.sizes import text_config

if TYPE_CHECKING:
    from exl3_plugin.checkpoint import Checkpoint, Module

_EXPERT = re.compile(r"(?P<base>.*\.experts)\.(?P<number>\d+)\.(?P<leaf>.+)$")
_NAMES = ({"gate_proj", "up_proj", "down_proj"}, {"w1", "w2", "w3"})
_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_MAX_SLOTS = 16  # experts of one token, as in csrc/moe/limits.h


def experts_of(config: Mapping[str, Any]) -> int | None:
    """How many routed experts a layer has according to config.json, None where it does not say."""
    text = text_config(config)
    found = [text[key] for key in _COUNT_KEYS if isinstance(text.get(key), int)]
    return found[0] if found else None


@dataclass(frozen=True)
class ExpertLayer:
    """The routed experts of one layer: the gate of the first, and what all have in common.

    `width` are columns between the products as the model counts them, `slots` experts of a token.
    """

    gate: Module
    count: int
    width: int
    slots: int


def expert_layers(checkpoint: Checkpoint) -> list[ExpertLayer]:
    """The layers of routed EXL3 experts of a checkpoint that `check_experts` lets pass.

    Raises:
        CheckpointError: config.json does not say how many experts serve a token.
    """
    slots = text_config(checkpoint.config).get("num_experts_per_tok")
    found = []
    for base, experts in _found(checkpoint).items():
        gate = next(experts[0][leaf] for leaf in ("gate_proj", "w1") if leaf in experts[0])
        if gate.kind != "exl3":
            continue
        if not isinstance(slots, int):
            raise CheckpointError(
                f"{checkpoint.path}: {base} holds experts, but config.json has no "
                "num_experts_per_tok"
            )
        found.append(ExpertLayer(gate, len(experts), gate.n_true or gate.n, slots))
    return found


def _found(checkpoint: Checkpoint) -> dict[str, dict[int, dict[str, Module]]]:
    """Modules of routed experts by layer, number and leaf."""
    layers: dict[str, dict[int, dict[str, Module]]] = defaultdict(lambda: defaultdict(dict))
    for name, module in checkpoint.modules.items():
        match = _EXPERT.match(name)
        if match and not OTHER_MODELS.search(name):
            layers[match["base"]][int(match["number"])][match["leaf"]] = module
    return layers


def check_experts(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint in which a routed expert is absent, plain among EXL3, or of other parts.

    Runs before anything is built, in the front end.

    Raises:
        CheckpointError: names the first such module.
    """
    count = experts_of(checkpoint.config)
    for base, found in _found(checkpoint).items():
        modules = [module for expert in found.values() for module in expert.values()]
        if any(module.kind == "exl3" for module in modules):
            _check_layer(checkpoint, base, found, count or max(found) + 1)


def _check_layer(
    checkpoint: Checkpoint, base: str, found: dict[int, dict[str, Module]], count: int
) -> None:
    where = checkpoint.path
    leaves = {leaf for expert in found.values() for leaf in expert}
    names = next((names for names in _NAMES if leaves <= names), None)
    if names is None:
        raise CheckpointError(
            f"{where}: experts of {base} have {some(sorted(leaves))}; expected gate_proj, "
            "up_proj and down_proj, or w1, w3 and w2, each an EXL3 module"
        )
    beyond = sorted(set(found) - set(range(count)))
    if beyond:
        raise CheckpointError(
            f"{where}: {base}.{beyond[0]} is there, but config.json speaks of {count} experts"
        )
    missing = [
        f"{base}.{expert}.{leaf}"
        for expert in range(count)
        for leaf in sorted(names)
        if leaf not in found.get(expert, {})
    ]
    if missing:
        raise CheckpointError(
            f"{where}: {some(missing)} of {count} experts a layer missing; the checkpoint is "
            "incomplete, download it again"
        )
    for expert in found.values():
        for module in expert.values():
            if module.kind != "exl3":
                raise CheckpointError(
                    f"{module.name} is not EXL3, but other experts of this layer are; all experts "
                    "of a layer must be. Quantise the model again"
                )
    slots = text_config(checkpoint.config).get("num_experts_per_tok")
    if isinstance(slots, int) and slots > _MAX_SLOTS:
        raise CheckpointError(
            f"{where}: config.json sends each token to {slots} experts, at most {_MAX_SLOTS} are "
            "possible"
        )
