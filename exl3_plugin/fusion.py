"""A pass over vLLM's compiled graphs: what stands before an EXL3 layer is computed inside it.

`sum = x + residual; layer(norm(sum))` becomes `exl3::norm_linear`, and `layer(silu(gate) * up)`
becomes `exl3::gated_linear`. The pass sees Inductor's graph after autograd, functional and with
vLLM's own operators (`vllm_ir`) not yet lowered, and changes only what it recognises whole: any
other user of a normed tensor, another dtype, a norm over a part of the row or a layer that begins
inside a 128-block is left as it was.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import vllm.ir.ops  # noqa: F401  (defines the operators of vllm_ir)
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch.fx.experimental.symbolic_shapes import statically_known_true
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import CompilationMode
from vllm.logger import init_logger
from vllm.platforms import current_platform

from exl3_plugin import env, fused

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.exl3")

MEASURED = ((9, 0),)
"""Compute capabilities on which layers with the norm inside were measured to be faster."""

WIDTH_MULTIPLE = 8
"""The CUDA kernels read 16 bytes of a row at a time."""

_aten, _prims = torch.ops.aten, torch.ops.prims
_NORM = torch.ops.vllm_ir.fused_add_rms_norm.default
_VIEWS = (_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default)
_CONVERT = _prims.convert_element_type.default
_TAKEN = {"cuda": (torch.bfloat16, torch.float16), "cpu": fused.DTYPES}


class Exl3FusionPass(InductorPass):
    """Moves norms and gated activations into the layers behind them.

    `norms` and `gated` count what was moved in all graphs seen so far. vLLM compiles a model in
    pieces and takes equal ones from its cache, so they are no count of the model's layers.
    """

    def __init__(self) -> None:
        self.norms = 0
        self.gated = 0

    def __call__(self, graph: fx.Graph) -> None:
        order = {node: at for at, node in enumerate(graph.nodes)}
        norms = gated = 0
        for linear in graph.find_nodes(op="call_function", target=torch.ops.exl3.linear.default):
            if linear.kwargs:
                continue
            if _fuse_norm(graph, linear, order):
                norms += 1
            elif _fuse_gated(graph, linear):
                gated += 1
        self.norms += norms
        self.gated += gated
        if norms or gated:
            logger.info_once(
                "exl3: %d norms and %d gated activations run inside the layers behind them",
                norms,
                gated,
            )

    def uuid(self) -> str:
        """Of this file and of the operators' own, so that no compiled graph outlives a change."""
        return get_hash_for_files((__file__, fused.__file__)).hex()


# When the pass is installed


def install(config: VllmConfig | None) -> None:
    """Give the pass to vLLM, which runs it after its own on every graph it compiles; idempotent.

    Called where a layer is built: before vLLM reads the passes, with the config of the model that
    is being built. The log says why, where norms and activations stay outside.
    """
    if config is None or config.compilation_config.mode in (None, CompilationMode.NONE):
        return
    passes, key = config.compilation_config.inductor_compile_config, current_platform.pass_key
    if isinstance(passes.get(key), Exl3FusionPass):
        return
    reason = reason_here()
    if reason is None and key in passes:
        reason = f"{key} is {type(passes[key]).__name__} already"
    if reason is None:
        passes[key] = Exl3FusionPass()
    else:
        logger.info_once("exl3: norms and activations stay outside the layers: %s", reason)


def reason_here() -> str | None:
    """`reason_against` of the device that vLLM runs on."""
    return reason_against(current_platform.dispatch_key, current_platform.get_device_capability())


def reason_against(dispatch_key: str, capability: tuple[int, int] | None) -> str | None:
    """Why nothing is to be fused on a device; None where it is.

    Args:
        dispatch_key: torch's name of the device's kernels, "CPU" or "CUDA".
        capability: compute capability of a GPU, (major, minor).
    """
    wanted = env.get("EXL3_FUSE")
    if wanted is False:
        return "EXL3_FUSE=0"
    if env.batch_invariant():
        return "VLLM_BATCH_INVARIANT=1 asks for one arithmetic, with and without a compiler"
    missing = _missing(dispatch_key)
    if missing is not None:
        return f"this build of exl3-fleet has no {missing} for {dispatch_key}"
    if wanted is None and capability not in MEASURED:
        return "faster on compute capability 9.0, not measured here; EXL3_FUSE=1 asks for it"
    return None


