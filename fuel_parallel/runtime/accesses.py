"""Which tasks of a plan must come before which: for each what it reads, and what memory it writes.

Two tasks keep their order where one reads the result of the other, or both touch the same memory and one of them writes
it. Memory is named by cells: bytes of the arena, of a bucket, or of a value that lies by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fuel_parallel.lazy.ops.creation import COPY
from fuel_parallel.runtime.region import ITEM, REGION

if TYPE_CHECKING:
    from fuel_parallel.runtime.lanes import Task
    from fuel_parallel.runtime.memory import Place
    from fuel_parallel.runtime.plan import Step


class Cell(NamedTuple):
    """Bytes from `begin` to `end` of some memory: the arena's of a device, a bucket's, or a value's own."""

    memory: tuple[str, object]
    begin: int = 0
    end: int = 1


def needs_of(steps: Sequence[Step], tasks: Sequence[Task], first: int) -> list[set[int]]:
    """For each task the earlier ones that it must come after. Slots from `first` on are those of the steps."""
    cells: list[tuple[Cell, ...]] = [(Cell(("slot", slot)),) for slot in range(first)]
    parts: dict[int, tuple[Cell, ...]] = {}
    copied = {steps[task.step].output for task in tasks if task.goes_out}
    for step in steps:
        # What a copy to the host gives may share memory with its source, but for one that goes on by itself.
        apart = step.op is COPY and (step.spec.device != "cpu" or step.output in copied)
        cells.append((Cell(("slot", step.output)),) if apart else _cells_of(step, cells, parts))
    made_by: dict[int, int] = {}
    noted = _Accesses(tasks)
    needs: list[set[int]] = []
    for number, task in enumerate(tasks):
        done = [steps[slot - first] for slot in task.finishes]
        if task.runs:
            done.append(steps[task.step])
        found = {made_by[slot] for step in done for slot in step.inputs if slot in made_by}
        # All reads before all writes, as a task may do both in one place.
        for step in done:
            for slot in step.inputs:
                found |= noted.read(number, cells[slot])
        for step in done:
            found |= noted.write(number, _written(step, cells))
            made_by[step.output] = number
        found.discard(number)
        needs.append(found)
    return needs


def _cells_of(step: Step, cells: Sequence[tuple[Cell, ...]], parts: dict[int, tuple[Cell, ...]]) -> tuple[Cell, ...]:
    """The cells that a step's result may lie in. `parts` are those of the results of regions, one by one."""
    own = Cell(("slot", step.output))
    if step.op is ITEM and step.inputs[0] in parts:
        return (parts[step.inputs[0]][step.attrs[0]],)
    given = tuple(dict.fromkeys(cell for slot in step.inputs for cell in cells[slot]))
    if step.places:
        placed = tuple(_cell_at(step, part, place) for part, place in enumerate(step.places))
        if step.op is REGION:
            parts[step.output] = placed
        return (*placed, *(given if step.reuses else ()))
    if step.op.update is not None or not step.op.aliases:
        return (own,)  # what was there before an update in place is not read any more
    return (own, *given)


def _cell_at(step: Step, part: int, place: Place) -> Cell:
    if place.bucket >= 0:
        return Cell(("bucket", place.bucket), place.offset, place.offset + place.spec.nbytes)
    if place.offset >= 0:
        return Cell(("arena", step.spec.device), place.offset, place.offset + place.spec.nbytes)
    return Cell(("slot", place.leaf)) if place.leaf >= 0 else Cell(("result", (step.output, part)))


def _written(step: Step, cells: Sequence[tuple[Cell, ...]]) -> Iterable[Cell]:
    if step.places:
        yield from cells[step.output]
    if step.reuses or step.updates:
        yield from cells[step.inputs[0]]


class _Accesses:
    """Who has read and written which cells. Of a lane, whose tasks come in order, only the last one counts."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.noted: dict[tuple[str, object], dict[tuple[int, int, str, bool], int]] = defaultdict(dict)

    def read(self, number: int, cells: Iterable[Cell]) -> set[int]:
        """Notes that a task reads cells. Gives those who have written them."""
        found = set()
        for memory, begin, end in cells:
            noted = self.noted[memory]
            found |= {n for (b, e, _, writes), n in noted.items() if writes and b < end and begin < e}
            noted[begin, end, self.tasks[number].lane, False] = number
        return found

    def write(self, number: int, cells: Iterable[Cell]) -> set[int]:
        """Notes that a task writes cells. Gives those who have touched them, and forgets them where it covers them."""
        found = set()
        for memory, begin, end in cells:
            noted = self.noted[memory]
            found |= {n for (b, e, _, _), n in noted.items() if b < end and begin < e}
            for key in [key for key in noted if begin <= key[0] and key[1] <= end]:
                del noted[key]
            noted[begin, end, self.tasks[number].lane, True] = number
        return found
