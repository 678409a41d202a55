"""The model of machines and clusters: which devices there are and how they are linked."""

from fuel_parallel.topology.model import (
    Cache,
    Connection,
    Description,
    DeviceId,
    DeviceInfo,
    DeviceKind,
    Interconnect,
    Link,
    Nic,
    NumaDomain,
    Origin,
    Switch,
)
from fuel_parallel.topology.routes import Route
from fuel_parallel.topology.topology import DeviceTopology

__all__ = [
    "Cache",
    "Connection",
    "Description",
    "DeviceId",
    "DeviceInfo",
    "DeviceKind",
    "DeviceTopology",
    "Interconnect",
    "Link",
    "Nic",
    "NumaDomain",
    "Origin",
    "Route",
    "Switch",
]
