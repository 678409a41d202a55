"""What a device cannot compute is computed on the host, between Copy instructions that the plan shows.

Not a pass that can be switched off: it comes after all of them, and a plan without it would not run. A value is copied
to the host once, and back only if something on the device, or the caller, needs it there. Copies of one value are that
value: none goes where it is already, whatever the way on which it came. A constant that a device needs is put there
when the plan is made, not in each run.
"""

from __future__ import annotations

from fuel_parallel.backends import backend_of, move
from fuel_parallel.lazy.node import Spec
from fuel_parallel.lazy.ops.creation import COPY
from fuel_parallel.runtime.graph import Builder, Graph, Instruction, without_dead
from fuel_parallel.runtime.kernels import kernel_of
from fuel_parallel.runtime.region import ITEM


def on_host_where_needed(graph: Graph) -> Graph:
    """The graph with each instruction on a device that has a kernel for it."""
    if all(i.spec.device == "cpu" for i in graph.instructions):
        return graph
    return _Placing(graph).graph()


class _Placing:
    """`places[v]` are the new numbers of the old value v, by device; a copy shares them with what it is a copy of."""

    def __init__(self, graph: Graph) -> None:
        self.old, self.specs = graph, graph.specs()
        self.builder = Builder(graph)
        self.constants = range(len(graph.leaves), graph.first)
        self.places: list[dict[str, int]] = [{self.specs[v].device: v} for v in range(graph.first)]

    def graph(self) -> Graph:
        """The new graph."""
        for number, i in enumerate(self.old.instructions, self.old.first):
            self.places.append(self._place(number, i))
        origins = [0] * self.old.first + [i.origin for i in self.old.instructions]
        for v in self.old.outputs:
            self._on(v, self.specs[v].device, origins[v])
        for places, spec in zip(self.places[self.old.first :], self.specs[self.old.first :], strict=True):
            self.builder.at.append(places.get(spec.device, next(iter(places.values()))))
        return without_dead(self.builder.finish())

    def _place(self, number: int, i: Instruction) -> dict[str, int]:
        spec, add = i.spec, self.builder.add
        if i.op is COPY:
            (value,) = i.inputs
            places = self.places[value]
            if value in self.constants:
                return {spec.device: self._on(value, spec.device, i.origin)}
            if spec.device not in places:
                source = self._on(value, self.specs[value].device, i.origin)
                places[spec.device] = add(COPY, (source,), i.attrs, spec, i.origin)
            return places
        inputs = [self.specs[v] for v in i.inputs]
        if self._stays(i, inputs):
            return {spec.device: add(i.op, self._all_on(i, None), i.attrs, spec, i.origin)}
        here = Spec(spec.shape, spec.dtype)
        return {"cpu": add(i.op, self._all_on(i, "cpu"), i.attrs, here, i.origin)}

    def _stays(self, i: Instruction, inputs: list[Spec]) -> bool:
        """Whether the instruction is computed on its own device. Parts of a bundle are where the bundle is."""
        if i.op is ITEM:
            return i.spec.device in self.places[i.inputs[0]]
        return i.spec.device == "cpu" or kernel_of(i.op, inputs, i.attrs, i.spec) is not None

    def _all_on(self, i: Instruction, device: str | None) -> list[int]:
        return [self._on(v, device or self.specs[v].device, i.origin) for v in i.inputs]

    def _on(self, value: int, device: str, origin: int) -> int:
        """The new number of a value on a device, copied there if it is not."""
        places = self.places[value]
        if device not in places and value in self.constants:
            constant = self.old.constants[value - len(self.old.leaves)]
            with backend_of(device).running():
                places[device] = self.builder.constant(move(constant, device))
        if device not in places:
            source = next(iter(places.values()))
            spec = self.specs[value]
            copied = Spec(spec.shape, spec.dtype, device)
            places[device] = self.builder.add(COPY, (source,), (device,), copied, origin)
        return places[device]
