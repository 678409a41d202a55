"""The collectives of the ranks of one node, through the memory that they share. Arrays are flat.

They go piece by piece, so that what passes through shared memory stays in cache:

    turn      t                t+1
    piece i   handed in        reduced
    piece i+1                  handed in

with one `meet` between two turns. Pieces of even and odd turns have memory of their own: a rank that is ahead writes
where nobody reads any more. All-reduces in place are in `shared_reduction`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuel_parallel.comm.node_memory import SLOT_BYTES
from fuel_parallel.comm.reduction import Host, reduce_into

if TYPE_CHECKING:
    from fuel_parallel.comm.communicator import ReduceOp
    from fuel_parallel.comm.node_memory import NodeMemory


def all_reduce_small(memory: NodeMemory, x: Host, op: ReduceOp, result: Host) -> None:
    """The reduction of all ranks' arrays, all of it on each rank; `result` may be `x`."""
    size = x.size
    slots = memory.slots(x.dtype)[memory.turn % 2]
    slots[memory.rank][:size] = x
    memory.meet()
    reduce_into(result, [slot[:size] for slot in slots], op)


def reduce_scatter(memory: NodeMemory, x: Host, op: ReduceOp, sections: list[range], result: Host) -> None:
    """`result` is my section of the reduction; the sections cover the array one after the other.

    Where an array lies in shared memory is known after the first meeting; it is then not handed in, but read there.
    """
    way = _Scattered(memory, x, result, op, sections)
    inside = memory.has_windows and memory.publish(x)
    if not inside:
        way.hand_in(0)
    memory.meet()
    if memory.has_windows:
        way.inputs = memory.published(x.size, x.dtype)
    for turn in range(1, way.count + 1):
        if turn < way.count and not inside:
            way.hand_in(turn)
        way.reduce(turn - 1)
        if turn < way.count:
            memory.meet()
    if any(array is not None for array in way.inputs):
        memory.meet()  # before that, who owns such an array may not write into it


class _Scattered:
    """How the pieces of an array go through shared memory; each method is for one piece, in its turn.

    Each rank hands in the sections of the others, and reduces its own: `result` is that section. `inputs[r]` is the
    array of rank r where that lies in shared memory; None where it is handed in.
    """

    def __init__(self, memory: NodeMemory, x: Host, result: Host, op: ReduceOp, sections: list[range]) -> None:
        self.memory, self.x, self.result, self.op = memory, x, result, op
        self.slots = memory.slots(x.dtype)
        self.inputs: list[Host | None] = [None] * memory.ranks
        self.sections = sections
        self.step = memory.piece_bytes // x.itemsize
        self.count = -(-max(map(len, sections)) // self.step)

    def hand_in(self, piece: int) -> None:
        """Copies what others need to where they find it."""
        slot = self.slots[self.memory.turn % 2][self.memory.rank]
        for rank in _others(self.memory):
            start, stop = _bounds(self.sections[rank], self.step, piece)
            place = rank * self.step
            slot[place : place + stop - start] = self.x[start:stop]

    def reduce(self, piece: int) -> None:
        """Reduces what was handed in the turn before."""
        mine = self.memory.rank
        section = self.sections[mine]
        start, stop = _bounds(section, self.step, piece)
        place = mine * self.step
        slots = self.slots[(self.memory.turn - 1) % 2]
        arrays = [
            slot[place : place + stop - start] if array is None else array[start:stop]
            for slot, array in zip(slots, self.inputs, strict=True)
        ]
        arrays[mine] = self.x[start:stop]
        reduce_into(self.result[start - section.start : stop - section.start], arrays, self.op)


def all_gather(memory: NodeMemory, x: Host, sections: list[range], result: Host) -> None:
    """`result` has the arrays of all ranks, that of rank r in `sections[r]`."""
    mine = sections[memory.rank]
    own = result[mine.start : mine.stop]
    step = SLOT_BYTES // 2 // x.itemsize
    count = -(-max(map(len, sections)) // step)
    for turn in range(count + 1):
        if turn < count:
            piece = x[turn * step : (turn + 1) * step]
            memory.slots(x.dtype)[memory.turn % 2][memory.rank][: piece.size] = piece
            if own is not x:
                own[turn * step : (turn + 1) * step] = piece
        if turn >= 1:
            slots = memory.slots(x.dtype)[(memory.turn - 1) % 2]
            for rank in _others(memory):
                start, stop = _bounds(sections[rank], step, turn - 1)
                result[start:stop] = slots[rank][: stop - start]
        if turn < count:
            memory.meet()


def broadcast(memory: NodeMemory, x: Host, root: int) -> None:
    """`x` of rank `root` of the node into that of the others."""
    step = SLOT_BYTES // 2 // x.itemsize
    count = -(-x.size // step)
    for turn in range(count + 1):
        if turn < count and memory.rank == root:
            piece = x[turn * step : (turn + 1) * step]
            memory.slots(x.dtype)[memory.turn % 2][root][: piece.size] = piece
        if turn >= 1 and memory.rank != root:
            piece = x[(turn - 1) * step : turn * step]
            piece[...] = memory.slots(x.dtype)[(memory.turn - 1) % 2][root][: piece.size]
        if turn < count:
            memory.meet()


def _bounds(section: range, step: int, piece: int) -> tuple[int, int]:
    """Where a piece of a section begins and ends; a section that is one element shorter may have none."""
    start = min(section.start + piece * step, section.stop)
    return start, min(start + step, section.stop)


def _others(memory: NodeMemory) -> list[int]:
    """The other ranks, the next one first, so that not all go to the same."""
    return [(memory.rank + i) % memory.ranks for i in range(1, memory.ranks)]
