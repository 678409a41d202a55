"""Graphs: stretches of a plan that a device has captured run by one launch instead of one for each kernel.

A stretch is a run of steps of one device that wait neither for the host nor for other ranks (`Backend.captures`). The
first run of a plan compiles its kernels; the second captures each stretch that is long enough to pay; later ones launch
the graph. Before each launch the plan makes sure that all that the graph reads is where it was:

- Leaves and earlier results that were in one place in both runs are read there. So parameters and the state of an
  optimizer, which are updated in place, cost nothing.
- Those that were not, such as batches, are copied into memory of the graph before the launch, if they are small.
- If something else has moved, or other leaves are free to be taken over, the steps run one by one, and are captured
  anew when that has settled; what does not settle is left alone.

Results that leave the plan are copies, but for those that took over the memory of a leaf: no launch changes what
somebody holds. A step that fails while it is captured is left out from then on, and the stretch goes around it.

A plan with graphs runs its steps in order, also where it has lanes, as long as one thread does all of them: a launch
less a kernel is worth more than a copy to the host that goes on beside. `FUEL_CUDA_GRAPHS=0` turns graphs off, and so
does a trace, which wants the time of each kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fuel_parallel.backends import backend_of
from fuel_parallel.backends.backend import Backend
from fuel_parallel.lazy.node import Spec
from fuel_parallel.runtime.arena import arena_of
from fuel_parallel.runtime.region import ITEM, REGION
from fuel_parallel.runtime.stretch import Graph, NotLaunched, Run, Situation, Stretch, keep_few, kernels, made_of

if TYPE_CHECKING:
    from fuel_parallel.runtime.plan import Step

VARIABLE = "FUEL_CUDA_GRAPHS"
LEAST_STEPS = 8
"""Kernels of a stretch at least: with fewer there is little to save."""
MOST_TRIES = 8
"""How often a stretch is captured anew because something has moved, or no longer does."""
MOST_UNSETTLED = 4
"""For how many runs what is large, or free to be taken over, may lie elsewhere in each; then it is not waited for."""
BYTES_A_STEP = 1 << 20
"""What may be copied for each step that is saved: some microseconds, which is what starting a kernel takes."""


def graphs_are_on() -> bool:
    """Whether `FUEL_CUDA_GRAPHS` leaves graphs on."""
    return os.environ.get(VARIABLE, "").strip() != "0"


class Captures:
    """The stretches of one plan. `reasons` say what is not in a graph, and why."""

    def __init__(self, steps: Sequence[Step], leaves: int, outputs: Sequence[int], specs: Sequence[Spec]) -> None:
        self.steps, self.leaves, self.outputs = tuple(steps), leaves, frozenset(outputs)
        self._escaping = _escaping(steps, outputs)
        self.reasons: list[str] = []
        self._allowed = [_may_capture(step, specs) for step in steps]
        self.stretches = self._find()

    def rest(self, run: Run) -> Iterator[Step]:
        """Launches graphs in their turns, and gives the steps that are in none."""
        at = 0
        for stretch in self.stretches:
            yield from self.steps[at : stretch.first]
            if not self._run(stretch, run):
                yield from stretch.steps
            at = stretch.first + len(stretch.steps)
        yield from self.steps[at:]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.stretches), *[f"not in a graph: {reason}" for reason in self.reasons]])

    def _run(self, stretch: Stretch, run: Run) -> bool:
        """Runs a stretch by its graph; False, and nothing is done, if there is none that fits."""
        if stretch.given_up:
            return False
        backend = backend_of(stretch.device)
        with backend.running():
            now = stretch.situation(run, backend)
            graph = stretch.graph
            stretch.note(now)
            if graph is None or not graph.fits(now) or stretch.steady():
                graph = self._anew(stretch, run, backend, now)
            if graph is None:
                return False
            try:
                graph.launch(run, backend.array_module)
            except NotLaunched as reason:
                if isinstance(reason.__cause__, MemoryError):
                    stretch.graph = None  # the kernels may find room, and a later run may capture again
                else:
                    self._give_up(stretch, f"its launch failed: {reason}")
                return False
        for step in stretch.steps:
            _let_go(run, step)
        return True

    def _anew(self, stretch: Stretch, run: Run, backend: Backend, now: Situation) -> Graph | None:
        """A graph for the situation, if that has settled; else there is none from now on, or not yet."""
        if not stretch.has_settled:
            return None
        moving = stretch.moving()
        moved = [run.values[slot] for slot in moving]
        has_gaps = any(isinstance(value, tuple) or not value.flags.c_contiguous for value in moved)
        waits = has_gaps or not moving.isdisjoint(now.spare)
        waits = waits or sum(value.nbytes for value in moved) > BYTES_A_STEP * stretch.work
        stretch.unsettled += waits
        if waits and stretch.unsettled == MOST_UNSETTLED:
            self._give_up(stretch, "what it reads is large, has gaps or is replaced, and lies elsewhere in each run")
        elif stretch.tries >= MOST_TRIES:
            if stretch.graph is not None and stretch.graph.fits(now):
                return stretch.graph
            self._give_up(stretch, f"something else has moved after each of {MOST_TRIES} captures")
        elif not waits:
            stretch.tries, stretch.graph = stretch.tries + 1, None
            return self._capture(stretch, run, backend, now, moving)
        return None

    def _capture(
        self, stretch: Stretch, run: Run, backend: Backend, now: Situation, moving: frozenset[int]
    ) -> Graph | None:
        """The graph of a stretch; None if it cannot be captured. The run is left as it was."""
        before = {slot: run.values[slot] for slot in stretch.reads}
        spare, taken, new_bytes = run.spare, set(run.taken), run.new_bytes
        at: Step | None = None
        xp = backend.array_module
        buffers: dict[int, Any] = {}

        def work() -> None:
            nonlocal at
            for slot in moving:
                buffers[slot] = run.values[slot] = xp.empty(before[slot].shape, dtype=before[slot].dtype)
            for at in stretch.steps:
                run.do(at, xp)
                _let_go(run, at)
            at = None

        run.spare = spare - moving
        try:
            recording = backend.record(work)
            fixed = {slot: value for slot, value in before.items() if slot not in moving}
            arena, escaping = arena_of(stretch.device).addresses, self._escaping
            made = [made_of(s, run.values[s], fixed, backend, arena, s in escaping) for s in stretch.leaving]
            stretch.graph = Graph(recording, now.without(moving), buffers, made, frozenset(run.taken - taken))
            keep_few(stretch)
        except Exception as error:
            self._leave_out(stretch, at, error)
        finally:
            run.spare, run.new_bytes = spare, new_bytes
            run.taken.clear()
            run.taken.update(taken)
            for step in stretch.steps:
                run.values[step.output] = None
            for slot, value in before.items():
                run.values[slot] = value
        return stretch.graph

    def _leave_out(self, stretch: Stretch, at: Step | None, error: Exception) -> None:
        """After a failed capture: from now on the stretch goes around the step that failed."""
        cause = error.__cause__ or error
        why = f"{type(cause).__name__}: {cause}"
        if at is None or isinstance(cause, MemoryError):
            self._give_up(stretch, why)
            return
        self.reasons.append(f"{at.op.name} (%{at.output}), {why}")
        self._allowed[at.output - self.steps[0].output] = False
        known = {(one.first, len(one.steps)): one for one in self.stretches if one is not stretch}
        self.stretches = [known.get((one.first, len(one.steps)), one) for one in self._find()]

    def _give_up(self, stretch: Stretch, why: str) -> None:
        stretch.graph, stretch.given_up = None, True
        self.reasons.append(f"%{stretch.steps[0].output} to %{stretch.steps[-1].output}, {why}")

    def _find(self) -> list[Stretch]:
        """The stretches between steps that may not be captured."""
        found: list[Stretch] = []
        first = 0
        for position in range(len(self.steps) + 1):
            here = self.steps[first].spec.device if first < len(self.steps) else ""
            if position < len(self.steps) and self._allowed[position] and self.steps[position].spec.device == here:
                continue
            between = self.steps[first:position]
            if kernels(between) >= LEAST_STEPS:
                found.append(self._stretch(first, between))
            starts = position < len(self.steps) and self._allowed[position]
            first = position if starts else position + 1
        return found

    def _stretch(self, first: int, steps: tuple[Step, ...]) -> Stretch:
        made = {step.output for step in steps}
        reads = dict.fromkeys(slot for step in steps for slot in step.inputs if slot not in made)
        after = {slot for step in self.steps[first + len(steps) :] for slot in step.inputs} | self.outputs
        over = {place.leaf for step in steps for place in step.places if place.leaf >= 0}
        over |= {step.inputs[0] for step in steps if step.updates and step.inputs[0] < self.leaves}
        return Stretch(first, steps, tuple(reads), tuple(sorted(made & after)), frozenset(over), self.leaves)


def _let_go(run: Run, step: Step) -> None:
    for slot in step.dies:
        run.values[slot] = None


def _may_capture(step: Step, specs: Sequence[Spec]) -> bool:
    op, backend = step.op, backend_of(step.spec.device)
    if not backend.graphs or op.start or op.crosses_ranks or op.has_effect or step.finishes:
        return False
    if any(specs[slot].device != step.spec.device for slot in step.inputs):
        return False  # what reads values of the host to launch, as a kernel on pages does, launches otherwise each time
    if op is REGION or op is ITEM or op.elementwise or step.kernel is not op.kernel:  # the last is a kernel in C
        return True
    return backend.captures(op.name, [specs[slot] for slot in step.inputs], step.attrs)


def _escaping(steps: Sequence[Step], outputs: Sequence[int]) -> frozenset[int]:
    """The slots whose memory may be seen in what leaves the plan."""
    found = set(outputs)
    for step in reversed(steps):
        if step.output in found and not step.places and (step.op.aliases or step.updates or step.reuses):
            found.update(step.inputs)
    return frozenset(found)
