"""The graph as the passes see it: instructions over numbered values, without any data.

Values are numbered: first the leaves, then one for each instruction, in an order in which inputs come before their use.
A graph is immutable; a pass reads one and builds another with a `Builder`. Two steps of a training loop have equal
graphs, which is what the plan cache is keyed by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fuel_parallel.backends import device_of
from fuel_parallel.lazy.node import Attrs, Node, Op, Spec, data_node, topological
from fuel_parallel.lazy.tensor import Tensor


class Instruction(NamedTuple):
    """One op on numbered values. `origin` is the place of the node it comes from among the computed nodes.

    A tuple, since each step of a training loop makes, hashes and compares about a thousand of them to find its plan.
    """

    op: Op
    inputs: tuple[int, ...]
    attrs: Attrs
    spec: Spec
    origin: int


@dataclass(frozen=True, slots=True)
class Graph:
    """Leaves, then constants, then instructions; `outputs` are the values that must survive, in the caller's order."""

    leaves: tuple[Spec, ...]
    constants: tuple[Any, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    @property
    def first(self) -> int:
        """The number of the first instruction's value."""
        return len(self.leaves) + len(self.constants)

    def specs(self) -> list[Spec]:
        """The spec of each value."""
        constants = [spec_of_constant(c) for c in self.constants]
        return [*self.leaves, *constants, *(i.spec for i in self.instructions)]

    def spec_of(self, value: int) -> Spec:
        """The spec of one value."""
        if value >= self.first:
            return self.instructions[value - self.first].spec
        if value < len(self.leaves):
            return self.leaves[value]
        return spec_of_constant(self.constants[value - len(self.leaves)])

    def consumers(self) -> list[list[int]]:
        """For each value the positions of the instructions that read it (once for each time)."""
        readers: list[list[int]] = [[] for _ in range(self.first + len(self.instructions))]
        for position, instruction in enumerate(self.instructions):
            for value in instruction.inputs:
                readers[value].append(position)
        return readers

    def waits(self) -> list[tuple[int, ...]]:
        """For each instruction the values it must come after: its inputs, and for a collective the one before it."""
        result = []
        before: tuple[int, ...] = ()
        for number, i in enumerate(self.instructions, self.first):
            result.append(i.inputs + before if i.op.crosses_ranks else i.inputs)
            if i.op.crosses_ranks:
                before = (number,)
        return result

    def __str__(self) -> str:
        lines = [f"graph: {len(self.leaves)} leaves, {len(self.constants)} constants"]
        for number, i in enumerate(self.instructions, self.first):
            lines.append(f"  %{number} = {i.op.name}({', '.join(f'%{v}' for v in i.inputs)}) : {i.spec}")
        return "\n".join([*lines, f"  outputs: {', '.join(f'%{v}' for v in self.outputs)}"])


def spec_of_constant(array: Any) -> Spec:
    """The spec of a constant, which may lie on a device."""
    return Spec(array.shape, array.dtype, device_of(array))


class Builder:
    """Makes the graph that replaces another one. `at[v]` is the new number of the old value v."""

    def __init__(self, old: Graph) -> None:
        self.old = old
        self.constants: list[Any] = list(old.constants)
        self.instructions: list[Instruction] = []
        # Instruction values are negative until the number of constants is known: -1 is the first.
        self.at: list[int] = [*range(old.first)]

    def constant(self, value: Any) -> int:
        """A new constant; returns its number."""
        self.constants.append(value)
        return len(self.old.leaves) + len(self.constants) - 1

    def add(self, op: Op, inputs: Sequence[int], attrs: Attrs, spec: Spec, origin: int) -> int:
        """A new instruction on new numbers; returns its number."""
        self.instructions.append(Instruction(op, tuple(inputs), attrs, spec, origin))
        return -len(self.instructions)

    def spec(self, value: int) -> Spec:
        """The spec of a new value."""
        if value < 0:
            return self.instructions[-value - 1].spec
        leaves = self.old.leaves
        if value < len(leaves):
            return leaves[value]
        return spec_of_constant(self.constants[value - len(leaves)])

    def keep(self, instruction: Instruction) -> int:
        """An old instruction, on the new numbers of its inputs."""
        i = instruction
        return self.add(i.op, [self.at[v] for v in i.inputs], i.attrs, i.spec, i.origin)

    def inline(self, body: Graph, inputs: Sequence[int], origin: int) -> list[int]:
        """The instructions of a graph whose leaves are the new numbers `inputs`; returns the numbers of its outputs."""
        at = list(inputs)
        for i in body.instructions:
            at.append(self.add(i.op, [at[v] for v in i.inputs], i.attrs, i.spec, origin))
        return [at[v] for v in body.outputs]

    def finish(self) -> Graph:
        """The new graph, without instructions that nobody needs."""
        first = len(self.old.leaves) + len(self.constants)

        def number(value: int) -> int:
            return value if value >= 0 else first - value - 1

        instructions = [
            Instruction(i.op, tuple(number(v) for v in i.inputs), i.attrs, i.spec, i.origin) for i in self.instructions
        ]
        outputs = tuple(number(self.at[v]) for v in self.old.outputs)
        return without_dead(Graph(self.old.leaves, tuple(self.constants), tuple(instructions), outputs))


def trace(roots: Sequence[Node], first: Sequence[Node] = ()) -> tuple[Graph, list[Node], list[Node]]:
    """The graph below `roots`, the leaf nodes, and the computed nodes. Outputs are the roots, then all collectives.

    Leaves begin with those named in `first`, used or not.

    Values of collectives are outputs since a collective runs once and somebody else may hold its node. `realize` knows
    whether somebody does.
    """
    computed = [node for node in topological(roots) if node.value is None]
    # Leaves are numbered by their first use: their age differs from step to step, their use does not.
    used = [i for node in computed for i in node.inputs if i.value is not None]
    leaves = list(dict.fromkeys([*first, *used]))
    number = {node: i for i, node in enumerate(leaves)}
    number.update({node: i for i, node in enumerate(computed, len(leaves))})
    instructions = tuple(
        [
            Instruction(node.op, tuple([number[i] for i in node.inputs]), node.attrs, node.spec, origin)
            for origin, node in enumerate(computed)
        ]
    )
    outputs = tuple(dict.fromkeys(number[n] for n in (*roots, *[n for n in computed if n.op.crosses_ranks])))
    return Graph(tuple([node.spec for node in leaves]), (), instructions, outputs), leaves, computed


def graph_of(function: Callable[..., Sequence[Tensor]], specs: Sequence[Spec]) -> Graph:
    """The graph of a function of tensors; its leaves are the arguments, which have these specs."""
    arguments = [data_node(np.empty(0), spec) for spec in specs]
    return trace([t.node for t in function(*[Tensor(node) for node in arguments])], arguments)[0]


def without_dead(graph: Graph) -> Graph:
    """The graph without instructions and constants that no output needs. Collectives stay: other ranks need them."""
    specs = graph.specs()
    first = graph.first
    needed = {*graph.outputs, *(n for n, i in enumerate(graph.instructions, first) if i.op.crosses_ranks)}
    for number in range(first + len(graph.instructions) - 1, first - 1, -1):
        if number in needed:
            needed.update(graph.instructions[number - first].inputs)
    if len(needed) == len(specs):
        return graph
    leaves = len(graph.leaves)
    order = [n for n in range(len(specs)) if n < leaves or n in needed]
    at = {old: new for new, old in enumerate(order)}
    return Graph(
        graph.leaves,
        tuple(c for n, c in enumerate(graph.constants, leaves) if n in needed),
        tuple(
            Instruction(i.op, tuple(at[v] for v in i.inputs), i.attrs, i.spec, i.origin)
            for n, i in enumerate(graph.instructions, first)
            if n in needed
        ),
        tuple(at[v] for v in graph.outputs),
    )
