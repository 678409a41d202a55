"""Expansion: functions of neural networks by their elementary operations.

Forward and backward then share what both compute (the exponentials of a softmax, the tanh of a gelu), and all of it can
be fused with what stands before and after. 16-bit floats stay whole, since they are rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
import numpy as np

from fuel_parallel.lazy.dtypes import is_half
from fuel_parallel.lazy.node import Attrs, Spec, data_node
from fuel_parallel.lazy.ops import elementwise, reductions
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.runtime.graph import Builder, Graph, Instruction, trace


def expand(graph: Graph) -> Graph:
    """Replaces instructions that have an expansion. The exponential of a log-softmax is taken as the softmax it is."""
    builder = Builder(graph)
    for i in graph.instructions:
        name, inputs, attrs = i.op.name, i.inputs, i.attrs
        if name == "exp" and inputs[0] >= graph.first:
            source = graph.instructions[inputs[0] - graph.first]
            if source.op.name == "log_softmax":
                name, inputs, attrs = "softmax", source.inputs, source.attrs
        if name not in _EXPANSIONS or is_half(i.spec.dtype) or not i.spec.size:
            builder.at.append(builder.keep(i))
            continue
        body = _body(name, i.spec, attrs)
        builder.at.append(_inline(builder, body, [builder.at[v] for v in inputs], i))
    return builder.finish()


def _inline(builder: Builder, body: Graph, inputs: list[int], i: Instruction) -> int:
    at = list(inputs)
    for part in body.instructions:
        at.append(builder.add(part.op, [at[v] for v in part.inputs], part.attrs, part.spec, i.origin))
    return at[body.outputs[0]]


@lru_cache(maxsize=1024)
def _body(name: str, spec: Spec, attrs: Attrs) -> Graph:
    """The expansion as a graph of one leaf."""
    placeholder = data_node(np.empty(0), spec)
    return trace([_EXPANSIONS[name](Tensor(placeholder), *attrs).node])[0]


def _exponentials(x: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    shifted = x - reductions.max(x, axis=axis, keepdims=True)
    e = elementwise.exp(shifted)
    return shifted, e, reductions.sum(e, axis=axis, keepdims=True)


def _softmax(x: Tensor, axis: int) -> Tensor:
    _, e, total = _exponentials(x, axis)
    return e / total


def _log_softmax(x: Tensor, axis: int) -> Tensor:
    shifted, _, total = _exponentials(x, axis)
    return shifted - elementwise.log(total)


_EXPANSIONS: dict[str, Callable[..., Tensor]] = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "gelu_tanh": elementwise.gelu_tanh_by_parts,
}
