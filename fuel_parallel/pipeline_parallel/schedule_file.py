"""Schedules as CSV: a row for each rank, an action in each cell, blank cells for nothing.

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

It is the table that PyTorch's pipelining writes, so a schedule can come from there, from a spreadsheet or by hand.
Which rank holds which stage follows from the rows.
"""

from __future__ import annotations

import csv
import io
from itertools import zip_longest
from pathlib import Path

from fuel_parallel.errors import ScheduleError
from fuel_parallel.pipeline_parallel.actions import Action, parse_cell
from fuel_parallel.pipeline_parallel.schedule import Schedule


def to_csv(schedule: Schedule) -> str:
    """The text of a file of a schedule.

    >>> from fuel_parallel.pipeline_parallel import build
    >>> print(to_csv(build("gpipe", num_ranks=2, num_microbatches=1)), end="")
    0F0,0B0
    1F0,1B0
    """
    text = io.StringIO()
    columns = zip_longest(*(map(str, order) for order in schedule.orders), fillvalue="")
    csv.writer(text, lineterminator="\n").writerows(zip(*columns, strict=True))
    return text.getvalue()


def read_csv(path: Path) -> Schedule:
    """The schedule in a file, named after it. `check` tells whether it can run.

    Raises `ScheduleError` with file, row and column when it is no schedule.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as reason:
        said = reason.strerror if isinstance(reason, OSError) else "it is no text in UTF-8"
        raise ScheduleError(f"{path}: cannot be read: {said}") from None
    return from_csv(text, path.stem, str(path))


def from_csv(text: str, name: str, source: str = "") -> Schedule:
    r"""The schedule in the text of a file; `source` is what errors call it. Raises like `read_csv`.

    >>> print(from_csv("0F0,0B0\n1F0,1B0\n", "mine"))
    mine: 1 micro-batch, 2 stages on 2 ranks
    rank 0: 0F0 0B0
    rank 1: 1F0 1B0
    """
    source = source or name
    try:
        table = enumerate(csv.reader(io.StringIO(text)), 1)
        rows = [(row, cells) for row, cells in table if any(map(str.strip, cells))]
    except csv.Error as reason:
        raise ScheduleError(f"{source}: no table: {reason}; expected a row of actions for each rank") from None
    orders: list[tuple[Action, ...]] = []
    first_seen: dict[int, tuple[int, int]] = {}  # of each stage: the rank, and the row
    for rank, (row, cells) in enumerate(rows):
        order: list[Action] = []
        for column, cell in enumerate(cells, 1):
            order += _actions(cell, rank, f"{source}: row {row}, column {column}", first_seen, row)
        orders.append(tuple(order))
    if not orders:
        raise ScheduleError(f"{source}: there is nothing in it; expected a row of actions for each rank, as 0F0,0B0")
    stages = range(len(first_seen))  # of that many, numbered from 0, one is missing if another is beyond
    missing = next((stage for stage in stages if stage not in first_seen), None)
    if missing is not None:
        raise ScheduleError(
            f"{source}: stage {missing} is on no rank, though stage {max(first_seen)} is; stages count from 0 up"
        )
    count = max(action.microbatch for order in orders for action in order) + 1
    return Schedule(name, max(count, 0), tuple(first_seen[stage][0] for stage in stages), tuple(orders))


def _actions(cell: str, rank: int, place: str, first_seen: dict[int, tuple[int, int]], row: int) -> list[Action]:
    try:
        actions = parse_cell(cell)
    except ScheduleError as reason:
        raise ScheduleError(f"{place}: {reason}") from None
    for action in actions:
        owner, its_row = first_seen.setdefault(action.stage, (rank, row))
        if owner != rank:
            raise ScheduleError(
                f"{place}: {action} is of stage {action.stage}, which row {its_row} has; a stage is in one row alone"
            )
    return actions
