"""The load audit: after loading, every tensor has a place and every parameter has contents.

vLLM checks neither for quantised models, so a lost tensor would leave whatever memory held. The
audit does not trust loaders to report what they did: while weights are loaded it watches every
write torch makes, notes which stored tensor the written values came from, and counts how much of
each parameter was written. What a model leaves out on purpose is left out by a rule with a name,
and the log says how many tensors each rule covered.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import PPMissingLayer, StageMissingLayer

from exl3_plugin import env
from exl3_plugin.loading import Held, LoadError
from exl3_plugin.moe import HeldExperts
from exl3_plugin.shards import OTHER_MODELS
from exl3_plugin.taken import as_taken, marker_names, unbuilt_head, unquantised_homes

if TYPE_CHECKING:
    from exl3_plugin.config import Exl3Config

logger = init_logger("vllm.exl3")

SHOWN = 20

HELD = (Held, HeldExperts)
"""What an EXL3 layer keeps as its `exl3`."""


class LoadWatch(TorchDispatchMode):
    """Which stored tensors reached a parameter, and how many elements of each parameter they wrote.

    Values are followed by the memory they lie in: a tensor computed from stored tensors belongs to
    all of them, so loaders may cast, cut, join and hold tensors back as they like.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.written: Counter[int] = Counter()
        self.offered: set[str] = set()
        self.placed: set[str] = set()
        self.current: str | None = None
        self._owned = {_address(t) for t in _held(model)}
        self._origin: dict[int, frozenset[str]] = {}

    def owned(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter still lies where it lay when loading began."""
        return _address(parameter) in self._owned

    def finish(self, model: torch.nn.Module) -> None:
        """Count tensors that were not copied into the model but taken over as they were."""
        for tensor in _held(model):
            self.placed |= self._origin.get(_address(tensor), frozenset())

    def stream(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator:
        """Pass the checkpoint's tensors on, remembering what was offered and where it lies."""
        for name, tensor in weights:
            self.offered.add(name)
            self.current = name
            if tensor.numel():
                self._origin[_address(tensor)] = frozenset((name,))
            yield name, tensor
        self.current = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = list(_tensors((args, kwargs)))
        origin = frozenset().union(*(self._origin.get(_address(t), ()) for t in tensors))
        for position, name in _written_arguments(func):
            target = args[position] if position < len(args) else kwargs.get(name)
            for tensor in _tensors(target):
                if _address(tensor) in self._owned:
                    self.written[_address(tensor)] += tensor.numel()
                    self.placed |= origin
        for tensor in _tensors(out):
            address = _address(tensor)
            if address in self._owned:
                continue
            if origin:
                self._origin[address] = origin
            else:
                # New contents in memory that once held a stored tensor.
                self._origin.pop(address, None)
        return out


def _held(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from _tensors([*model.parameters(), *model.buffers()])


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.numel() and value.device.type != "meta" and value.layout is torch.strided:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@functools.cache
def _written_arguments(func) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operator writes to."""
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


# -- what may be missing --------------------------------------------------------------------------


def skip_rules(model: torch.nn.Module, config: Exl3Config) -> list[tuple[str, Callable]]:
    """Rules by which this model leaves stored tensors out: (name of the class, test of a name)."""
    text = config.checkpoint.config.get("text_config") or config.checkpoint.config
    layers = text.get("num_hidden_layers")
    built = [name for name, _ in model.named_modules()]
    absent = [
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, (PPMissingLayer, StageMissingLayer))
    ]
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    unused = getattr(model, "is_unused_checkpoint_weight", None)
    tied = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name.endswith("lm_head.weight")
        and sum(_address(parameter) == _address(other) for other in model.parameters()) > 1
    }

    elsewhere = frozenset().union(
        *(m.exl3.elsewhere for m in model.modules()
          if isinstance(getattr(m, "exl3", None), HeldExperts))
    )  # fmt: skip

    def mapped(name: str) -> str | None:
        return mapper.map_name(name) if mapper is not None else name

    def of_another_model(name: str) -> bool:
        found = OTHER_MODELS.search(name)
        return bool(found) and not any(found[2] in module.split(".") for module in built)

    def draft_layer(name: str) -> bool:
        found = re.search(r"(^|\.)layers\.(\d+)\.", name)
        return bool(found) and isinstance(layers, int) and int(found[2]) >= layers

    return [
        (
            "rotary tables, computed at start",
            lambda name: bool(
                re.search(r"rotary\w*\.(inv_freq|cos_cached|sin_cached)$", name)
            ),
        ),
        (
            "routed experts of other ranks",
            lambda name: name.rpartition(".")[0] in elsewhere,
        ),
        ("multi-token prediction layers, which only a draft builds", draft_layer),
        ("towers and drafts that this model class does not build", of_another_model),
        (f"dropped by {type(model).__name__}'s weight map", lambda name: mapped(name) is None),
        (
            "modules built on other ranks or switched off",
            lambda name: any((mapped(name) or "").startswith(prefix) for prefix in absent),
        ),
        (
            f"declared unused by {type(model).__name__}",
            lambda name: bool(unused and unused(name)),
        ),
        ("tied to the embedding", lambda name: mapped(name) in tied),
        (
            f"a head, for which {type(model).__name__} takes its embedding",
            lambda name: unbuilt_head(model, name),
        ),
    ]  # fmt: skip


def audit(
    model: torch.nn.Module, config: Exl3Config, watch: LoadWatch, *, draft: bool = False
) -> dict[str, int]:
    """Compare what was loaded with what is stored and with what the model needs.

    Args:
        draft: the model is a draft that takes a part of the checkpoint and may borrow embedding and
            head from its target, so stored tensors it leaves alone are not its business.

    Returns:
        The number of tensors that each skip rule covered.

    Raises:
        LoadError: names the first 20 tensors and parameters in question, and counts them.
    """
    skipped: Counter[str] = Counter()
    homeless: list[str] = []
    if not draft:
        watch.placed |= marker_names(unquantised_homes(model, config), config)
    rules = skip_rules(model, config)
    for name in [] if draft else config.checkpoint.tensors:
        if name in watch.placed:
            continue
        rule = next((title for title, test in rules if test(name)), None)
        if rule:
            skipped[rule] += 1
        elif name in watch.offered:
            homeless.append(name)
        else:
            homeless.append(f"{name} (in {config.checkpoint.tensors[name].file}, never read)")
    unfilled = list(_unfilled(model, watch, draft))
    problems = []
    if homeless:
        problems.append(
            f"{len(homeless)} stored tensors have no place in {type(model).__name__}: "
            f"{_some(homeless)}"
        )
    if unfilled:
        problems.append(f"{len(unfilled)} parameters were not filled: {_some(unfilled)}")
    if problems:
        hint = (
            "; a file that is never read is usually one that model.safetensors.index.json does not "
            "list: delete that index, it is not needed"
            if any("never read" in name for name in homeless)
            else ""
        )
        raise LoadError(f"{config.checkpoint.path}: {'; '.join(problems)}{hint}")
    return dict(skipped)


def _unfilled(model: torch.nn.Module, watch: LoadWatch, draft: bool) -> Iterator[str]:
    """Parameters that were not, or not wholly, written; EXL3 layers by their stored names."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    seen: set[int] = set()
    for prefix, module in model.named_modules():
        held = getattr(module, "exl3", None)
        if isinstance(held, HELD):
            yield from sorted(held.missing)
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
            continue  # scales with defaults, which few checkpoints carry
        for name, parameter in module.named_parameters(recurse=False):
            address = _address(parameter) if parameter.numel() else 0
            if not address or address in seen or not watch.owned(parameter):
                continue
            seen.add(address)
            if isinstance(held, HELD) and name != "bias":
                continue
            if draft and re.search(r"(^|\.)(embed_tokens|lm_head)$", prefix):
                continue
            written = watch.written[address]
            if written < parameter.numel():
                part = f" ({written} of {parameter.numel()} elements)" if written else ""
                yield f"{prefix}.{name}{part}"


def _some(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f", and {rest} more" if rest > 0 else "")


# -- the hook -------------------------------------------------------------------------------------


def _config_of(model: torch.nn.Module) -> Exl3Config | None:
    """The EXL3 config a model was built with, None for any other model."""
    from exl3_plugin.config import Exl3Config

    current = get_current_vllm_config_or_none()
    candidates = [current.quant_config] if current is not None else []
    candidates += [getattr(module, "quant_config", None) for module in model.modules()]
    return next((c for c in candidates if isinstance(c, Exl3Config) and c.checkpoint), None)


def install_audit() -> None:
    """Audit every load of an EXL3 model through vLLM's default loader; idempotent.

    `DefaultModelLoader.load_weights` is the one place that sees both the stored tensors and the
    model. For models of other formats it does what it did.
    """
    original = DefaultModelLoader.load_weights
    if getattr(original, "exl3_audited", False):
        return

    @functools.wraps(original)
    def load_weights(self, model: torch.nn.Module, model_config) -> None:
        config = _config_of(model)
        if config is None:
            return original(self, model, model_config)
        watch = LoadWatch(model)
        draft = getattr(model_config, "runner_type", "") == "draft"
        inner = model.load_weights
        model.load_weights = lambda weights, *a, **k: inner(
            as_taken(model, watch.stream(weights), config, draft=draft), *a, **k
        )
        try:
            with watch:
                original(self, model, model_config)
        except Exception as error:
            if watch.current is not None:
                raise LoadError(
                    f"{config.checkpoint.path}: loading stopped at tensor {watch.current}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            raise
        finally:
            del model.load_weights
        watch.finish(model)
        report(model, config, watch, draft)

    load_weights.exl3_audited = True
    DefaultModelLoader.load_weights = load_weights


def report(model: torch.nn.Module, config: Exl3Config, watch: LoadWatch, draft: bool) -> None:
    """Audit, and log one line that says what was loaded and one for each class left out."""
    try:
        skipped = audit(model, config, watch, draft=draft)
    except LoadError as error:
        if env.get("EXL3_LOAD_AUDIT") == "refuse":
            raise
        logger.warning("EXL3_LOAD_AUDIT=warn, serving all the same: %s", error)
        skipped = {}
    layers = [m.exl3 for m in model.modules() if isinstance(getattr(m, "exl3", None), HELD)]
    bits = Counter(
        module.bits for held in layers for module in held.modules if module.kind == "exl3"
    )
    plain = sum(module.kind != "exl3" for held in layers for module in held.modules)
    nbytes = sum(
        parameter.numel() * parameter.element_size()
        for module in model.modules()
        if isinstance(getattr(module, "exl3", None), HELD)
        for parameter in module.parameters(recurse=False)
    )
    logger.info(
        "EXL3: %d layers from %d modules (%s%s), %.1f MiB on this rank",
        len(layers),
        sum(bits.values()) + plain,
        ", ".join(f"{rate:g} bits: {count}" for rate, count in sorted(bits.items())),
        f", plain inside fused layers: {plain}" if plain else "",
        nbytes / 2**20,
    )
    for rule, count in skipped.items():
        logger.info("EXL3: %d stored tensors left out: %s", count, rule)
