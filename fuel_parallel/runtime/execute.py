"""Runs a plan: one kernel after the other, each value let go after its last use.

One plan at a time: who runs one holds the graph's lock, since all plans share the arena. The lanes of a plan over
several devices run side by side, see `side_by_side`.
"""

from __future__ import annotations

import copy
import gc
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuel_parallel.backends import backend_of
from fuel_parallel.comm.announce import announce
from fuel_parallel.errors import FuelError, RealizeError
from fuel_parallel.lazy.node import Node, describe_line
from fuel_parallel.runtime.arena import arena_bytes, arena_of, forget_arenas
from fuel_parallel.runtime.capture import graphs_are_on
from fuel_parallel.runtime.lanes import HOST
from fuel_parallel.runtime.memory import MemoryPlan, Place
from fuel_parallel.runtime.plan import Plan, Step
from fuel_parallel.runtime.region import REGION, region_into
from fuel_parallel.runtime.side_by_side import run_side_by_side
from fuel_parallel.runtime.stretch import graph_bytes, release_graphs
from fuel_parallel.runtime.trace import Compute, recorder


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes of memory: of the last plan that ran, and of what is held now.

    `planned` is what the plan asks for: its part of the arenas and the results that leave it. `peak` is what the run
    took; it is less where results took over the memory of leaves. `arena` is kept from run to run and as large as the
    largest plan needs, on the host and on each device whose kernels write into given memory. `graphs` is what captured
    graphs hold besides, on all devices. Views, and memory that kernels make for themselves, are not counted. `live` is
    the memory of all values that tensors hold at this moment, whichever plan they come from, on all devices.
    """

    planned: int
    peak: int
    arena: int
    live: int
    graphs: int = 0


_last_run: tuple[MemoryPlan, int] = MemoryPlan((), {}, 0), 0
"""The memory of the plan that ran last, and the bytes that it took besides its arenas."""


def memory_stats() -> MemoryStats:
    """The memory of the last plan that ran, and of the tensors that are alive.

    >>> import numpy as np
    >>> import fuel_parallel.lazy as ft
    >>> x = ft.asarray(np.ones((1000, 1000)))
    >>> y = ft.sum(ft.matmul(ft.matmul(x, x), x)).realize()   # two products of 8 MB in the arena, one number leaves
    >>> memory_stats().planned // 8_000_000
    2
    """
    memory, new_bytes = _last_run
    planned, peak = memory.arena_bytes + memory.leaving_bytes, memory.arena_bytes + new_bytes
    return MemoryStats(planned, peak, arena_bytes(), _live_bytes(), graph_bytes())


def _live_bytes() -> int:
    # Found by looking, so that computing does not pay for it; views of one array count once.
    values = [o.value for o in gc.get_objects() if type(o) is Node and o.value is not None]
    wholes = [v if getattr(v, "base", None) is None else v.base for v in values]
    return sum({id(w): int(getattr(w, "nbytes", 0)) for w in wholes}.values())


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
    announce(plan.steps, computed)
    return _Run(plan, leaves, computed, spare, set() if taken is None else taken).run()


class _Run:
    def __init__(
        self, plan: Plan, leaves: list[Any], computed: list[Node], spare: frozenset[int], taken: set[int]
    ) -> None:
        self.plan, self.computed, self.spare, self.taken = plan, computed, spare, taken
        self.new_bytes = 0
        self.others: list[_Run] = []
        self.buckets: dict[int, Any] = {}
        self.under_way: dict[int, tuple[Step, Any]] = {}
        self.values = [*leaves, *plan.constants, *[None] * len(plan.steps)]

    def run(self) -> list[Any]:
        plan, values = self.plan, self.values
        for device, nbytes in plan.memory.arenas.items():
            arena = arena_of(device)
            if arena.nbytes < nbytes:
                release_graphs(device)  # they work on the bytes that are let go
                arena.at_least(nbytes)
            if device != HOST:
                arena.follow()
        by_graphs = plan.captures is not None and not recorder and graphs_are_on()
        if by_graphs or plan.lanes is None or not run_side_by_side(self, plan.lanes):
            self._one_by_one(by_graphs)
        global _last_run
        for other in self.others:
            self.new_bytes += other.new_bytes
        _last_run = plan.memory, self.new_bytes
        if recorder:
            recorder.ran(arena_bytes())
        results = [values[slot] for slot in plan.outputs]
        values.clear()  # a thread that has ended its part may still refer to it
        return results

    def _one_by_one(self, by_graphs: bool) -> None:
        plan, values = self.plan, self.values
        compute = self.noted(HOST, self._compute)
        device = ""
        with ExitStack() as active:
            for step in plan.captures.rest(self) if by_graphs and plan.captures else plan.steps:
                if step.spec.device != device:
                    device = step.spec.device
                    active.close()
                    backend = backend_of(device)
                    xp = backend.array_module
                    active.enter_context(backend.running())
                if step.finishes:
                    self.finish(step.finishes)
                self.do(step, xp, compute)
                for slot in step.dies:
                    values[slot] = None
                if self.under_way:
                    self.progress()
            self.finish(tuple(self.under_way))

    def do(self, step: Step, xp: Any, compute: Compute | None = None) -> None:
        """Runs one step, by `compute` if that is given; what it was the last to read is let go of by the caller."""
        values, compute = self.values, compute or self._compute
        arguments = [values[slot] for slot in step.inputs]
        try:
            values[step.output] = compute(step, xp, arguments)
        except FuelError:
            raise
        except Exception as reason:
            values[step.output] = self._with_room(compute, step, xp, arguments, reason)

    def _with_room(self, compute: Compute, step: Step, xp: Any, arguments: list[Any], reason: Exception) -> Any:
        """The step once more if it found no memory and graphs have some, which they hold for speed only."""
        # What writes over its input, or has begun something with other ranks, is not begun twice.
        once = step.op.update is not None or step.op.crosses_ranks
        if once or not isinstance(reason, MemoryError) or not release_graphs(step.spec.device):
            raise self._failure(step, arguments, reason) from reason
        try:
            return compute(step, xp, arguments)
        except FuelError:
            raise
        except Exception as again:
            raise self._failure(step, arguments, again) from again

    def _compute(self, step: Step, xp: Any, arguments: list[Any]) -> Any:
        op = step.op
        if op.start is not None:
            return self._start(step, xp, arguments)
        if op.update is not None:
            return self._update(step, xp, arguments)
        if not step.places:
            return step.kernel(xp, arguments, *step.attrs) if op.variadic else step.kernel(xp, *arguments, *step.attrs)
        if op is REGION:
            outputs = [self._memory(place) for place in step.places]
            in_place = xp is not np and any(place.over for place in step.places)
            region_into(xp, outputs, arguments, step.attrs[0], in_place)
            return tuple(outputs)
        out = self._memory(step.places[0])
        if op.into is None:
            getattr(xp, op.ufunc)(*arguments, out=out)
        elif op.variadic:
            op.into(xp, out, arguments, *step.attrs)
        else:
            op.into(xp, out, *arguments, *step.attrs)
        return out

    def _start(self, step: Step, xp: Any, arguments: list[Any]) -> Any:
        out = self._memory(step.places[0]) if step.places else None
        pending = step.op.start(xp, *arguments, *step.attrs, reuse=step.reuses, out=out)  # type: ignore[misc]
        if not step.goes_on:
            return pending.wait()
        self.under_way[step.output] = step, pending
        return None

    def _update(self, step: Step, xp: Any, arguments: list[Any]) -> Any:
        leaf = step.inputs[0]
        if step.updates and (leaf >= self.plan.leaves or leaf in self.spare):
            if leaf < self.plan.leaves:
                self.taken.add(leaf)
        else:
            self.new_bytes += step.spec.nbytes
            arguments[0] = xp.array(arguments[0])
        update: Any = step.op.update
        update(xp, arguments, *step.attrs) if step.op.variadic else update(xp, *arguments, *step.attrs)
        return arguments[0]

    def _memory(self, place: Place) -> Any:
        if place.bucket >= 0:
            return self._in_bucket(place)
        if place.offset >= 0:
            return arena_of(place.spec.device).view(place)
        if place.leaf in self.spare:
            self.taken.add(place.leaf)
            array = self.values[place.leaf]
            # The array itself where it fits: a view would not own its memory, and could not be taken over next time.
            return array if array.shape == place.spec.shape else array.reshape(place.spec.shape)
        self.new_bytes += place.spec.nbytes
        return backend_of(place.spec.device).array_module.empty(place.spec.shape, dtype=place.spec.dtype)

    def _in_bucket(self, place: Place) -> Any:
        memory = self.buckets.get(place.bucket)
        if memory is None:
            bucket = self.plan.memory.buckets[place.bucket]
            memory = self.buckets[place.bucket] = bucket.allocate()
            self.new_bytes += bucket.nbytes
        flat = memory[place.offset : place.offset + place.spec.nbytes]
        return flat.view(place.spec.dtype).reshape(place.spec.shape)

    # For threads that run the plan side by side: see `side_by_side.Run`.

    def compute_on(self, thread: str) -> Compute:
        if thread == HOST:
            return self._compute
        other = copy.copy(self)  # counts for itself
        other.new_bytes = 0
        self.others.append(other)
        return other._compute

    def noted(self, thread: str, compute: Compute) -> Compute:
        return recorder.timed(self.plan, self.computed, compute, thread) if recorder else compute

    def progress(self) -> None:
        for _, pending in self.under_way.values():
            pending.progress()

    def finish(self, slots: tuple[int, ...]) -> None:
        """Puts the results of steps that went on where they are read."""
        for slot in slots:
            step, pending = self.under_way.pop(slot)
            try:
                self.values[slot] = pending.wait()
            except FuelError:
                raise
            except Exception as reason:
                raise self._failure(step, [], reason) from reason
            if recorder:
                recorder.went_on(step)

    def abandon(self) -> None:
        for device in forget_arenas():
            release_graphs(device)

    def _failure(self, step: Step, arguments: list[Any], reason: Exception) -> RealizeError:
        inputs = ", ".join(f"{a.dtype.name}{list(a.shape)}" if hasattr(a, "dtype") else str(a) for a in arguments)
        what = f"{step.op.name}({inputs}) -> {step.spec} failed: {type(reason).__name__}: {reason}"
        if isinstance(reason, MemoryError):
            what += f" (the result alone needs {step.spec.nbytes / 2**20:.0f} MiB)"
        return RealizeError(f"{what}\n  built at {describe_line(self.computed[step.origin].line)}")
