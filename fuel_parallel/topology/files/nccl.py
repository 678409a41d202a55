"""NCCL's and RCCL's topology files (`NCCL_TOPO_FILE`, `NCCL_TOPO_DUMP_FILE`).

    <system version="1">
      <cpu numaid="0" affinity="000000ff,ffff0000" arch="x86_64" vendor="AuthenticAMD" familyid="25" modelid="17">
        <pci busid="0000:4f:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
          <gpu dev="0" sm="90" rank="0"> <nvlink target="0000:60:00.0" count="18" tclass="0x030200"/> </gpu>

Partial files are normal: clouds ship the PCI tree only, and NCCL asks the machine for the rest. What a file leaves out
is unknown here; where NCCL would take a figure for it instead, a note says so.
"""

from __future__ import annotations

import re

import msgspec

from fuel_parallel.topology import rates
from fuel_parallel.topology.cores import format_list
from fuel_parallel.topology.files import nccl_links, nccl_write
from fuel_parallel.topology.files.nccl_links import Gpu, Machine
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.files.xml import Element, cores_of, integer, natural, parse, root_name
from fuel_parallel.topology.model import (
    DeviceInfo,
    DeviceKind,
    Interconnect,
    Link,
    Nic,
    NumaDomain,
    Switch,
    assumed,
    mb_s,
)
from fuel_parallel.topology.topology import DeviceTopology

MOST_DOMAINS, MOST_GPUS = 256, 1024

BRIDGES, NVSWITCH = ("0x0604", "0x0801"), "0x068000"
GPUS, NICS = ("0x03", "0x1200"), ("0x02",)

SPEEDS_OF_NCCL = (
    *("2.5 GT/s", "5 GT/s", "8 GT/s", "16 GT/s", "32 GT/s"),
    *("5.0 GT/s PCIe", "8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe", "64.0 GT/s PCIe"),
)
"""The beginnings of `link_speed` that NCCL knows (src/graph/topo.cc); it takes all others for 8 GT/s."""

VENDORS = ("GenuineIntel", "AuthenticAMD", "CentaurHauls", "  Shanghai  ")


def matches(source: Source) -> bool:
    """Whether the first element is `<system>`, or `<graphs>`, which is refused with a reason."""
    return root_name(source.text) in ("system", "graphs")


def read(source: Source) -> DeviceTopology:
    """The topology of a file. GPUs are `cuda:<dev>`, or `rocm:<dev>`, in the order of the file where it has no `dev`.

    Raises `TopologyFileError`.
    """
    root = parse(source)
    if root.name == "graphs":
        raise source.error(
            "this is a file of NCCL's rings and trees (NCCL_GRAPH_DUMP_FILE), which does not say what links there are;"
            " the topology is what NCCL_TOPO_DUMP_FILE writes",
            line=root.line,
        )
    if root.name != "system":
        raise source.error(f"the first element is <{root.name[:40]}>; expected <system>", line=root.line)
    machine = Machine(source, DeviceTopology("nccl"))
    _add_domains(machine, root)
    for cpu, index in machine.domains:
        _add_children(machine, cpu, f"numa:{index}", index)
    _name_gpus(machine)
    nccl_links.add_all(machine)
    if not machine.gpus:
        source.note("the file has no GPU")
    return machine.topology


def write(topology: DeviceTopology) -> str:
    """The text of a file. Raises `TopologyError`: more than one machine, or what such a file cannot say."""
    return nccl_write.write(topology)


# Processors.


def _add_domains(machine: Machine, root: Element) -> None:
    source, t = machine.source, machine.topology
    cpus = list(root.all("cpu"))
    if not cpus:
        raise source.error("<system> has no <cpu>; expected one for each NUMA domain", line=root.line)
    if len(cpus) > MOST_DOMAINS:
        raise source.error(f"there are {len(cpus)} <cpu>; at most {MOST_DOMAINS} can be read", line=root.line)
    hosts = {cpu.get("host_hash") for cpu in cpus}
    if len(hosts) > 1:
        raise source.error(
            f"it describes {len(hosts)} hosts (host_hash); expected one: keep the <cpu> of one host", line=root.line
        )
    for cpu in cpus:
        index = _index(machine, cpu)
        machine.domains.append((cpu, index))
        cores = format_list(cores_of(source, cpu, "affinity"))
        t.add_numa(NumaDomain(id=f"numa:{index}", index=index, cores=cores))
        t.add_device(DeviceInfo(id=f"cpu:{index}", kind=DeviceKind.CPU, name=_cpu_name(cpu), numa=index, cores=cores))
        machine.connect(f"cpu:{index}", f"numa:{index}", rates.near())
    between = [_between_sockets(machine, cpu) for cpu, _ in machine.domains]
    for (_, a), link in zip(machine.domains, between, strict=True):
        for _, b in machine.domains:
            if a != b:
                machine.links[f"numa:{a}", f"numa:{b}"] = link


