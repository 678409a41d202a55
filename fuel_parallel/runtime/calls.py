"""Calls are replaced by the operations that they stand for: what is planned, and run, is these.

This comes before all passes and is none of them: it cannot be switched off.
"""

from __future__ import annotations

from functools import lru_cache

from fuel_parallel.lazy.ops.call import CALL, Body
from fuel_parallel.runtime.graph import Builder, Graph, trace, without_dead


def expand_calls(graph: Graph) -> Graph:
    """The graph with the bodies of its calls; nodes of one call, which are its results, share one."""
    if all(i.op is not CALL for i in graph.instructions):
        return graph
    builder = Builder(graph)
    done: dict[tuple[Body, tuple[int, ...]], list[int]] = {}
    for i in graph.instructions:
        if i.op is not CALL:
            builder.at.append(builder.keep(i))
            continue
        body, place = i.attrs
        results = done.get((body, i.inputs))
        if results is None:
            inputs = [builder.at[v] for v in i.inputs]
            results = done[body, i.inputs] = builder.inline(_graph_of(body), inputs, i.origin)
        builder.at.append(results[place])
    return without_dead(builder.finish())


@lru_cache(maxsize=1 << 12)
def _graph_of(body: Body) -> Graph:
    return expand_calls(trace(body.results, body.arguments)[0])
