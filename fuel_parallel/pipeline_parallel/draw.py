"""Time lines as pictures: rows of a terminal, or a canvas that becomes SVG or PNG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fuel_parallel.pipeline_parallel.actions import COMPUTE, RECEIVES, SENDS, Action, ActionKind
from fuel_parallel.pipeline_parallel.schedule import Schedule
from fuel_parallel.pipeline_parallel.simulate import Timeline
from fuel_parallel.topology.canvas import FAINT, Box, Canvas, Line, Text, text_width

COLORS = {
    ActionKind.FORWARD: ("#93c5fd", "#3b82f6"),
    ActionKind.BACKWARD: ("#86efac", "#22c55e"),
    ActionKind.BACKWARD_INPUT: ("#5eead4", "#14b8a6"),
    ActionKind.BACKWARD_WEIGHT: ("#fde047", "#eab308"),
    ActionKind.REDUCE_GRAD: ("#d8b4fe", "#a855f7"),
}
"""Of a kind, for a rank's stages in turn."""

MESSAGE = "#cbd5e1"
NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward, input part",
    ActionKind.BACKWARD_WEIGHT: "backward, weight part",
    ActionKind.REDUCE_GRAD: "reduction",
}
ROW, LEFT, TOP, WIDTH, TITLE = 30.0, 70.0, 70.0, 1200.0, 26.0


def color_of(action: Action, schedule: Schedule) -> str:
    """By kind, darker for every second stage of the rank."""
    if action.kind not in COLORS:
        return MESSAGE
    turn = schedule.stages_of(schedule.placement[action.stage]).index(action.stage)
    return COLORS[action.kind][turn % 2]


def label_of(action: Action, schedule: Schedule) -> str:
    """The action without its stage where each rank holds one only; a send is `>`, a receive `<`."""
    text = str(action)
    for mark, kinds in ((">", SENDS), ("<", RECEIVES)):
        if action.kind in kinds:
            return f"{mark}{action.microbatch}"
    return text.lstrip("0123456789") if schedule.num_stages == schedule.num_ranks else text


def per_time_of(schedule: Schedule, timeline: Timeline) -> float:
    """Characters of a unit of time with which the shortest action has room for the longest label; 0 without any."""
    compute = [span for row in timeline.ranks for span in row if span.action.kind in COMPUTE and span.end > span.start]
    if not compute:
        return 0.0
    longest = max(len(label_of(span.action, schedule)) for span in compute) + 1
    return longest / min(span.end - span.start for span in compute)


def terminal_rows(schedule: Schedule, timeline: Timeline, per_time: float | None = None) -> list[list[tuple[str, str]]]:
    """For each rank, pieces of text with their colours, "" for none; together as long as the time line.

    An action is as long as its time says: `per_time` characters a unit, by default those of `per_time_of`. Labels that
    have no room are cut. What is shorter than a character, as messages and reductions can be, is left out.

    >>> from fuel_parallel.pipeline_parallel import build, simulate
    >>> schedule = build("gpipe", num_ranks=2, num_microbatches=1)
    >>> for row in terminal_rows(schedule, simulate(schedule)):
    ...     print("|" + "".join(text for text, _ in row) + "|")
    |F0          B0    |
    |   F0 B0          |
    """
    scale = per_time_of(schedule, timeline) if per_time is None else per_time
    return [list(_row(schedule, timeline, rank, scale)) if scale else [] for rank in range(schedule.num_ranks)]


def _row(schedule: Schedule, timeline: Timeline, rank: int, per_time: float) -> Iterator[tuple[str, str]]:
    at = 0
    for span in timeline.ranks[rank]:
        start, stop = round(span.start * per_time), round(span.end * per_time)
        if stop <= start:
            continue
        if start > at:
            yield " " * (start - at), ""
        room = stop - start
        text = label_of(span.action, schedule)[: max(room - 1, 1)]
        yield text.ljust(room), color_of(span.action, schedule)
        at = stop
    rest = round(timeline.total * per_time) - at
    if rest > 0:
        yield " " * rest, ""


def schedule_canvas(schedule: Schedule, timelines: Mapping[str, Timeline], unit: str = "") -> Canvas:
    """Time lines of a schedule as shapes, one below the other on one scale: a row for each rank, boxes as long as their
    actions take. Each has a title above it unless that is ""; `unit` is said behind times.
    """
    heights = [TITLE * bool(title) + ROW * schedule.num_ranks for title in timelines]
    canvas = Canvas(LEFT + WIDTH + 24, TOP + sum(heights) + 64)
    held = max(schedule.held())
    stages, ranks = schedule.num_stages, schedule.num_ranks
    summary = [f"{schedule.num_microbatches} micro-batches, {stages} stages on {ranks} ranks; "]
    summary += [_figures(one, unit) + ", " for title, one in timelines.items() if not title]
    summary.append(f"at most {held} activations held")
    canvas.add(Text(24, 32, schedule.name, 18, bold=True), Text(24, 52, "".join(summary), 11, color=FAINT))
    total = max((one.total for one in timelines.values()), default=0.0)
    per_time = WIDTH / total if total else 0.0
    y = TOP
    for (title, timeline), height in zip(timelines.items(), heights, strict=True):
        if title:
            canvas.add(Text(24, y + 16, f"{title}: {_figures(timeline, unit)}", 11, bold=True))
        _panel(canvas, schedule, timeline, y + TITLE * bool(title), per_time)
        y += height
    _legend(canvas, schedule, list(timelines.values()), y + 34)
    return canvas


def _figures(timeline: Timeline, unit: str) -> str:
    behind = f" {unit}" if unit else ""
    return f"time {timeline.total:.4g}{behind}, bubble {timeline.bubble_ratio():.1%}"


def _panel(canvas: Canvas, schedule: Schedule, timeline: Timeline, top: float, per_time: float) -> None:
    for rank, spans in enumerate(timeline.ranks):
        y = top + rank * ROW
        canvas.add(Text(24, y + ROW / 2 + 4, f"rank {rank}", 11))
        canvas.add(Line(LEFT, y + ROW, LEFT + WIDTH, y + ROW, "#e2e8f0"))
        for span in spans:
            x, width = LEFT + span.start * per_time, (span.end - span.start) * per_time
            if width <= 0:
                continue
            title = f"{span.action}: {span.start:g} to {span.end:g}"
            fill = color_of(span.action, schedule)
            canvas.add(Box(x, y + 2, width, ROW - 4, fill=fill, stroke="#ffffff", title=title))
            label = str(span.action.microbatch) if span.action.kind in COMPUTE else ""
            if label and text_width(label, 10) < width:
                canvas.add(Text(x + width / 2, y + ROW / 2 + 4, label, 10, "middle"))


def _legend(canvas: Canvas, schedule: Schedule, timelines: Sequence[Timeline], y: float) -> None:
    kinds = {span.action.kind for one in timelines for spans in one.ranks for span in spans}
    entries = [(NAMES[kind], COLORS[kind][0]) for kind in NAMES if kind in kinds]
    if kinds & SENDS:
        entries.append(("message", MESSAGE))
    elif kinds & RECEIVES:
        entries.append(("waiting for a message", MESSAGE))
    if schedule.num_stages > schedule.num_ranks:
        entries.append(("darker: every second stage of a rank", "#ffffff"))
    x = LEFT
    for name, color in entries:
        canvas.add(Box(x, y - 10, 14, 14, fill=color, radius=3), Text(x + 20, y + 2, name, 11))
        x += 44 + text_width(name, 11)
