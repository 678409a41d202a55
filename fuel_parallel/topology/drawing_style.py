"""Colours and widths of pictures of topologies."""

from __future__ import annotations

import math

from fuel_parallel.topology.model import Interconnect, Link, gb_s

LINK_COLORS = {
    Interconnect.NVLINK: "#65a30d",
    Interconnect.PCIE: "#3b82f6",
    Interconnect.INFINITY_FABRIC: "#e11d48",
    Interconnect.SHARED_MEMORY: "#a855f7",
    Interconnect.NETWORK: "#f97316",
    Interconnect.UNKNOWN: "#94a3b8",
}

COLORS = (
    "#93c5fd",
    "#fca5a5",
    "#86efac",
    "#fde047",
    "#d8b4fe",
    "#fdba74",
    "#67e8f9",
    "#f9a8d4",
    "#bef264",
    "#c4b5fd",
    "#5eead4",
    "#d6d3d1",
)
"""Of ranks, by their coordinate."""

DEVICE, NUMA, NIC, SWITCH = "#dbeafe", "#f3e8ff", "#ffedd5", "#f1f5f9"


def link_width(rate: float | None) -> float:
    """Of a line, by the root of MB/s; that of an unknown rate says nothing."""
    return 1.6 if rate is None else min(1.0 + 0.35 * math.sqrt(gb_s(rate)), 8.0)


def link_text(link: Link) -> str:
    """A link in words: `nvlink NV4, 74.5 GB/s`."""
    rate = "bandwidth unknown" if link.bandwidth_mb_s is None else f"{gb_s(link.bandwidth_mb_s):.3g} GB/s"
    kind = "link" if link.interconnect is Interconnect.UNKNOWN else link.interconnect.value.replace("_", " ")
    return ", ".join(word for word in (f"{kind} {link.path}".strip(), rate) if word)
