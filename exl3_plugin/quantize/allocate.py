"""Bits for every linear: whole rates that average to a target, which may lie between them."""

from __future__ import annotations

from collections.abc import Sequence

from exl3_plugin.format import CODEBOOKS, LEGAL_BITS, words_from_bits
from exl3_plugin.quantize.inventory import Linear
from exl3_plugin.quantize.ldlq import QuantizeError


def legal_rates(codebook: str) -> tuple[float, ...]:
    """Rates that exist with `codebook`, ascending: half steps below 4 only with mul1."""
    if codebook not in CODEBOOKS:
        raise QuantizeError(
            f"codebook {codebook!r} does not exist; there are {', '.join(CODEBOOKS)}"
        )
    return tuple(bits for bits in LEGAL_BITS if codebook == "mul1" or bits == int(bits))


def check_rate(bits: float, codebook: str, what: str) -> None:
    """Refuse a rate for a single tensor (such as the head) that the codebook does not have."""
    rates = legal_rates(codebook)
    if bits not in rates:
        raise QuantizeError(
            f"{what} {bits:g} does not exist with codebook {codebook}; there are "
            f"{', '.join(f'{rate:g}' for rate in rates)}"
        )


def allocate(linears: Sequence[Linear], target: float, codebook: str) -> dict[str, float]:
    """Rate of each decoder linear, by name.

    Everything starts at the highest rate not above `target`; what is left of the budget raises
    whole groups (q+k+v; o; gate+up; down; all experts of a layer) by one step, attention first,
    then the layers nearest to either end of the network. The mean over the stored (padded)
    weights never exceeds `target`, and falls short of it by less than the smallest group not
    raised.

    Raises:
        QuantizeError: target outside 1 to 8, or no such codebook.
    """
    rates = legal_rates(codebook)
    if not rates[0] <= target <= rates[-1]:
        raise QuantizeError(f"--bits {target:g} is outside {rates[0]:g} to {rates[-1]:g}")
    floor = max(rate for rate in rates if rate <= target)
    groups: dict[str, list[Linear]] = {}
    for linear in linears:
        groups.setdefault(linear.group, []).append(linear)
    layers = 1 + max(linear.layer for linear in linears)

    def priority(members: list[Linear]) -> tuple:
        layer = members[0].layer
        return (not members[0].is_attention, min(layer, layers - 1 - layer), layer)

    result = dict.fromkeys((linear.name for linear in linears), floor)
    if floor == rates[-1]:
        return result
    step = rates[rates.index(floor) + 1]
    total = sum(linear.tiles for linear in linears)
    budget = target * 16 * total - words_from_bits(floor) * total
    for members in sorted(groups.values(), key=priority):
        extra = words_from_bits(step) - words_from_bits(floor)
        price = extra * sum(linear.tiles for linear in members)
        # The tolerance only absorbs the float product of a target such as 3.3.
        if price <= budget + 1e-6 * total:
            budget -= price
            result.update(dict.fromkeys((linear.name for linear in members), step))
    return result


def mean_bits(linears: Sequence[Linear], rates: dict[str, float]) -> float:
    """Average bits per stored weight."""
    total = sum(linear.tiles for linear in linears)
    return sum(rates[linear.name] * linear.tiles for linear in linears) / total
