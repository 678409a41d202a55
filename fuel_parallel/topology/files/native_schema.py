"""What a native file consists of, whether it is written as TOML, YAML or JSON. docs/topology-files.md explains it.

A field that may be a list has one value for all ids of its entry, or a value for each.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fuel_parallel.topology.model import DeviceKind, Interconnect, Origin

FORMAT: Literal["fuel-parallel 1"] = "fuel-parallel 1"

Size = int | str
Rate = float | str
Time = float | str
Index = Annotated[int, Meta(ge=0, le=1 << 20)]
Id = Annotated[str, Meta(min_length=1, description="One id or an expression of several: 'cuda:[0-7]'")]


class Pairs(Enum):
    """Which of the parts of two ends are linked, where both are several."""

    ALL = "all"  # each of one end with each of the other
    MATCHING = "matching"  # the first with the first, the second with the second


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What all tables of the file share: a field that is not known is an error."""


class PartEntry(Entry, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One part, or several whose ids count up. `node` is for parts outside of a [[node]] table."""

    id: Id
    node: str = ""


class DeviceEntry(PartEntry, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A device. Its kind, where it is not given, is what its id begins with: `cuda` of `cuda:0`."""

    kind: DeviceKind | None = None
    name: str = ""
    memory: Size | None = None
    tflops: float | None = None
    numa: Index | list[Index] | None = None
    bus: str | list[str] = ""
    cores: str | list[str] = ""


class CacheEntry(Entry, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A cache for data, and the cores that share it."""

    level: Index
    size: Size
    cores: str = ""


class NumaEntry(PartEntry, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A NUMA domain. Its index, where it is not given, is the number at the end of its id."""

    index: Index | list[Index] | None = None
    cores: str | list[str] = ""
    memory: Size | list[Size] | None = None
    caches: list[CacheEntry] = []


class NicEntry(PartEntry, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A network card, or a port of one."""

    name: str | list[str] = ""
    speed: Rate | None = None
    numa: Index | list[Index] | None = None
    bus: str | list[str] = ""


class SwitchEntry(PartEntry, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A switch, bridge or block."""

    kind: Interconnect = Interconnect.UNKNOWN
    name: str | list[str] = ""
    bus: str | list[str] = ""


class Figures(Entry, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is said of a link. What is left out is unknown."""

    kind: Interconnect = Interconnect.UNKNOWN
    bandwidth: Rate | None = None
    latency: Time | None = None
    count: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    path: str = ""
    origin: Origin = Origin.STATED


class LinkEntry(Figures, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Links between parts, both ways unless `one_way`, from the first end to the second."""

    between: tuple[Id | list[Id], Id | list[Id]]
    pairs: Pairs | None = None
    one_way: bool = False


class Override(Entry, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Other figures for single links, or other values for single parts, than the tables above them give."""

    between: tuple[Id | list[Id], Id | list[Id]] | None = None
    pairs: Pairs | None = None
    one_way: bool = False
    kind: Interconnect | None = None
    bandwidth: Rate | None = None
    latency: Time | None = None
    count: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    path: str | None = None
    origin: Origin | None = None
    part: Id | None = None
    name: str | None = None
    memory: Size | None = None
    tflops: float | None = None
    numa: Index | None = None
    bus: str | None = None
    cores: str | None = None
    speed: Rate | None = None


class Node(Entry, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A machine, or several that are alike: `name = "n[001-032]"`. Ids inside are those of the machine: `cuda:0`."""

    name: Id
    numa: list[NumaEntry] = []
    device: list[DeviceEntry] = []
    nic: list[NicEntry] = []
    switch: list[SwitchEntry] = []
    link: list[LinkEntry] = []


class File(Entry, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The whole file. Parts and links outside of nodes have full ids: `n001/cuda:0`, `leaf1`."""

    format: Literal["fuel-parallel 1"] | None = None
    name: str = ""
    node: list[Node] = []
    numa: list[NumaEntry] = []
    device: list[DeviceEntry] = []
    nic: list[NicEntry] = []
    switch: list[SwitchEntry] = []
    link: list[LinkEntry] = []
    override: list[Override] = []
