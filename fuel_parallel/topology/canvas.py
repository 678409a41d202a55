"""Shapes on a plane, and two ways to put them into a file: as SVG, written here, and as PNG, by matplotlib."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from fuel_parallel.errors import ArgumentError

FONT = "ui-sans-serif, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
INK, FAINT, PAPER = "#0f172a", "#64748b", "#ffffff"


@dataclass(frozen=True)
class Box:
    """A rectangle; `hatched` ones stand for what is unknown."""

    x: float
    y: float
    width: float
    height: float
    fill: str = PAPER
    stroke: str = "none"
    radius: float = 0
    dashed: bool = False
    hatched: bool = False
    title: str = ""


@dataclass(frozen=True)
class Line:
    """A straight line, or one that bends downwards by `sag`."""

    x1: float
    y1: float
    x2: float
    y2: float
    color: str = FAINT
    width: float = 1
    dashed: bool = False
    sag: float = 0
    title: str = ""


@dataclass(frozen=True)
class Text:
    """A line of text on its base line; `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    size: float = 11
    anchor: str = "start"
    color: str = INK
    bold: bool = False


Shape = Box | Line | Text


@dataclass
class Canvas:
    """Shapes in the order in which they are drawn."""

    width: float = 0
    height: float = 0
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Draws over what is there."""
        self.shapes.extend(shapes)


def text_width(text: str, size: float) -> float:
    """About as wide as a text is."""
    return len(text) * size * 0.56


def fitting(text: str, width: float, size: float) -> str:
    """A text, shortened in its middle until it fits.

    >>> fitting("a-very-long-name", 60, 10)
    'a-ver…name'
    """
    most = max(int(width / (size * 0.56)), 3)
    if len(text) <= most:
        return text
    return f"{text[: most - 1 - (most - 1) // 2]}…{text[len(text) - (most - 1) // 2 :]}"


def to_svg(canvas: Canvas) -> str:
    """The picture as the text of an SVG file.

    >>> to_svg(Canvas(10, 10, [Text(1, 9, "<a>")])).splitlines()[-2]
    '<text x="1" y="9" font-size="11" fill="#0f172a">&lt;a&gt;</text>'
    """
    width, height = _number(canvas.width), _number(canvas.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="{FONT}">',
        '<defs><pattern id="unknown" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="7" height="7" fill="#f8fafc"/><line x1="0" y1="0" x2="0" y2="7" stroke="#cbd5e1" '
        'stroke-width="2.5"/></pattern></defs>',
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        *map(_svg_shape, canvas.shapes),
    ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def write_png(canvas: Canvas, path: Path) -> None:
    """The picture as a PNG file. Raises `ArgumentError` without matplotlib, and when the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ArgumentError("a PNG needs matplotlib: pip install 'fuel-parallel[plot]'; an SVG needs nothing") from None
    figure = Figure(figsize=(canvas.width / 100, canvas.height / 100), dpi=200, facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, canvas.width), ylim=(canvas.height, 0))
    for order, shape in enumerate(canvas.shapes):
        _plot(axes, shape, order)
    try:
        figure.savefig(path, format="png")
    except (OSError, ValueError) as reason:
        raise ArgumentError(f"cannot write the picture {path}: {reason}") from None


def _svg_shape(shape: Shape) -> str:
    if isinstance(shape, Text):
        anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
        weight = ' font-weight="600"' if shape.bold else ""
        place = f'x="{_number(shape.x)}" y="{_number(shape.y)}" font-size="{_number(shape.size)}"'
        return f'<text {place}{anchor}{weight} fill="{shape.color}">{_escaped(shape.text)}</text>'
    title = f"<title>{_escaped(shape.title)}</title>" if shape.title else ""
    dashes = ' stroke-dasharray="5 4"' if shape.dashed else ""
    if isinstance(shape, Box):
        place = " ".join(f'{name}="{_number(getattr(shape, name))}"' for name in ("x", "y", "width", "height"))
        radius = f' rx="{_number(shape.radius)}"' if shape.radius else ""
        fill = "url(#unknown)" if shape.hatched else shape.fill
        return f'<rect {place}{radius} fill="{fill}" stroke="{shape.stroke}"{dashes}>{title}</rect>'
    (x1, y1), (x2, y2) = (tuple(map(_number, end)) for end in ((shape.x1, shape.y1), (shape.x2, shape.y2)))
    stroke = f'stroke="{shape.color}" stroke-width="{_number(shape.width)}" stroke-linecap="round"{dashes}'
    if not shape.sag:
        return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {stroke}>{title}</line>'
    low = [_number(y + shape.sag) for y in (shape.y1, shape.y2)]
    return f'<path d="M{x1} {y1}C{x1} {low[0]} {x2} {low[1]} {x2} {y2}" fill="none" {stroke}>{title}</path>'


def _plot(axes: object, shape: Shape, order: int) -> None:
    from matplotlib import patches
    from matplotlib.path import Path as Curve

    points = 0.72  # a unit of the plane: a hundredth of an inch
    if isinstance(shape, Text):
        axes.text(  # type: ignore[attr-defined]
            shape.x,
            shape.y,
            shape.text.replace("$", r"\$"),
            size=shape.size * points,
            ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
            va="baseline",
            color=shape.color,
            weight="bold" if shape.bold else "normal",
            zorder=order,
        )
        return
    style = "--" if shape.dashed else "-"
    patch: patches.Patch
    if isinstance(shape, Box):
        corners = f"round,pad=0,rounding_size={shape.radius}" if shape.radius else "square,pad=0"
        patch = patches.FancyBboxPatch(
            (shape.x, shape.y),
            shape.width,
            shape.height,
            boxstyle=corners,
            facecolor="#f8fafc" if shape.hatched else shape.fill,
            edgecolor="#cbd5e1" if shape.hatched else shape.stroke,
            hatch="////" if shape.hatched else None,
            linestyle=style,
            linewidth=points,
            zorder=order,
        )
    else:
        ends = (shape.x1, shape.y1), (shape.x2, shape.y2)
        low = [(x, y + shape.sag) for x, y in ends]
        curve = Curve([ends[0], *low, ends[1]], [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
        patch = patches.PathPatch(
            curve, fill=False, edgecolor=shape.color, linewidth=shape.width * points, linestyle=style, zorder=order
        )
    axes.add_patch(patch)  # type: ignore[attr-defined]


def _escaped(text: str) -> str:
    """Text of a file in XML: without characters that XML cannot have."""
    return escape(
        "".join(c if c >= " " and c not in "\ufffe\uffff" and not "\ud800" <= c <= "\udfff" else "?" for c in text)
    )


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
