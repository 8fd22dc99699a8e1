"""Which links join the hosts: trees of two Sparks, real cables between namespaces, faults."""

import json
import subprocess
import sys

import pytest
from exl3_host import commands, links, nccl
from exl3_host.errors import HostError

from tests import two_hosts


class Spark:
    """The files and the `ip` of a DGX Spark as far as links are concerned.

    Names, domains and the shape of the tables follow public captures of ConnectX-7 in GB10 hosts:
    a port is at 0000:01:00.1 and, over its other PCIe link, at 0002:01:00.1.
    """

    def __init__(self, root, number: int, twins: bool = True, prefix: str = "enp1s0f1np1"):
        self.root, self.number, self.entries = root, number, []
        self.nic(prefix, "rocep1s0f1", "0000:01:00.1", f"192.168.100.{number}", carrier=True)
        if twins:
            self.nic("enP2p1s0f1np1", "roceP2p1s0f1", "0002:01:00.1", f"192.168.101.{number}")
        self.nic("enP7s7", None, "0007:01:00.0", f"10.0.0.{number}", speed=10000, port="")
        self.entry("docker0", "172.17.0.1", 1500)
        self.entry("lo", "127.0.0.1", 65536)

    def entry(self, name: str, address: str, mtu: int, prefixlen: int = 24) -> None:
        info = [{"family": "inet", "local": address, "prefixlen": prefixlen}]
        self.entries.append({"ifname": name, "mtu": mtu, "addr_info": info})

    def nic(
        self, name, rdma, pci, address, carrier=True, speed=200000, port="p1", mtu=9000
    ) -> None:
        device = self.root / "sys/devices" / f"pci{pci[:7]}" / pci
        device.mkdir(parents=True)
        net = self.root / "sys/class/net" / name
        net.mkdir(parents=True)
        (net / "device").symlink_to(device)
        (net / "carrier").write_text("1\n" if carrier else "0\n")
        (net / "speed").write_text(f"{speed}\n")
        if port:
            (net / "phys_port_name").write_text(f"{port}\n")
        self.entry(name, address, mtu)
        if rdma is None:
            return
        folder = self.root / "sys/class/infiniband" / rdma
        (folder / "ports/1/gids").mkdir(parents=True)
        (folder / "ports/1/gid_attrs/types").mkdir(parents=True)
        (folder / "device").symlink_to(device)
        (folder / "ports/1/state").write_text("4: ACTIVE\n")
        octets = [int(part) for part in address.split(".")]
        mapped = "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}".format(*octets)
        local = "fe80:0000:0000:0000:4ebb:47ff:fe2b:6301"
        table = [(local, "IB/RoCE v1"), (local, "RoCE v2"), (mapped, "IB/RoCE v1")]
        table += [(mapped, "RoCE v2")]
        for index, (gid, kind) in enumerate(table):
            (folder / "ports/1/gids" / str(index)).write_text(gid + "\n")
            (folder / "ports/1/gid_attrs/types" / str(index)).write_text(kind + "\n")

    def links(self) -> dict:
        def ask(argv):
            assert argv == ["ip", "-j", "-4", "address", "show"]
            return commands.Answer(0, json.dumps(self.entries))

        return links.collect(self.root, ask)


@pytest.fixture
def sparks(tmp_path):
    return Spark(tmp_path / "a", 1), Spark(tmp_path / "b", 2)


def settings(host: dict) -> dict:
    return {one.name: one.value for one in nccl.for_links(host)}


def test_two_sparks_with_both_twins(sparks):
    found = links.choose({"spark-a": sparks[0].links(), "spark-b": sparks[1].links()}, mtu=9000)
    assert settings(found["spark-a"]) == {
        "VLLM_HOST_IP": "192.168.100.1",
        "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
        "TP_SOCKET_IFNAME": "enp1s0f1np1",
        "NCCL_SOCKET_IFNAME": "=enp1s0f1np1",
        "NCCL_IB_HCA": "=rocep1s0f1,roceP2p1s0f1",
        "NCCL_IB_GID_INDEX": "3",
    }
    assert found["spark-b"]["twin"] == {"name": "enP2p1s0f1np1", "address": "192.168.101.2"}
    assert "its twin enP2p1s0f1np1 reaches them too" in found["spark-b"]["reason"]
    assert links.rate_gb_s(found["spark-a"]) == 25.0, "200 Gbit/s of the port, not twice"


def test_names_are_those_of_each_host(tmp_path):
    """vllm#40991: the head's interface names, copied to the worker, hang the start."""
    one, other = Spark(tmp_path / "a", 1), Spark(tmp_path / "b", 2, prefix="enp1s0f0np0")
    found = links.choose({"a": one.links(), "b": other.links()})
    assert settings(found["a"])["GLOO_SOCKET_IFNAME"] == "enp1s0f1np1"
    assert settings(found["b"])["GLOO_SOCKET_IFNAME"] == "enp1s0f0np0"
    assert settings(found["b"])["VLLM_HOST_IP"] == "192.168.100.2"


def test_without_rdma(sparks):
    found = links.choose({"a": sparks[0].links(), "b": sparks[1].links()}, kind="tcp")
    wanted = settings(found["a"])
    assert wanted["NCCL_IB_DISABLE"] == "1" and "NCCL_IB_HCA" not in wanted


