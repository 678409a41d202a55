"""Constant folding: what depends on no leaf is computed while the plan is made."""

from __future__ import annotations

from typing import Any

from fuel_parallel.backends import backend_of
from fuel_parallel.lazy.ops.creation import COPY
from fuel_parallel.runtime.graph import Builder, Graph, Instruction

FOLDED_BYTES = 1 << 18
"""Larger results are computed in each run: a plan should not hold them."""


def fold(graph: Graph) -> Graph:
    """Replaces small results that depend on constants only by their value; on a device by a copy of it."""
    builder = Builder(graph)
    values = dict(enumerate(graph.constants, len(graph.leaves)))
    for number, i in enumerate(graph.instructions, graph.first):
        known = all(v in values for v in i.inputs)
        if not known or i.op.crosses_ranks or i.spec.nbytes > FOLDED_BYTES:
            builder.at.append(builder.keep(i))
            continue
        value = values[i.inputs[0]] if i.op is COPY else computed(i, [values[v] for v in i.inputs])
        if value is None:
            builder.at.append(builder.keep(i))
            continue
        values[number] = value
        at = builder.constant(value)
        if i.spec.device != "cpu":
            at = builder.add(COPY, (at,), (i.spec.device,), i.spec, i.origin)
        builder.at.append(at)
    return builder.finish()


def computed(i: Instruction, arguments: list[Any]) -> Any:
    """What an instruction makes of known values, on the CPU.

    None if it fails: it will fail again when the plan runs, where the script's line is known.
    """
    backend = backend_of("cpu")
    try:
        with backend.running():
            xp = backend.array_module
            return backend.settle(i.op.kernel(xp, *([arguments] if i.op.variadic else arguments), *i.attrs))
    except Exception:
        return None
