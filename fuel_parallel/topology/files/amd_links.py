"""What `rocm-smi` and `amd-smi` say of pairs of GPUs, as links.

Weights count, and hops do not: of MI250X those are 1 even between GPUs that have no link. A hop over Infinity Fabric
(XGMI) has the weight 15, so more than that is a way through other GPUs, and no link of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from fuel_parallel.errors import TopologyFileError
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.model import DeviceInfo, DeviceKind, Interconnect, Link, NumaDomain
from fuel_parallel.topology.topology import DeviceTopology

MOST_GPUS = 256
"""No machine has more; partitions of 8 MI300X are 64."""

WEIGHT_OF_XGMI_HOP = 15
KINDS = {"XGMI": Interconnect.INFINITY_FABRIC, "PCIE": Interconnect.PCIE}
UNKNOWN = frozenset({"N/A", "XXXX", "UNKNOWN", "NOT_APPLICABLE"})
SELF = frozenset({"0", "SELF"}) | UNKNOWN
MOST_BUNDLED = 64


@dataclass(frozen=True)
class Cell:
    """A word of a table, or a value of JSON, and where it is."""

    text: str
    line: int | None
    key: str

    def error(self, source: Source, reason: str) -> TopologyFileError:
        """That this cell is wrong."""
        return source.error(reason, line=self.line, key=self.key)


Matrix = dict[tuple[int, int], Cell]
"""What is said of the way from one GPU to another, by their numbers."""


@dataclass
class Machine:
    """All that a text says. Each matrix may be empty: then it says nothing of the kind."""

    weights: Matrix = field(default_factory=dict)
    types: Matrix = field(default_factory=dict)
    bandwidths: Matrix = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    buses: dict[int, str] = field(default_factory=dict)
    numa: dict[int, int] = field(default_factory=dict)


def build(source: Source, gpus: list[int], machine: Machine) -> DeviceTopology:
    """The topology: devices `rocm:0`, their NUMA domains as far as known, and a link for each pair of which one is.

    Raises `TopologyFileError` where a way differs from the way back, or a cell makes no sense.
    """
    topology = DeviceTopology()
    for index in sorted(set(machine.numa.values())):
        topology.add_numa(NumaDomain(id=f"numa:{index}", index=index))
    for gpu in gpus:
        topology.add_device(
            DeviceInfo(
                id=f"rocm:{gpu}",
                kind=DeviceKind.ROCM,
                name=machine.names.get(gpu, ""),
                bus=machine.buses.get(gpu, ""),
                numa=machine.numa.get(gpu),
            )
        )
    _check_selves(source, machine)
    unknown = []
    for a, b in _pairs(gpus):
        link = _link(source, machine, a, b)
        if link is None:
            unknown.append(f"rocm:{a} to rocm:{b}")
        else:
            topology.add_directed_link(f"rocm:{a}", f"rocm:{b}", link)
    if unknown and (machine.weights or machine.types):
        some = ", ".join(unknown[:4]) + ", ..." * (len(unknown) > 4)
        source.note(f"no link is known from {some}: that is unknown, and not slow")
    return topology


def count_of(cell: Cell, source: Source) -> int | None:
    """A count in a cell; None where it says that it is unknown."""
    if cell.text.upper() in UNKNOWN:
        return None
    if not re.fullmatch(r"\d{1,6}", cell.text, re.ASCII):
        raise cell.error(source, f"found {cell.text[:40]!r}, expected a number below 1000000 or N/A")
    return int(cell.text)


def _pairs(gpus: list[int]) -> Iterator[tuple[int, int]]:
    return ((a, b) for a in gpus for b in gpus if a != b)


def _check_selves(source: Source, machine: Machine) -> None:
    for matrix in (machine.weights, machine.types, machine.bandwidths):
        for (a, b), cell in matrix.items():
            if a == b and cell.text.upper() not in SELF:
                raise cell.error(source, f"found {cell.text[:40]!r}, expected 0, SELF or N/A between a GPU and itself")


def _link(source: Source, machine: Machine, a: int, b: int) -> Link | None:
    weight, kind = _weight(source, machine.weights, a, b), _kind(source, machine.types, a, b)
    bandwidth = _bandwidth(source, machine.bandwidths.get((a, b)))
    if weight is None and kind is None:
        return None
    path = ", ".join([*([kind] if kind else []), *([f"weight {weight}"] if weight is not None else [])])
    if kind == "XGMI" and not _is_direct(weight, bandwidth):
        return Link(path=f"{path}, through other GPUs")
    least, most = bandwidth or (0, 0)
    bundled = most // least if kind == "XGMI" and least and most % least == 0 else 1
    return Link(
        interconnect=KINDS[kind] if kind else Interconnect.UNKNOWN,
        bandwidth_mb_s=most * 1e6 / 2**20 if most else None,
        count=bundled if bundled <= MOST_BUNDLED else 1,
        path=path,
    )


def _is_direct(weight: int | None, bandwidth: tuple[int, int] | None) -> bool:
    """By its weight, or where that is missing by its bandwidth, which only links of their own have."""
    if weight is not None:
        return weight <= WEIGHT_OF_XGMI_HOP
    return bandwidth is None or bandwidth[1] > 0


def _weight(source: Source, weights: Matrix, a: int, b: int) -> int | None:
    cell = _agreed(source, weights, a, b)
    return None if cell is None else count_of(cell, source)


def _kind(source: Source, types: Matrix, a: int, b: int) -> str | None:
    cell = _agreed(source, types, a, b)
    if cell is None or cell.text.upper() in UNKNOWN:
        return None
    kind = cell.text.upper()
    if kind not in KINDS:
        raise cell.error(source, f"found {cell.text[:40]!r}, expected {', '.join(KINDS)}, or N/A where it is unknown")
    return kind


def _agreed(source: Source, matrix: Matrix, a: int, b: int) -> Cell | None:
    """A cell that is the same as that of the way back."""
    cell, back = matrix.get((a, b)), matrix.get((b, a))
    if cell is not None and back is not None and cell.text.upper() != back.text.upper():
        place = "" if back.line is None else f"line {back.line}, "
        raise cell.error(
            source,
            f"found {cell.text[:40]!r}, but {place}{back.key} says {back.text[:40]!r}; expected the same both ways",
        )
    return cell


def _bandwidth(source: Source, cell: Cell | None) -> tuple[int, int] | None:
    """MB/s of 10**6 bytes: that of one link, and that of all, as the kernel's driver gives them."""
    if cell is None or cell.text.upper() in UNKNOWN:
        return None
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", cell.text, re.ASCII)
    if not found or int(found[1]) > int(found[2]):
        raise cell.error(source, f"found {cell.text[:40]!r}, expected MB/s such as 50000-100000, or N/A")
    return int(found[1]), int(found[2])
