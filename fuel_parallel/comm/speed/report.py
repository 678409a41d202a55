"""What was measured, as a table to read, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from fuel_parallel.errors import ArgumentError


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One collective, one way, one size: microseconds of a call on the slowest rank, and gigabytes a second."""

    collective: str
    way: str
    bytes: int
    latency_us: float
    min_us: float
    max_us: float
    algorithm_gb_s: float
    bus_gb_s: float
    calls: int


class Skipped(msgspec.Struct, frozen=True):
    """A way that could not be taken."""

    way: str
    reason: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    machine: str
    mpi: str
    ranks: int
    nodes: int
    dtype: str
    device: str = "cpu"
    timings: tuple[Timing, ...]
    skipped: tuple[Skipped, ...]


def title(collective: str, report: Report, counted: str) -> Iterator[str]:
    """The lines above the table of a collective."""
    nodes = "1 node" if report.nodes == 1 else f"{report.nodes} nodes"
    where = f" on {report.device}" * (report.device != "cpu")
    yield f"# {collective}, {report.dtype}{where}, {report.ranks} ranks on {nodes}, {report.mpi}; bytes: {counted}"
    columns = ("latency us", "min", "max", "alg GB/s", "bus GB/s", "calls")
    yield f"#{'bytes':>11}  {'way':<7}" + "".join(f"{name:>12}" for name in columns)


def row(t: Timing) -> str:
    """A line of the table.

    >>> row(Timing(collective="all_reduce", way="mpi", bytes=4096, latency_us=2.512, min_us=2.1, max_us=70.0,
    ...            algorithm_gb_s=1.63, bus_gb_s=1.63, calls=900)).split()
    ['4096', 'mpi', '2.51', '2.10', '70.0', '1.63', '1.63', '900']
    """
    numbers = (t.latency_us, t.min_us, t.max_us, t.algorithm_gb_s, t.bus_gb_s)
    return f"{t.bytes:>12}  {t.way:<7}" + "".join(f"{_short(n):>12}" for n in numbers) + f"{t.calls:>12}"


def _short(number: float) -> str:
    """Three digits or more, never in powers of ten: easy to read and to cut."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def plot(report: Report, path: Path) -> None:
    """Draws latency and bus bandwidth over size, a row of pictures for each collective.

    Raises `ArgumentError` without matplotlib, and when the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ArgumentError("a plot needs matplotlib: pip install 'fuel-parallel[plot]'") from None
    sized = [t for t in report.timings if t.bytes]
    if not sized:
        raise ArgumentError("a plot is over sizes, but none of these collectives has any")
    names = list(dict.fromkeys(t.collective for t in sized))
    figure = Figure(figsize=(10, 3.2 * len(names)), layout="constrained")
    figure.suptitle(
        f"{report.dtype} on {report.device}, {report.ranks} ranks, {report.mpi}\n{report.machine}", fontsize=10
    )
    axes = figure.subplots(len(names), 2, squeeze=False)
    for name, (latency, bandwidth) in zip(names, axes, strict=True):
        for way in dict.fromkeys(t.way for t in sized if t.collective == name):
            points = [t for t in sized if (t.collective, t.way) == (name, way)]
            sizes = [t.bytes for t in points]
            (line,) = latency.plot(sizes, [t.latency_us for t in points], marker=".", label=way)
            low, high = [t.min_us for t in points], [t.max_us for t in points]
            latency.fill_between(sizes, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
            bandwidth.plot(sizes, [t.bus_gb_s for t in points], marker=".", label=way, color=line.get_color())
        latency.set(title=name, xlabel="bytes", ylabel="latency, µs (min to max)", xscale="log", yscale="log")
        bandwidth.set(title=name, xlabel="bytes", ylabel="bus bandwidth, GB/s", xscale="log", ylim=(0, None))
        for each in (latency, bandwidth):
            each.set_xscale("log", base=2)
            each.grid(alpha=0.3)
            each.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as reason:
        raise ArgumentError(f"cannot write the plot {path}: {reason}") from None
