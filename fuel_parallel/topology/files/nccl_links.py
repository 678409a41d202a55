"""What is being read of NCCL's topology file, and its links that are no PCI tree: NVLink, Infinity Fabric, C2C."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from fuel_parallel.topology import rates
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.files.xml import Element, decimal, natural
from fuel_parallel.topology.model import Interconnect, Link, Origin, Switch, assumed, mb_s
from fuel_parallel.topology.topology import DeviceTopology

MOST_LINKS = 1024
"""Of one GPU to one other; real ones have 18."""

TO_SWITCH, TO_CPU = "0x068000", "0x068001"


@dataclass(eq=False)
class Gpu:
    """A GPU: its PCI element, its `<gpu>` where there is one, and what it hangs from."""

    bus: str
    card: Element
    element: Element | None
    numa: int
    upper: str
    link: Link
    number: int | None = None
    part: str = ""
    capability: int | None = None

    @property
    def is_amd(self) -> bool:
        """Only RCCL's files have `gcn`, and only its GPUs these classes."""
        has_gcn = self.element is not None and "gcn" in self.element.attributes
        kind, vendor = self.card.get("class").lower(), self.card.get("vendor").lower()
        return has_gcn or vendor == "0x1002" or (vendor == "" and kind.startswith(("0x1200", "0x0380")))

    @property
    def architecture(self) -> str:
        """Of AMD's GPUs: "gfx90a", which RCCL wrote as 910 once."""
        gcn = self.element.get("gcn") if self.element is not None else ""
        return {"": "", "910": "gfx90a"}.get(gcn, gcn if gcn.startswith("gfx") else f"gfx{gcn}")


@dataclass(eq=False)
class Machine:
    """What was found so far. Links are added last, when all of their ends are known."""

    source: Source
    topology: DeviceTopology
    domains: list[tuple[Element, int]] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    nvswitches: set[str] = field(default_factory=set)
    pcilinks: list[tuple[str, Element]] = field(default_factory=list)
    parts_of_bus: dict[str, str] = field(default_factory=dict)
    above: dict[str, str] = field(default_factory=dict)
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    _lines: dict[str, int] = field(default_factory=dict)

    def connect(self, a: str, b: str, link: Link) -> None:
        """A link both ways."""
        self.links[a, b] = self.links[b, a] = link

    def new_bus(self, card: Element) -> str:
        """The address of a card, which no other may have."""
        bus = address(self.source, card, "busid")
        if bus in self._lines:
            raise self.source.error(
                f"the PCI address {bus} is that of line {self._lines[bus]} already", line=card.line, key="busid"
            )
        self._lines[bus] = card.line
        return bus


