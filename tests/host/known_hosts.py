"""The captured hosts of data/topo as whole machines, and what is right for each, written by hand.

`cpus` per node is what lscpu prints on such a host; the CPU column of the capture stops at an
offline CPU and is not used. `tp` holds, by number of ranks: GPUs, worst link, mode, CPUs, memory
nodes (of a docker runtime that keeps SMT siblings).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu_host import DATA, GpuHost, PciDevice

SMALL, BIG = "NVIDIA GeForce RTX 4090", "NVIDIA RTX PRO 6000 Blackwell Server Edition"


@dataclass
class Known:
    cpus: dict[int, str]
    sockets: dict[int, int]
    name: str
    gpus: int
    printed: list  # nodes that the capture prints per GPU; None where it prints none
    decided: list  # the node of each GPU, sysfs saying -1
    source: str
    tp: dict[int, tuple] = field(default_factory=dict)
    smt_offset: int | None = None
    offline: str = ""
    warnings: int = 0


ALL = range(8)
TWO = [0, 0, 0, 0, 1, 1, 1, 1]
EPYC = {0: "0-63,128-191", 1: "64-127,192-238,240-255"}
TWO_SOCKETS = {0: 0, 1: 1}
NPS4 = {n: f"{16 * n}-{16 * n + 15},{128 + 16 * n}-{143 + 16 * n}" for n in range(8)}
GB200_MEMORY = dict.fromkeys((2, 10, 18, 26), "")

HOSTS: dict[str, Known] = {
    "f01": Known(
        EPYC, TWO_SOCKETS, BIG, 8, TWO, TWO, "topo", smt_offset=128, offline="239",
        tp={
            1: ([0], None, "container", "2-63,130-191", "0"),
            2: ([0, 1], "PIX", "container", "2-63,130-191", "0"),
            4: ([0, 1, 2, 3], "NODE", "container", "2-63,130-191", "0"),
            8: ([*ALL], "SYS", "per_rank", "2-63,66-127,130-191,194-238,240-255", "0-1"),
        },
    ),
    "f02": Known(
        EPYC, TWO_SOCKETS, BIG, 8, TWO, TWO, "topo", smt_offset=128, offline="239",
        tp={
            2: ([0, 1], "NODE", "container", "2-63,130-191", "0"),
            4: ([0, 1, 2, 3], "NODE", "container", "2-63,130-191", "0"),
        },
    ),
    "f03": Known(
        {0: "0-19"}, {0: 0}, "NVIDIA GB10", 1, [0], [0], "trivial",
        tp={1: ([0], None, "none", "0-19", "0")},
    ),
    "f04": Known(
        {0: "0-13"}, {0: 0}, BIG, 2, [0, 0], [0, 0], "trivial",
        tp={2: ([0, 1], "PHB", "none", "0-13", "0")},
    ),
    "f05": Known(
        {0: "0-55,112-167", 1: "56-111,168-223"}, TWO_SOCKETS, SMALL, 8, TWO, TWO, "topo",
        smt_offset=112,
        tp={
            2: ([0, 1], "SYS", "container", "2-55,114-167", "0"),
            4: ([0, 1, 2, 3], "SYS", "container", "2-55,114-167", "0"),
        },
    ),
    "f06": Known(
        {0: "0-47,96-143", 1: "48-95,144-191"}, TWO_SOCKETS, "NVIDIA A10G", 8,
        [[0, 1]] * 8, [None] * 8, "unknown", smt_offset=96,
        tp={
            2: ([0, 1], "PHB", "none", "0-191", "0-1"),
            4: ([0, 1, 2, 3], "PHB", "none", "0-191", "0-1"),
        },
    ),
    "f07": Known(
        {0: "0-7"}, {0: 0}, "Tesla P4", 1, [None], [0], "trivial",
        tp={1: ([0], None, "none", "0-7", "0")},
    ),
    "f08": Known(
        {0: "0-63"}, {0: 0}, "NVIDIA GeForce RTX 5090", 2, [0, 0], [0, 0], "trivial",
        tp={2: ([0, 1], "PHB", "none", "0-63", "0")},
    ),
    "f09": Known(
        {0: "0-15"}, {0: 0}, "NVIDIA GeForce RTX 3090", 2, [0, 0], [0, 0], "trivial",
        tp={2: ([0, 1], "NODE", "none", "0-15", "0")},
    ),
    "f11": Known(
        {0: "0-31", 1: "32-63"}, TWO_SOCKETS, "NVIDIA A100-SXM4-80GB", 2,
        [None, None], [None, None], "unknown",
        tp={2: ([0, 1], "NV12", "none", "0-63", "0-1")},
    ),
    "f12": Known(
        {0: "0-71", 1: "72-143", **GB200_MEMORY}, TWO_SOCKETS, "NVIDIA GB200", 4,
        [[0, *range(3, 10), *range(11, 18)]] * 2 + [[1, *range(19, 26), *range(27, 34)]] * 2,
        [0, 0, 1, 1], "topo",
        tp={
            2: ([0, 1], "NV18", "container", "2-71", None),
            4: ([0, 1, 2, 3], "NV18", "container", "2-71,74-143", None),
        },
    ),
    "f13": Known(
        {0: "0-17,36-53", 1: "18-35,54-71"}, TWO_SOCKETS, "Tesla V100-PCIE-32GB", 6,
        [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1], "topo", smt_offset=36,
        tp={
            2: ([0, 1], "PIX", "container", "1-17,37-53", "0"),
            4: ([0, 1, 3, 4], "SYS", "per_rank", "1-17,19-35,37-53,55-71", "0-1"),
        },
    ),
    "f14": Known(
        NPS4, {n: n // 4 for n in range(8)}, "NVIDIA A100-SXM4-80GB", 8,
        [3, 3, 1, 1, 7, 7, None, None], [3, 3, 1, 1, 7, 7, None, None], "topo",
        smt_offset=128, warnings=1,
        tp={
            2: ([0, 1], "NV12", "container", "49-63,177-191", "3"),
            4: (
                [0, 1, 2, 3], "NV12", "container",
                "1-15,17-31,33-47,49-63,129-143,145-159,161-175,177-191", "0-3",
            ),
            8: ([*ALL], "NV12", "none", "0-255", "0-7"),
        },
    ),
    "f15": Known(
        {0: "0-55,112-167", 1: "56-111,168-223"}, TWO_SOCKETS, "NVIDIA H100 80GB HBM3", 8,
        TWO, TWO, "topo", smt_offset=112,
        tp={
            2: ([0, 1], "NV18", "container", "2-55,114-167", "0"),
            4: ([0, 1, 2, 3], "NV18", "container", "2-55,114-167", "0"),
        },
    ),
    "f17": Known(
        {0: "0-31", 1: "32-63"}, TWO_SOCKETS, BIG, 8, [None] * 8, [None] * 8, "unknown",
        tp={
            2: ([0, 1], "PHB", "none", "0-63", "0-1"),
            4: ([0, 1, 2, 3], "PHB", "none", "0-63", "0-1"),
        },
    ),
    "f18": Known(
        {0: "0-23,48-71", 1: "24-47,72-95"}, TWO_SOCKETS, "Tesla V100-SXM3-32GB", 4,
        [None] * 4, [None] * 4, "unknown", smt_offset=48,
        tp={
            2: ([0, 1], "NV6", "none", "0-95", "0-1"),
            4: ([0, 1, 2, 3], "NV6", "none", "0-95", "0-1"),
        },
    ),
    "f20": Known(
        {0: "0-47,96-143", 1: "48-95,144-191"}, TWO_SOCKETS, "NVIDIA H100 80GB HBM3", 8,
        TWO, TWO, "topo", smt_offset=96,
        tp={
            2: ([0, 1], "NV18", "container", "2-47,98-143", "0"),
            4: ([0, 1, 2, 3], "NV18", "container", "2-47,98-143", "0"),
        },
    ),
    "f21": Known(
        {0: "0-27,56-83", 1: "28-55,84-111"}, TWO_SOCKETS, SMALL, 8, TWO, TWO, "topo",
        smt_offset=56,
        tp={
            2: ([0, 1], "PIX", "container", "1-27,57-83", "0"),
            4: ([0, 1, 2, 3], "PIX", "container", "1-27,57-83", "0"),
        },
    ),
}  # fmt: skip

# The eight cards of f01 by bus, and the N of /dev/nvidiaN of those whose owner noted it.
F01_BUSES = ("06", "07", "75", "76", "84", "85", "f4", "f5")
F01_MINORS = [2, 3, 0, 1, 6, 7]


def buses(name: str, count: int) -> list[str]:
    if name == "f01":
        return [f"0000:{bus}:00.0" for bus in F01_BUSES]
    if name == "f03":
        return ["000f:01:00.0"]
    return [f"0000:{16 + 16 * i:02x}:00.0" for i in range(count)]


def known_host(name: str) -> GpuHost:
    """The host of a capture, with firmware that says nothing about nodes."""
    known = HOSTS[name]
    devices = []
    for address in buses(name, known.gpus):
        domain, bus, _rest = address.split(":")
        above = f"{int(bus, 16) - 1:02x}"
        root = f"pci{domain}:{above}"
        devices.append(PciDevice(address, root, [f"{domain}:{above}:01.1"]))
    memory = {n: (0 if n not in known.sockets else 262144) for n in known.cpus}
    if name == "f12":
        memory = dict.fromkeys(known.cpus, 262144)
    return GpuHost(
        nodes=known.cpus,
        sockets=known.sockets,
        devices=devices,
        names=[known.name] * known.gpus,
        topo=(DATA / "topo" / f"{name}.txt").read_text(),
        smt_offset=known.smt_offset,
        offline=known.offline,
        node_mib=memory,
        memory="[N/A]" if name == "f03" else "97887",
        compute="12.1" if name == "f03" else "12.0",
        minors=F01_MINORS if name == "f01" else [],
    )
