"""The rules that keep a reading cold and a graph long enough."""

import pytest

from bench import timing

MIB = 1 << 20


@pytest.mark.parametrize("copy_mib", [0.5, 2, 5, 31.5, 126, 700])
@pytest.mark.parametrize("l2_mib", [1, 40, 60, 128])
def test_twice_the_cache_passes_between_two_uses(copy_mib, l2_mib):
    copies = timing.copies_needed(int(copy_mib * MIB), l2_mib * MIB)
    assert copies >= 8
    # Between two uses of a copy every other copy is read once.
    assert (copies - 1) * copy_mib >= 2 * l2_mib
    assert copies == 8 or (copies - 2) * copy_mib < 2 * l2_mib, "more copies than it takes"


@pytest.mark.parametrize("copies", [8, 13, 60])
@pytest.mark.parametrize("estimate", [0.5, 4, 49, 51, 599, 601, 5000])
def test_graphs_hold_whole_turns(copies, estimate):
    calls = timing.graph_calls(copies, estimate)
    assert calls % copies == 0, "the next replay would reuse a copy too early"
    if estimate <= timing.LONG_CALL_US:
        assert calls >= 20
        long_enough = calls * estimate >= timing.GRAPH_US
        assert long_enough or calls >= min(timing.MAX_CALLS, timing.GRAPH_US / estimate)
    else:
        assert calls == copies


def test_rings_of_activations():
    assert timing.ring_size(8192, 60 * MIB, 8) == 8, "small ones rotate with the weights"
    assert timing.ring_size(200 * MIB, 60 * MIB, 8) == 2, "large ones push each other out"
    ring = timing.ring_size(30 * MIB, 60 * MIB, 60)
    assert (ring - 1) * 30 >= 120
    assert timing.ring_size(0, 60 * MIB, 8) >= 2


def test_a_reading_is_the_median_with_its_spread():
    reading = timing.summarise([100.0, 90.0, 400.0], 10)
    assert reading.us == 10.0
    assert reading.spread == pytest.approx(3.1)
    assert (reading.calls, reading.replays) == (10, 3)
