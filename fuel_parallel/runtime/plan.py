"""The plan: which kernels run, in which order, and when each value is let go.

A plan is made from the graph alone and holds no values, so that it can be printed, compared, and kept. Slots stand for
values: first the leaves, then one for each step. Steps are in the order in which the script built their nodes, which is
a topological order and keeps collectives in the order of the script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fuel_parallel.lazy.node import Attrs, Line, Node, Op, Spec, topological


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel: reads the slots `inputs`, writes `output`, then lets go of the slots `dies`."""

    op: Op
    inputs: tuple[int, ...]
    attrs: Attrs
    output: int
    dies: tuple[int, ...]
    spec: Spec
    line: Line | None

    @property
    def kernel(self) -> Callable[..., Any]:
        """The function that computes the step."""
        return self.op.kernel


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps over slots. Slots 0 to `leaves` - 1 are filled before the run."""

    steps: tuple[Step, ...]
    leaves: int
    outputs: frozenset[int]

    def __str__(self) -> str:
        lines = [f"plan: {self.leaves} leaves, {len(self.steps)} steps, {len(self.outputs)} outputs"]
        for step in self.steps:
            inputs = ", ".join(f"%{i}" for i in step.inputs)
            dies = f"   lets go of {', '.join(f'%{i}' for i in step.dies)}" if step.dies else ""
            lines.append(f"  %{step.output} = {step.op.name}({inputs}) : {step.spec}{dies}")
        return "\n".join(lines)


def make_plan(roots: Sequence[Node]) -> tuple[Plan, list[Node]]:
    """The plan that computes `roots`, and the node of each slot. Nodes that no root needs are not in it.

    Values of collectives stay to the end, since a collective runs once and somebody else may hold its node.
    """
    needed = topological(roots)
    leaves = [node for node in needed if node.value is not None]
    computed = [node for node in needed if node.value is None]
    slots = [*leaves, *computed]
    slot_of = {node: slot for slot, node in enumerate(slots)}
    collectives = [node for node in computed if node.op.crosses_ranks]
    outputs = frozenset(slot_of[node] for node in (*roots, *collectives))
    last_use = {slot_of[i]: node for node in computed for i in node.inputs}
    steps = []
    for node in computed:
        inputs = tuple(slot_of[i] for i in node.inputs)
        output = slot_of[node]
        dies = {slot for slot in inputs if last_use[slot] is node and slot not in outputs}
        if output not in last_use and output not in outputs:
            dies.add(output)
        steps.append(Step(node.op, inputs, node.attrs, output, tuple(sorted(dies)), node.spec, node.line))
    return Plan(tuple(steps), len(leaves), outputs), slots