def test_a_port_with_one_twin_says_what_lies_idle(tmp_path):
    hosts = {n: Spark(tmp_path / n, i, twins=False).links() for i, n in enumerate("ab", 1)}
    found = links.choose(hosts)
    assert found["a"]["twin"] is None and "half of the port may lie idle" in found["a"]["reason"]
    assert settings(found["a"])["NCCL_IB_HCA"] == "=rocep1s0f1"


@pytest.mark.parametrize(
    ("break_it", "kind", "mtu", "message", "fix"),
    [
        (
            lambda a, b: b.entries.clear(),
            "auto",
            None,
            r"share no subnet:\n  a: .*enp1s0f1np1 192.168.100.1 .*\n  b: no interface",
            "subnet of its own",
        ),
        (
            lambda a, b: (b.root / "sys/class/infiniband/rocep1s0f1/device").unlink(),
            "roce",
            None,
            r"the interface in 192.168.101.0/24|has no RDMA device on b",
            "mlx5_ib",
        ),
        (
            lambda a, b: b.entries[0].update(mtu=1500),
            "auto",
            9000,
            "MTU 9000 is asked for: enp1s0f1np1 on b has 1500",
            "netplan",
        ),
        (
            lambda a, b: a.entries[1]["addr_info"][0].update(local="192.168.100.7"),
            "auto",
            None,
            "a: the twins enp1s0f1np1 and enP2p1s0f1np1 are both in 192.168.100.0/24",
            "a subnet of its own",
        ),
        (lambda a, b: None, "ib", None, "fabric 'ib' is not known", "auto, roce, tcp"),
    ],
)
def test_faults_are_named(sparks, break_it, kind, mtu, message, fix):
    one, other = sparks
    if kind == "roce":
        for spark in sparks:
            del spark.entries[1]
    break_it(one, other)
    with pytest.raises(HostError, match=message) as raised:
        links.choose({"a": one.links(), "b": other.links()}, kind, mtu)
    assert fix in raised.value.fix


def test_a_cable_that_is_out_is_not_chosen(sparks):
    one, other = sparks
    (other.root / "sys/class/net/enp1s0f1np1/carrier").write_text("0\n")
    found = links.choose({"a": one.links(), "b": other.links()})
    assert found["a"]["interface"] == "enP2p1s0f1np1" and found["a"]["twin"] is None


@pytest.fixture(scope="module")
def hosts():
    two_hosts.needed()
    with two_hosts.TwoHosts() as made:
        yield made


def asked(host):
    """A runner inside a host."""

    def ask(argv):
        done = subprocess.run(host.command(*argv), capture_output=True, text=True)
        return commands.Answer(done.returncode, done.stdout, done.stderr.strip())

    return ask


def collected(host) -> dict:
    """What the host itself finds, in its own /sys."""
    program = (
        "import json, pathlib; from exl3_host import commands, links; "
        "print(json.dumps(links.collect(pathlib.Path('/'), commands.run_here)))"
    )
    return json.loads(host.run(sys.executable, "-c", program).stdout)


def test_real_cables(hosts):
    found = {host.name: collected(host) for host in hosts}
    chosen = links.choose(found)
    assert chosen["a"]["interface"] == "fab0" and chosen["a"]["address"] == hosts.a.address
    assert chosen["b"]["interface"] == "enp7s0" and chosen["b"]["rdma"] == []
    assert links.verify(chosen["a"], {"b": chosen["b"]}, asked(hosts.a)) == []
    assert links.verify(chosen["b"], {"a": chosen["a"]}, asked(hosts.b)) == []


def test_a_switch_that_drops_large_frames_is_found(hosts):
    """Both hosts say 9000; what lies between carries 1500."""
    chosen = links.choose({host.name: collected(host) for host in hosts})
    two_hosts.ip("-n", hosts.a.space, "link", "set", "fab0", "mtu", "9000")
    try:
        (fault,) = links.verify(chosen["a"], {"b": chosen["b"]}, asked(hosts.a), mtu=9000)
    finally:
        two_hosts.ip("-n", hosts.a.space, "link", "set", "fab0", "mtu", "1500")
    assert fault.startswith(f"fab0 loses frames of 9000 bytes to b ({hosts.b.address})")
    assert "same MTU on both hosts and on the switch" in fault


def test_another_way_does_not_stand_in(hosts):
    """The second cable would carry the packets; the chosen one is cut, and that is said."""
    chosen = links.choose({host.name: collected(host) for host in hosts})
    two_hosts.ip("-n", hosts.b.space, "link", "set", hosts.b.interface, "down")
    try:
        (fault,) = links.verify(chosen["a"], {"b": chosen["b"]}, asked(hosts.a))
        after = links.choose({host.name: collected(host) for host in hosts})
    finally:
        two_hosts.ip("-n", hosts.b.space, "link", "set", hosts.b.interface, "up")
    assert fault.startswith(f"fab0 does not reach b ({hosts.b.address})")
    assert after["a"]["interface"] == "fab1", "looked at again, the other cable is found"
