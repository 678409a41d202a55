"""Runs a plan: one kernel after the other, each value let go after its last use."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuel_parallel.backends import backend_of
from fuel_parallel.errors import FuelError, RealizeError
from fuel_parallel.lazy.node import Node, describe_line
from fuel_parallel.runtime.memory import Arena, Place
from fuel_parallel.runtime.plan import Plan, Step
from fuel_parallel.runtime.region import REGION, region_into

_arena = Arena()
_one_at_a_time = threading.RLock()


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes of memory that plans use.

    `arena` is kept from run to run; `planned` is what the last plan's results were planned to take at most at one time,
    `peak` what they took.
    """

    arena: int
    planned: int
    peak: int


_stats = MemoryStats(0, 0, 0)


def memory_stats() -> MemoryStats:
    """The memory of the last plan that ran; views and what kernels allocate for themselves are not counted."""
    return _stats


def execute(
    plan: Plan,
    leaves: list[Any],
    computed: list[Node],
    spare: frozenset[int] = frozenset(),
    taken: set[int] | None = None,
) -> list[Any]:
    """The values of the plan's outputs. `computed` are the nodes that the plan stands for, for messages.

    `spare` are the leaves whose memory nobody else holds: a result may take it over. Those that were end in `taken`.
    Raises `RealizeError` with the op and the script's line when a kernel fails.
    """
    with _one_at_a_time:
        return _Run(plan, leaves, computed, spare, set() if taken is None else taken).run()


class _Run:
    def __init__(
        self, plan: Plan, leaves: list[Any], computed: list[Node], spare: frozenset[int], taken: set[int]
    ) -> None:
        self.plan, self.computed, self.spare, self.taken = plan, computed, spare, taken
        self.values = [*leaves, *plan.constants, *[None] * len(plan.steps)]

    def run(self) -> list[Any]:
        plan, values = self.plan, self.values
        _arena.at_least(plan.memory.arena_bytes)
        device = ""
        with ExitStack() as active:
            for step in plan.steps:
                if step.spec.device != device:
                    device = step.spec.device
                    active.close()
                    backend = backend_of(device)
                    xp = backend.array_module
                    active.enter_context(backend.running())
                arguments = [values[slot] for slot in step.inputs]
                try:
                    values[step.output] = self._compute(step, xp, arguments)
                except FuelError:
                    raise
                except Exception as reason:
                    raise _failure(step, arguments, self.computed[step.origin], reason) from reason
                for slot in step.dies:
                    values[slot] = None
        return [values[slot] for slot in plan.outputs]

    def _compute(self, step: Step, xp: Any, arguments: list[Any]) -> Any:
        op = step.op
        if not step.places:
            return step.kernel(xp, arguments, *step.attrs) if op.variadic else step.kernel(xp, *arguments, *step.attrs)
        if op is REGION:
            outputs = [self._memory(place) for place in step.places]
            region_into(xp, outputs, arguments, *step.attrs)
            return tuple(outputs)
        out = self._memory(step.places[0])
        if op.into is None:
            getattr(xp, op.ufunc)(*arguments, out=out)
        elif op.variadic:
            op.into(xp, out, arguments, *step.attrs)
        else:
            op.into(xp, out, *arguments, *step.attrs)
        return out

    def _memory(self, place: Place) -> Any:
        if place.offset >= 0:
            return _arena.view(place)
        if place.leaf in self.spare:
            self.taken.add(place.leaf)
            return self.values[place.leaf].reshape(place.spec.shape)
        return np.empty(place.spec.shape, dtype=place.spec.dtype)


def _failure(step: Step, arguments: list[Any], node: Node, reason: Exception) -> RealizeError:
    inputs = ", ".join(f"{a.dtype.name}{list(a.shape)}" if hasattr(a, "dtype") else str(a) for a in arguments)
    what = f"{step.op.name}({inputs}) -> {step.spec} failed: {type(reason).__name__}: {reason}"
    if isinstance(reason, MemoryError):
        what += f" (the result alone needs {step.spec.nbytes / 2**20:.0f} MiB)"
    return RealizeError(f"{what}\n  built at {describe_line(node.line)}")
