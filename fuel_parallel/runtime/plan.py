"""The plan: which kernels run, in which order, and when each value is let go.

A plan is made from the graph alone and holds no values but constants, so that it can be printed, compared, and kept:
two steps of a training loop have equal graphs and one plan. Slots stand for values: leaves, constants, then one for
each step. Steps keep the order in which the script built their nodes as far as the passes leave it, and always for
collectives.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fuel_parallel.backends import backend_of
from fuel_parallel.backends.precision import matmul_precision
from fuel_parallel.lazy.node import Attrs, Op, Spec
from fuel_parallel.lazy.ops.creation import COPY
from fuel_parallel.runtime import passes
from fuel_parallel.runtime.buckets import JOIN
from fuel_parallel.runtime.calls import expand_calls
from fuel_parallel.runtime.capture import Captures
from fuel_parallel.runtime.graph import Graph
from fuel_parallel.runtime.kernels import Kernel, kernel_of
from fuel_parallel.runtime.lanes import HOST, Lanes, Way, lanes_of
from fuel_parallel.runtime.memory import MemoryPlan, Place, plan_memory
from fuel_parallel.runtime.passes.host import on_host_where_needed
from fuel_parallel.runtime.passes.overlap import endings


def _no_kernel(*_: Any) -> Any:
    raise RuntimeError("a step of no plan")


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel: reads the slots `inputs`, writes `output`, then lets go of the slots `dies`.

    One that `goes_on` has started, when it is over; a later step has it among those it `finishes` first. With `reuses`
    it may leave its result in the memory of its input; one that `updates` may write over its first input.

    `origin` is the place of the node it comes from among the computed nodes, for messages. `places` say where its
    results go; without any, the kernel makes its own memory.
    """

    op: Op
    inputs: tuple[int, ...]
    attrs: Attrs
    output: int
    dies: tuple[int, ...]
    spec: Spec
    origin: int
    places: tuple[Place, ...]
    finishes: tuple[int, ...] = ()
    goes_on: bool = False
    reuses: bool = False
    updates: bool = False
    kernel: Kernel = field(default=_no_kernel, compare=False, repr=False)
    """The function that computes it on its device, called as `Op.kernel` is."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps over slots. `outputs` are the slots of the graph's outputs, in its order.

    `lanes` say which steps may run side by side; None where all run one after the other.
    `in_tf32` says whether float32 products are in TF32, on the devices that have it: see `matmul_precision`.
    """

    leaves: int
    constants: tuple[Any, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    memory: MemoryPlan
    devices: tuple[str, ...] = ()
    """Of the leaves and constants."""
    lanes: Lanes | None = None
    in_tf32: bool = False
    captures: Captures | None = field(default=None, compare=False, repr=False)
    """What has become of it on devices that capture graphs; None where no stretch of it can be captured, or several
    threads run it."""

    def device_of(self, slot: int) -> str:
        """The device on which a slot's value lies."""
        first = self.leaves + len(self.constants)
        return self.steps[slot - first].spec.device if slot >= first else self.devices[slot]

    def __str__(self) -> str:
        counts = f"{self.leaves} leaves, {len(self.constants)} constants, {len(self.steps)} steps"
        lines = [f"plan: {counts}, {len(self.outputs)} outputs, arena of {self.memory.arena_bytes} bytes"]
        if self.in_tf32:
            lines[0] += ", float32 products in TF32"
        for step in self.steps:
            inputs = ", ".join(f"%{i}" for i in step.inputs)
            lines.append(
                f"  %{step.output} = {step.op.name}({inputs}) : {step.spec}{self._where(step)}{_remarks(step)}"
            )
        return "\n".join([*lines, *([] if self.captures is None else str(self.captures).splitlines())])

    def _where(self, step: Step) -> str:
        if step.op is COPY:
            return f" from {self.device_of(step.inputs[0])} to {step.spec.device}"
        return "" if step.spec.device == "cpu" else f" on {step.spec.device}"


def _remarks(step: Step) -> str:
    remarks = []
    if step.finishes:
        remarks.append(f"finishes {_named(step.finishes)} first")
    buckets = [f"bucket {place.bucket} at {place.offset}" for place in step.places if place.bucket >= 0]
    if buckets:
        remarks.append(f"in {', '.join(buckets)}")
    if step.reuses or step.updates:
        remarks.append("in place")
    if step.goes_on:
        remarks.append("goes on")
    if step.dies:
        remarks.append(f"lets go of {_named(step.dies)}")
    return f"   {'; '.join(remarks)}" if remarks else ""


def _named(slots: tuple[int, ...]) -> str:
    return ", ".join(f"%{slot}" for slot in slots)


def make_plan(graph: Graph, pass_names: tuple[str, ...] = ()) -> Plan:
    """The plan of a graph, after the named passes."""
    graph = on_host_where_needed(passes.optimize(expand_calls(graph), pass_names))
    specs = graph.specs()
    last_use = {v: n for n, i in enumerate(graph.instructions) for v in i.inputs}
    kept = set(graph.outputs)
    ends = endings(graph) if "overlap" in pass_names else {}
    memory = plan_memory(graph, ends)
    reusing = {bucket.position for bucket in memory.buckets}
    finished: dict[int, tuple[int, ...]] = {}
    for n, end in ends.items():
        finished[end] = (*finished.get(end, ()), graph.first + n)
    steps = []
    for n, i in enumerate(graph.instructions):
        output = graph.first + n
        dies = {v for v in i.inputs if last_use[v] == n and v not in kept}
        if output not in last_use and output not in kept:
            dies.add(output)
        op = JOIN if n in memory.joined else i.op
        kernel = op.kernel if i.spec.device == "cpu" else kernel_of(op, [specs[v] for v in i.inputs], i.attrs, i.spec)
        steps.append(
            Step(
                op,
                i.inputs,
                i.attrs,
                output,
                tuple(sorted(dies)),
                i.spec,
                i.origin,
                memory.places[n],
                finished.get(n, ()),
                n in ends,
                n in reusing,
                n in memory.updates,
                kernel or op.kernel,
            )
        )
    lanes = lanes_of(steps, specs[: graph.first], graph.outputs, way_of) if "overlap" in pass_names else None
    in_tf32 = matmul_precision() == "high" and any(backend_of(d).has_tf32 for d in {spec.device for spec in specs})
    devices = tuple(spec.device for spec in specs[: graph.first])
    alone = lanes is None or len(lanes.threads) == 1
    captures = Captures(steps, len(graph.leaves), graph.outputs, specs) if alone else None
    return Plan(
        len(graph.leaves),
        graph.constants,
        tuple(steps),
        graph.outputs,
        memory,
        devices,
        lanes,
        in_tf32,
        captures if captures is not None and captures.stretches else None,
    )


def way_of(device: str) -> Way:
    """How the work of a device is done in a plan over several devices."""
    if device == HOST:
        return Way.HERE
    backend = backend_of(device)
    if backend.queues:
        return Way.QUEUED
    # Regions that numpy runs share their scratch.
    return Way.HERE if backend.array_module is np else Way.THREAD


class PlanCache:
    """Plans by the structure of their graph, the passes that are on, and the precision of products.

    The least recently used ones are dropped.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        self.made = 0
        self._plans: OrderedDict[Any, Plan] = OrderedDict()

    def plan_for(self, graph: Graph) -> Plan:
        """The plan of an equal graph, made now if there is none."""
        names = passes.enabled()
        key = (graph, names, matmul_precision())
        plan = self._plans.get(key)
        if plan is None:
            plan = make_plan(graph, names)
            self.made += 1
            self._plans[key] = plan
            while len(self._plans) > self.capacity:
                self._plans.popitem(last=False)
        elif plan is not next(reversed(self._plans.values())):
            self._plans.move_to_end(key)  # equal graphs are compared node by node: not for the plan that ran last
        return plan

    def __len__(self) -> int:
        return len(self._plans)


plans = PlanCache()
