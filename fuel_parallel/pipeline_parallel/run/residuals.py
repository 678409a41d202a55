"""Which values of a forward pass are held for its backward pass: the fewest bytes that save all costly work.

A value that the backward pass needs is held, or computed again from others that are. Products, reductions and
transcendental functions are never computed again; views, sums and masks are. The cheapest choice is a minimum cut of
the forward graph, between what must not be computed again and what is needed, where each value costs its bytes (Chen et
al., 2016, arXiv:1604.06174, for the idea; as a cut: Jain et al., 2020, arXiv:1910.02653).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from fuel_parallel.lazy.node import Node, Op
from fuel_parallel.lazy.tensor import Tensor

_VIEWS = frozenset(
    {"reshape", "permute_dims", "broadcast_to", "slice", "full", "arange", "eye", "tril", "triu", "copy"}
    | {"stop_gradient"}
)
_COSTLY = frozenset(
    {"exp", "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh"}
    | {"tanh", "asinh", "acosh", "atanh", "erf", "sigmoid", "silu", "gelu_tanh", "gelu_erf", "pow", "atan2"}
    | {"logaddexp"}
)
_MOST = (1 << 31) - 1
_UNIT = 64  # bytes; flows are 32-bit integers


class Residuals:
    """Chooses, for `runtime.realize.hold`, what to hold; thinks once for each structure of a forward pass."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[object, ...], list[int]] = {}

    def choose(self, computed: list[Node], backward: Callable[[], Sequence[Tensor]]) -> list[int]:
        """The places in `computed` of the values to hold; `backward` builds what will be computed from them."""
        key = tuple([(node.op, node.spec) for node in computed])
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._chosen[key] = to_hold(computed, backward())
        return chosen


def to_hold(computed: list[Node], results: Sequence[Tensor]) -> list[int]:
    """The places of the values in `computed` to hold for `results`, which are computed later."""
    place = {node: n for n, node in enumerate(computed)}
    needed = {place[node] for node in reached(results, place)}
    below: set[int] = set()
    stack = list(needed)
    while stack:
        n = stack.pop()
        if n not in below:
            below.add(n)
            stack.extend(place[i] for i in computed[n].inputs if i in place)
    return sorted(_least_cut(computed, place, needed, below)) if below else []


def reached(results: Sequence[Tensor], among: Collection[Node]) -> set[Node]:
    """Those of the nodes `among` that `results` are computed from with no other one of them between."""
    found: set[Node] = set()
    seen: set[Node] = set()
    stack = [tensor.node for tensor in results]
    while stack:
        node = stack.pop()
        if node in seen or node.value is not None:
            continue
        seen.add(node)
        if node in among:
            found.add(node)
        else:
            stack.extend(node.inputs)
    return found


def _least_cut(computed: list[Node], place: dict[Node, int], needed: set[int], below: set[int]) -> list[int]:
    """Each value is an edge from its making (2n) to its use (2n + 1); the values on the cut are held."""
    count = len(computed)
    source, sink = 2 * count, 2 * count + 1
    edges: dict[tuple[int, int], int] = {}
    for n in below:
        node = computed[n]
        edges[2 * n, 2 * n + 1] = min(node.spec.nbytes // _UNIT + 1, _MOST // (4 * count))
        if not _is_cheap(node.op):
            edges[source, 2 * n] = _MOST // 2
        for i in node.inputs:
            if i in place:
                edges[2 * place[i] + 1, 2 * n] = _MOST // 2
        if n in needed:
            edges[2 * n + 1, sink] = _MOST // 2
    rows, columns = np.array(list(edges), dtype=np.int32).T
    size = 2 * count + 2
    capacity = csr_array((np.array(list(edges.values()), dtype=np.int32), (rows, columns)), shape=(size, size))
    left = capacity - maximum_flow(capacity, source, sink).flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    return [n for n in below if 2 * n in reached and 2 * n + 1 not in reached]


def _is_cheap(op: Op) -> bool:
    return (op.elementwise and op.name not in _COSTLY) or op.name in _VIEWS
