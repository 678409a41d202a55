"""Pictures of topologies as files: the suffix says which kind, `.svg` or `.png`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from fuel_parallel.topology import DeviceTopology
    from fuel_parallel.topology.canvas import Canvas
    from fuel_parallel.topology.placement import Placement


def write_picture(topology: DeviceTopology, path: Path, placement: Placement | None = None) -> None:
    """Draws machines, devices and links, with the ranks of a placement. Raises `ArgumentError`, `DataError`."""
    from fuel_parallel.topology.drawing import drawing_canvas

    _write(drawing_canvas(topology, placement), path)


def write_heat_map(topology: DeviceTopology, path: Path) -> None:
    """Draws the bandwidth between each two devices. Raises like `write_picture`."""
    from fuel_parallel.topology.heat_map import heat_map_canvas

    _write(heat_map_canvas(topology), path)


def _write(canvas: Canvas, path: Path) -> None:
    from fuel_parallel.errors import DataError
    from fuel_parallel.topology.canvas import to_svg, write_png

    suffix = path.suffix.lower()
    if suffix not in (".svg", ".png"):
        raise click.UsageError(f"{path}: a picture is an .svg or a .png file")
    if suffix == ".png":
        write_png(canvas, path)
        return
    try:
        path.write_text(to_svg(canvas), encoding="utf-8")
    except OSError as reason:
        raise DataError(f"cannot write {path}: {reason.strerror}") from None
