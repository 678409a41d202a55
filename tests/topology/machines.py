"""Machines to place ranks on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable

from fuel_parallel.topology import DeviceInfo, DeviceKind, DeviceTopology, Interconnect, Link, Nic, Switch

GB = 953.67  # MB/s of 2**20 bytes


def link(gb_s: float, latency_us: float = 1.0, kind: Interconnect = Interconnect.NVLINK) -> Link:
    return Link(interconnect=kind, bandwidth_mb_s=gb_s * GB, latency_us=latency_us)


def gpus(count: int, node: str = "", topology: DeviceTopology | None = None) -> DeviceTopology:
    t = DeviceTopology() if topology is None else topology
    for n in range(count):
        t.add_device(DeviceInfo(id=f"{node}/cuda:{n}" if node else f"cuda:{n}", node=node, kind=DeviceKind.CUDA))
    return t


def bus(t: DeviceTopology, gb_s: float = 12, latency_us: float = 3.0, name: str = "pci") -> DeviceTopology:
    """A PCI switch below all devices, for those without a link of their own."""
    t.add_switch(Switch(id=name))
    for device in t.device_ids():
        t.add_link(device, name, link(gb_s, latency_us / 2, Interconnect.PCIE))
    return t


def linked(edges: Iterable[tuple[int, int, float]], count: int = 8) -> DeviceTopology:
    t = gpus(count)
    for a, b, gb_s in edges:
        t.add_link(f"cuda:{a}", f"cuda:{b}", link(gb_s))
    return bus(t)


def ring_of_nvlinks() -> DeviceTopology:
    order = [0, 3, 6, 1, 4, 7, 2, 5]
    return linked((a, b, 50) for a, b in zip(order, order[1:] + order[:1], strict=True))


def dgx1() -> DeviceTopology:
    """The hybrid cube mesh: two fully connected fours, and a link from each GPU to its image."""
    double = {(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)}
    single = {(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)}
    return linked([(a, b, 50) for a, b in double] + [(a, b, 25) for a, b in single])


def two_nodes(count: int = 4, shuffled: int | None = None, nodes: int = 2, network: float = 10) -> DeviceTopology:
    """GPUs all linked in each machine, one network card a machine, a switch between."""
    t = DeviceTopology()
    t.add_switch(Switch(id="leaf", kind=Interconnect.NETWORK))
    places = [(f"n{node}", n) for n in range(count) for node in range(nodes)]
    if shuffled is not None:
        random.Random(shuffled).shuffle(places)
    for node, n in places:
        t.add_device(DeviceInfo(id=f"{node}/cuda:{n}", node=node, kind=DeviceKind.CUDA))
    for node in (f"n{i}" for i in range(nodes)):
        t.add_nic(Nic(id=f"{node}/nic", node=node))
        t.add_link(f"{node}/nic", "leaf", link(network, 2.0, Interconnect.NETWORK))
        for a, b in itertools.combinations(range(count), 2):
            t.add_link(f"{node}/cuda:{a}", f"{node}/cuda:{b}", link(200, 0.5))
        for n in range(count):
            t.add_link(f"{node}/cuda:{n}", f"{node}/nic", link(24, 0.5, Interconnect.PCIE))
    return t


def pcie_tree() -> DeviceTopology:
    """Two GPUs a switch, two switches a host bridge, the GPUs numbered across."""
    t = gpus(8)
    for name in ("root", "host:0", "host:1", *(f"pci:{n}" for n in range(4))):
        t.add_switch(Switch(id=name, kind=Interconnect.PCIE))
    for host in range(2):
        t.add_link("root", f"host:{host}", link(16, 0.4))
        for n in (2 * host, 2 * host + 1):
            t.add_link(f"host:{host}", f"pci:{n}", link(24, 0.3))
    for n in range(8):
        t.add_link(f"cuda:{n}", f"pci:{n % 4}", link(24, 0.2))
    return t


def numa_pair() -> DeviceTopology:
    t = gpus(8)
    for numa in range(2):
        t.add_switch(Switch(id=f"numa:{numa}"))
        for n in range(numa, 8, 2):
            t.add_link(f"cuda:{n}", f"numa:{numa}", link(24, 0.5))
    t.add_link("numa:0", "numa:1", link(20, 1.0))
    return t


def star() -> DeviceTopology:
    t = gpus(8)
    t.add_switch(Switch(id="hub"))
    for n in range(8):
        t.add_link(f"cuda:{n}", "hub", link(10 + 2 * n, 1.0))
    return t


def line() -> DeviceTopology:
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    return linked((a, b, 40) for a, b in itertools.pairwise(order))


def random_links() -> DeviceTopology:
    numbers = random.Random(5)
    return linked(
        (a, b, numbers.uniform(5, 60)) for a, b in itertools.combinations(range(8), 2) if numbers.random() < 0.6
    )


def mi250() -> DeviceTopology:
    """Four packages of two dies: four links inside a package, one or two to some others."""
    packages = [(0, 5), (1, 4), (2, 7), (3, 6)]
    inside = [(a, b, 200) for a, b in packages]
    across = [(packages[p][0], packages[(p + 1) % 4][1], 100) for p in range(4)]
    return linked(inside + across + [(packages[p][1], packages[(p + 2) % 4][0], 50) for p in range(4)])


def unequal_links() -> DeviceTopology:
    return linked((a, b, 5 + 7 * ((a * 3 + b * 5) % 8)) for a, b in itertools.combinations(range(8), 2))


MACHINES: dict[str, Callable[[], DeviceTopology]] = {
    "ring of NVLinks": ring_of_nvlinks,
    "DGX-1": dgx1,
    "two nodes of four": two_nodes,
    "PCIe tree": pcie_tree,
    "NUMA pair": numa_pair,
    "star": star,
    "line": line,
    "random": random_links,
    "MI250": mi250,
    "unequal links": unequal_links,
}


def fat_tree(
    machines: int, shuffled: int | None = None, under_leaf: int = 16, spines: int = 8, uplink: float = 100
) -> DeviceTopology:
    """Machines of eight A100-80GB with a card each, leaf switches, and spines."""
    t = DeviceTopology("fat tree")
    leaves = range(-(-machines // under_leaf))
    for name in (*(f"spine{s}" for s in range(spines)), *(f"leaf{x}" for x in leaves)):
        t.add_switch(Switch(id=name, kind=Interconnect.NETWORK))
    for leaf, spine in itertools.product(leaves, range(spines)):
        t.add_link(f"leaf{leaf}", f"spine{spine}", link(uplink, 0.5, Interconnect.NETWORK))
    places = list(itertools.product(range(machines), range(8)))
    if shuffled is not None:
        random.Random(shuffled).shuffle(places)
    for n, g in places:
        t.add_device(
            DeviceInfo(
                id=f"n{n}/cuda:{g}",
                node=f"n{n}",
                kind=DeviceKind.CUDA,
                name="A100-80GB",
                memory_bytes=80 * 2**30,
                tflops=312,
            )
        )
    for n in range(machines):
        t.add_switch(Switch(id=f"n{n}/nvswitch", node=f"n{n}", kind=Interconnect.NVLINK))
        for g in range(8):
            t.add_nic(Nic(id=f"n{n}/nic:{g}", node=f"n{n}"))
            t.add_link(f"n{n}/cuda:{g}", f"n{n}/nvswitch", link(240, 0.5))
            t.add_link(f"n{n}/cuda:{g}", f"n{n}/nic:{g}", link(24, 0.5, Interconnect.PCIE))
            t.add_link(f"n{n}/nic:{g}", f"leaf{n // under_leaf}", link(25, 1.0, Interconnect.NETWORK))
    return t
