"""What the options of `fuelrun run` become: variables in the environment of each rank, checked before any starts."""

from __future__ import annotations

import math
import os
from pathlib import Path

import click

from fuel_parallel.errors import ArgumentError, FuelError
from fuelrun.launch import placing
from fuelrun.launch.binding import BIND, cores_by_local_rank
from fuelrun.launch.rank import LOG_DIR, TIMEOUT, TRACE


def of_watching(timeout: float | None, log_dir: str | None, trace_to: Path | None) -> dict[str, str]:
    """--timeout, --log-dir and --trace."""
    settings = {}
    if timeout is not None:
        settings[TIMEOUT] = f"{timeout:g}"
    if log_dir is not None:
        from fuelrun.launch import logs

        logs.check(Path(log_dir))
        settings[LOG_DIR] = os.path.abspath(log_dir)
    if trace_to is not None:
        settings[TRACE] = str(trace_to)
    return settings


def of_variables(words: tuple[str, ...]) -> dict[str, str]:
    """--env NAME=VALUE, or NAME for one that is set here."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or (not equals and name not in os.environ):
            said = f"{name} is not set here" if name else "expected NAME=VALUE"
            raise click.UsageError(f"--env {word}: {said}; --env NAME=VALUE sets it, --env NAME passes it on")
        found[name] = value if equals else os.environ[name]
    return found


def of_binding(bind: str | None) -> dict[str, str]:
    """--bind."""
    if bind is None:
        return {}
    if bind not in ("auto", "none"):
        try:
            cores_by_local_rank(bind)
        except FuelError as reason:
            raise click.UsageError(str(reason).replace(f"{BIND}=", "--bind ", 1)) from None
    return {BIND: bind}


def of_mesh(mesh: str | None, topology: str | None, ranks: int | None) -> dict[str, str]:
    """--mesh and --topology; where fuelrun starts `ranks` ranks, it finds out first whether they fit."""
    if mesh is None and topology is None:
        return {}
    from fuel_parallel.topology.mesh_axes import MESH, filled, parse_axes, read_axes

    settings = {}
    if mesh is not None:
        try:
            mesh = read_axes(Path(mesh)) if mesh.endswith(".toml") else mesh
            sizes = {axis.name: axis.size for axis in parse_axes(mesh)}
            if ranks is not None and math.prod(filled(sizes, ranks).values()) != ranks:
                raise ArgumentError(f"--mesh {mesh} has not as many ranks as -n {ranks}")
        except FuelError as reason:
            raise click.UsageError(str(reason)) from None
        settings[MESH] = mesh
    if topology is not None:
        settings[placing.TOPOLOGY] = os.path.abspath(topology)
        if ranks is not None:
            placing.check(settings[placing.TOPOLOGY], mesh, ranks)
    return settings
