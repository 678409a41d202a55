"""Constant folding: what depends on no leaf is computed while the plan is made."""

from __future__ import annotations

from fuel_parallel.backends import backend_of
from fuel_parallel.runtime.graph import Builder, Graph

FOLDED_BYTES = 1 << 18
"""Larger results are computed in each run: a plan should not hold them."""


def fold(graph: Graph) -> Graph:
    """Replaces small results that depend on constants only by their value."""
    builder = Builder(graph)
    values = dict(enumerate(graph.constants, len(graph.leaves)))
    for number, i in enumerate(graph.instructions, graph.first):
        known = all(v in values for v in i.inputs)
        if not known or i.op.crosses_ranks or i.spec.device != "cpu" or i.spec.nbytes > FOLDED_BYTES:
            builder.at.append(builder.keep(i))
            continue
        backend = backend_of(i.spec.device)
        arguments = [values[v] for v in i.inputs]
        try:
            with backend.running():
                xp = backend.array_module
                result = i.op.kernel(xp, *([arguments] if i.op.variadic else arguments), *i.attrs)
        except Exception:
            # It will fail again when the plan runs, where the script's line is known.
            builder.at.append(builder.keep(i))
            continue
        values[number] = backend.settle(result)
        builder.at.append(builder.constant(values[number]))
    return builder.finish()
