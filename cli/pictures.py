"""Pictures of topologies as files: the suffix says which kind, `.svg` or `.png`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fuelrun.bench import check_folder

if TYPE_CHECKING:
    from fuel_parallel.topology import DeviceTopology
    from fuel_parallel.topology.canvas import Canvas
    from fuel_parallel.topology.placement import Placement


F = TypeVar("F", bound=Callable[..., Any])
PICTURE = click.Path(path_type=Path, dir_okay=False)


def picture_options(heat_map: bool) -> Callable[[F], F]:
    """The options --svg and --png of a command, and --heat-map."""

    def add(command: F) -> F:
        if heat_map:
            text = "Draw the bandwidth between each two devices (.svg or .png)."
            command = click.option("--heat-map", type=PICTURE, metavar="FILE", help=text)(command)
        for kind in ("png", "svg"):
            text = f"Draw machines, devices and links as {kind.upper()}."
            command = click.option(f"--{kind}", type=PICTURE, metavar="FILE", help=text)(command)
        return command

    return add


def check_pictures(svg: Path | None, png: Path | None, heat_map: Path | None = None) -> None:
    """Refuses a name that is no picture's, or a folder that is not there, before work is done."""
    for option, path, suffixes in (
        ("--svg", svg, (".svg",)),
        ("--png", png, (".png",)),
        ("--heat-map", heat_map, (".svg", ".png")),
    ):
        check_folder(option, path)
        if path is not None and path.suffix.lower() not in suffixes:
            raise click.UsageError(f"{option} {path}: the name must end in {' or '.join(suffixes)}")


def draw(
    topology: DeviceTopology,
    svg: Path | None,
    png: Path | None,
    heat_map: Path | None = None,
    placement: Placement | None = None,
) -> bool:
    """Writes the pictures that were asked for and says so; whether there were any."""
    for path in filter(None, (svg, png)):
        write_picture(topology, path, placement)
    if heat_map is not None:
        write_heat_map(topology, heat_map)
    written = [str(path) for path in (svg, png, heat_map) if path is not None]
    if written:
        click.echo(f"fuelrun: {', '.join(written)} written", err=True)
    return bool(written)


def write_picture(topology: DeviceTopology, path: Path, placement: Placement | None = None) -> None:
    """Draws machines, devices and links, with the ranks of a placement. Raises `ArgumentError`, `DataError`."""
    from fuel_parallel.topology.drawing import drawing_canvas

    write_canvas(drawing_canvas(topology, placement), path)


def write_heat_map(topology: DeviceTopology, path: Path) -> None:
    """Draws the bandwidth between each two devices. Raises like `write_picture`."""
    from fuel_parallel.topology.heat_map import heat_map_canvas

    write_canvas(heat_map_canvas(topology), path)


def write_canvas(canvas: Canvas, path: Path) -> None:
    """Writes any picture, by the suffix of its file. Raises like `write_picture`."""
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
