"""`show`: the graph behind tensors, as a table or as a picture."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy.draw import to_dot, to_svg
from fuel_parallel.lazy.outline import Entry, outline
from fuel_parallel.lazy.tree import tensors_of

_MOST_INPUTS = 8
_WIDEST_ATTRIBUTES = 44


@dataclass(frozen=True, slots=True)
class GraphView:
    """The graph behind some tensors, as it was when it was looked at. A notebook shows it as a picture."""

    entries: list[Entry]

    def __str__(self) -> str:
        return table(self.entries)

    def _repr_svg_(self) -> str:
        return to_svg(self.entries)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Draws the graph: as Graphviz text (`.dot`, `.gv`), or as a picture (`.svg`)."""
        write = _WRITERS.get(Path(file).suffix.lower())
        if write is None:
            raise ArgumentError(f"show: the file must end in {', '.join(_WRITERS)}, but is named {os.fspath(file)!r}")
        Path(file).write_text(write(self.entries), encoding="utf-8")


_WRITERS: dict[str, Callable[[list[Entry]], str]] = {".dot": to_dot, ".gv": to_dot, ".svg": to_svg}


def graph(x: Any, *, plan: bool = False) -> GraphView:
    """The graph behind a tensor, a module or a nest of them, for a notebook to draw; `show` prints it.

    With `plan` it is the plan of it, as for `show`.

    >>> import fuel_parallel.lazy as ft
    >>> [entry.op for entry in graph(ft.ones(3) + ft.asarray([1.0, 2.0, 3.0])).entries]
    ['full', 'data', 'add']
    """
    tensors = tensors_of(x)
    if not tensors:
        raise ArgumentError(f"show: expected a tensor, a module or a nest of them, but found no tensor in {x!r:.60}")
    if plan:
        from fuel_parallel.runtime.outline import outline_of_plan

        return GraphView(outline_of_plan(tensors))
    return GraphView(outline(tensors))


def show(x: Any, file: str | os.PathLike[str] | None = None, *, plan: bool = False) -> None:
    """Prints the graph behind a tensor, a module or a nest of them, one node a line, inputs before what uses them.

    Nothing is computed. Nodes that several others use are listed once; `>` marks what was asked for. Where a value is
    there already, its graph has been let go and it is the start of the table.

    With `file` the graph is drawn instead: as Graphviz text (`.dot`, `.gv`), or as a picture (`.svg`). Copies name both
    ends, and where there is more than one device each has a colour.

    With `plan` it is the steps that `realize` would run: after the passes, with the copies to and from the host.

    >>> import fuel_parallel.lazy as ft
    >>> x = ft.ones((2, 3))
    >>> show(ft.sum(x * x, axis=0))                                                 # doctest: +ELLIPSIS
    3 nodes to compute from 0 values
       #  op        inputs  result         attributes                 device  state  built at
       0  full              float32[2, 3]  value=1                    cpu     lazy   ...
       1  multiply  0 0     float32[2, 3]                             cpu     lazy   ...
    >  2  sum       1       float32[3]     axis=(0,), keepdims=False  cpu     lazy   ...
    """
    view = graph(x, plan=plan)
    if file is None:
        sys.stdout.write(str(view))
    else:
        view.save(file)


def table(entries: list[Entry]) -> str:
    """The entries as text in columns."""
    values = sum(entry.has_value for entry in entries)
    rows = [("", "#", "op", "inputs", "result", "attributes", "device", "state", "built at")]
    rows += [
        (
            ">" if entry.is_output else "",
            str(number),
            entry.op,
            _list(entry.inputs),
            entry.result,
            _cut(", ".join(entry.attributes)),
            entry.place,
            "value" if entry.has_value else "lazy",
            entry.line,
        )
        for number, entry in enumerate(entries)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{len(entries) - values} nodes to compute from {values} values"]
    for mark, number, *cells in rows:
        padded = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths[2:], strict=True))
        lines.append(f"{mark:1}  {number.rjust(max(widths[1], 1))}  {padded}".rstrip())
    return "\n".join(lines) + "\n"


def _list(inputs: tuple[int, ...]) -> str:
    if len(inputs) <= _MOST_INPUTS:
        return " ".join(map(str, inputs))
    return f"{' '.join(map(str, inputs[: _MOST_INPUTS - 1]))} … ({len(inputs)} in all)"


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST_ATTRIBUTES else text[: _WIDEST_ATTRIBUTES - 1] + "…"
