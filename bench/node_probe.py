#!/usr/bin/env python3
"""How near is each GPU to the memory of one NUMA node?

    python bench/node_probe.py --node 1 [--seconds 0.5]

binds itself to the CPUs and the memory of that node and prints one JSON line,
{"gpus": [{"uuid", "latency_ns", "alone_gbs", "loaded_gbs", ...}]}:

    latency_ns   one dependent 4-byte load by the GPU from 4 MiB of host memory, a random cycle
    alone_gbs    copies to and from the host, one GPU and one direction at a time, their mean
    loaded_gbs   all GPUs at once and both directions, bytes of this GPU a second
    pages        bytes of the buffers on each node, so that a binding that did nothing shows

With --serve it prints {"ready": true}, then one such line for each line that it reads: the host
logic (exl3_host.measure) keeps one process per node and goes round them. Buffers are touched under
the process' own memory policy and registered afterwards; memory that the driver allocates itself
would not show in numa_maps.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import re
import sys
import time
from pathlib import Path
from statistics import median

CHAIN_BYTES = 4 << 20
COPY_BYTES = 64 << 20
CHAIN_STEPS = 20000
LAUNCHES = 5
COPIES = 10
ROUND_COPIES = 4
SMALL_COPIES = 2000

MPOL_BIND = 2
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}

CHASE = r"""
extern "C" __global__ void chase(const unsigned* next, unsigned* end, int steps) {
    unsigned at = *end;
    for (int i = 0; i < steps; ++i) at = *reinterpret_cast<const volatile unsigned*>(next + at);
    *end = at;
}
"""


def bind(node: int) -> None:
    """Run on the node's CPUs and take memory from it alone, as numactl would do.

    Containers often forbid the memory policy; then first touch places the pages, and the counts in
    `pages` say whether it did.
    """
    text = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text(encoding="ascii")
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    os.sched_setaffinity(0, cpus & os.sched_getaffinity(0))
    number = SET_MEMPOLICY.get(platform.machine())
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    if number is None or libc.syscall(number, MPOL_BIND, mask, 1024) != 0:
        error = os.strerror(ctypes.get_errno())
        print(f"no memory policy ({error}): pages go where they are touched", file=sys.stderr)


def buffer(size: int) -> mmap.mmap:
    """Anonymous memory whose pages are placed now, by the policy of this process."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, size, mmap.PAGESIZE):
        memory[offset] = 1
    return memory


def pages_at(address: int) -> dict[str, int]:
    """Bytes per node of the mapping that holds `address`, from /proc/self/numa_maps.

    A mapping may have grown together with its neighbour: then the neighbour, made by us under the
    same policy, is counted too. Empty where the kernel does not tell.
    """
    best = ""
    try:
        lines = Path("/proc/self/numa_maps").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        if int(line.split(" ", 1)[0], 16) > address:
            break
        best = line
    size = re.search(r"kernelpagesize_kB=(\d+)", best)
    page = int(size.group(1)) * 1024 if size else 4096
    return {node: int(count) * page for node, count in re.findall(r"\bN(\d+)=(\d+)", best)}


def random_cycle(count: int) -> list[int]:
    """next[i] of one cycle through all of range(count) in a random order (Sattolo's shuffle)."""
    import random

    rng = random.Random(1)
    order = list(range(count))
    for i in range(count - 1, 0, -1):
        j = rng.randrange(i)
        order[i], order[j] = order[j], order[i]
    return order


