"""The plan behind some tensors as a list of entries: what `show(..., plan=True)` prints and draws."""

from __future__ import annotations

from collections.abc import Iterable

from fuel_parallel.lazy.node import DATA, describe_line, graph_lock
from fuel_parallel.lazy.ops.creation import COPY
from fuel_parallel.lazy.outline import Entry, category_of, describe_attributes
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.runtime.graph import spec_of_constant, trace
from fuel_parallel.runtime.plan import plans


def outline_of_plan(tensors: Iterable[Tensor]) -> list[Entry]:
    """The entries of the values, constants and steps of the plan that `realize` of these tensors would run now."""
    with graph_lock:
        roots = list(dict.fromkeys(t.node for t in tensors if t.node.value is None))
        graph, leaves, computed = trace(roots)
    plan = plans.plan_for(graph)
    wanted = set(graph.outputs[: len(roots)])
    outputs = {slot for node, slot in zip(graph.outputs, plan.outputs, strict=True) if node in wanted}
    entries = [
        Entry("data", category_of(DATA), (), repr(n.spec), (), n.spec.device, True, False, describe_line(n.line))
        for n in leaves
    ]
    for constant in plan.constants:
        spec = spec_of_constant(constant)
        entries.append(Entry("constant", "creation", (), repr(spec), (), spec.device, True, False, ""))
    for step in plan.steps:
        entries.append(
            Entry(
                op=step.op.name,
                category=category_of(step.op),
                inputs=step.inputs,
                result=repr(step.spec),
                attributes=describe_attributes(step.op, step.attrs, step.spec),
                device=step.spec.device,
                has_value=False,
                is_output=step.output in outputs,
                line=describe_line(computed[step.origin].line),
                source=plan.device_of(step.inputs[0]) if step.op is COPY else "",
            )
        )
    return entries
