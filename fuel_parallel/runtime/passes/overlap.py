"""Overlap: collectives start as soon as their input is there, and what needs their results comes as late as possible.

Collectives keep their order. What does not need a result comes before what does: while the first bucket of gradients is
under way the backward pass goes on, and while the last one is, the parameters of the others are updated.

Two things are for memory. The input of a gather is there from the beginning, but only one is gathered ahead: it starts
when the last but one has been used up. And a reduce-scatter, which holds more than it gives, is over when the next one
starts.
"""

from __future__ import annotations

from fuel_parallel.runtime.graph import Graph, Instruction

LEAST_BYTES = 64 << 10
"""Smaller collectives are over as soon as they have begun: a place of its own is not worth it."""

_PREPARATIONS = ("concat", "reshape", "slice")


def may_overlap(graph: Graph, i: Instruction) -> bool:
    """Whether the instruction is an operation between ranks that can go on while other work is done."""
    if i.op.start is None or not i.op.crosses_ranks:
        return False
    # By the larger one of what it reads and gives: a part may be of another size on another rank.
    return max(i.spec.nbytes, graph.spec_of(i.inputs[0]).nbytes) >= LEAST_BYTES


def overlap(graph: Graph) -> Graph:
    """Orders instructions so that communication and computation can go on side by side."""
    if not any(may_overlap(graph, i) for i in graph.instructions):
        return graph
    return _in_order(graph, _begin_early(graph, _wait_late(graph)))


def endings(graph: Graph) -> dict[int, int]:
    """Which collectives go on while other instructions run: their positions, and where the result is needed first.

    One whose result nobody in the graph reads goes on to its end.
    """
    readers = graph.consumers()
    ends: dict[int, int] = {}
    next_scatter = len(graph.instructions)
    for position in range(len(graph.instructions) - 1, -1, -1):
        i = graph.instructions[position]
        end = min(readers[graph.first + position], default=len(graph.instructions))
        if may_overlap(graph, i) and i.spec.nbytes < graph.spec_of(i.inputs[0]).nbytes:
            end, next_scatter = min(end, next_scatter), position
        if may_overlap(graph, i) and end > position + 1:
            ends[position] = end
    return ends


def _wait_late(graph: Graph) -> list[int]:
    """The numbers of all instructions: those that need no collective's result, then those that need the first one's."""
    needed: dict[int, int] = {}  # by the instruction itself
    result: dict[int, int] = {}  # by those that read its value
    started = before = gathered = 0
    for number, i in enumerate(graph.instructions, graph.first):
        needs = max((result.get(v, 0) for v in i.inputs), default=0)
        if i.op.crosses_ranks:
            # It comes after the collective before it, but need not have that one's result.
            before = needs = max(before, needs, gathered if i.op.recomputed else 0)
        needed[number] = result[number] = needs
        if may_overlap(graph, i):
            result[number] = started = started + 1
            gathered = started if i.op.recomputed else gathered
    return sorted(needed, key=lambda number: needed[number])


def _begin_early(graph: Graph, order: list[int]) -> list[int]:
    """The same, with each collective that may overlap moved to where its input is ready, if its turn has come."""
    collectives = iter([n for n in order if graph.instructions[n - graph.first].op.crosses_ranks])
    used_up = _first_to_be_used_up(graph, order)
    done: dict[int, None] = {}
    upcoming = next(collectives, None)
    for number in order:
        done.setdefault(number)
        while upcoming is not None:
            if upcoming not in done:
                way = _way_to(graph, upcoming, done)
                if way is None or not done.keys() >= used_up.get(upcoming, set()):
                    break
                done.update(dict.fromkeys(way))
            upcoming = next(collectives, None)
    return list(done)


def _first_to_be_used_up(graph: Graph, order: list[int]) -> dict[int, set[int]]:
    """For each gather what must have run before it may start early: all that read the last but one."""
    gathers = [n for n in order if graph.instructions[n - graph.first].op.recomputed]
    readers = graph.consumers()
    return {n: {graph.first + p for p in readers[last]} for last, n in zip(gathers, gathers[2:], strict=False)}


def _way_to(graph: Graph, number: int, done: dict[int, None]) -> list[int] | None:
    """What is left to do for a collective, itself last; None unless that is only to put its input together."""
    if not may_overlap(graph, graph.instructions[number - graph.first]):
        return None
    way: list[int] = []
    stack = [number]
    while stack:
        n = stack.pop()
        i = graph.instructions[n - graph.first]
        if n != number and i.op.name not in _PREPARATIONS:
            return None
        way.append(n)
        stack.extend(v for v in i.inputs if v >= graph.first and v not in done)
    return sorted(set(way))


def _in_order(graph: Graph, order: list[int]) -> Graph:
    at = {**{n: n for n in range(graph.first)}, **{old: new for new, old in enumerate(order, graph.first)}}
    instructions = []
    for number in order:
        i = graph.instructions[number - graph.first]
        instructions.append(Instruction(i.op, tuple(at[v] for v in i.inputs), i.attrs, i.spec, i.origin))
    return Graph(graph.leaves, graph.constants, tuple(instructions), tuple(at[v] for v in graph.outputs))
