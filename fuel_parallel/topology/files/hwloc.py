"""hwloc's XML (`lstopo file.xml`), versions 1, 2 and 3: processors, NUMA domains, caches; cards and distances besides.

The three differ: version 1 has memory on the objects that hold the cores, 2 beside them; and in version 3 the kind of
an operating system's device is a set of bits, before it was a number.
"""

from __future__ import annotations

import msgspec

from fuel_parallel.errors import DataError
from fuel_parallel.topology import rates
from fuel_parallel.topology.cores import format_list, mask_number
from fuel_parallel.topology.files import hwloc_devices, hwloc_distances
from fuel_parallel.topology.files.hwloc_machine import Domain, Machine
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.files.xml import Element, natural, parse, root_name
from fuel_parallel.topology.model import Cache, DeviceInfo, DeviceKind, Interconnect, Link, NumaDomain, assumed
from fuel_parallel.topology.topology import DeviceTopology

MOST_DOMAINS, MOST_CACHES = 512, 1 << 14

DOCTYPES = frozenset({'topology SYSTEM "hwloc.dtd"', 'topology SYSTEM "hwloc2.dtd"'})


def matches(source: Source) -> bool:
    """Whether the first element is `<topology>`."""
    return root_name(source.text) == "topology"


def read(source: Source) -> DeviceTopology:
    """The topology of a file: a device `cpu:N` for each NUMA domain, GPUs, network cards, and the PCI switches between.

    Raises `TopologyFileError`.
    """
    root = parse(source, doctypes=DOCTYPES)
    objects = [e for e in root.all("object") if e.get("type") in ("Machine", "System")]
    if root.name != "topology" or len(objects) != 1:
        raise source.error(
            f'there are {len(objects)} <object type="Machine"> in <{root.name[:40]}>; expected one in <topology>',
            line=root.line,
        )
    machine = Machine(source, DeviceTopology(), _version(source, root), objects[0])
    _collect(machine, root)
    machine.topology.name = machine.info("HostName") or "hwloc"
    _find_domains(machine)
    slit = hwloc_distances.between_domains(machine, root)
    caches = _caches(machine)
    for domain in machine.domains:
        _add_domain(machine, domain, caches)
    _link_domains(machine, slit)
    hwloc_devices.add_all(machine)
    hwloc_distances.add_fabric(machine, root)
    for (a, b), link in machine.links.items():
        machine.topology.add_directed_link(a, b, link)
    return machine.topology


def _version(source: Source, root: Element) -> int:
    text = root.get("version")
    known = {"": 1, "1": 1, "2": 2, "3": 3}.get(text.partition(".")[0])
    if known is None:
        raise source.error(
            f"version {text[:20]!r} of hwloc's XML is unknown; expected 1, 2 or 3: lstopo of an older hwloc, or its"
            " option --export-xml-flags v2, writes one",
            line=root.line,
            key="version",
        )
    return known


def _collect(machine: Machine, root: Element) -> None:
    """All objects by type, with the mask of the cores of each and of what it is in."""
    for info in root.all("info"):
        machine.infos.setdefault(info.get("name"), info.get("value"))
    for info in machine.root.all("info"):
        machine.infos.setdefault(info.get("name"), info.get("value"))
    for element in machine.root.walk():
        if element.name != "object":
            continue
        machine.objects.setdefault(element.get("type"), []).append(element)
        index = element.get("gp_index")
        if index and machine.by_gp.setdefault(index, element) is not element:
            line = machine.by_gp[index].line
            raise machine.source.error(
                f"gp_index {index[:20]} is that of line {line} already", line=element.line, key="gp_index"
            )
        if "..." not in element.get("cpuset"):
            machine.masks[element] = _mask(machine.source, element)
    everything = 0
    for unit in machine.objects.get("PU", []):
        everything |= machine.masks.get(unit, 0)
    for element in machine.root.walk():
        if element.name == "object":  # "0xf...f": all that there is
            machine.masks.setdefault(element, everything)


def _mask(source: Source, element: Element) -> int:
    text = element.get("cpuset")
    try:
        return mask_number(text)
    except DataError as reason:
        raise source.error(str(reason), line=element.line, key="cpuset") from None


# NUMA domains, each with a device of its cores.


