"""What decoding a tile costs in instructions, held to the counts of the design, for two devices.

A change that makes the compiler spend two shifts instead of one costs 5 percent on a card that
nobody here can run, so the machine code is counted instead. `pytest -s` prints the table.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.build import machine_code

PROBE = Path(__file__).parent / "probes" / "decode_probe.cu"
TOLERANCE = 2

# Instructions for the eight weights that a lane has of a tile, and how many of them go to the pipe
# for logic, shifts and permutations, which is the one that runs out first on Hopper. By twice the
# bits per weight. Counted by hand and in prototypes: windows first (one instruction at offsets 0, 8
# and 16 of a register, two elsewhere, one for each shift between), then a multiplication, a mask
# and an addition for each weight and a permutation for each pair, or a byte sum instead of mask and
# addition. The exact byte sum has one fused multiplication for each pair.
BUDGET = {
    ("Halves", "Exact"): {
        2: (44, 21), 4: (40, 24), 6: (44, 22), 8: (39, 19),
        10: (45, 23), 12: (45, 24), 14: (46, 26), 16: (38, 18),
    },
    ("Halves", "Fast"): {
        2: (32, 17), 4: (28, 20), 6: (32, 18), 8: (27, 15),
        10: (33, 19), 12: (33, 20), 14: (34, 22), 16: (26, 14),
    },
    ("ByteSum", "Exact"): {
        2: (40, 20), 3: (39, 19), 4: (36, 16), 5: (37, 17), 6: (40, 20), 7: (40, 20),
        8: (35, 15), 10: (41, 21), 12: (41, 21), 14: (42, 22), 16: (34, 14),
    },
    ("ByteSum", "Fast"): {
        2: (36, 20), 3: (35, 19), 4: (32, 16), 5: (33, 17), 6: (36, 20), 7: (36, 20),
        8: (31, 15), 10: (37, 21), 12: (37, 21), 14: (38, 22), 16: (30, 14),
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=[90, 120])
def counted(request, tmp_path_factory) -> tuple[int, dict[str, Counter]]:
    """Architecture, and the opcodes of every probe kernel compiled for it."""
    cubin = tmp_path_factory.mktemp("decoder") / f"sm_{request.param}.cubin"
    machine_code.compile_object(PROBE, request.param, cubin)
    return request.param, machine_code.instructions(cubin)


def cost_of_a_tile(kernels: dict[str, Counter], half_bits: int, family: str, form: str) -> Counter:
    """Opcodes that one more tile takes, loads and stores left out."""
    name = f"probe_{half_bits}_{family}_{form}"
    two, four = (machine_code.without_memory(kernels[f"{name}_{tiles}"]) for tiles in (2, 4))
    return Counter({code: (four[code] - two[code]) / 2 for code in four | two})


@pytest.mark.parametrize(("family", "form"), BUDGET)
def test_decoder_keeps_to_its_budget(counted, family, form):
    architecture, kernels = counted
    over = []
    for half_bits, (most, most_logic) in BUDGET[family, form].items():
        cost = cost_of_a_tile(kernels, half_bits, family, form)
        whole = sum(cost.values())
        logic, multiply, half = (
            machine_code.total(cost, pipe)
            for pipe in (machine_code.LOGIC, machine_code.MULTIPLY, machine_code.HALF)
        )
        line = (
            f"sm_{architecture} {family} {form} {half_bits / 2:g} bits: {whole:g} instructions of "
            f"{most} (logic {logic:g} of {most_logic}, IMAD and IDP {multiply:g}, fp16 {half:g}, "
            f"other {whole - logic - multiply - half:g})"
        )
        print(line)
        # Far fewer would mean that a part of the decoder was optimised away.
        if not most - 8 <= whole <= most + TOLERANCE or logic > most_logic + TOLERANCE:
            over.append(line)
    assert not over, "\n".join(over)
