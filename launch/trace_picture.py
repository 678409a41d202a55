"""A trace's last full step as an SVG: for each rank what it realized, its kernels and its collectives, over time.

The last step is the last realize with at least half as many kernels as the largest one, and the script before it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from xml.sax.saxutils import escape

from fuel_parallel.errors import DataError
from fuelrun.launch.traces import Event, Trace

_LEFT, _WIDTH, _ROW, _GAP, _TOP = 150, 900, 20, 14, 30
_TRACKS = ("realize", "kernels", "collectives")
_FONT = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_LETTER = 6.1
_COLORS = {
    "matmul": "#3b82f6",
    "region": "#14b8a6",
    "kernel": "#94a3b8",
    "collective": "#f97316",
    "wait": "#fed7aa",
    "script": "#fde68a",
    "graph": "#d8b4fe",
    "plan": "#c084fc",
    "run": "#e2e8f0",
    "keep": "#e9d5ff",
}


def draw(trace: Trace) -> str:
    """The picture. Raises `DataError` when nothing was realized."""
    begin, end = _window(trace)
    ranks = [info.rank for info in trace.fuel_parallel.ranks]
    spans = list(_spans(trace))
    height = _TOP + len(ranks) * (len(_TRACKS) * _ROW + _GAP) + 50
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        f'font-family="{_FONT}" font-size="10">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for number, rank in enumerate(ranks):
        top = _TOP + number * (len(_TRACKS) * _ROW + _GAP)
        for track, name in enumerate(_TRACKS):
            y = top + track * _ROW
            lines.append(f'<text x="10" y="{y + 13}">{f"rank {rank}" if not track else ""}</text>')
            lines.append(f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end" fill="#64748b">{name}</text>')
        events = [e for e in spans if e.pid == rank and e.end > begin and e.ts < end]
        for event in sorted(events, key=lambda e: (e.cat == "wait", e.ts)):
            lines += _box(event, begin, end, top + min(event.tid, len(_TRACKS) - 1) * _ROW)
    lines += _axis((end - begin) / 1000, _TOP - 8)
    lines += _legend(height - 18)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _spans(trace: Trace) -> Iterator[Event]:
    """All but the actions of pipelines, which have a picture of their own."""
    return (e for e in trace.traceEvents if e.ph == "X" and e.cat != "action")


def _window(trace: Trace) -> tuple[float, float]:
    events = list(_spans(trace))
    first = trace.fuel_parallel.ranks[0].rank if trace.fuel_parallel.ranks else 0
    runs = [e for e in events if e.cat == "run" and e.pid == first]
    if not runs:
        raise DataError("there is nothing to draw: no rank realized anything")
    kernels = sorted(e.ts for e in events if e.cat == "kernel" and e.pid == first)
    counts = [bisect.bisect(kernels, run.end) - bisect.bisect(kernels, run.ts) for run in runs]
    last = [run for run, count in zip(runs, counts, strict=True) if count * 2 >= max(counts)][-1]
    scripts = [e for e in events if e.cat == "script" and e.pid == first and e.ts < last.ts]
    begin = scripts[-1].ts if scripts else min(e.ts for e in events if e.pid == first)
    following = [e.ts for e in events if e.cat == "script" and e.pid == first and e.ts > last.ts]
    end = following[0] if following else max(e.end for e in events if e.pid == first)
    return begin, end


def _box(event: Event, begin: float, end: float, y: float) -> Iterator[str]:
    scale = _WIDTH / (end - begin)
    left, right = max(event.ts, begin), min(event.end, end)
    x, width = _LEFT + (left - begin) * scale, (right - left) * scale
    if width < 0.15:
        return
    kind = "region" if event.name.startswith("region: ") else event.name if event.name in _COLORS else event.cat
    took = f"{event.dur:.0f} us" if event.dur < 1000 else f"{event.dur / 1000:.2f} ms"
    ops = event.args.get("ops", "")
    title = escape(f"{event.name}, {took}" + (f"\n{ops}" if ops else ""))
    yield (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.2f}" height="{_ROW - 3}" fill="{_COLORS.get(kind, "#94a3b8")}">'
        f"<title>{title}</title></rect>"
    )
    room = int((width - 4) / _LETTER)
    if room >= 3:
        name = event.name.removeprefix("region: ")
        text = escape(name if len(name) <= room else name[: room - 1] + "…")
        yield f'<text x="{x + 2:.1f}" y="{y + 12}" pointer-events="none">{text}</text>'


def _axis(milliseconds: float, y: float) -> Iterator[str]:
    step = next(s for s in (10**e * m for e in range(-4, 9) for m in (1, 2, 5)) if milliseconds / s <= 10)
    for number in range(int(milliseconds / step) + 1):
        x = _LEFT + number * step / milliseconds * _WIDTH
        unit = " ms" if not number else ""
        yield f'<text x="{x:.1f}" y="{y}" fill="#64748b" text-anchor="middle">{number * step:g}{unit}</text>'
        yield f'<path d="M{x:.1f},{y + 2} v5" stroke="#94a3b8"/>'


def _legend(y: float) -> Iterator[str]:
    x = float(_LEFT)
    for kind in ("matmul", "region", "kernel", "collective", "wait", "script", "graph", "plan", "keep"):
        name = {"kernel": "other kernel", "wait": "waiting in it"}.get(kind, kind)
        yield f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" fill="{_COLORS[kind]}"/>'
        yield f'<text x="{x + 14:.0f}" y="{y}">{name}</text>'
        x += 30 + len(name) * _LETTER