def _index(machine: Machine, cpu: Element) -> int:
    index = integer(machine.source, cpu, "numaid")
    if index is None:
        raise machine.source.error("<cpu> has no numaid; expected the number of its NUMA domain", line=cpu.line)
    if index == -1:  # A virtual machine that hides its domains.
        index = 0
    if index < 0:
        raise machine.source.error(f"there is no NUMA domain {index}", line=cpu.line, key="numaid")
    earlier = next((other.line for other, taken in machine.domains if taken == index), None)
    if earlier is not None:
        raise machine.source.error(f"numaid {index} is that of line {earlier} already", line=cpu.line, key="numaid")
    return index


def _cpu_name(cpu: Element) -> str:
    """The file has numbers only; these words the writer understands."""
    words = [cpu.get("vendor").strip() or cpu.get("arch")]
    words += [f"{word} {cpu.get(key)}" for word, key in (("family", "familyid"), ("model", "modelid")) if cpu.get(key)]
    return " ".join(words)


def _between_sockets(machine: Machine, cpu: Element) -> Link:
    source, vendor, architecture = machine.source, cpu.get("vendor"), cpu.get("arch")
    if not architecture:
        source.note("<cpu> has no arch, which some versions of NCCL refuse", line=cpu.line)
    elif architecture == "x86_64" and vendor not in VENDORS:
        source.note(
            f"NCCL does not know the vendor {vendor[:40]!r} and would take its sockets for joined at 5000 GB/s; here"
            f" that is unknown. It knows {', '.join(v.strip() for v in VENDORS)}",
            line=cpu.line,
        )
    model = natural(source, cpu, "modelid")
    natural(source, cpu, "familyid")
    return msgspec.structs.replace(rates.sockets(vendor, model, architecture), path="SYS")


# The PCI tree.


def _add_children(machine: Machine, cpu: Element, part: str, index: int) -> None:
    for nic in cpu.all("nic"):  # cards that the kernel makes have no PCI link
        _add_nets(machine, nic, part, Link(), index)
    pending = [(card, part) for card in reversed(list(cpu.all("pci")))]
    while pending:
        card, upper = pending.pop()
        lower = _add_card(machine, card, upper, index)
        if lower:
            pending += [(child, lower) for child in reversed(list(card.all("pci")))]


def _add_card(machine: Machine, card: Element, upper: str, index: int) -> str:
    """Adds a card; the id of it where others are below it, else ""."""
    source, kind = machine.source, card.get("class").lower()
    bus = machine.new_bus(card)
    gpus, nics = list(card.all("gpu")), list(card.all("nic"))
    if kind == NVSWITCH:
        machine.nvswitches.add(bus)
        return ""
    if gpus or kind.startswith(GPUS):
        machine.gpus.append(Gpu(bus, card, gpus[0] if gpus else None, index, upper, _link(machine, card)))
        if len(machine.gpus) > MOST_GPUS:
            raise source.error(f"there are more than {MOST_GPUS} GPUs", line=card.line)
        return ""
    if nics or kind.startswith(NICS):
        _add_nic(machine, card, bus, nics, upper, index)
        return ""
    if not kind.startswith(BRIDGES) and not any(card.all("pci")):
        what = f"the device {bus} of class {kind[:20]}" if kind else f"the device {bus} without a class"
        source.note(f"{what} is left out: neither GPU nor network card nor bridge", line=card.line)
        return ""
    switch = machine.parts_of_bus[bus] = f"pci:{bus}"
    machine.topology.add_switch(Switch(id=switch, kind=Interconnect.PCIE, bus=bus))
    machine.connect(switch, upper, _link(machine, card))
    machine.above[switch] = upper
    machine.pcilinks += [(switch, link) for link in card.all("pcilink")]
    return switch


