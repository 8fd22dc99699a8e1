"""Which stored 128-blocks a rank needs, and which rows and columns of them it uses.

The Hadamard transforms work on blocks of 128 rows and columns, so a block cannot be cut. A cut that
falls inside a block is still exact: the rank loads every block its range touches and uses only its
own rows (the others count as zero) or columns (the others are not returned). The same rule trims
the padding of dimensions that are not multiples of 128.

Nothing here knows torch or vLLM, so a plan can be checked from checkpoint headers alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exl3_plugin.format import BLOCK

if TYPE_CHECKING:
    from exl3_plugin.checkpoint import Checkpoint

# Towers and drafts have sizes of their own, which the text model's config does not tell.
OTHER_MODELS = re.compile(r"(^|\.)(mtp|visual|vision_\w+|audio_\w+)\.")


class ShardingError(ValueError):
    """A layer cannot be laid out: its sizes contradict the model, or it cannot be divided."""


@dataclass(frozen=True)
class Cut:
    """A range of a stored axis as whole 128-blocks: `[first, stop)` is loaded, and of that
    `[begin, begin + size)` is used. `stop` may lie beyond `stored`; what is missing is zero."""

    first: int
    stop: int
    begin: int
    size: int

    @property
    def loaded(self) -> int:
        """Rows or columns held by this rank, a multiple of 128."""
        return self.stop - self.first


def round_up(size: int) -> int:
    """The next multiple of 128."""
    return -(-size // BLOCK) * BLOCK


def covering(start: int, size: int) -> Cut:
    """The 128-blocks that cover `[start, start + size)`."""
    first = start // BLOCK * BLOCK
    return Cut(first, round_up(start + size), start - first, size)


@dataclass(frozen=True)
class Member:
    """One stored module that goes into a layer: `k` inputs and `n` outputs, as stored.

    `kind` is "exl3" or "plain"; `words` are the int16 words of one 16x16 tile.
    """

    name: str
    kind: str
    k: int
    n: int
    words: int = 0
    codebook: str = ""


@dataclass(frozen=True)
class Segment:
    """Neighbouring output columns of a rank that come from one member, in output order."""

    member: int
    columns: Cut


@dataclass(frozen=True)
class Layout:
    """Everything a rank needs to know of one layer: rows, segments, and who owns which outputs.

    `spans[i]` are the logical partitions (q, k, v; gate, up; ...) that member i covers.
    """

    members: tuple[Member, ...]
    rows: Cut
    segments: tuple[Segment, ...]
    spans: tuple[tuple[int, ...], ...]

    @property
    def quantised(self) -> tuple[Segment, ...]:
        """The segments decoded from a trellis."""
        return tuple(s for s in self.segments if self.members[s.member].kind == "exl3")

    @property
    def plain(self) -> tuple[Segment, ...]:
        """The segments whose member is an ordinary weight."""
        return tuple(s for s in self.segments if self.members[s.member].kind != "exl3")


def _fits(member: Member, size: int) -> bool:
    """Whether `size` logical columns are what the member stores, padding allowed for."""
    return member.n == (round_up(size) if member.kind == "exl3" else size)


def _spans(layer: str, members: Sequence[Member], sizes: Sequence[int], tp: int):
    """Deal the logical partitions out to the members, in order.

    `sizes` are whole widths. Usually there is one partition a member; a member that is stored fused
    (`in_proj_qkv`, or `qkv_proj` itself) takes as many as fill it.
    """
    if len(members) == len(sizes):
        return [(i,) for i in range(len(sizes))]
    if len(members) == 1:
        return [tuple(range(len(sizes)))]
    spans, at = [], 0
    for member in members:
        for end in range(at + 1, len(sizes) + 1):
            if _fits(member, sum(sizes[at:end])):
                spans.append(tuple(range(at, end)))
                at = end
                break
        else:
            break
    if len(spans) != len(members) or at != len(sizes):
        stored = ", ".join(f"{m.name} {m.n}" for m in members)
        raise ShardingError(
            f"{layer}: cannot match the stored modules ({stored} columns) with the layer's "
            f"{len(sizes)} outputs of {list(sizes)} columns at tensor parallel size {tp}"
        )
    return spans


def _replicas(member: Member, size: int, tp: int, declared: int) -> int | None:
    """How many neighbouring ranks share one slice of a member that is one partition by itself.

    The layer's own word is tried first; a layer that keeps a shard whole on every rank (latent
    projections fused with sharded ones) shows in the stored width.
    """
    for replicas in dict.fromkeys((declared, tp)):
        if tp % replicas == 0 and _fits(member, size * tp // replicas):
            return replicas
    return None


def lay_out(
    layer: str,
    members: Sequence[Member],
    *,
    partition_sizes: Sequence[int],
    input_size: int,
    input_size_per_rank: int,
    tp_rank: int,
    tp_size: int,
    replicas: Sequence[int] | None = None,
) -> Layout:
    """Plan one layer on one rank.

    Args:
        layer: vLLM's name of the layer, for errors.
        members: stored modules in output order.
        partition_sizes: output columns of this rank, for each logical partition.
        input_size, input_size_per_rank: whole and own input width; where they differ the layer is
            row parallel.
        replicas: for each partition, how many ranks share a slice (key/value heads); default 1.

    Raises:
        ShardingError: names the tensor, what it stores and what the layer needs.
    """
    replicas = list(replicas or [1] * len(partition_sizes))
    for member in members:
        stored_fits = (
            input_size <= member.k < input_size + BLOCK
            if member.kind == "exl3"
            else member.k == input_size
        )
        if not stored_fits:
            raise ShardingError(
                f"{member.name} stores {member.k} input rows, but {layer} has {input_size} inputs: "
                "the tensors contradict config.json"
            )
    start = tp_rank * input_size_per_rank if input_size_per_rank != input_size else 0
    rows = covering(start, input_size_per_rank)

    whole = [size * tp_size // r for size, r in zip(partition_sizes, replicas)]
    spans = _spans(layer, members, whole, tp_size)
    segments: list[Segment] = []
    for index, (member, span) in enumerate(zip(members, spans)):
        shared = {p: replicas[p] for p in span}
        if len(span) == 1:
            found = _replicas(member, partition_sizes[span[0]], tp_size, replicas[span[0]])
            if found is not None:
                shared[span[0]] = found
        offsets, at = [], 0
        for p in span:
            offsets.append(at)
            at += partition_sizes[p] * tp_size // shared[p]
        if not _fits(member, at):
            raise ShardingError(
                f"{member.name} stores {member.n} output columns, but {layer} "
                f"expects {at} ({[partition_sizes[p] for p in span]} on each of {tp_size} ranks): "
                "the tensors contradict config.json, or the layer cannot be divided this way"
            )
        ranges: list[list[int]] = []
        for p, offset in zip(span, offsets):
            size = partition_sizes[p]
            first = offset + tp_rank // shared[p] * size
            if ranges and ranges[-1][0] + ranges[-1][1] == first:
                ranges[-1][1] += size
            else:
                ranges.append([first, size])
        segments += [Segment(index, covering(first, size)) for first, size in ranges]
    return Layout(tuple(members), rows, tuple(segments), tuple(spans))


def lay_out_head(
    layer: str, member: Member, *, vocab_start: int, columns: int, input_size: int, vocab: int
) -> Layout:
    """Plan `lm_head` on one rank: `columns` logits from `vocab_start` on.

    Logits beyond the stored ones are padding of vLLM's; their blocks are zero (svh 0).
    """
    if not input_size <= member.k < input_size + BLOCK:
        raise ShardingError(
            f"{member.name} stores {member.k} input rows, but the model's hidden size is "
            f"{input_size}: the tensors contradict config.json"
        )
    if member.n < vocab:
        raise ShardingError(
            f"{member.name} stores {member.n} output columns, but {layer} has a vocabulary of "
            f"{vocab}: the tensors contradict config.json"
        )
    segment = Segment(0, covering(vocab_start, columns))
    return Layout((member,), covering(0, input_size), (segment,), ((0,),))


_EXPERT = re.compile(r"\.experts\.\d+$")


def _divisibility(
    checkpoint: Checkpoint, whole_experts: bool
) -> Iterator[tuple[str, str, int, bool]]:
    """What has to divide by the tensor parallel size: (tensor, what, count, may be replicated)."""
    config = checkpoint.config.get("text_config") or checkpoint.config
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    for name, module in checkpoint.modules.items():
        if module.kind != "exl3" or OTHER_MODELS.search(name):
            continue
        parent, _, leaf = name.rpartition(".")
        expert = _EXPERT.search(parent) is not None
        if expert and whole_experts:
            continue
        if parent.endswith("self_attn") and heads and leaf in ("q_proj", "o_proj"):
            yield name, "attention heads", heads, False
        elif parent.endswith("self_attn") and kv_heads and leaf in ("k_proj", "v_proj"):
            yield name, "key/value heads", kv_heads, True
        elif leaf in ("gate_proj", "up_proj") or (expert and leaf in ("w1", "w3")):
            yield name, "output columns", module.n_true or module.n, False
        elif leaf == "down_proj" or (expert and leaf == "w2"):
            yield name, "input rows", module.k_true or module.k, False


def _divides(count: int, tp: int, replicable: bool) -> bool:
    return count % tp == 0 or (replicable and tp % count == 0)


def check_tensor_parallel(checkpoint: Checkpoint, tp: int, *, whole_experts: bool = False) -> None:
    """Refuse a tensor parallel size at which a layer of this checkpoint cannot be divided.

    Needs headers and config.json alone, so it runs before anything is built or read. With
    `whole_experts` (expert parallelism) ranks share out routed experts without cutting them.

    Raises:
        ShardingError: names the first such tensor, its size, `tp`, and the sizes that would work.
    """
    needs = list(_divisibility(checkpoint, whole_experts))
    bad = next((need for need in needs if not _divides(need[2], tp, need[3])), None)
    if bad is None:
        return
    name, what, count, _ = bad
    works = [
        str(t) for t in range(1, 65) if all(_divides(count, t, rep) for _, _, count, rep in needs)
    ]
    raise ShardingError(
        f"{name}: {count} {what} cannot be divided among {tp} ranks; tensor parallel sizes that "
        f"work for this checkpoint: {', '.join(works)}"
    )