def address(source: Source, element: Element, name: str) -> str:
    """A PCI address, as /sys writes it."""
    text = element.get(name).strip().lower()
    found = re.fullmatch(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", text)
    if not found:
        what = f"{text[:40]!r} is no PCI address" if text else f"<{element.name[:40]}> has no PCI address"
        raise source.error(f"{what}; expected one such as 0000:4f:00.0", line=element.line, key=name)
    return f"{int(found[1] or '0', 16):04x}:{found[2]:0>2}:{found[3]:0>2}.{found[4]}"


def add_all(machine: Machine) -> None:
    """Adds the links to the topology. Raises `TopologyFileError`: two that contradict each other."""
    for gpu in machine.gpus:
        _add_fabric(machine, gpu)
    _check_counts(machine)
    for part, element in machine.pcilinks:
        _add_pcilink(machine, part, element)
    for (a, b), link in machine.links.items():
        machine.topology.add_directed_link(a, b, link)


def _add_fabric(machine: Machine, gpu: Gpu) -> None:
    if gpu.element is None:
        return
    counts: Counter[str] = Counter()
    for element in gpu.element.all("nvlink", "xgmi"):
        count = natural(machine.source, element, "count")
        if not count or count > MOST_LINKS:
            raise machine.source.error(
                f"a bundle of {count} links; expected 1 to {MOST_LINKS}", line=element.line, key="count"
            )
        end = _end(machine, gpu, element)
        if end:
            counts[end] += count
    for end, count in counts.items():
        link = rates.xgmi(gpu.architecture, count) if gpu.is_amd else rates.nvlink(gpu.capability, count)
        machine.links[gpu.part, end] = link
        if not end.startswith(("cuda:", "rocm:")):
            machine.links[end, gpu.part] = link
    if counts and not gpu.is_amd and gpu.capability is None:
        machine.source.note(f"the GPU {gpu.bus} has no sm: what its NVLinks carry is unknown", line=gpu.card.line)
    for element in gpu.element.all("c2c"):
        machine.connect(gpu.part, f"numa:{gpu.numa}", _c2c(machine, element))


def _end(machine: Machine, gpu: Gpu, element: Element) -> str:
    """Where a link leads: a GPU, the NVSwitch, a processor; "" if it is to be left out."""
    source, kind = machine.source, element.get("tclass").lower()
    if kind == TO_CPU:
        return f"numa:{gpu.numa}"
    # A hidden NVSwitch has an address that is none.
    target = "" if kind == TO_SWITCH else address(source, element, "target")
    if kind == TO_SWITCH or target in machine.nvswitches:
        if not machine.topology.has("nvswitch"):
            machine.topology.add_switch(Switch(id="nvswitch", kind=Interconnect.NVLINK))
        return "nvswitch"
    if target == gpu.bus:
        # Virtual machines show it where the hypervisor hides the peer.
        source.note(f"the link of the GPU {gpu.bus} to itself is left out; its peer is unknown", line=element.line)
        return ""
    part = machine.parts_of_bus.get(target, "")
    if not part:
        source.note(f"the link to {target}, which the file does not have, is left out", line=element.line)
    elif not part.startswith(("cuda:", "rocm:")):
        raise source.error(f"the link leads to {target}, which is no GPU", line=element.line, key="target")
    return part


def _check_counts(machine: Machine) -> None:
    """Both ends must count the same links; where one says nothing there is a link one way, and a note."""
    by_part = {gpu.part: gpu for gpu in machine.gpus}
    for (a, b), link in list(machine.links.items()):
        if a in by_part and b in by_part:
            back = machine.links.get((b, a))
            line = by_part[a].card.line
            if back is None:
                machine.source.note(f"{a} has {link.path} to {b}, which says nothing of a way back", line=line)
            elif back.count != link.count:
                raise machine.source.error(
                    f"{a} has {link.count} links to {b}, which has {back.count} to it; expected as many", line=line
                )


def _c2c(machine: Machine, element: Element) -> Link:
    """`bw` is what one link carries, in MB/s of 10**6 bytes."""
    count, rate = natural(machine.source, element, "count") or 1, decimal(machine.source, element, "bw")
    if count > MOST_LINKS:
        raise machine.source.error(f"a bundle of {count} links", line=element.line, key="count")
    bandwidth = mb_s(rate * count / 1000) if rate else None
    return Link(
        interconnect=Interconnect.NVLINK, bandwidth_mb_s=bandwidth, count=count, path="C2C", origin=Origin.STATED
    )


def _add_pcilink(machine: Machine, part: str, element: Element) -> None:
    """Between the halves of a PCI switch that shows itself as two."""
    bus = address(machine.source, element, "target")
    target = machine.parts_of_bus.get(bus, "")
    if not target:
        machine.source.note(f"the pcilink to {bus}, which the file does not have, is left out", line=element.line)
        return
    for lower, upper in ((part, target), (target, part)):
        walker = lower
        while walker:
            if walker == upper:
                raise machine.source.error(
                    f"a pcilink from {part} to {bus}, which is itself or in its own branch: a cycle",
                    line=element.line,
                    key="target",
                )
            walker = machine.above.get(walker, "")
    if (part, target) not in machine.links:
        machine.connect(part, target, assumed(Interconnect.PCIE, None, path="pcilink"))
