"""Passes: small functions from graph to graph, in a fixed order.

Each can be switched off by name with the environment variable FUEL_PASSES: `-fusion` leaves one out, `-fusion,-cse`
two, `none` all.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from fuel_parallel.errors import ArgumentError
from fuel_parallel.runtime.graph import Graph, without_dead
from fuel_parallel.runtime.passes.algebra import algebra
from fuel_parallel.runtime.passes.attention import attention
from fuel_parallel.runtime.passes.constants import fold
from fuel_parallel.runtime.passes.expansion import expand
from fuel_parallel.runtime.passes.fusion import fusion
from fuel_parallel.runtime.passes.layout import layout
from fuel_parallel.runtime.passes.overlap import overlap
from fuel_parallel.runtime.passes.sharing import cse

Pass = Callable[[Graph], Graph]

PASSES: dict[str, Pass] = {
    "attention": attention,
    "expand": expand,
    "fold": fold,
    "algebra": algebra,
    "layout": layout,
    "cse": cse,
    "fusion": fusion,
    "overlap": overlap,
}
VARIABLE = "FUEL_PASSES"


def enabled() -> tuple[str, ...]:
    """The names of the passes that are on."""
    setting = os.environ.get(VARIABLE, "")
    return _chosen(setting)


def _chosen(setting: str) -> tuple[str, ...]:
    if setting in _choices:
        return _choices[setting]
    words = [word.strip() for word in setting.split(",") if word.strip()]
    if words == ["none"]:
        chosen: tuple[str, ...] = ()
    else:
        off = {word.removeprefix("-") for word in words}
        if not off <= PASSES.keys() or any(not word.startswith("-") for word in words):
            raise ArgumentError(
                f"{VARIABLE}={setting!r}: expected 'none' or names to leave out, each after a minus, such as "
                f"'-fusion'; the passes are {', '.join(PASSES)}"
            )
        chosen = tuple(name for name in PASSES if name not in off)
    _choices[setting] = chosen
    return chosen


_choices: dict[str, tuple[str, ...]] = {}


def optimize(graph: Graph, names: tuple[str, ...]) -> Graph:
    """The graph after the named passes."""
    for name in names:
        graph = without_dead(PASSES[name](graph))
    return graph
