"""The links between hosts: which interface reaches the other hosts, and which RDMA belongs to it.

A ConnectX-7 port of a DGX Spark hangs on two PCIe links, so it shows up twice: `enp1s0f1np1` and
`enP2p1s0f1np1`, twins at the same bus, slot and function of two PCI domains. Each carries half of
the port's rate, and NCCL has to be told both. Everything is found on each host by itself: names of
interfaces differ between hosts, and the head's names on a worker are a known way to hang.

Three steps: `collect` reads one host, `choose` pairs the hosts up by their subnets, `verify` sends
packets over the chosen interfaces alone. Standard library only, since the first and the last run on
the managed hosts.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import HostError

SCHEMA = "exl3-links/1"
KINDS = ("auto", "roce", "tcp")
# Interfaces of container engines, bridges and tunnels never lead to another host's GPU.
_VIRTUAL = re.compile(r"^(lo|docker|br-|virbr|veth[0-9a-f]{7}|cni|flannel|tun|tap|wg|tailscale)")
_IP_HEADERS = 28
"""IPv4 and ICMP headers: a ping of MTU - 28 bytes fills one frame."""
PINGS = 3

Ask = Callable[[list[str]], Any]
"""Runs a program; the answer has rc, out and error (`commands.run_here`)."""


def collect(root: Path, ask: Ask) -> dict:
    """What this host has: interfaces with an IPv4 address, their PCI function, rate and RDMA.

    root: `/`, or a tree of a host's files; ask: runs `ip -j -4 address show`.
    Raises HostError where `ip` does not answer.
    """
    answer = ask(["ip", "-j", "-4", "address", "show"])
    if answer.rc != 0:
        raise HostError(
            f"the addresses of this host cannot be read: {answer.error}.", "Install iproute2."
        )
    rdma = _rdma_devices(root)
    interfaces = []
    for entry in json.loads(answer.out or "[]"):
        name = entry.get("ifname", "").partition("@")[0]
        if not name or _VIRTUAL.match(name):
            continue
        folder = root / "sys/class/net" / name
        pci = _pci_of(folder / "device")
        here = [one for one in rdma if one["pci"] == pci and pci is not None]
        for one in entry.get("addr_info", []):
            network = ipaddress.ip_interface(f"{one['local']}/{one['prefixlen']}")
            interfaces.append(
                {
                    "name": name,
                    "address": one["local"],
                    "network": str(network.network),
                    "mtu": entry.get("mtu"),
                    "carrier": _text(folder / "carrier") == "1",
                    "speed_mbit": _speed(folder),
                    "port": _text(folder / "phys_port_name") or None,
                    "pci": pci,
                    "rdma": _rdma_of(root, here[0]["device"], one["local"]) if here else None,
                }
            )
    # By PCI address first, so that of two twins every host names the same one first.
    interfaces.sort(key=lambda one: (one["pci"] or "~", one["name"]))
    return {"schema": SCHEMA, "interfaces": interfaces}


def choose(hosts: dict[str, dict], kind: str = "auto", mtu: int | None = None) -> dict[str, dict]:
    """For each host its interface, address, RDMA devices and twin, by a subnet that all share.

    hosts: name to what `collect` found there; the first one is the head. kind: roce asks for RDMA,
    tcp does without, auto takes it where every host has it. The fastest shared subnet wins.
    Raises HostError where no subnet is shared, where RDMA is asked for and absent, where an MTU is
    smaller than the one asked for, and where twins sit in one subnet.
    """
    if kind not in KINDS:
        raise HostError(f"fabric '{kind}' is not known.", f"Use {', '.join(KINDS)}.")
    if len(hosts) < 2:
        raise HostError("one host needs no link.", "Name at least two hosts in the inventory.")
    shared = _shared_networks(hosts)
    if not shared:
        raise HostError(
            "the hosts share no subnet:\n"
            + "\n".join(f"  {name}: {_addresses(one)}" for name, one in hosts.items()),
            "Give the linked interfaces addresses in one subnet, and each twin a subnet of its own "
            "(docs/two-nodes.md).",
        )
    network = max(shared, key=lambda one: _merit(shared[one], kind))
    found = shared[network]
    with_rdma = kind != "tcp" and all(one["rdma"] for one in found.values())
    if kind == "roce" and not with_rdma:
        without = [name for name, one in found.items() if not one["rdma"]]
        raise HostError(
            f"RoCE is asked for, and the interface in {network} has no RDMA device on "
            f"{', '.join(without)}.",
            "Load mlx5_ib there (rdma link show), or write kind: tcp.",
        )
    _check_mtu(found, mtu)
    out = {}
    for name, one in found.items():
        twin = _twin(hosts[name], one, shared, name)
        devices = [used["rdma"] for used in (one, twin) if used and used["rdma"]]
        out[name] = {
            "interface": one["name"],
            "address": one["address"],
            "network": network,
            "mtu": one["mtu"],
            "speed_mbit": _sum_speed(one, twin),
            "twin": None if twin is None else {"name": twin["name"], "address": twin["address"]},
            "rdma": devices if with_rdma else [],
            "reason": _reason(one, twin, network, with_rdma),
        }
    return out


def verify(mine: dict, others: dict[str, dict], ask: Ask, mtu: int | None = None) -> list[str]:
    """Send packets to every other host over each chosen interface; one sentence per fault.

    Bound to the interface, so that another route cannot stand in for it; of full size and with
    "do not fragment" where `mtu` is asked for, so that a switch that drops large frames is found.
    """
    faults = []
    ways = [(mine["interface"], "address")]
    if mine["twin"]:
        ways.append((mine["twin"]["name"], "twin"))
    for name, other in others.items():
        for interface, which in ways:
            target = (
                other["address"] if which == "address" else (other["twin"] or {}).get("address")
            )
            if target is None:
                continue
            size = (mtu or mine["mtu"] or 1500) - _IP_HEADERS
            base = ["ping", "-n", "-q", "-c", str(PINGS), "-i", "0.2", "-W", "2", "-I", interface]
            small = ask([*base, target])
            if small.rc != 0:
                faults.append(
                    f"{interface} does not reach {name} ({target}): {_lost(small)}. Check cable, "
                    "addresses and firewall."
                )
                continue
            large = ask([*base, "-M", "do", "-s", str(size), target])
            if large.rc != 0:
                faults.append(
                    f"{interface} loses frames of {size + _IP_HEADERS} bytes to {name} ({target}): "
                    f"{_lost(large)}. Set the same MTU on both hosts and on the switch."
                )
    return faults


def rate_gb_s(host: dict) -> float | None:
    """What the chosen interface and its twin carry in one direction, in GB/s; None if unknown."""
    return None if host["speed_mbit"] is None else host["speed_mbit"] / 8000


def _shared_networks(hosts: dict[str, dict]) -> dict[str, dict[str, dict]]:
    per_host = [
        {i["network"]: i for i in reversed(one["interfaces"]) if i["carrier"]}
        for one in hosts.values()
    ]
    common = set(per_host[0]).intersection(*per_host[1:])
    return {
        network: {name: found[network] for name, found in zip(hosts, per_host)}
        for network in sorted(common)
    }


def _merit(found: dict[str, dict], kind: str) -> tuple:
    rdma = kind != "tcp" and all(one["rdma"] for one in found.values())
    slowest = min(one["speed_mbit"] or 0 for one in found.values())
    # Of twins the one in the lower PCI domain, so that every host takes the same one.
    return rdma, slowest, tuple(-int((one["pci"] or "0")[:4], 16) for one in found.values())


def _twin(host: dict, one: dict, shared: dict, name: str) -> dict | None:
    """The same port on the card's other PCIe link, where it reaches the other hosts too."""
    if one["pci"] is None:
        return None
    for other in host["interfaces"]:
        same = other["pci"] and other["pci"][4:] == one["pci"][4:] and other["port"] == one["port"]
        if not same or other["pci"] == one["pci"] or not other["carrier"]:
            continue
        if other["network"] == one["network"]:
            raise HostError(
                f"{name}: the twins {one['name']} and {other['name']} are both in "
                f"{one['network']}; answers would leave through either.",
                f"Give {other['name']} an address in a subnet of its own, on every host.",
            )
        if other["network"] in shared:
            return other
    return None


