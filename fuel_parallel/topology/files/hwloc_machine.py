"""What is being read of hwloc's XML."""

from __future__ import annotations

from dataclasses import dataclass, field

from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.files.xml import Element
from fuel_parallel.topology.model import Link
from fuel_parallel.topology.topology import DeviceTopology


@dataclass(eq=False)
class Domain:
    """A NUMA node: its number, its object, the mask of its cores, bytes of its memory."""

    index: int
    element: Element
    mask: int
    memory: int | None


@dataclass(eq=False)
class Machine:
    """What was found so far. Links are added last, when all of their ends are known.

    Args:
        source: The file.
        topology: What becomes of it.
        version: 1, 2 or 3.
        root: The object of the machine.
        infos: What is said of the machine.
        objects: All objects by type, in the order of the file.
        by_gp: All objects by their number in the file, `gp_index`.
        masks: The cores of each object.
        domains: The NUMA nodes, by number.
        links: The links, one way each.
        parts: The part that an object has become; all NVSwitches are one.
    """

    source: Source
    topology: DeviceTopology
    version: int
    root: Element
    infos: dict[str, str] = field(default_factory=dict)
    objects: dict[str, list[Element]] = field(default_factory=dict)
    by_gp: dict[str, Element] = field(default_factory=dict)
    masks: dict[Element, int] = field(default_factory=dict)
    domains: list[Domain] = field(default_factory=list)
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    parts: dict[Element, str] = field(default_factory=dict)

    def connect(self, a: str, b: str, link: Link) -> None:
        """A link both ways."""
        self.links[a, b] = self.links[b, a] = link

    def info(self, name: str) -> str:
        """What is said of the machine, "" if nothing is."""
        return self.infos.get(name, "")

    def package(self, mask: int) -> Element | None:
        """The socket of some cores."""
        packages = [*self.objects.get("Package", []), *self.objects.get("Socket", [])]
        return next((p for p in packages if self.masks[p] & mask), None)

    def package_info(self, mask: int, name: str) -> str:
        """What is said of the socket of some cores; some versions say it of the machine."""
        package = self.package(mask)
        found = infos_of(package).get(name) if package is not None else None
        return found or self.info(name)

    def domain_of(self, mask: int) -> int | None:
        """The only NUMA node near to some cores; None if there are several."""
        near = [d.index for d in self.domains if d.mask & mask] if mask else []
        near = near or [d.index for d in self.domains]
        return near[0] if len(near) == 1 else None


def infos_of(element: Element) -> dict[str, str]:
    """What is said of an object, by name."""
    return {info.get("name"): info.get("value") for info in element.all("info")}
