"""The kernels of some rates, compiled for cards that are not here: no spills, and a block fits.

scripts/build-kernels looks at the spills of every kernel of every architecture; this takes a few,
so that a change that spills is red at once, and asks the host code for the shared memory it wants.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import cuda_tools
import kernel_usage
import pytest

from tests.build import machine_code

PROBE = Path(__file__).parent / "probes" / "launch_probe.cu"
LINEAR = machine_code.ROOT / "csrc" / "linear"
REGISTERS_OF_SM = 65536

# Twice the bits per weight, and the compute capability times ten.
COMPILED = [(8, 120), (12, 120), (5, 120), (8, 80), (8, 90)]


@dataclass(frozen=True)
class Launch:
    """One launch as the host asks for it; sizes in bytes a block."""

    kernel: str
    rows: int
    threads: int
    planned_blocks: int
    dynamic: int
    allowed: int


@pytest.fixture(scope="module", params=COMPILED, ids=lambda p: f"{p[0] / 2:g} bits sm_{p[1]}")
def compiled(request, tmp_path_factory) -> tuple:
    """Architecture, what each kernel of one rate takes, every launch of a product, the object."""
    half_bits, architecture = request.param
    folder = tmp_path_factory.mktemp(f"rate_{half_bits}_{architecture}")
    code, probe, plan = folder / "rate.o", folder / "probe.o", folder / "plan.o"
    machine_code.compile_object(LINEAR / f"rate_half_bits_{half_bits}.cu", architecture, code)
    machine_code.compile_object(PROBE, architecture, probe, f"-DEXL3_HALF_BITS={half_bits}")
    machine_code.compile_object(LINEAR / "plan.cpp", architecture, plan)
    subprocess.run(["c++", probe, plan, code, "-o", folder / "probe"], check=True)
    limit = kernel_usage.SHARED_LIMITS[architecture] * 1024
    lines = subprocess.run(
        [folder / "probe", str(architecture), str(limit)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    launches = [Launch(line.split()[0], *map(int, re.findall(r"=(\d+)", line))) for line in lines]
    usages = kernel_usage.read_usage(code, cuda_tools.find_tool("cuobjdump"))
    return architecture, {usage.kernel: usage for usage in usages}, launches, code


def test_no_kernel_spills(compiled):
    _, usages, *_ = compiled
    assert len(usages) >= 6  # five row counts exactly, one fast
    assert kernel_usage.problems(list(usages.values())) == []


def test_the_main_loop_stays_in_registers(compiled):
    """A few values are parked on the stack while it runs; one access inside it costs each unit."""
    architecture, usages, launches, code = compiled
    loops = machine_code.main_loops(code)
    products = {launch.kernel for launch in launches}
    if architecture == 90:
        products |= {kernel for kernel in usages if "stream_kernel" in kernel}
    assert set(loops) == products  # instances for the room of other cards are empty here
    for kernel, lines in loops.items():
        # A product of a warpgroup is that of a whole step, and two steps take turns.
        product, least = ("HGMMA", 2) if "tall_kernel" in kernel else ("HMMA", 8)
        found = sum(product in line for line in lines)
        assert found >= least, f"sm_{architecture} {kernel}: no loop"
        local = [line for line in lines if re.search(r"\b(LDL|STL)\b", line)]
        assert not local, f"sm_{architecture} {kernel}: {local}"


def test_blocks_fit_into_shared_memory(compiled):
    architecture, usages, launches, _ = compiled
    limit = kernel_usage.SHARED_LIMITS[architecture] * 1024
    assert {launch.rows for launch in launches} == {8, 16, 32, 64, 128}
    for launch in launches:
        whole = launch.dynamic + usages[launch.kernel].shared_bytes
        assert whole <= limit, f"{launch}: {whole} bytes of shared memory of {limit}"
        assert launch.dynamic <= launch.allowed, f"{launch}: more than the runtime was told"


def test_a_multiprocessor_holds_the_blocks_that_the_plan_counts_on(compiled):
    # One block too many would wait for the others to end: twice the time, and nothing else to see.
    architecture, usages, launches, _ = compiled
    shared = kernel_usage.SHARED_LIMITS[architecture] * 1024 + kernel_usage.RESERVED_BYTES
    wrong = []
    for launch in launches:
        usage = usages[launch.kernel]
        registers = -(-usage.registers // 8) * 8 * launch.threads
        block = launch.dynamic + usage.shared_bytes + kernel_usage.RESERVED_BYTES
        held = min(REGISTERS_OF_SM // registers, shared // block)
        if held < max(1, launch.planned_blocks):
            wrong.append(
                f"{launch}: {held} blocks fit, with {block} of {shared} bytes of shared memory and "
                f"{registers} of {REGISTERS_OF_SM} registers each"
            )
    assert any(launch.planned_blocks for launch in launches)
    assert not wrong, "\n".join(wrong)