def _check_mtu(found: dict[str, dict], mtu: int | None) -> None:
    small = {name: one for name, one in found.items() if mtu and (one["mtu"] or 0) < mtu}
    if small:
        said = ", ".join(f"{one['name']} on {name} has {one['mtu']}" for name, one in small.items())
        raise HostError(
            f"MTU {mtu} is asked for: {said}.",
            f"ip link set DEVICE mtu {mtu}, in netplan too, or write a smaller mtu.",
        )


def _sum_speed(one: dict, twin: dict | None) -> int | None:
    if one["speed_mbit"] is None:
        return None
    # Both twins report the port's rate; their PCIe links share it.
    return max(one["speed_mbit"], twin["speed_mbit"] or 0) if twin else one["speed_mbit"]


def _reason(one: dict, twin: dict | None, network: str, rdma: bool) -> str:
    speed = f"{one['speed_mbit'] / 1000:g} Gbit/s" if one["speed_mbit"] else "unknown rate"
    parts = [f"{one['name']} is in {network}, which all hosts share ({speed})"]
    parts.append("RDMA" if rdma else "TCP")
    if twin:
        parts.append(f"its twin {twin['name']} reaches them too")
    elif one["port"] and rdma:
        parts.append("no twin with carrier and address: half of the port may lie idle")
    return "; ".join(parts)


def _addresses(host: dict) -> str:
    found = [
        f"{i['name']} {i['address']} in {i['network']}" + ("" if i["carrier"] else " (no carrier)")
        for i in host["interfaces"]
    ]
    return ", ".join(found) or "no interface with an address"


def _lost(answer: Any) -> str:
    match = re.search(r"\d+ received|[\d.]+% packet loss|message too long[^\n]*", answer.out)
    return match[0] if match else answer.error or "no answer"


def _pci_of(device: Path) -> str | None:
    """PCI address of a class device: the last part of its resolved folder."""
    try:
        name = device.resolve(strict=True).name
    except OSError:
        return None
    return name if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", name) else None


def _speed(folder: Path) -> int | None:
    text = _text(folder / "speed")
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _rdma_devices(root: Path) -> list[dict]:
    folder = root / "sys/class/infiniband"
    if not folder.is_dir():
        return []
    return [
        {"device": one.name, "pci": _pci_of(one / "device")} for one in sorted(folder.iterdir())
    ]


def _rdma_of(root: Path, device: str, address: str) -> dict:
    """The device's port 1 and the index of its RoCE v2 entry for this IPv4 address.

    The table holds several entries a port, RoCE v1 and v2, for link-local and other addresses;
    NCCL takes a wrong one where index and address do not belong together.
    """
    port = root / "sys/class/infiniband" / device / "ports/1"
    octets = ipaddress.IPv4Address(address).packed
    wanted = f"0000:0000:0000:0000:0000:ffff:{octets[:2].hex()}:{octets[2:].hex()}"
    index = None
    for entry in sorted(port.glob("gids/*"), key=lambda path: int(path.name)):
        kind = _text(port / "gid_attrs/types" / entry.name)
        if _text(entry) == wanted and kind == "RoCE v2":
            index = int(entry.name)
            break
    return {"device": device, "state": _text(port / "state") or None, "gid_index": index}