def _find_domains(machine: Machine) -> None:
    source, nodes = machine.source, machine.objects.get("NUMANode", [])
    if len(nodes) > MOST_DOMAINS:
        raise source.error(f"there are {len(nodes)} NUMA nodes; at most {MOST_DOMAINS} can be read", line=nodes[0].line)
    if not nodes:  # a machine with one kind of memory
        memory = natural(source, machine.root, "local_memory")
        machine.domains.append(Domain(0, machine.root, machine.masks[machine.root], memory))
    taken: dict[int, Element] = {}
    for node in nodes:
        index = natural(source, node, "os_index")
        if index is None:
            raise source.error("a NUMANode has no os_index; expected its number", line=node.line, key="os_index")
        if index in taken:
            raise source.error(
                f"NUMA node {index} is that of line {taken[index].line} already", line=node.line, key="os_index"
            )
        taken[index] = node
        machine.domains.append(Domain(index, node, machine.masks[node], natural(source, node, "local_memory")))
    machine.domains.sort(key=lambda d: d.index)
    if not any(domain.mask for domain in machine.domains):
        raise source.error("no object has a cpuset, so there are no cores; expected some", line=machine.root.line)


def _add_domain(machine: Machine, domain: Domain, caches: list[tuple[int, Cache]]) -> None:
    t, index, cores = machine.topology, domain.index, _list(domain.mask)
    t.add_numa(
        NumaDomain(
            id=f"numa:{index}",
            index=index,
            cores=cores,
            memory_bytes=domain.memory,
            caches=tuple(cache for mask, cache in caches if mask & domain.mask),
        )
    )
    twin = next((d for d in machine.domains if d.index < index and d.mask & domain.mask), None)
    if twin is not None:
        machine.source.note(
            f"the cores of NUMA node {index} are those of node {twin.index} too, of which they are a device",
            line=domain.element.line,
        )
    if not domain.mask or twin is not None:
        return  # memory without cores of its own
    name = machine.package_info(domain.mask, "CPUModel")
    cpu = DeviceInfo(
        id=f"cpu:{index}", kind=DeviceKind.CPU, name=name, memory_bytes=domain.memory, numa=index, cores=cores
    )
    t.add_device(cpu)
    machine.connect(cpu.id, f"numa:{index}", rates.near())


def _caches(machine: Machine) -> list[tuple[int, Cache]]:
    """The caches for data, and the masks of their cores; version 1 calls all of them "Cache"."""
    names = ("Cache", "L1Cache", "L2Cache", "L3Cache", "L4Cache", "L5Cache")
    elements = [element for name in names for element in machine.objects.get(name, [])]
    if len(elements) > MOST_CACHES:
        raise machine.source.error(f"there are more than {MOST_CACHES} caches", line=elements[MOST_CACHES].line)
    found: dict[tuple[int, int], Cache] = {}
    for element in elements:
        mask = machine.masks[element]
        level, size = (natural(machine.source, element, key) for key in ("depth", "cache_size"))
        if element.get("cache_type") != "2" and level and size:
            found.setdefault((level, mask), Cache(level=level, bytes=size, cores=_list(mask)))
    return sorted(((mask, cache) for (_, mask), cache in found.items()), key=lambda entry: entry[1].level)


def _link_domains(machine: Machine, slit: dict[tuple[int, int], int]) -> None:
    """Between sockets what such sockets do; between domains of one socket that is unknown."""
    packages = [machine.package(domain.mask) for domain in machine.domains]
    links = [_from_socket(machine, domain) for domain in machine.domains]
    unknown = assumed(Interconnect.SHARED_MEMORY, None)
    for a, package, link in zip(machine.domains, packages, links, strict=True):
        for b, other in zip(machine.domains, packages, strict=True):
            if a is not b:
                apart = package is not None and other is not None and package is not other
                said = slit.get((a.index, b.index))
                between = link if apart else unknown
                if said is not None:
                    between = msgspec.structs.replace(between, path=f"SLIT {said}")
                machine.links[f"numa:{a.index}", f"numa:{b.index}"] = between


def _from_socket(machine: Machine, domain: Domain) -> Link:
    model = machine.package_info(domain.mask, "CPUModelNumber")
    return rates.sockets(
        machine.package_info(domain.mask, "CPUVendor"),
        int(model) if model.isascii() and model.isdigit() and len(model) < 6 else None,
        machine.info("Architecture"),
    )


def _list(mask: int) -> str:
    return format_list(bit for bit, digit in enumerate(f"{mask:b}"[::-1]) if digit == "1")
