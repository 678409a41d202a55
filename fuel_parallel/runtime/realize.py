"""`realize`: computes everything that was asked for in one plan."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fuel_parallel import failure
from fuel_parallel.backends import backend_of
from fuel_parallel.lazy import effects
from fuel_parallel.lazy.node import History, Node, graph_lock, lose
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.lazy.tree import tensors_of
from fuel_parallel.runtime.execute import execute
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import plans
from fuel_parallel.runtime.trace import recorder


def realize(*things: Any) -> None:
    """Computes tensors, modules, optimizers, and nests of them, in one plan.

    Work that several of them share is done once; what none of them needs is not done. Afterwards they hold their values
    and the graph behind them is let go. Pending sends and writes to a cache, and collectives older than those that are
    needed, run as well. Threads may call it; one runs at a time.

    >>> import fuel_parallel.lazy as ft
    >>> a = ft.ones(3); b = a + 1; c = a * 5
    >>> realize(b, [c])
    >>> b.is_realized, c.is_realized
    (True, True)
    """
    tensors = tensors_of(*things)
    if not effects.any_kept() and all(t.is_realized for t in tensors):
        return  # who only reads a value does not wait for other threads
    with graph_lock:
        # Each handle is read once: another thread may point it elsewhere.
        nodes = [(t.node, t.is_state) for t in [*tensors, *effects.take_due()]]
        targets = [node for node, _ in nodes if node.value is None]
        side_effects = effects.take()
        # In the order in which they were given, so that equal steps have equal graphs.
        roots = [*targets, *side_effects]
        if roots:
            _run(_with_older_collectives(roots), set(roots), {node for node, is_state in nodes if is_state})


Choose = Callable[[list[Node]], Sequence[int]]


def hold(tensors: Sequence[Tensor], choose: Choose) -> list[Any]:
    """Computes tensors and returns their values, contiguous arrays; unlike `realize`, lets no graph go.

    Gradients can be taken afterwards. `choose` is given the nodes that are about to be computed, oldest first, and
    returns the places of those whose values are to be held for that. Whatever else is needed then, the tensors
    themselves as well, is computed again; collectives are not, they run once.
    """
    nodes = [tensor.node for tensor in tensors]
    arrays = {node: node.value for node in nodes if node.value is not None}
    with graph_lock:
        roots = [*[node for node in nodes if node.value is None], *effects.take()]
        if roots:
            _run(_with_older_collectives(roots), set(), set(), choose, arrays)
    return [backend_of(node.spec.device).settle(arrays[node]) for node in nodes]


def _with_older_collectives(roots: list[Node]) -> list[Node]:
    """The roots, and the older collectives that somebody holds and that no root leads to."""
    if not effects.any_noted():
        return list(dict.fromkeys(roots))
    below = _below(roots)
    newest = max((node.serial for node in below if node.op.crosses_ranks), default=-1)
    older = effects.noted_before(newest) if newest >= 0 else []
    return list(dict.fromkeys([*roots, *[node for node in older if node not in below]]))


def _below(roots: list[Node]) -> set[Node]:
    """The nodes without a value that the roots lead to, and themselves."""
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen and node.value is None:
            seen.add(node)
            stack.extend(node.inputs)
    return seen


def _run(
    roots: list[Node],
    targets: set[Node],
    state: set[Node],
    choose: Choose | None = None,
    arrays: dict[Node, Any] | None = None,
) -> None:
    """Computes the roots. `targets` let their graph go; `choose` and `arrays`, which is filled, are as for `hold`."""
    if recorder:
        recorder.begin()
    graph, leaves, computed = trace(roots)
    uses = Counter(i for node in computed for i in node.inputs)
    again = _needed_again(computed, targets, uses)
    chosen = [] if choose is None else choose(computed)
    held = {computed[place] for place in chosen}
    # The value of a collective that nobody else needs is let go like any other.
    needed = again | targets if arrays is None else again | targets | held | set(roots)
    outputs = dict.fromkeys([*graph.outputs, *[len(leaves) + place for place in chosen]])
    graph = replace(graph, outputs=tuple(n for n in outputs if computed[n - len(leaves)] in needed))
    if recorder:
        recorder.phase("plan")
    plan = plans.plan_for(graph)
    spare = _held_by_the_graph_alone(leaves, again, uses)
    taken: set[int] = set()
    if recorder:
        recorder.phase("run")
    try:
        values = execute(plan, [node.value for node in leaves], computed, spare, taken)
    except BaseException:
        for number in taken:
            lose(leaves[number])
        raise
    if not failure.has_told("progressed") and (failure.is_alone() or any(n.op.crosses_ranks for n in computed)):
        failure.tell(progressed=True)
    if recorder:
        recorder.phase("keep")
    # A variable ends here: for what was computed from it, it is a leaf.
    ends = [*leaves, *[node for node in computed if not node.inputs or node in state]]
    history = History.of(ends) if targets - state else None
    for number, value in zip(graph.outputs, values, strict=True):
        node = computed[number - len(leaves)]
        if node not in targets:
            if arrays is not None:
                arrays[node] = value
            if node in held:
                node.value = backend_of(node.spec.device).settle(value)
            elif node.op.crosses_ranks:
                # A collective runs once: whoever still holds the node finds its value.
                node.value = value
            continue
        node.release(backend_of(node.spec.device).settle(value), None if node in state else history)
    if recorder:
        recorder.phase("")


def _needed_again(computed: list[Node], targets: set[Node], uses: Counter[Node]) -> set[Node]:
    """The nodes that others than this graph may need one day: those that are held, and all below them."""
    held = references(computed)
    again: set[Node] = set()
    for number in range(len(computed) - 1, -1, -1):
        node = computed[number]
        if node in targets:
            continue
        if node in again or held[number] > uses[node] + 1:  # the counter itself has one
            again.add(node)
            # A node without value is computed again from what is below it.
            again.update(node.inputs)
    return again


def _held_by_the_graph_alone(leaves: list[Node], again: set[Node], uses: Counter[Node]) -> frozenset[int]:
    """The leaves that nothing but this graph refers to, such as the old value of a parameter that was rebound."""
    held, of_values = references(leaves), references([leaf.value for leaf in leaves])
    return frozenset(
        number
        for number, leaf in enumerate(leaves)
        if leaf not in again
        and held[number] == uses[leaf] + 1
        and of_values[number] == 1  # the leaf's own
        and backend_of(leaf.spec.device).owns(leaf.value)
    )


def references(things: Sequence[object]) -> list[int]:
    """How many references there are to each of the things, beside that of the list."""
    return [sys.getrefcount(thing) - _COUNTED_HERE for thing in things]


# What the list, the name and the call add differs between versions of Python: from 3.14 on calls borrow.
_COUNTED_HERE = 0
_COUNTED_HERE = references([object()])[0]
