"""The cards of hwloc's XML: GPUs, network cards and the PCI switches above them.

A GPU to compute with is one that a library for computing has found (CUDA, NVML, ROCm SMI, Level Zero), or by its PCI
class one of NVIDIA or AMD. Cards that only show a console, as servers have them, are none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from fuel_parallel.topology.files.hwloc_machine import Machine, infos_of
from fuel_parallel.topology.files.nccl_links import address
from fuel_parallel.topology.files.xml import Element, decimal
from fuel_parallel.topology.model import DeviceInfo, DeviceKind, Interconnect, Link, Nic, Origin, Switch, assumed, mb_s

MOST_CARDS = 4096

# What operating systems call devices: before version 3 a number, since then a set of bits.
NET, OPENFABRICS = {1: 2, 2: 2, 3: 16}, {1: 3, 2: 3, 3: 32}

LIBRARIES = {"cuda": DeviceKind.CUDA, "nvml": DeviceKind.CUDA, "rsmi": DeviceKind.ROCM, "ze": DeviceKind.INTEL_GPU}
"""By the name of a device: who found it. The first that numbers all GPUs of a kind numbers them for us."""

VENDORS = {"10de": DeviceKind.CUDA, "1002": DeviceKind.ROCM}
CONSOLES = {"1002:515e", "1002:4752", "1002:5159"}  # ES1000, Rage XL, RV100: on the boards of servers

INFINIBAND = re.compile(r"(mlx[0-9]|mthca|hfi1|qib|bnxt_re|irdma|efa|rdmap|rocep|ibp)")


@dataclass(eq=False)
class Card:
    """A PCI device: its object, address, class, "vendor:device", what the system sees of it, and what it hangs from."""

    element: Element
    bus: str
    kind: str
    model: str
    systems: list[Element]
    bridges: list[Element]
    domain: int | None

    def number(self, library: str) -> int | None:
        """Its number in a library."""
        names = [re.fullmatch(rf"{library}([0-9]{{1,4}})", system.get("name")) for system in self.systems]
        return next((int(name[1]) for name in names if name), None)


def add_all(machine: Machine) -> None:
    """Adds GPUs, network cards and switches. Raises `TopologyFileError`: an address or a name twice."""
    gpus: dict[DeviceKind, list[Card]] = {}
    for card in _cards(machine):
        kind = _compute_kind(machine, card)
        if kind is not None:
            gpus.setdefault(kind, []).append(card)
        elif "NVSwitch" in card.element.get("subtype") or card.model == "10de:1ac2":
            machine.parts[card.element] = "nvswitch"
        else:
            _add_nic(machine, card)
    for kind, cards in gpus.items():
        for number, card in zip(_numbers(kind, cards), cards, strict=True):
            _add_gpu(machine, kind, number, card)


def _cards(machine: Machine) -> list[Card]:
    """In the order of the file, with the PCI bridges above each, the uppermost first."""
    found: list[Card] = []
    lines: dict[str, int] = {}
    pending: list[tuple[Element, list[Element], int]] = [(machine.root, [], 0)]
    while pending:
        element, bridges, mask = pending.pop()
        kind = element.get("type")
        if kind == "PCIDev":
            card = _card(machine, element, bridges, mask)
            if card.bus in lines:
                raise machine.source.error(
                    f"the PCI address {card.bus} is that of line {lines[card.bus]} already", line=element.line
                )
            lines[card.bus] = element.line
            found.append(card)
            if len(found) > MOST_CARDS:
                raise machine.source.error(f"there are more than {MOST_CARDS} PCI devices", line=element.line)
        elif kind == "Bridge":
            below = [*bridges, element] if element.get("pci_busid") else []
        else:
            below, mask = [], machine.masks[element] or mask
        if kind != "PCIDev":
            pending += [(child, below, mask) for child in reversed(list(element.all("object")))]
    return found


def _card(machine: Machine, element: Element, bridges: list[Element], mask: int) -> Card:
    kind = re.match(r"([0-9a-f]{4}) \[([0-9a-f]{4}:[0-9a-f]{4})\]", element.get("pci_type").lower())
    return Card(
        element,
        address(machine.source, element, "pci_busid"),
        kind[1] if kind else "",
        kind[2] if kind else "",
        [child for child in element.walk() if child.get("type") == "OSDev"],
        bridges,
        machine.domain_of(mask),
    )


# GPUs.


def _compute_kind(machine: Machine, card: Card) -> DeviceKind | None:
    for library, found in LIBRARIES.items():
        if card.number(library) is not None:
            return found
    if not card.kind.startswith(("03", "1200")):
        return None
    kind = VENDORS.get(card.model[:4])
    if kind is None or card.model in CONSOLES:
        machine.source.note(
            f"the display {card.bus} [{card.model}] is left out: nothing says that it can compute",
            line=card.element.line,
        )
        return None
    return kind


def _numbers(kind: DeviceKind, cards: list[Card]) -> list[int]:
    for library in (name for name, found in LIBRARIES.items() if found is kind):
        numbers = [card.number(library) for card in cards]
        known = [n for n in numbers if n is not None]
        if len(set(known)) == len(cards):
            return known
    return list(range(len(cards)))


def _add_gpu(machine: Machine, kind: DeviceKind, number: int, card: Card) -> None:
    infos = infos_of(card.element)
    for system in card.systems:
        infos = infos_of(system) | infos
    domain = next((n for n in machine.topology.numa_domains if n.index == card.domain), None)
    part = f"{kind.value}:{number}"
    machine.topology.add_device(
        DeviceInfo(
            id=part,
            kind=kind,
            name=infos.get("GPUModel", infos.get("PCIDevice", "")),
            memory_bytes=_memory(infos),
            numa=card.domain,
            bus=card.bus,
            cores=domain.cores if domain else "",
        )
    )
    _attach(machine, card, part)


def _memory(infos: dict[str, str]) -> int | None:
    """Libraries say it in KiB."""
    for name in ("CUDAGlobalMemorySize", "RSMIVRAMSize"):
        found = re.fullmatch(r"([0-9]{1,12}) ?(?:KiB|kB)?", infos.get(name, ""))
        if found:
            return int(found[1]) * 1024
    return None


# Network cards.


def _add_nic(machine: Machine, card: Card) -> None:
    """Each card once, by its InfiniBand name where it has one."""
    ports = [s for s in card.systems if _is(machine, s, NET) or _is(machine, s, OPENFABRICS)]
    if not ports:
        if card.kind.startswith("02"):
            machine.source.note(
                f"the network card {card.bus} is left out: the system has no device for it", line=card.element.line
            )
        return
    named = [p for p in ports if _is(machine, p, OPENFABRICS)]
    named += [p for p in ports if INFINIBAND.match(p.get("name"))]
    port = (named or ports)[0]
    part = f"nic:{port.get('name')}"
    if machine.topology.has(part):
        raise machine.source.error(f"there are two network cards {port.get('name')[:40]!r}", line=port.line, key="name")
    machine.topology.add_nic(Nic(id=part, name=port.get("name"), numa=card.domain, bus=card.bus))
    _attach(machine, card, part)


def _is(machine: Machine, system: Element, kinds: dict[int, int]) -> bool:
    text, wanted = system.get("osdev_type"), kinds[machine.version]
    if not re.fullmatch(r"[0-9]{1,4}", text):
        return False
    return bool(int(text) & wanted) if machine.version == 3 else int(text) == wanted


# The PCI tree.


def _attach(machine: Machine, card: Card, part: str) -> None:
    """Above a card are the port of the host bridge, which joins nothing, and then two ports of each switch."""
    machine.parts[card.element] = part
    for system in card.systems:
        machine.parts[system] = part
    chain = [(part, card.element)]
    for bridge in card.bridges[1::2][::-1]:
        bus = address(machine.source, bridge, "pci_busid")
        chain.append((f"pci:{bus}", bridge))
        if machine.topology.has(f"pci:{bus}"):
            break
        machine.topology.add_switch(Switch(id=f"pci:{bus}", kind=Interconnect.PCIE, bus=bus))
    for (lower, element), (upper, _) in pairwise(chain):
        machine.links.setdefault((lower, upper), _link(machine, element))
        machine.links.setdefault((upper, lower), _link(machine, element))
    top, element = chain[-1]
    if card.domain is not None and (top, f"numa:{card.domain}") not in machine.links:
        machine.connect(top, f"numa:{card.domain}", _link(machine, element))


def _link(machine: Machine, element: Element) -> Link:
    """`pci_link_speed` is in GB/s of 10**9 bytes, 0 where the system does not know it."""
    rate = decimal(machine.source, element, "pci_link_speed")
    if not rate:
        return assumed(Interconnect.PCIE, None)
    return Link(interconnect=Interconnect.PCIE, bandwidth_mb_s=mb_s(rate), origin=Origin.STATED)
