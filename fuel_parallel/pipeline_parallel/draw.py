"""Time lines as pictures: rows of a terminal, or a canvas that becomes SVG or PNG."""

from __future__ import annotations

from collections.abc import Iterator

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
ROW, LEFT, TOP, WIDTH = 30.0, 70.0, 70.0, 1200.0


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


def terminal_rows(schedule: Schedule, timeline: Timeline) -> list[list[tuple[str, str]]]:
    """For each rank, pieces of text with their colours, "" for none; together as long as the time line.

    The shortest action has room for the longest label; others are as long as their time says. Messages and reductions
    that take no time are left out.

    >>> from fuel_parallel.pipeline_parallel import build, simulate
    >>> schedule = build("gpipe", num_ranks=2, num_microbatches=1)
    >>> for row in terminal_rows(schedule, simulate(schedule)):
    ...     print("|" + "".join(text for text, _ in row) + "|")
    |F0          B0    |
    |   F0 B0          |
    """
    spans = [span for row in timeline.ranks for span in row if span.end > span.start]
    compute = [span for span in spans if span.action.kind in COMPUTE]
    if not compute:
        return [[] for _ in timeline.ranks]
    longest = max(len(label_of(span.action, schedule)) for span in compute) + 1
    per_time = longest / min(span.end - span.start for span in compute)
    return [list(_row(schedule, timeline, rank, per_time)) for rank in range(schedule.num_ranks)]


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


def schedule_canvas(schedule: Schedule, timeline: Timeline) -> Canvas:
    """The time line as shapes: a row for each rank, boxes as long as their actions take."""
    canvas = Canvas(LEFT + WIDTH + 24, TOP + ROW * schedule.num_ranks + 64)
    held = max(schedule.held())
    summary = (
        f"{schedule.num_microbatches} micro-batches, {schedule.num_stages} stages on {schedule.num_ranks} ranks; "
        f"time {timeline.total:g}, bubble {timeline.bubble_ratio():.1%}, at most {held} activations held"
    )
    canvas.add(Text(24, 32, schedule.name, 18, bold=True), Text(24, 52, summary, 11, color=FAINT))
    per_time = WIDTH / timeline.total if timeline.total else 0.0
    for rank, spans in enumerate(timeline.ranks):
        y = TOP + rank * ROW
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
    _legend(canvas, schedule, TOP + ROW * schedule.num_ranks + 34)
    return canvas


def _legend(canvas: Canvas, schedule: Schedule, y: float) -> None:
    kinds = {action.kind for order in schedule.orders for action in order}
    entries = [(NAMES[kind], COLORS[kind][0]) for kind in NAMES if kind in kinds]
    if schedule.has_messages:
        entries.append(("message", MESSAGE))
    if schedule.num_stages > schedule.num_ranks:
        entries.append(("darker: every second stage of a rank", "#ffffff"))
    x = LEFT
    for name, color in entries:
        canvas.add(Box(x, y - 10, 14, 14, fill=color, radius=3), Text(x + 20, y + 2, name, 11))
        x += 44 + text_width(name, 11)
