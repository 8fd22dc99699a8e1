"""The checkpoint's tensors as the loaders of a model class take them.

Most pass through. Three things are settled here, since no layer of ours sees them:

* a head that the class never builds is left out (it multiplies with its embedding);
* biases that were stored as wide as the padded layer are cut to the model's own width;
* a layer that the class builds without any quantisation, although its tensors are EXL3, gets the
  dense weight that they decode to, for that layer alone, and the log says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from exl3_plugin import loading, ops
from exl3_plugin.format import BLOCK, MARKERS

if TYPE_CHECKING:
    from exl3_plugin.checkpoint import Module
    from exl3_plugin.config import Exl3Config

logger = init_logger("vllm.exl3")

EXPERT = re.compile(r"\.experts\.\d+\.")
KEPT = 64


def unbuilt_head(model: torch.nn.Module, name: str) -> bool:
    """Whether a stored tensor belongs to a head that the model class never builds.

    Such a class (Gemma 2) multiplies with its embedding, which EXL3 checkpoints keep unquantised.
    """
    built = (module.rpartition(".")[2] for module, _ in model.named_modules())
    return name.split(".")[-2:-1] == ["lm_head"] and "lm_head" not in built


def unquantised_homes(model: torch.nn.Module, config: Exl3Config) -> dict[str, str]:
    """Stored EXL3 modules whose layer the model class built unquantised: name to vLLM's name.

    Classes do that by passing no `quant_config` to a layer. Routed experts never come here.
    """
    from exl3_plugin.config import FUSED

    built = dict(model.named_modules())
    held = [module.exl3 for module in built.values() if hasattr(module, "exl3")]
    claimed = {module.name for layer in held for module in layer.modules}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    fused: dict[str, list[str]] = {}
    for whole, parts in [*config.packed_modules_mapping.items(), *FUSED.items()]:
        for part in parts:
            fused.setdefault(part, []).append(whole)
    homes = {}
    for name, module in config.checkpoint.modules.items():
        if module.kind != "exl3" or name in claimed or EXPERT.search(name):
            continue
        mapped = mapper.map_name(f"{name}.weight") if mapper is not None else f"{name}.weight"
        if mapped is None:
            continue
        parent, dot, leaf = mapped.removesuffix(".weight").rpartition(".")
        for candidate in (leaf, *fused.get(leaf, ())):
            home = built.get(f"{parent}{dot}{candidate}")
            if home is not None and not hasattr(home, "exl3") and _has_matrix(home):
                homes[name] = f"{parent}{dot}{candidate}"
                break
    return homes


def _has_matrix(layer: torch.nn.Module) -> bool:
    weight = getattr(layer, "weight", None)
    return isinstance(weight, torch.nn.Parameter) and weight.ndim == 2


def dense_weight(module: Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight float32 `[n, k]` that the tensors of one EXL3 module decode to, true sizes.

    `W = diag(suh) P inner P diag(svh)`, where P transforms blocks of 128 (docs/format.md).
    """
    inner = ops.reconstruct(tensors["trellis"], module.codebook).float()
    for _ in range(2):
        inner = _transform(inner).T
    suh, svh = (
        loading.scales(next(tensors[s] for s in names if s in tensors)).float()
        for names in (("suh", "su"), ("svh", "sv"))
    )
    weight = inner * suh[:, None] * svh
    return weight[: module.k_true or module.k, : module.n_true or module.n].T.contiguous()


def _transform(matrix: torch.Tensor) -> torch.Tensor:
    """Every 128 neighbouring columns through the orthonormal Hadamard transform."""
    rows, columns = matrix.shape
    blocks = matrix.reshape(-1, BLOCK)
    half = 1
    while half < BLOCK:
        pairs = blocks.reshape(-1, BLOCK // (2 * half), 2, half)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        blocks = torch.stack([low + high, low - high], dim=2).reshape(-1, BLOCK)
        half *= 2
    return (blocks / BLOCK**0.5).reshape(rows, columns)


def as_taken(
    model: torch.nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    config: Exl3Config,
    *,
    draft: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The stored tensors as the model's loaders take them; see above.

    Args:
        draft: the model is a draft, which takes a part of the checkpoint; no layer is dequantised,
            because its names mean other layers than the target's.
    """
    loading.OFFERED.clear()
    homes = {} if draft else unquantised_homes(model, config)
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights:
        parent, _, suffix = name.rpartition(".")
        module = config.checkpoint.modules.get(parent)
        if suffix == "bias" and module is not None and module.kind == "exl3" and module.n_true:
            tensor = tensor[: module.n_true]
        if unbuilt_head(model, name):
            continue
        if parent not in homes or suffix == "bias":
            if module is not None and module.kind == "exl3" and suffix != "bias":
                _offer(name, tensor)
            yield name, tensor
            continue
        parts = waiting.setdefault(parent, {})
        parts[suffix] = tensor
        if parts.keys() == module.tensors.keys() - {"bias"}:
            yield f"{parent}.weight", dense_weight(module, waiting.pop(parent))
            logger.warning(
                "%s: %s builds %s without a quantisation, so its EXL3 weight is dequantised: "
                "%.1f MiB of bfloat16 instead of %.1f",
                parent,
                type(model).__name__,
                homes[parent],
                2 * (module.k or 0) * (module.n or 0) / 2**20,
                module.nbytes / 2**20,
            )
    loading.OFFERED.clear()


def _offer(name: str, tensor: torch.Tensor) -> None:
    """Remember what was handed out, to compare it with what comes back.

    What a class leaves out never comes back, so only the latest are kept; the loader of routed
    experts compares nothing.
    """
    if EXPERT.search(name):
        return
    loading.OFFERED[name] = tensor
    if len(loading.OFFERED) > KEPT:
        del loading.OFFERED[next(iter(loading.OFFERED))]


def marker_names(homes: Iterable[str], config: Exl3Config) -> set[str]:
    """Stored markers of dequantised modules: they chose the codebook and hold no values."""
    return {f"{name}.{m}" for name in homes for m in MARKERS
            if m in config.checkpoint.modules[name].tensors}  # fmt: skip
