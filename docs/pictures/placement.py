"""Draws docs/pictures/placement.svg and heat_map.svg: `python docs/pictures/placement.py`.

Two machines of four GPUs, and on them a mesh of two by four.
"""

from __future__ import annotations

from pathlib import Path

from fuel_parallel.topology import MeshAxis, files, place
from fuel_parallel.topology.drawing import drawing
from fuel_parallel.topology.heat_map import heat_map

CLUSTER = """
format = "fuel-parallel 1"
name = "two machines"

[[node]]
name = "n[1-2]"

[[node.device]]
id = "cuda:[0-3]"
name = "H100"
memory = "80 GiB"

[[node.nic]]
id = "nic:0"
speed = "200 Gb/s"

[[node.link]]
between = ["cuda:[0-3]", "cuda:[0-3]"]
pairs = "all"
kind = "nvlink"
bandwidth = "120 GB/s"
latency = "1 us"
path = "NV6"

[[node.link]]
between = ["cuda:[0-3]", "nic:0"]
kind = "pcie"
bandwidth = "24 GB/s"

[[switch]]
id = "leaf"
kind = "network"

[[link]]
between = ["n[1-2]/nic:0", "leaf"]
kind = "network"
bandwidth = "200 Gb/s"
latency = "2 us"
"""

if __name__ == "__main__":
    folder = Path(__file__).parent
    topology = files.examine_text(CLUSTER, "cluster.toml").topology
    placed = place(topology, [MeshAxis(name="dp", size=2), MeshAxis(name="tp", size=4, nbytes=16 << 20)])
    (folder / "placement.svg").write_text(drawing(topology, placed, "tp"))
    (folder / "heat_map.svg").write_text(heat_map(topology))
