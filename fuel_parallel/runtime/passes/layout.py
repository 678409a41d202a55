"""Layout: what a reshape has to copy is copied once, into the plan's memory.

A reshape of a permuted value is a copy unless rows stay together. As one of many views it would be made in memory of
its own, again for each shape that is asked for. Here it becomes `contiguous`, whose result has a place in the plan,
and views of that; `cse` gives all shapes the same one. The parts of a `concat` are permuted before they are joined.
"""

from __future__ import annotations

import numpy as np

from fuel_parallel.backends import backend_of
from fuel_parallel.lazy.node import OPS, Op, Shape, Spec, define
from fuel_parallel.runtime.graph import Builder, Graph, Instruction
from fuel_parallel.runtime.program import not_inferred

CONTIGUOUS = define(
    Op(
        "contiguous",
        not_inferred,
        kernel=lambda xp, x: x.copy(),
        into=lambda xp, out, x: xp.copyto(out, x),
        aliases=False,
        shapes="[...] -> [...]",
    )
)
"""The same values, row after row in memory of their own."""


def layout(graph: Graph) -> Graph:
    """Puts `contiguous` before reshapes that copy."""
    builder = Builder(graph)
    readers = graph.consumers()
    outputs = set(graph.outputs)
    for number, i in enumerate(graph.instructions, graph.first):
        source = graph.instructions[i.inputs[0] - graph.first] if i.inputs and i.inputs[0] >= graph.first else None
        if source is None:
            builder.at.append(builder.keep(i))
        elif i.op.name == "reshape" and _copies(graph, source, i.spec.shape):
            laid = builder.at[i.inputs[0]]
            if not _is_joined(builder, laid):
                laid = builder.add(CONTIGUOUS, (laid,), (), source.spec, source.origin)
            builder.at.append(builder.add(i.op, (laid,), i.attrs, i.spec, i.origin))
        elif (
            i.op.name == "permute_dims"
            and source.op.name == "concat"
            and len(readers[i.inputs[0]]) == 1
            and not outputs & {number, i.inputs[0]}
            and all(_reads_in_order(graph, i, graph.instructions[r]) for r in readers[number])
        ):
            builder.at.append(_permuted_before(builder, source, i))
        else:
            builder.at.append(builder.keep(i))
    return builder.finish()


def _reads_in_order(graph: Graph, i: Instruction, reader: Instruction) -> bool:
    return reader.op.name == "reshape" and _copies(graph, i, reader.spec.shape)


def _copies(graph: Graph, permuted: Instruction, shape: Shape) -> bool:
    """Whether a reshape to that shape copies, if what was permuted lies in order."""
    if permuted.op.name != "permute_dims" or 0 in shape or not backend_of(permuted.spec.device).views:
        return False
    (axes,) = permuted.attrs
    before = graph.spec_of(permuted.inputs[0]).shape
    strides = np.cumprod((1, *before[:0:-1]))[::-1]
    # Only shapes and strides are looked at, so one byte stands for all of the memory.
    view = np.lib.stride_tricks.as_strided(
        np.empty(1, np.uint8), permuted.spec.shape, tuple(int(strides[a]) for a in axes)
    )
    try:
        view.reshape(shape, copy=False)
    except ValueError:
        return True
    return False


def _is_joined(builder: Builder, value: int) -> bool:
    return value < 0 and builder.instructions[-value - 1].op.name == "concat"


def _permuted_before(builder: Builder, joined: Instruction, permuted: Instruction) -> int:
    """The `concat` of permuted parts in place of the permuted `concat`."""
    (axes,), (axis,) = permuted.attrs, joined.attrs
    parts = []
    for part in (builder.at[v] for v in joined.inputs):
        spec = builder.spec(part)
        turned = Spec(tuple(spec.shape[a] for a in axes), spec.dtype, spec.device)
        parts.append(builder.add(OPS["permute_dims"], (part,), permuted.attrs, turned, permuted.origin))
    return builder.add(joined.op, parts, (axes.index(axis),), permuted.spec, joined.origin)