class Gpu:
    """One GPU with its pinned buffers; everything is enqueued on its own two streams."""

    def __init__(self, index: int) -> None:
        import torch

        self.index = index
        self.device = torch.device("cuda", index)
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        self.uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        torch.cuda.set_device(index)
        self.memory = []
        self.up, self.down, self.chain = (
            self._pinned(size) for size in (COPY_BYTES, COPY_BYTES, CHAIN_BYTES)
        )
        self.into = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device)
        self.out = torch.ones(COPY_BYTES, dtype=torch.uint8, device=self.device)
        self.streams = (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))
        # One 64-byte line per element, so that no load finds its word in a line fetched before.
        lines = torch.tensor(random_cycle(CHAIN_BYTES // 64), dtype=torch.int32) * 16
        self.chain.view(torch.int32).view(-1, 16)[:, 0].copy_(lines)
        self.chase = _chase_kernel()

    def _pinned(self, size: int):
        import torch

        memory = buffer(size)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        result = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0)
        if int(result) != 0:
            raise SystemExit(f"cudaHostRegister of {size} bytes failed: error {int(result)}")
        self.memory.append(memory)
        return tensor

    def pages(self) -> dict[str, int]:
        """Bytes of all buffers per node."""
        total: dict[str, int] = {}
        for address in {self.up.data_ptr(), self.down.data_ptr(), self.chain.data_ptr()}:
            for node, size in pages_at(address).items():
                total[node] = total.get(node, 0) + size
        return total

    def latency_ns(self) -> float:
        """Median time of one dependent load; of a small copy where no kernel can be compiled."""
        import torch

        torch.cuda.set_device(self.index)
        if self.chase is None:
            return self._copy_latency_ns()
        end = torch.zeros(1, dtype=torch.int32, device=self.device)
        times = []
        for _ in range(LAUNCHES):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.chase(grid=(1, 1, 1), block=(1, 1, 1), args=[self.chain, end, CHAIN_STEPS])
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e6 / CHAIN_STEPS)
        return median(times)

    def _copy_latency_ns(self) -> float:
        import torch

        small, into = self.up[:4096], self.into[:4096]
        times = []
        for _ in range(SMALL_COPIES):
            begin = time.perf_counter_ns()
            into.copy_(small, non_blocking=True)
            torch.cuda.current_stream(self.device).synchronize()
            times.append(time.perf_counter_ns() - begin)
        return float(median(times))

    def copy(self, direction: int) -> None:
        """Enqueue one copy: 0 from the host, 1 to the host."""
        import torch

        with torch.cuda.stream(self.streams[direction]):
            if direction == 0:
                self.into.copy_(self.up, non_blocking=True)
            else:
                self.down.copy_(self.out, non_blocking=True)

    def alone_gbs(self) -> list[float]:
        """GB/s from the host and to the host, nothing else going on."""
        import torch

        rates = []
        for direction in (0, 1):
            stream = self.streams[direction]
            self.copy(direction)
            stream.synchronize()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            for _ in range(COPIES):
                self.copy(direction)
            stop.record(stream)
            stop.synchronize()
            rates.append(COPIES * COPY_BYTES / start.elapsed_time(stop) / 1e6)
        return rates

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()


def _chase_kernel():
    """The compiled load chain, or None where this torch cannot compile a kernel at run time."""
    import torch

    try:
        kernel = torch.cuda._compile_kernel(CHASE, "chase")
        chain = torch.zeros(1, dtype=torch.int32).pin_memory()
        end = torch.zeros(1, dtype=torch.int32, device="cuda")
        kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[chain, end, 1])
        torch.cuda.synchronize()
        return kernel
    except (AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
        print(f"latency by small copies: {error}", file=sys.stderr)
        return None


def loaded_gbs(gpus: list[Gpu], seconds: float) -> list[float]:
    """GB/s of each GPU while all of them copy in both directions for about `seconds`."""
    for gpu in gpus:
        gpu.synchronize()
    counts = [0] * len(gpus)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for number, gpu in enumerate(gpus):
            for _ in range(ROUND_COPIES):
                gpu.copy(0)
                gpu.copy(1)
            counts[number] += 2 * ROUND_COPIES
        for gpu in gpus:
            gpu.synchronize()
    elapsed = time.perf_counter() - begin
    return [count * COPY_BYTES / elapsed / 1e9 for count in counts]


def measure(gpus: list[Gpu], seconds: float) -> dict:
    """One repeat."""
    alone = [gpu.alone_gbs() for gpu in gpus]
    loaded = loaded_gbs(gpus, seconds)
    out = []
    for gpu, rates, together in zip(gpus, alone, loaded):
        out.append(
            {
                "uuid": gpu.uuid,
                "latency_ns": round(gpu.latency_ns(), 1),
                "latency_by": "copies" if gpu.chase is None else "loads",
                "alone_gbs": round(sum(rates) / 2, 3),
                "from_host_gbs": round(rates[0], 3),
                "to_host_gbs": round(rates[1], 3),
                "loaded_gbs": round(together, 3),
                "pages": gpu.pages(),
            }
        )
    return {"gpus": out}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--node", type=int, help="bind to this node first")
    parser.add_argument("--serve", action="store_true", help="one repeat per line of stdin")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of the loaded copies")
    given = parser.parse_args()
    if given.node is not None:
        bind(given.node)
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA device here", file=sys.stderr)
        return 3
    gpus = [Gpu(i) for i in range(torch.cuda.device_count())]
    # Clocks and links wake up under load.
    loaded_gbs(gpus, given.seconds)
    if not given.serve:
        print(json.dumps(measure(gpus, given.seconds)), flush=True)
        return 0
    print(json.dumps({"ready": True}), flush=True)
    for _line in sys.stdin:
        print(json.dumps(measure(gpus, given.seconds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
