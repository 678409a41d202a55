"""Common subexpressions: what is computed twice is computed once."""

from __future__ import annotations

from typing import Any

from fuel_parallel.runtime.graph import Builder, Graph


def cse(graph: Graph) -> Graph:
    """Gives instructions with equal op, inputs and attributes one value. Collectives stay: each is on the wire."""
    builder = Builder(graph)
    seen: dict[Any, int] = {}
    constants: dict[Any, int] = {}
    for number, value in enumerate(graph.constants, len(graph.leaves)):
        builder.at[number] = constants.setdefault((value.dtype, value.shape, value.tobytes()), number)
    for i in graph.instructions:
        if i.op.crosses_ranks:
            builder.at.append(builder.keep(i))
            continue
        key = (i.op, tuple(builder.at[v] for v in i.inputs), i.attrs)
        if key not in seen:
            seen[key] = builder.keep(i)
        builder.at.append(seen[key])
    return builder.finish()
