"""A topology as a picture in SVG."""

from __future__ import annotations

from fuel_parallel.topology.drawing import drawing
from fuel_parallel.topology.topology import DeviceTopology


def write(topology: DeviceTopology) -> str:
    """The picture; `fuel_parallel.topology.drawing` also takes a placement."""
    return drawing(topology)
