"""Bit allocation: targets are hit, groups stay together, the budget is never exceeded."""

import pytest

from exl3_plugin.quantize.allocate import allocate, check_rate, mean_bits
from exl3_plugin.quantize.inventory import Linear
from exl3_plugin.quantize.ldlq import QuantizeError


def decoder(layers: int = 12) -> list[Linear]:
    """The linears of a Llama of hidden size 1024."""
    linears = []
    for layer in range(layers):
        base = f"model.layers.{layer}"
        for leaf, k, n, group in (
            ("self_attn.q_proj", 1024, 1024, "self_attn.qkv"),
            ("self_attn.k_proj", 1024, 256, "self_attn.qkv"),
            ("self_attn.v_proj", 1024, 256, "self_attn.qkv"),
            ("self_attn.o_proj", 1024, 1024, "self_attn.o_proj"),
            ("mlp.gate_proj", 1024, 2816, "mlp.gate_up"),
            ("mlp.up_proj", 1024, 2816, "mlp.gate_up"),
            ("mlp.down_proj", 2816, 1024, "mlp.down_proj"),
        ):
            name = f"{base}.{leaf}"
            linears.append(
                Linear(name, f"{name}.weight", k, n, f"{base}.{group}", f"{base}.{group}", layer)
            )
    return linears


@pytest.mark.parametrize("codebook", ["mul1", "mcg", "3inst"])
@pytest.mark.parametrize("target", [1.0, 1.3, 2.25, 3.3, 4.0, 4.25, 5.5, 6.9, 8.0])
def test_targets_are_met_from_below(target, codebook):
    linears = decoder()
    rates = allocate(linears, target, codebook)
    found = mean_bits(linears, rates)
    # The smallest group (o_proj) is 1/40 of a layer, so 1/480 of a step is the coarsest remainder.
    assert target - 0.05 < found <= target + 1e-9
    assert len(set(rates.values())) <= 2
    if codebook != "mul1":
        assert all(rate == int(rate) for rate in rates.values())


def test_groups_share_a_rate_and_attention_and_the_ends_come_first():
    linears = decoder()
    rates = allocate(linears, 3.6, "mul1")
    by_group: dict[str, set] = {}
    for linear in linears:
        by_group.setdefault(linear.group, set()).add(rates[linear.name])
    assert all(len(found) == 1 for found in by_group.values())
    assert set(rates.values()) == {3.5, 4.0}
    raised = {group for group, found in by_group.items() if found == {4.0}}
    assert {"model.layers.0.self_attn.qkv", "model.layers.11.self_attn.qkv"} <= raised
    assert "model.layers.6.mlp.gate_up" not in raised


def test_rates_that_do_not_exist_are_refused():
    with pytest.raises(QuantizeError, match=r"--bits 9"):
        allocate(decoder(), 9.0, "mul1")
    with pytest.raises(QuantizeError, match=r"codebook 'mul2'"):
        allocate(decoder(), 4.0, "mul2")
    with pytest.raises(QuantizeError, match=r"--head-bits 2.5 .* mcg"):
        check_rate(2.5, "mcg", "--head-bits")
    with pytest.raises(QuantizeError, match=r"--head-bits 4.5"):
        check_rate(4.5, "mul1", "--head-bits")
    check_rate(2.5, "mul1", "--head-bits")
