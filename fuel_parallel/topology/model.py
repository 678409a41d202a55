"""What a machine consists of: devices, NUMA domains, network cards, switches, and links between them.

All are immutable, hashable and typed. Whatever is not known is None, never a small number: a link that a file does not
mention is no slow link. Bandwidths are in MB/s of 2**20 bytes, one direction; latencies in microseconds; memory in
bytes; cores are lists as Linux writes them, "0-3,8".
"""

from __future__ import annotations

from enum import Enum

import msgspec

DeviceId = str
"""Names a device: `cuda:1` on a machine by itself, `host/cuda:1` in a cluster."""


class DeviceKind(Enum):
    """Who computes."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    METAL = "metal"
    INTEL_GPU = "intel_gpu"
    OTHER = "other"


class Interconnect(Enum):
    """What a link is made of."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    INFINITY_FABRIC = "infinity_fabric"
    SHARED_MEMORY = "shared_memory"
    NETWORK = "network"
    UNKNOWN = "unknown"


class Origin(Enum):
    """Where a link's figures come from."""

    MEASURED = "measured"
    STATED = "stated"  # by the file
    ASSUMED = "assumed"  # from a table of what such links do


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Anything that has links. `node` is the machine it is in, "" for what lies between machines."""

    id: str
    node: str = ""


class DeviceInfo(Part, frozen=True, kw_only=True, omit_defaults=True, tag="device"):
    """A device that a rank can be given.

    Args:
        kind: Who computes.
        name: The model, as its vendor says it.
        memory_bytes: Its own memory; of a CPU that of its NUMA domain.
        numa: The NUMA domain that it is next to, as its node numbers it.
        bus: PCI address.
        cores: Of a CPU its cores; of other devices the cores that are near.
        tflops: Peak rate of matrix products in the dtype that it is meant for, 10**12 operations a second.
    """

    kind: DeviceKind
    name: str = ""
    memory_bytes: int | None = None
    numa: int | None = None
    bus: str = ""
    cores: str = ""
    tflops: float | None = None


class Cache(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A cache for data, and the cores that share it."""

    level: int
    bytes: int
    cores: str = ""


class NumaDomain(Part, frozen=True, kw_only=True, omit_defaults=True, tag="numa"):
    """Cores and the memory that is near to them."""

    index: int
    cores: str = ""
    memory_bytes: int | None = None
    caches: tuple[Cache, ...] = ()


class Nic(Part, frozen=True, kw_only=True, omit_defaults=True, tag="nic"):
    """A network card, or one port of it. `speed_mb_s` is that of its port, whatever it is plugged into."""

    name: str = ""
    numa: int | None = None
    bus: str = ""
    speed_mb_s: float | None = None


class Switch(Part, frozen=True, kw_only=True, omit_defaults=True, tag="switch"):
    """Passes on what comes: a PCI bridge, an NVSwitch, a switch of the network, a block of a machine room."""

    kind: Interconnect = Interconnect.UNKNOWN
    name: str = ""
    bus: str = ""


AnyPart = DeviceInfo | NumaDomain | Nic | Switch


class Link(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One direction between two parts.

    Args:
        interconnect: What it is made of.
        bandwidth_mb_s: All of its lanes together; None where unknown.
        latency_us: None where unknown.
        count: How many equal links are bundled.
        path: What the source of the link called it: "NV12", "PIX", "SYS".
        origin: Where the figures come from.
    """

    interconnect: Interconnect = Interconnect.UNKNOWN
    bandwidth_mb_s: float | None = None
    latency_us: float | None = None
    count: int = 1
    path: str = ""
    origin: Origin = Origin.STATED


class Connection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A link and its ends; `one_way` if nothing is said of the way back."""

    source: str
    target: str
    link: Link
    one_way: bool = False


class Description(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All of a topology, to compare, to hash and to store."""

    name: str = ""
    parts: tuple[AnyPart, ...] = ()
    connections: tuple[Connection, ...] = ()


def assumed(
    interconnect: Interconnect, rate: float | None, *, latency_us: float | None = None, count: int = 1, path: str = ""
) -> Link:
    """A link of which a table says what such links carry: `rate` in GB/s, all of its lanes together; None: unknown.

    >>> assumed(Interconnect.NVLINK, None, path="NV4").bandwidth_mb_s is None
    True
    """
    bandwidth = None if rate is None else mb_s(rate)
    return Link(
        interconnect=interconnect,
        bandwidth_mb_s=bandwidth,
        latency_us=latency_us,
        count=count,
        path=path,
        origin=Origin.ASSUMED,
    )


def mb_s(gb_s: float) -> float:
    """MB/s of 2**20 bytes for GB/s of 10**9, in which data sheets count.

    >>> round(mb_s(12.0))
    11444
    """
    return gb_s * 1e9 / 2**20


def gb_s(mb_s: float) -> float:
    """The other way round.

    >>> round(gb_s(11444.1), 3)
    12.0
    """
    return mb_s * 2**20 / 1e9
