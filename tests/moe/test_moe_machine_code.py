"""The kernels of routed experts compiled for cards that are not here: nothing spills in a loop."""

from __future__ import annotations

import re
from pathlib import Path

import cuda_tools
import kernel_usage
import pytest

from tests.build import machine_code

ROOT = Path(__file__).resolve().parents[2]
COMPILED = [("moe_rate_half_bits_8", 120), ("moe_rate_half_bits_8", 90), ("moe_plan", 121),
            ("moe_rows", 80), ("moe_stream_finish", 90), ("moe_tall_rows", 90)]  # fmt: skip
KERNELS = {"moe_plan": 2, "moe_rows": 8, "moe_stream_finish": 2, "moe_tall_rows": 2}
"""Of a source; those of a rate have 26."""


@pytest.fixture(scope="module", params=COMPILED, ids=lambda p: f"{p[0]} sm_{p[1]}")
def compiled(request, tmp_path_factory) -> tuple[str, int, Path]:
    name, architecture = request.param
    target = tmp_path_factory.mktemp("moe") / f"{name}.o"
    machine_code.compile_object(ROOT / "csrc" / "moe" / f"{name}.cu", architecture, target)
    return name, architecture, target


def test_registers_and_stacks(compiled):
    name, _, target = compiled
    usages = kernel_usage.read_usage(target, cuda_tools.find_tool("cuobjdump"))
    assert len(usages) == KERNELS.get(name, 26)
    assert kernel_usage.problems(usages) == []


def test_the_main_loop_stays_in_registers(compiled):
    name, architecture, target = compiled
    loops = machine_code.main_loops(target)
    # Empty where they are not used: few tokens, warpgroups, and either room of a tile.
    assert len(loops) == ((18 if architecture == 90 else 12) if "rate" in name else 0)
    for kernel, lines in loops.items():
        # Four stages of four steps for each number of tiles, two turns.
        product, least = ("HGMMA", 32) if "tall_kernel" in kernel else ("HMMA", 8)
        assert sum(product in line for line in lines) >= least, (
            f"sm_{architecture} {kernel}: no loop"
        )
        local = [line for line in lines if re.search(r"\b(LDL|STL)\b", line)]
        assert not local, f"sm_{architecture} {kernel}: {local}"