def _add_nic(machine: Machine, card: Element, bus: str, nics: list[Element], upper: str, index: int) -> None:
    """A card with several ports is a switch with a network card each."""
    nets = [net for nic in nics for net in nic.all("net")]
    link = _link(machine, card)
    if not nets:
        part = machine.parts_of_bus[bus] = f"nic:{bus}"
        machine.topology.add_nic(Nic(id=part, numa=index, bus=bus))
        machine.connect(part, upper, link)
        return
    if len(nets) > 1:
        switch = machine.parts_of_bus[bus] = f"pci:{bus}"
        machine.topology.add_switch(Switch(id=switch, kind=Interconnect.PCIE, bus=bus))
        machine.connect(switch, upper, link)
        upper = switch
    for nic in nics:
        _add_nets(machine, nic, upper, link, index, bus)


def _add_nets(machine: Machine, nic: Element, upper: str, link: Link, index: int, bus: str = "") -> None:
    for net in nic.all("net"):
        name = net.get("name") or f"net{net.get('dev')}"
        part = f"nic:{name}"
        if machine.topology.has(part):
            part = f"nic:{name}:{net.get('port')}"
        if machine.topology.has(part):
            raise machine.source.error(f"there are two network cards {part[4:60]!r}", line=net.line, key="name")
        megabits = natural(machine.source, net, "speed")
        speed = mb_s(megabits / 8000) if megabits else None
        machine.topology.add_nic(Nic(id=part, name=name, numa=index, bus=bus, speed_mb_s=speed))
        machine.connect(part, upper, link)


def _link(machine: Machine, card: Element) -> Link:
    source, speed = machine.source, card.get("link_speed").strip()
    found = re.match(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) ?GT/s", speed)
    width = natural(source, card, "link_width")
    if width is not None and width > 32:
        raise source.error(f"a PCIe link has 1 to 32 lanes, not {width}", line=card.line, key="link_width")
    if not found or float(found[1]) not in rates.PCIE_LANE:
        said = f"link_speed {speed[:40]!r} of" if speed else "no link_speed of"
        if speed or "link_speed" in card.attributes:
            source.note(f"{said} {card.get('busid')[:20]}: unknown here, 8 GT/s for NCCL", line=card.line)
        return assumed(Interconnect.PCIE, None)
    if not speed.startswith(SPEEDS_OF_NCCL):
        source.note(
            f"NCCL does not know {speed[:40]!r} and takes it for 8 GT/s; it would know '{float(found[1])} GT/s PCIe'",
            line=card.line,
        )
    if not width:
        source.note(f"no link_width of {card.get('busid')[:20]}; taken for 16, as NCCL does", line=card.line)
    return rates.pcie(float(found[1]), width or 16)


# GPUs.


def _name_gpus(machine: Machine) -> None:
    """Those with a number first, so that the others get what is left; each vendor by itself."""
    taken: dict[tuple[bool, int], Gpu] = {}
    for gpu in machine.gpus:
        dev = natural(machine.source, gpu.element, "dev") if gpu.element else None
        if dev is None:
            continue
        other = taken.setdefault((gpu.is_amd, dev), gpu)
        if other is not gpu:
            raise machine.source.error(f"dev {dev} is that of line {other.card.line} already", line=gpu.card.line)
        gpu.number = dev
    free = {amd: iter([n for n in range(MOST_GPUS) if (amd, n) not in taken]) for amd in (False, True)}
    for gpu in machine.gpus:
        gpu.number = next(free[gpu.is_amd]) if gpu.number is None else gpu.number
        _add_gpu(machine, gpu)


def _add_gpu(machine: Machine, gpu: Gpu) -> None:
    source, element = machine.source, gpu.element
    kind = DeviceKind.ROCM if gpu.is_amd else DeviceKind.CUDA
    if element is not None and "rank" not in element.attributes:
        source.note(f"the GPU {gpu.bus} has no rank; NCCL leaves it out", line=element.line)
    gpu.capability = natural(source, element, "sm") if element and not gpu.is_amd else None
    name = gpu.architecture or (f"sm{gpu.capability}" if gpu.capability else "")
    gpu.part = machine.parts_of_bus[gpu.bus] = f"{kind.value}:{gpu.number}"
    cores = next(n.cores for n in machine.topology.numa_domains if n.index == gpu.numa)
    machine.topology.add_device(DeviceInfo(id=gpu.part, kind=kind, name=name, numa=gpu.numa, bus=gpu.bus, cores=cores))
    machine.connect(gpu.part, gpu.upper, gpu.link)
