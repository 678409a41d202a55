"""`fuelrun trace --pipeline`: a step of a pipeline as it ran, below what was predicted, and the difference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fuelrun.time_lines import as_data, console, print_rows, room, write_pictures

if TYPE_CHECKING:
    from rich.table import Table

    from fuel_parallel.pipeline_parallel import Difference, Measurement

_MS = 1e3


def show_pipeline(
    file: Path,
    as_json: bool,
    svg: Path | None,
    png: Path | None,
    step: int | None,
    replica: int | None,
    costs: Path | None,
) -> None:
    """Draws both time lines and prints their difference, in ms. Raises `DataError`, `click.UsageError`."""
    from fuel_parallel.pipeline_parallel import differences, read_trace, simulate

    measured = _chosen(read_trace(file), replica, file)
    source = measured if costs is None else _chosen(read_trace(costs), None, costs)
    predicted_line = simulate(measured.schedule, source.costs()).scaled(_MS)
    measured_line = measured.timeline(step).scaled(_MS)
    found = differences(predicted_line, measured_line)
    counted = len(measured.counted())
    which = f"median of {counted} step{'' if counted == 1 else 's'}" if step is None else f"step {step}"
    lines = {"predicted": predicted_line, f"measured, {which}": measured_line}
    write_pictures(measured.schedule, lines, svg, png, "ms")
    if as_json:
        import msgspec

        data = {
            "name": measured.schedule.name,
            "microbatches": measured.schedule.num_microbatches,
            "placement": measured.schedule.placement,
            "unit": "ms",
            "steps": len(measured.steps),
            "predicted": as_data(predicted_line),
            "measured": as_data(measured_line),
            "differences": [
                {"name": one.name, "predicted": one.predicted, "measured": one.measured, "share": one.share}
                for one in found
            ],
        }
        click.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())
        return
    to = console()
    longest = max(predicted_line.total, measured_line.total)
    per_time = room(to, measured.schedule) / longest if longest else 0.0
    to.print(str(measured.schedule).partition("\n")[0])
    for title, line in lines.items():
        to.print(f"\n{title}: {line.total:.4g} ms, bubble {line.bubble_ratio():.1%}")
        print_rows(to, measured.schedule, line, per_time)
    to.print(_table(found))


def _chosen(found: list[Measurement], replica: int | None, file: Path) -> Measurement:
    if replica is not None and replica >= len(found):
        raise click.UsageError(f"--replica {replica}: {file} has {len(found)} pipelines, counted from 0")
    if replica is None and len(found) > 1:
        click.echo(f"fuelrun: the first of {len(found)} pipelines in {file}; --replica N shows another", err=True)
    return found[replica or 0]


def _table(found: list[Difference]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("ms", "predicted", "measured", "more"):
        table.add_column(column, justify="left" if column == "ms" else "right", no_wrap=True)
    for one in found:
        is_ratio = one.name.endswith("ratio")
        figures = (f"{value:.1%}" if is_ratio else f"{value:.2f}" for value in (one.predicted, one.measured))
        table.add_row(one.name, *figures, "" if one.share is None else f"{round(one.share, 3) + 0.0:+.1%}")
    return table
