"""Memory: nothing read that was not written, nothing written outside, no byte undeclared."""

from contextlib import contextmanager

import pytest
import torch

from exl3_plugin import ops
from tests.gpu import cases

pytestmark = pytest.mark.usefixtures("gpu")

FUSED = [("mcg", 64, 384), ("mul1", 40, 256, 10, 201), ("3inst", 96, 128)]
REGION = 96 << 20
POISON = 0xFF  # NaN in every float format, and a flag that says "done"


@contextmanager
def poisoned_memory():
    """All that is allocated inside comes from memory full of 0xFF, large blocks and small ones."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        sizes = [REGION] * 2 + [1 << 20] * 16 + [64 << 10] * 64 + [512] * 256
        held = [torch.full((size,), POISON, dtype=torch.uint8, device="cuda") for size in sizes]
        torch.cuda.synchronize()
        del held
        yield
        torch.cuda.synchronize()


class RawMemory:
    """Bytes of the device at an address, whoever they belong to."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


@pytest.mark.quick
@pytest.mark.parametrize("name", [*cases.PLANS, "default"])
def test_poisoned_outputs_and_workspaces(name):
    plan = cases.PLANS.get(name)
    layer = cases.make_layer(1, 1024, FUSED, bias=torch.float16)
    for m in (1, 9, 40, 130, 700):
        x = cases.activations(2, m, 1024, torch.bfloat16)
        clean = layer.run(x, plan)
        with poisoned_memory():
            y = layer.run(x, plan)
            right = bool(torch.isfinite(y).all()) and cases.same_bits(y, clean)
            del y
        assert right, m


@pytest.mark.quick
@pytest.mark.parametrize("name", [*cases.PLANS, "default"])
def test_inputs_between_guard_bands(name):
    """Every input lies in a buffer of NaN, which no result may notice and no kernel may change."""
    plan = cases.PLANS.get(name)
    layer = cases.make_layer(3, 640, FUSED, bias=torch.bfloat16)
    x = cases.activations(4, 37, 600, torch.bfloat16)
    clean = layer.run(x, plan)

    buffers = {}

    def fenced(tensor, what):
        guard = 4096 // tensor.element_size()
        whole = torch.full((tensor.numel() + 2 * guard,), -1, dtype=torch.int16, device="cuda")
        inside = slice(guard, guard + tensor.numel())
        whole[inside] = tensor.reshape(-1).view(torch.int16)
        buffers[what] = (whole, whole.clone())
        return whole[inside].view(tensor.dtype).view(tensor.shape)

    for what in ("flat", "suh", "svh", "bias"):
        setattr(layer, what, fenced(getattr(layer, what), what))
    y = layer.run(fenced(x, "x"), plan)
    assert cases.same_bits(y, clean)
    for what, (now, before) in buffers.items():
        assert torch.equal(now, before), f"{what} was written to"


@pytest.mark.parametrize("name", cases.PLANS)
def test_nothing_is_written_around_the_output(name):
    """Output and workspaces are cut from poisoned memory; the rest of it must stay poisoned."""
    plan = cases.PLANS[name]
    if plan.kernel == ops.GEMM:
        plan = plan._replace(blocks=60)
    layer = cases.make_layer(5, 1024, [("mcg", 64, 1024, 3, 1001)])
    x = cases.activations(6, 601, 1024, torch.bfloat16)
    layer.run(x, plan)  # what libraries allocate once is there before
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        region = torch.full((REGION,), POISON, dtype=torch.uint8, device="cuda")
        address = region.data_ptr()
        torch.cuda.synchronize()
        del region
        y = layer.run(x, plan)
        torch.cuda.synchronize()
    begin = y.data_ptr() - address
    size = y.numel() * y.element_size()
    assert 0 <= begin < REGION - size, "the output does not lie in the poisoned memory"
    assert size % 512, "the output should end inside a block of the allocator"

    memory = torch.as_tensor(RawMemory(address, REGION), device="cuda")
    changed = memory != POISON
    changed[begin : begin + size] = False
    declared = ops.workspace_bytes(len(x), layer.k, layer.n_stored, 1, plan)
    assert int(changed.sum()) <= declared
    after = changed[begin + size : begin + -(-size // 512) * 512]
    assert not after.any(), "written just behind the output"
    used = changed.nonzero().flatten()
    # Blocks are cut one after another from the start, each rounded up to 512 bytes.
    limit = -(-size // 512) * 512 + declared + 16 * 512
    assert len(used) == 0 or int(used.max()) < limit, "written far behind the workspaces"


@pytest.mark.quick
@pytest.mark.parametrize("name", cases.PLANS)
def test_peak_memory_is_what_is_declared(name):
    plan = cases.PLANS[name]
    if plan.kernel == ops.GEMM:
        plan = plan._replace(blocks=ops.cuda_device().multiprocessors)
    layer = cases.make_layer(7, 2048, [("mcg", 64, 1024), ("mul1", 40, 512)])
    for m in (1, 16, 100, 1000):
        x = cases.activations(8, m, 2048, torch.bfloat16)
        layer.run(x, plan)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        y = layer.run(x, plan)
        stats = torch.cuda.memory_stats()
        peak = stats["requested_bytes.all.peak"] - before
        output = y.numel() * y.element_size()
        declared = ops.workspace_bytes(m, layer.k, layer.n_stored, len(layer.shards), plan)
        assert stats["requested_bytes.all.current"] - before == output, "something stayed behind"
        assert peak == declared + output, f"m={m}: {peak} bytes, declared {declared} + {output}"
        del y


@pytest.mark.quick
def test_memory_does_not_grow():
    layer = cases.make_layer(9, 1024, FUSED)
    rows = [cases.activations(10, m, 1024, torch.float16) for m in (1, 8, 33, 129, 600, 3000)]
    for x in rows:
        layer.run(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        for x in rows:
            layer.run(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