def _missing(dispatch_key: str) -> str | None:
    """The first operator that a device has no kernel for."""
    for name in ("exl3::norm_linear", "exl3::gated_linear"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key):
            return name
    return None


# Norms


def _fuse_norm(graph: fx.Graph, linear: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Put the norm before `linear` into it, if there is one and nothing speaks against it."""
    x, *weights, shards, k_begin = _linear_arguments(linear)
    normed = _sole_source(x)
    if normed is None or not _calls(normed, operator.getitem) or normed.args[1] != 0:
        return False
    norm = normed.args[0]
    if not _calls(norm, _NORM) or norm.kwargs or len(norm.args) < 4 or k_begin != 0:
        return False
    states, residual, norm_weight, epsilon, *variance_size = norm.args
    sums = [user for user in norm.users if user is not normed]
    if (
        any(size is not None for size in variance_size)
        or not all(_calls(user, operator.getitem) and user.args[1] == 1 for user in sums)
        or not _may_be_normed(states, residual, norm_weight)
        or not _same_rows(states, x)
        # The sum may be wanted before the layer, so the new call stands where the norm stood.
        or any(
            order.get(node, len(order)) > order[norm]
            for node in linear.all_input_nodes
            if node is not x
        )
    ):
        return False
    with graph.inserting_before(norm):
        arguments = (states, residual, norm_weight, epsilon, *weights, shards, k_begin)
        both = _call(graph, torch.ops.exl3.norm_linear.default, arguments)
        result = _call(graph, operator.getitem, (both, 0))
        total = _call(graph, operator.getitem, (both, 1))
    for user in sums:
        user.replace_all_uses_with(total)
        graph.erase_node(user)
    _replace(graph, linear, result)
    if not total.users:
        graph.erase_node(total)
    return True


def _may_be_normed(states: Any, residual: Any, norm_weight: Any) -> bool:
    """Whether the operator takes these: two equal tensors of rows, a weight as wide as a row."""
    values = [_value(node) for node in (states, residual, norm_weight)]
    if any(value is None for value in values):
        return False
    x, r, weight = values
    return (
        _row_width(x) is not None
        and x.dtype in _TAKEN.get(x.device.type, ())
        and (r.dtype, r.device, r.dim()) == (x.dtype, x.device, x.dim())
        and all(_known_equal(a, b) for a, b in zip(x.shape, r.shape))
        and (weight.dim(), weight.device) == (1, x.device)
        and weight.dtype in (x.dtype, torch.float32)
        and _known_equal(weight.shape[0], x.shape[-1])
    )


# Gated activations


def _fuse_gated(graph: fx.Graph, linear: fx.Node) -> bool:
    """Put the gated activation before `linear` into it, if there is one."""
    x, *weights, shards, k_begin = _linear_arguments(linear)
    gated = _sole_source(x)
    if gated is None or k_begin != 0 or not _same_rows(gated, x):
        return False
    both = _gate_and_up(gated)
    value, wide = _value(gated), _value(both)
    if (
        wide is None
        or value.dtype not in _TAKEN.get(value.device.type, ())
        or wide.dtype != value.dtype
        or wide.dim() != value.dim()
        or _row_width(value) is None
        or wide.shape[-1] != 2 * value.shape[-1]
    ):
        return False
    with graph.inserting_before(linear):
        arguments = (both, *weights, shards, k_begin)
        result = _call(graph, torch.ops.exl3.gated_linear.default, arguments)
    _replace(graph, linear, result)
    return True


def _gate_and_up(node: fx.Node) -> fx.Node | None:
    """The tensor [..., 2 k] of which `node` is silu of the first half times the second."""
    if _calls(node, operator.getitem) and node.args[1] == 1:
        call = node.args[0]
        silu_and_mul = getattr(torch.ops._C, "silu_and_mul", None)
        named = _calls(call, auto_functionalized) and silu_and_mul is not None
        if named and call.args == (silu_and_mul.default,):
            return call.kwargs.get("input")
        return None
    if not _calls(node, _aten.mul.Tensor):
        return None
    silu, up = node.args
    gate = _silu_of(silu)
    if gate is None or not _calls(gate, _aten.slice.Tensor) or not _calls(up, _aten.slice.Tensor):
        return None
    both = gate.args[0]
    value = _value(both)
    if up.args[0] is not both or value is None or _row_width(value) is None:
        return None
    half, rest = divmod(value.shape[-1], 2)
    halves = _sliced_columns(gate), _sliced_columns(up)
    return both if rest == 0 and halves == (range(half), range(half, 2 * half)) else None


def _sliced_columns(node: fx.Node) -> range | None:
    """Which columns of a row a slice keeps; None where it cuts something else."""
    source, dim, start, end, step, *_ = (*node.args, *(0, 0, None, None, 1)[len(node.args) :])
    value = _value(source)
    if node.kwargs or step != 1 or dim % value.dim() != value.dim() - 1:
        return None
    if not all(bound is None or isinstance(bound, int) for bound in (start, end)):
        return None
    return range(value.shape[-1])[start:end]


def _silu_of(node: Any) -> fx.Node | None:
    """What `node` is the silu of, computed in float32 and rounded to the dtype of its source.

    torch decomposes it into x / (1 + exp(-x)) for Inductor, and into x * sigmoid(x) elsewhere.
    """
    if _calls(node, _aten.silu.default):
        return node.args[0]
    narrowed = _calls(node, _CONVERT)
    body = node.args[0] if narrowed else node
    if _calls(body, _aten.div.Tensor):
        wide, below = body.args
        exp = below.args[0] if _calls(below, _aten.add.Tensor) and below.args[1:] == (1,) else None
        neg = exp.args[0] if _calls(exp, _aten.exp.default) else None
        inner = neg.args[0] if _calls(neg, _aten.neg.default) else None
    elif _calls(body, _aten.mul.Tensor):
        wide, sigmoid = body.args
        inner = sigmoid.args[0] if _calls(sigmoid, _aten.sigmoid.default) else None
    else:
        return None
    if inner is None or inner is not wide or _value(wide).dtype != torch.float32:
        return None
    if not narrowed:
        return wide
    source = wide.args[0] if _calls(wide, _CONVERT) else None
    return source if source is not None and _value(source).dtype == node.args[1] else None


# The graph


def _linear_arguments(node: fx.Node) -> tuple[Any, ...]:
    """All arguments of a call of `exl3::linear`, the default of the last one written out."""
    return node.args if len(node.args) == 7 else (*node.args, 0)


def _calls(node: Any, target: Callable) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def _value(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node; None where it has none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _sole_source(node: fx.Node) -> fx.Node | None:
    """What a layer multiplies, seen through views that change nothing, if nobody else uses it."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if node.op != "call_function" or node.target not in _VIEWS:
            return node
        if not _same_rows(node, node.args[0]):
            return None
        node = node.args[0]
    return None


def _same_rows(one: fx.Node, other: fx.Node) -> bool:
    """Whether both have the same shape: a view that keeps number and width of rows is none."""
    a, b = _value(one), _value(other)
    if a is None or b is None or a.dim() != b.dim() or a.dtype != b.dtype:
        return False
    return all(_known_equal(m, n) for m, n in zip(a.shape, b.shape))


def _known_equal(a: Any, b: Any) -> bool:
    """Equal for every size a graph is compiled for; asking adds no guard."""
    return statically_known_true(a == b)


def _row_width(value: torch.Tensor) -> int | None:
    """Numbers in a row, where there are rows of a fixed width that the kernels take."""
    width = value.shape[-1] if value.dim() else 0
    return width if isinstance(width, int) and width and width % WIDTH_MULTIPLE == 0 else None


def _call(graph: fx.Graph, target: Callable, arguments: tuple[Any, ...]) -> fx.Node:
    """A new call, with the fake result that Inductor expects of every node."""
    node = graph.call_function(target, arguments)
    values = fx.map_arg(arguments, lambda source: source.meta["val"])
    node.meta["val"] = target(*values)
    return node


def _replace(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """Let `new` stand for `old`, and erase `old` with all that only it needed."""
    old.replace_all_uses_with(new)
    unused, erased = [old], set()
    while unused:
        node = unused.pop()
        if node.op == "call_function" and not node.users and node not in erased:
            unused += node.all_input_nodes
            erased.add(node)
            graph.erase_node(node)
