"""Writes NCCL's and RCCL's topology files.

Their readers are written by hand: no prolog, no tabs, no escapes, values of at most 255 characters, at most 16
attributes and 640 children. What is unknown is not written; NCCL then asks the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from fuel_parallel.errors import TopologyError
from fuel_parallel.topology import rates
from fuel_parallel.topology.cores import parse_list
from fuel_parallel.topology.model import (
    AnyPart,
    DeviceInfo,
    DeviceKind,
    Interconnect,
    Link,
    Nic,
    NumaDomain,
    Switch,
    gb_s,
)
from fuel_parallel.topology.topology import DeviceTopology

LONGEST_VALUE, MOST_ATTRIBUTES, MOST_CHILDREN, DEEPEST = 255, 16, 640, 100

HIDDEN_SWITCH = "fffffff:ffff:ff"
"""What NCCL calls an NVSwitch that it cannot see."""


@dataclass(eq=False)
class Node:
    """An element to be written."""

    name: str
    attributes: dict[str, str | int]
    children: list[Node] = field(default_factory=list)


def write(t: DeviceTopology) -> str:
    """The text of a file. Raises `TopologyError`: more than one machine, or what such a file cannot say."""
    if len(t.nodes) > 1:
        some = ", ".join(t.nodes[:4]) + ", ..." * (len(t.nodes) > 4)
        raise TopologyError(
            f"NCCL's file describes one machine, this topology has {len(t.nodes)}: {some}; `convert --node NAME`"
            " writes one of them"
        )
    tree = _Tree(t)
    amd = any(gpu.kind is DeviceKind.ROCM for gpu in tree.gpus)
    root = Node("system", {"version": 2 if amd else 1}, [tree.cpu(numa) for numa in t.numa_domains])
    missing = [gpu.id for gpu in tree.gpus if gpu.id not in tree.written]
    if missing:
        raise TopologyError(
            f"{missing[0]} hangs from no NUMA domain of this topology, so NCCL's file has no place for it; give it its"
            " domain (numa), or a PCIe link to it"
        )
    return "\n".join(_lines(root, "")) + "\n"


class _Tree:
    """Walks down from each NUMA domain along PCIe links; each part is written once."""

    def __init__(self, t: DeviceTopology) -> None:
        self.t = t
        self.gpus = [d for d in t.devices if d.kind in (DeviceKind.CUDA, DeviceKind.ROCM)]
        self.written: set[str] = set()
        self._invented = 0

    def cpu(self, numa: NumaDomain) -> Node:
        device = next((d for d in self.t.devices if d.kind is DeviceKind.CPU and d.numa == numa.index), None)
        attributes: dict[str, str | int] = {"numaid": numa.index}
        if numa.cores:
            attributes["affinity"] = _mask(numa.cores)
        return Node("cpu", attributes | _vendor(device.name if device else ""), self._below(numa))

    def _below(self, numa: NumaDomain) -> list[Node]:
        found: list[Node] = []
        pending: list[tuple[str, list[Node]]] = [(numa.id, found)]
        while pending:
            upper, nodes = pending.pop()
            for part, link in self._cards(upper):
                self.written.add(part.id)
                node = self._node(part, link)
                nodes.append(node)
                if isinstance(part, Switch):
                    pending.append((part.id, node.children))
        for gpu in self.gpus:  # Those of which only the domain is known
            if gpu.numa == numa.index and gpu.id not in self.written and not self._has_upper(gpu):
                self.written.add(gpu.id)
                found.append(self._node(gpu, Link()))
        return found

    def _has_upper(self, gpu: DeviceInfo) -> bool:
        links = self.t.links_of(gpu.id)
        return any(
            link.interconnect is Interconnect.PCIE and not isinstance(self.t.part(end), DeviceInfo)
            for end, link in links.items()
        )

    def _cards(self, upper: str) -> Iterator[tuple[AnyPart, Link]]:
        for end, link in self.t.links_of(upper).items():
            part = self.t.part(end)
            card = isinstance(part, Nic) or (
                link.interconnect is Interconnect.PCIE
                and link.path != "pcilink"
                and (isinstance(part, Switch) or part in self.gpus)
            )
            if card and part.id not in self.written:
                yield part, link

    def _node(self, part: AnyPart, link: Link) -> Node:
        if isinstance(part, Nic):
            return self._nic(part, link)
        if isinstance(part, Switch):
            node = self._pci(part.bus, "0x060400", link)
            node.children += [Node("pcilink", {"target": bus}) for bus in self._halves(part)]
            return node
        if not isinstance(part, DeviceInfo):  # no other part is a card
            raise TopologyError(f"{part.id} is no card")
        if not part.bus:
            raise TopologyError(f"{part.id} has no PCI address (bus), by which NCCL finds its GPUs")
        amd = part.kind is DeviceKind.ROCM
        node = self._pci(part.bus, "0x038000" if amd else "0x030200", link)
        node.children.append(Node("gpu", self._gpu(part), list(self._fabric(part))))
        return node

    def _halves(self, switch: Switch) -> Iterator[str]:
        """The addresses of the other halves of a switch that shows itself as several."""
        for end, link in self.t.links_of(switch.id).items():
            part = self.t.part(end)
            if link.path == "pcilink" and isinstance(part, Switch) and part.bus:
                yield part.bus

    def _gpu(self, gpu: DeviceInfo) -> dict[str, str | int]:
        numbers = [_number(other) for other in self.gpus]
        devs = sorted(n for n in numbers if n is not None)
        if len(set(devs)) == len(self.gpus):
            dev = numbers[self.gpus.index(gpu)] or 0
            attributes: dict[str, str | int] = {"dev": dev, "rank": devs.index(dev)}
        else:
            attributes = {"dev": self.gpus.index(gpu), "rank": self.gpus.index(gpu)}
        named = re.fullmatch(r"sm([0-9]{2,3})", gpu.name)
        if gpu.kind is DeviceKind.ROCM:
            attributes["gcn"] = gpu.name if gpu.name.startswith("gfx") else ""
        elif named:
            attributes["sm"] = int(named[1])
        else:
            capability = rates.capability_of(gpu.name)
            attributes |= {} if capability is None else {"sm": capability}
        return attributes

    def _fabric(self, gpu: DeviceInfo) -> Iterator[Node]:
        for end, link in self.t.links_of(gpu.id).items():
            part = self.t.part(end)
            if link.interconnect not in (Interconnect.NVLINK, Interconnect.INFINITY_FABRIC):
                continue
            if link.path == "C2C" and isinstance(part, NumaDomain):
                rate = (
                    {} if link.bandwidth_mb_s is None else {"bw": round(gb_s(link.bandwidth_mb_s) * 1000 / link.count)}
                )
                yield Node("c2c", {"count": link.count, **rate})
            elif isinstance(part, DeviceInfo) and part in self.gpus:
                amd = gpu.kind is DeviceKind.ROCM
                kind = "0x038000" if amd else "0x030200"
                yield Node("xgmi" if amd else "nvlink", {"target": part.bus, "count": link.count, "tclass": kind})
            else:
                kind = "0x068001" if isinstance(part, NumaDomain) else "0x068000"
                yield Node("nvlink", {"target": HIDDEN_SWITCH, "count": link.count, "tclass": kind})

    def _nic(self, nic: Nic, link: Link) -> Node:
        net: dict[str, str | int] = {"name": nic.name or nic.id.rpartition("nic:")[2]}
        net["dev"] = self.t.nics.index(nic)
        if nic.speed_mb_s is not None:
            net["speed"] = round(gb_s(nic.speed_mb_s) * 8000)
        known = nic.name or nic.speed_mb_s is not None
        inner = [Node("nic", {}, [Node("net", net)])] if known else []
        if not nic.bus or self._shares_bus(nic):
            return inner[0] if inner else Node("nic", {}, [Node("net", net)])
        node = self._pci(nic.bus, "0x020000", link)
        node.children += inner
        return node

    def _shares_bus(self, nic: Nic) -> bool:
        return any(isinstance(p, Switch) and p.bus == nic.bus for p in map(self.t.part, self.t.links_of(nic.id)))

    def _pci(self, bus: str, kind: str, link: Link) -> Node:
        if not bus:
            self._invented += 1
            bus = f"ffff:fe:{self._invented // 8 % 32:02x}.{self._invented % 8}"
        return Node("pci", {"busid": bus, "class": kind, **_width(link)})


def _number(gpu: DeviceInfo) -> int | None:
    number = gpu.id.rpartition(":")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 9 else None


def _width(link: Link) -> dict[str, str | int]:
    """Speed and lanes, by the path or else by the bandwidth; nothing where neither says."""
    said = re.fullmatch(r"([0-9.]{1,6}) GT/s x([0-9]{1,2})", link.path)
    if said and float(said[1]) in rates.PCIE_LANE:
        return {"link_speed": f"{float(said[1])} GT/s PCIe", "link_width": int(said[2])}
    if link.bandwidth_mb_s is not None:
        rate = gb_s(link.bandwidth_mb_s)
        for lanes in (16, 8, 4, 2, 1):
            for speed, lane in rates.PCIE_LANE.items():
                if abs(lane * lanes - rate) < 0.02 * rate:
                    return {"link_speed": f"{speed} GT/s PCIe", "link_width": lanes}
    return {}


def _vendor(name: str) -> dict[str, str | int]:
    """What NCCL wants to know of a processor, by its name."""
    arch = next((a for word, a in _ARCHITECTURES.items() if word.lower() in name.lower()), "")
    vendor = next((v for word, v in _VENDORS.items() if word in name), "")
    found: dict[str, str | int] = {key: word for key, word in (("arch", arch), ("vendor", vendor)) if word}
    for key, word in (("familyid", "family"), ("modelid", "model")):
        number = re.search(rf"\b{word} ([0-9]{{1,5}})\b", name)
        if number:
            found[key] = int(number[1])
    return found


_VENDORS = {
    **{"GenuineIntel": "GenuineIntel", "AuthenticAMD": "AuthenticAMD", "CentaurHauls": "CentaurHauls"},
    **{"Shanghai": "  Shanghai  ", "Intel": "GenuineIntel", "AMD": "AuthenticAMD", "EPYC": "AuthenticAMD"},
}
_ARCHITECTURES = dict.fromkeys(("x86_64", *_VENDORS), "x86_64") | {
    **dict.fromkeys(("arm64", "aarch64", "Neoverse", "Grace"), "arm64"),
    "power": "ppc64",
    "ppc64": "ppc64",
}


def _mask(cores: str) -> str:
    number = sum(1 << core for core in parse_list(cores))
    digits = f"{number:x}"
    digits = digits.zfill(-(-len(digits) // 8) * 8)
    return ",".join(digits[place : place + 8] for place in range(0, len(digits), 8))


def _lines(node: Node, indent: str) -> Iterator[str]:
    attributes = {key: str(value) for key, value in node.attributes.items() if value != ""}
    for key, value in attributes.items():
        if len(value) > LONGEST_VALUE or not re.fullmatch(r"[ -~]*", value) or set(value) & set("<>&\"'"):
            raise TopologyError(
                f"NCCL cannot read {key}={value[:40]!r} of <{node.name}>; its values have at most {LONGEST_VALUE}"
                " characters, all of them ASCII, without quotes and <>&"
            )
    if len(indent) > 2 * DEEPEST:
        raise TopologyError(f"PCI switches are at most {DEEPEST} deep")
    if len(attributes) > MOST_ATTRIBUTES or len(node.children) > MOST_CHILDREN:
        raise TopologyError(f"NCCL reads at most {MOST_CHILDREN} elements in one; <{node.name}> has more")
    head = " ".join([node.name, *(f'{key}="{value}"' for key, value in attributes.items())])
    if not node.children:
        yield f"{indent}<{head}/>"
        return
    yield f"{indent}<{head}>"
    for child in node.children:
        yield from _lines(child, indent + "  ")
    yield f"{indent}</{node.name}>"
