"""Where a card sits: the PCI bridges above it, as /sys has them, become switches."""

from __future__ import annotations

import re
from itertools import pairwise

from fuel_parallel.topology import rates
from fuel_parallel.topology.model import Interconnect, Link, Switch
from fuel_parallel.topology.sysfs import Sysfs
from fuel_parallel.topology.topology import DeviceTopology

DEVICES = "sys/bus/pci/devices"
ADDRESS = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"


def normal(bus: str) -> str:
    """A PCI address as /sys writes it.

    >>> normal("00000000:3B:00.0"), normal("3b:00.0")
    ('0000:3b:00.0', '0000:3b:00.0')
    """
    words = bus.lower().split(":")
    domain = words[0][-4:] if len(words) == 3 else "0000"
    return ":".join([domain.rjust(4, "0"), *words[-2:]])


def numa_of(sysfs: Sysfs, bus: str) -> int | None:
    """The NUMA domain that a card is next to; None where the kernel does not know."""
    number = sysfs.number(f"{DEVICES}/{bus}/numa_node")
    return None if number is None or number < 0 else number


def link_of(sysfs: Sysfs, bus: str) -> Link:
    """The link from a card or bridge upwards. Idle cards lower their speed, so it is the greatest that counts."""
    speed, width = (sysfs.text(f"{DEVICES}/{bus}/max_link_{what}") for what in ("speed", "width"))
    rate = re.match(r"(\d+(?:\.\d+)?) ?GT/s", speed)
    lanes = int(width) if re.fullmatch(r"[1-9]\d?", width) else None
    return rates.pcie(float(rate[1]) if rate else None, lanes)


def attach(t: DeviceTopology, sysfs: Sysfs, part: str, bus: str, node: str) -> None:
    """Links a card that was added to what is above it: bridges, and at the top its NUMA domain.

    A card whose domain is unknown belongs to the only one, or to none: then it has no link out of its tree.
    """
    prefix = f"{node}/" if node else ""
    chain = [(part, bus)]
    for bridge in _bridges(sysfs, bus):
        name = f"{prefix}pci:{bridge}"
        chain.append((name, bridge))
        if t.has(name):
            break
        t.add_switch(Switch(id=name, node=node, kind=Interconnect.PCIE, bus=bridge))
    for (lower, address), (upper, _) in pairwise(chain):
        if t.link(lower, upper) is None:
            t.add_link(lower, upper, link_of(sysfs, address))
    top, address = chain[-1]
    index = numa_of(sysfs, bus)
    here = [n for n in t.numa_domains if n.node == node and (index is None or n.index == index)]
    if len(here) == 1 and t.link(top, here[0].id) is None:
        t.add_link(top, here[0].id, link_of(sysfs, address))


def _bridges(sysfs: Sysfs, bus: str) -> list[str]:
    """The switches above a card, the nearest first, by the address of their upper port.

    Above a card are the port of the host bridge, which joins nothing, and then two ports of each switch.
    """
    target = sysfs.target(f"{DEVICES}/{bus}")
    above = [p for p in target.parts[:-1] if re.fullmatch(ADDRESS, p)] if target else []
    return above[1::2][::-1]
