"""Expansion: functions of neural networks by their elementary operations.

Forward and backward then share what both compute (the exponentials of a softmax, the tanh of a gelu), and all of it can
be fused with what stands before and after. 16-bit floats stay whole, since they are rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from fuel_parallel.lazy.dtypes import is_half
from fuel_parallel.lazy.node import Attrs, Spec
from fuel_parallel.lazy.ops import elementwise, neural
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.runtime.graph import Builder, Graph, graph_of


def expand(graph: Graph) -> Graph:
    """Replaces instructions that have an expansion. The exponential of a log-softmax is taken as the softmax it is."""
    builder = Builder(graph)
    graph_specs = graph.specs()
    for i in graph.instructions:
        name, inputs, attrs = i.op.name, i.inputs, i.attrs
        if name == "exp" and inputs[0] >= graph.first:
            source = graph.instructions[inputs[0] - graph.first]
            if source.op.name == "log_softmax":
                name, inputs, attrs = "softmax", source.inputs, source.attrs
        if name not in _EXPANSIONS or is_half(i.spec.dtype) or not i.spec.size:
            builder.at.append(builder.keep(i))
            continue
        specs = tuple(graph_specs[v] for v in inputs)
        body = _body(name, specs, attrs)
        builder.at.extend(builder.inline(body, [builder.at[v] for v in inputs], i.origin))
    return builder.finish()


@lru_cache(maxsize=1024)
def _body(name: str, specs: tuple[Spec, ...], attrs: Attrs) -> Graph:
    """The expansion as a graph whose leaves are the inputs."""
    return graph_of(lambda *inputs: [_EXPANSIONS[name](*inputs, *attrs)], specs)


def _softmax(x: Tensor, axis: int) -> Tensor:
    _, e, total = neural.exponentials(x, axis)
    return e / total


def _log_softmax(x: Tensor, axis: int) -> Tensor:
    shifted, _, total = neural.exponentials(x, axis)
    return shifted - elementwise.log(total)


_EXPANSIONS: dict[str, Callable[..., Tensor]] = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "gelu_erf": elementwise.gelu_erf_by_parts,
    "gelu_tanh": elementwise.gelu_tanh_by_parts,
    "normalize": neural.normalize_by_parts,
    "nll": neural.nll_by_parts,
    "nll_backward": neural.nll_backward_by_parts,
}
