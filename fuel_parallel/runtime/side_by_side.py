"""Runs a plan whose work lies in lanes: several threads, and copies that devices do in their own time.

The realizing thread does its tasks like anybody else, and then waits for the other threads: none of them touches
anything once a run is over.

Where a step fails, those before it in the plan are still done, and none after it is begun. So what is raised is what
one thread would have raised, and ranks on which the same step fails have begun the same collectives: a collective waits
for all steps before it that other threads do. An interrupt stops every thread after the step that it is at.
"""

from __future__ import annotations

import contextlib
import threading
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol

from fuel_parallel.backends import backend_of, device_of
from fuel_parallel.backends.backend import Departure
from fuel_parallel.runtime.lanes import HOST, Lanes, Task
from fuel_parallel.runtime.plan import Plan, Step
from fuel_parallel.runtime.trace import Compute
from fuel_parallel.runtime.workers import leave, workers

BETWEEN_PROGRESS = 0.001
"""Seconds between two times that a thread which waits for others drives its collectives forward."""


class Run(Protocol):
    """A run of a plan, as far as threads need it."""

    plan: Plan
    values: list[Any]
    under_way: dict[int, Any]

    def compute_on(self, thread: str) -> Compute:
        """What a thread computes its steps with."""

    def noted(self, thread: str, compute: Compute) -> Compute:
        """The same, with a note in the trace where there is one."""

    def progress(self) -> None:
        """Drives collectives forward."""

    def finish(self, slots: tuple[int, ...]) -> None:
        """Ends collectives."""

    def do(self, step: Step, xp: Any, compute: Compute) -> None:
        """Runs one step by `compute`; a failure names the line of the script."""

    def abandon(self) -> None:
        """Others are left at work: nobody else may use the memory of the run."""


def run_side_by_side(run: Run, lanes: Lanes) -> bool:
    """Runs all tasks; False, and nothing done, where no thread can be started any more.

    Raises the failure of the step that comes first in the plan, among those that failed.
    """
    names = [name for name in lanes.threads if name != HOST]
    others = workers(names)
    if others is None:
        return False
    together = _Together(run, lanes)
    for name, worker in zip(names, others, strict=True):
        # In the caller's context: numpy's errstate is in it.
        worker.give(partial(copy_context().run, together.do_other, name))
    together.do_own()
    return True


class _Together:
    """What the threads of a run share."""

    def __init__(self, run: Run, lanes: Lanes) -> None:
        self.run, self.lanes = run, lanes
        self.departures: dict[int, Departure] = {}
        self.changed = threading.Condition()
        # What follows is changed by who holds `changed`.
        self.done: set[int] = set()
        self.busy = len(lanes.threads) - 1
        self.sharers = dict(lanes.sharers)
        self.failures: list[tuple[int, BaseException]] = []
        self.end = len(run.plan.steps)

    def do_own(self) -> None:
        """The realizing thread's part, until all others have ended."""
        self._do_all(HOST)
        self._join()
        for departure in self.departures.values():
            with contextlib.suppress(Exception) if self.failures else contextlib.nullcontext():
                departure.wait()
        self.departures.clear()
        if self.failures:
            raise min(self.failures, key=lambda failure: failure[0])[1]

    def do_other(self, name: str) -> None:
        """Another thread's part."""
        self._do_all(name)
        with self.changed:
            self.busy -= 1
            self.changed.notify_all()

    def _do_all(self, name: str) -> None:
        try:
            _Thread(self, name).do_all()
        except BaseException as reason:  # an interrupt between two steps
            self.fail(-1, reason)

    def fail(self, step: int, reason: BaseException) -> None:
        """Notes a failure, and that no step from this one on is to be done; an interrupt comes before all steps."""
        with self.changed:
            at = step if isinstance(reason, Exception) else -1
            self.failures.append((at, reason))
            self.end = min(self.end, at)
            self.changed.notify_all()

    def _join(self) -> None:
        """Waits for all others; a second interrupt leaves them alone."""
        while True:
            try:
                with self.changed:
                    self.changed.wait_for(lambda: not self.busy)
                return
            except KeyboardInterrupt as reason:
                again = any(isinstance(failure, KeyboardInterrupt) for _, failure in self.failures)
                self.fail(-1, reason)
                if again:
                    leave()
                    self.run.abandon()
                    return

    # For the threads.

    def wait_for(self, tasks: tuple[int, ...], step: int, drive: bool) -> None:
        """Returns when tasks of others have ended, or `step` is not to be done; meanwhile may drive collectives."""
        while True:
            with self.changed:
                over = self.changed.wait_for(
                    lambda: self.end <= step or self.done.issuperset(tasks), BETWEEN_PROGRESS if drive else None
                )
            if over:
                return
            self.run.progress()

    def ended(self, number: int) -> None:
        """Says that a task for which others wait has ended."""
        with self.changed:
            self.done.add(number)
            self.changed.notify_all()

    def let_go(self, slots: tuple[int, ...]) -> None:
        """Lets go of values; of those that several threads read, the last one does."""
        for slot in slots:
            if slot in self.lanes.sharers:
                with self.changed:
                    self.sharers[slot] -= 1
                    if self.sharers[slot]:
                        continue
            self.run.values[slot] = None


class _Thread:
    """One thread of a run."""

    def __init__(self, together: _Together, name: str) -> None:
        self.together, self.run, self.name = together, together.run, name
        self.compute = self.run.noted(name, self.run.compute_on(name))
        self.depart = self.run.noted(name, self._depart)
        self.device = ""

    def do_all(self) -> None:
        """Does the tasks of this thread in their order, but for those behind a failure."""
        together, run, is_host = self.together, self.run, self.name == HOST
        with ExitStack() as active:
            for number in together.lanes.threads[self.name]:
                task = together.lanes.tasks[number]
                try:
                    if task.joins:
                        together.wait_for(task.joins, task.step, is_host and bool(run.under_way))
                    if task.step >= together.end:
                        continue
                    self._do(task, active)
                    if number in together.lanes.awaited:
                        together.ended(number)
                    if is_host and run.under_way:
                        run.progress()
                except BaseException as reason:
                    together.fail(task.step, reason)
            if is_host and not together.failures:
                try:
                    run.finish(tuple(run.under_way))
                except BaseException as reason:
                    together.fail(together.end, reason)

    def _do(self, task: Task, active: ExitStack) -> None:
        run, step = self.run, self.run.plan.steps[task.step]
        for slot in task.arrivals:
            self._wait_for_copy(slot)
        if task.finishes:
            run.finish(task.finishes)
        if not task.runs:
            return
        if step.spec.device != self.device:
            active.close()
            self.device = step.spec.device
            active.enter_context(backend_of(self.device).running())
        for slot in task.behind:
            if (departure := self.together.departures.get(slot)) is not None:
                departure.hold_up()
        run.do(step, backend_of(self.device).array_module, self.depart if task.goes_out else self.compute)
        self.together.let_go(task.dies)

    def _depart(self, step: Step, xp: Any, arguments: list[Any]) -> Any:
        departure = backend_of(device_of(arguments[0])).depart(arguments[0])
        self.together.departures[step.output] = departure
        return departure.host

    def _wait_for_copy(self, slot: int) -> None:
        departures = self.together.departures
        # Two threads may wait for one copy: it is noted as under way until it is there.
        if (departure := departures.get(slot)) is not None:
            departure.wait()
            departures.pop(slot, None)
