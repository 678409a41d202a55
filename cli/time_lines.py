"""Time lines of pipelines on a terminal, as pictures, and as data: what `schedule` and `trace --pipeline` share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fuelrun.pictures import write_canvas

if TYPE_CHECKING:
    from rich.console import Console

    from fuel_parallel.pipeline_parallel import Schedule, Timeline

_LEAST_ROOM = 20


def console() -> Console:
    """As wide as the terminal, or 160 characters where there is none."""
    from rich.console import Console

    found = Console(highlight=False)
    if not found.is_terminal:
        found.width = 160
    return found


def room(to: Console, schedule: Schedule) -> int:
    """The characters of a row, next to the name of its rank."""
    return max(to.width - len(_margin(schedule)), _LEAST_ROOM)


def print_rows(to: Console, schedule: Schedule, timeline: Timeline, per_time: float | None = None) -> None:
    """The time line, in pieces as wide as the terminal; `per_time` as `terminal_rows` takes it."""
    from rich.text import Text

    from fuel_parallel.pipeline_parallel.draw import terminal_rows

    rows = []
    for pieces in terminal_rows(schedule, timeline, per_time):
        row = Text()
        for text, color in pieces:
            row.append(text, f"black on {color}" if color else "")
        rows.append(row)
    margin, width = len(_margin(schedule)), room(to, schedule)
    for start in range(0, max(len(row) for row in rows), width):
        for rank, row in enumerate(rows):
            line = Text(f"rank {rank}  ".ljust(margin))
            line.append_text(row[start : start + width])
            if not to.is_terminal:
                line.rstrip()
            to.print(line, no_wrap=True, overflow="ignore", crop=False)
        to.print()


def _margin(schedule: Schedule) -> str:
    return f"rank {schedule.num_ranks - 1}  "


def write_pictures(
    schedule: Schedule, timelines: Mapping[str, Timeline], svg: Path | None, png: Path | None, unit: str = ""
) -> None:
    """The pictures that were asked for; says so."""
    from fuel_parallel.pipeline_parallel.draw import schedule_canvas

    for path in filter(None, (svg, png)):
        write_canvas(schedule_canvas(schedule, timelines, unit), path)
        click.echo(f"fuelrun: {path} written", err=True)


def as_data(timeline: Timeline) -> dict[str, Any]:
    """The time line and what it comes to, for JSON."""
    return {
        "total": timeline.total,
        "bubble_ratio": timeline.bubble_ratio(),
        "bubble_ratio_of_span": timeline.bubble_ratio_of_span(),
        "ranks": [
            [{"action": str(one.action), "start": one.start, "end": one.end} for one in row] for row in timeline.ranks
        ],
    }
