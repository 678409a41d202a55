"""The memory plan: where each value of a plan lives.

Values that live and die within a plan get offsets in one arena of bytes for each device, found from their lifetimes:
two values whose lifetimes do not overlap may share bytes, whatever their dtypes. An arena is kept from run to run, so
that a training step touches no new page of the host, and on a device finds each value where it was in the step before.
Devices that cannot write into given memory (`Backend.writes`) have none. What an all-reduce works on in place lies in a
bucket instead, see `buckets`. What leaves the plan gets memory of its own, or takes over that of a leaf which dies
there (a parameter's new value replaces the old one in place).

An instruction that goes on while others run reads its inputs until it ends.

What changes some elements of a value (`Op.update`) does so in place, on any device, where that value is a leaf which
nobody else holds or was made by another such op, and is not read again. So a step that writes a few rows of a large
variable costs those rows.

Only kernels that write into given memory take part. Any other is assumed to give a view of its inputs, which then live
as long as its result, unless the op says that it never does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fuel_parallel.backends import backend_of
from fuel_parallel.comm.collectives import ALL_REDUCE
from fuel_parallel.lazy.dtypes import is_half
from fuel_parallel.lazy.node import Spec
from fuel_parallel.lazy.ops.manipulation import CONCAT
from fuel_parallel.runtime.buckets import Bucket, may_hold
from fuel_parallel.runtime.codegen.launch import replaceable
from fuel_parallel.runtime.graph import Graph, Instruction
from fuel_parallel.runtime.kernels import kernel_of
from fuel_parallel.runtime.program import reusable
from fuel_parallel.runtime.region import ITEM, REGION

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where one result goes: to an offset of the arena or of a bucket, or (offset -1) to memory of its own.

    `leaf` is the number of a leaf whose memory it takes over if nobody else holds it, `bucket` that of a bucket, or -1.
    `over` says that it lies where an input of its instruction lay.
    """

    spec: Spec
    offset: int = -1
    leaf: int = -1
    bucket: int = -1
    over: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """For each instruction the places of its results; none for instructions whose kernel makes its own memory.

    `joined` are the positions of instructions that put a bucket together, `updates` those that may write over their
    first input, a leaf only if nobody else holds it.
    """

    places: tuple[tuple[Place, ...], ...]
    arenas: Mapping[str, int]
    """Bytes of the arenas, by device."""
    leaving_bytes: int
    """Bytes of results that outlive the plan, and of buckets."""
    buckets: tuple[Bucket, ...] = ()
    joined: frozenset[int] = frozenset()
    updates: frozenset[int] = frozenset()

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arenas."""
        return sum(self.arenas.values())


@dataclass(eq=False, slots=True)
class _Allocation:
    """`reads` are the positions that read it, and until when each does."""

    spec: Spec
    first: int
    last: int
    reads: list[tuple[int, int]] = field(default_factory=list)
    escapes: bool = False
    leaf: int = -1
    bucket: int = -1
    offset: int = -1
    nbytes: int = 0
    replaces: _Allocation | None = None

    @property
    def root(self) -> _Allocation:
        """The first of those that lie in this memory one after the other."""
        first = self
        while first.replaces is not None:
            first = first.replaces
        return first


def plan_memory(graph: Graph, ends: Mapping[int, int] | None = None) -> MemoryPlan:
    """The memory plan of a graph whose instructions run in order; those in `ends` go on until a later position."""
    ends = ends or {}
    owners, results = _allocations(graph, ends)
    for number in graph.outputs:
        for allocation in owners[number]:
            allocation.escapes = True
    buckets, joined = _place_in_buckets(graph, owners)
    _take_over(graph, owners, results)
    updates = frozenset(_updates_in_place(graph, owners))
    made = [a for allocations in results for a in allocations]
    inside = [a for a in made if not a.escapes and a.bucket < 0 and a.replaces is None]
    devices = dict.fromkeys(a.spec.device for a in inside)
    arenas = {device: _assign_offsets([a for a in inside if a.spec.device == device]) for device in devices}
    places = tuple(
        tuple(
            Place(a.spec, a.root.offset, a.leaf, a.bucket, a.leaf >= 0 or a.replaces is not None) for a in allocations
        )
        for allocations in results
    )
    leaving = sum(a.nbytes for a in made if a.escapes) + sum(bucket.nbytes for bucket in buckets)
    return MemoryPlan(places, arenas, leaving, tuple(buckets), frozenset(joined), updates)


def _place_in_buckets(graph: Graph, owners: list[set[_Allocation]]) -> tuple[list[Bucket], set[int]]:
    """Buckets for the all-reduces, and the positions of what puts them together."""
    buckets: list[Bucket] = []
    joined: set[int] = set()
    for position, i in enumerate(graph.instructions):
        if i.op is not ALL_REDUCE or not may_hold(i.spec):
            continue
        whole = _alone(owners[i.inputs[0]], i.spec, position)
        if whole is None:
            continue
        whole.bucket, whole.offset = len(buckets), 0
        maker = graph.instructions[whole.first]
        if maker.op is CONCAT and maker.attrs == (0,):
            joined.add(whole.first)
            offset = 0
            for value in maker.inputs:
                spec = graph.spec_of(value)
                part = _alone(owners[value], spec, whole.first)
                if part is not None:
                    part.bucket, part.offset = whole.bucket, offset
                offset += spec.nbytes
        buckets.append(Bucket(i.attrs[0], i.spec.nbytes, position))
    return buckets, joined


def _alone(owners: set[_Allocation], spec: Spec, reader: int) -> _Allocation | None:
    """The allocation that is as large as the value, made for it, and not read after `reader` has begun; else None."""
    if len(owners) != 1:
        return None
    (found,) = owners
    if found.escapes or found.leaf >= 0 or found.bucket >= 0 or found.nbytes != spec.nbytes:
        return None
    return found if all(position == reader or end <= reader for position, end in found.reads) else None


def _allocations(graph: Graph, ends: Mapping[int, int]) -> tuple[list[set[_Allocation]], list[list[_Allocation]]]:
    """For each value the allocations it may lie in, and for each instruction the allocations it makes."""
    owners: list[set[_Allocation]] = [{_Allocation(spec, -1, -1)} for spec in graph.leaves]
    owners += [set() for _ in graph.constants]
    results: list[list[_Allocation]] = []
    region_of: dict[int, list[_Allocation]] = {}
    for position, i in enumerate(graph.instructions):
        number = graph.first + position
        for value in i.inputs:
            for allocation in owners[value]:
                end = ends.get(position, position)
                allocation.reads.append((position, end))
                allocation.last = max(allocation.last, end)
        made: list[_Allocation] = []
        if writes_into(i, graph):
            made = [_Allocation(spec, position, position, nbytes=spec.nbytes) for spec in result_specs(i)]
        results.append(made)
        if i.op is REGION:
            region_of[number] = made
            owners.append(set(made))
        elif i.op is ITEM and region_of.get(i.inputs[0]):
            owners.append({region_of[i.inputs[0]][i.attrs[0]]})
        elif i.op.update is not None:
            # Memory of its own, as far as others are concerned: that of its input if this is the last to read it.
            owners.append({_Allocation(i.spec, position, position)})
        elif made or not i.op.aliases:
            owners.append(set(made))
        else:
            owners.append(set().union(*(owners[v] for v in i.inputs)))
    return owners, results


def writes_into(i: Instruction, graph: Graph) -> bool:
    """Whether the instruction's kernel can write into given memory."""
    if not backend_of(i.spec.device).writes or i.op.update is not None:
        return False
    if i.op.crosses_ranks and i.spec.device != "cpu":
        return False  # transports take memory on the streams on which they work
    if i.op is REGION:
        return True
    if i.spec.device != "cpu":
        inputs = [graph.spec_of(value) for value in i.inputs]
        if kernel_of(i.op, inputs, i.attrs, i.spec) is not i.op.kernel:
            return False  # a kernel in C, which makes its own memory
    return (i.op.into is not None or i.op.ufunc != "") and not is_half(i.spec.dtype) and i.spec.size > 0


def result_specs(i: Instruction) -> list[Spec]:
    """The specs of what an instruction makes: one, or those of all values that leave a region."""
    if i.op is not REGION:
        return [i.spec]
    program = i.attrs[0]
    return [Spec(shape, program.dtype_of(register), i.spec.device) for register, shape in program.outputs]


def _take_over(graph: Graph, owners: list[set[_Allocation]], results: list[list[_Allocation]]) -> None:
    """Lets results replace inputs that are read for the last time there, block by block or element by element.

    Memory is read and written once where it would else be read from one place and written to another.
    """
    dense = _dense_values(graph, results)
    for position, i in enumerate(graph.instructions):
        made = results[position]
        if not made or not (i.op is REGION or i.op.ufunc):
            continue
        read = Counter(a for v in i.inputs for a in owners[v])
        free: dict[int, _Allocation] = {}
        for register, value in enumerate(i.inputs):
            if value in dense and len(owners[value]) == 1:
                (allocation,) = owners[value]
                dies = allocation.last == position and not allocation.escapes and allocation.bucket < 0
                if dies and read[allocation] == 1:
                    free[register] = allocation
        # What leaves the plan may lie in a leaf's memory, and what does not in the arena's.
        leaves = {register for register in free if i.inputs[register] < len(graph.leaves)}
        others = free.keys() - leaves
        allowed = [leaves if a.escapes else others if a.bucket < 0 else set() for a in made]
        for output, register in _pairs(graph, i, allowed):
            if register in leaves:
                made[output].leaf = i.inputs[register]
            else:
                made[output].replaces = free[register]
                free[register].root.last = made[output].last


def _updates_in_place(graph: Graph, owners: list[set[_Allocation]]) -> Iterator[int]:
    """The positions of instructions that may write their result over their first input."""
    own = set(range(len(graph.leaves)))
    for number, i in enumerate(graph.instructions, graph.first):
        if i.op.update is None:
            continue
        position, value = number - graph.first, i.inputs[0]
        if value in own:
            (allocation,) = owners[value]
            reads = [end for _, end in allocation.reads if end >= position]
            if reads == [position] and not allocation.escapes:
                yield position
        own.add(number)


def _pairs(graph: Graph, i: Instruction, free: Sequence[set[int]]) -> list[tuple[int, int]]:
    """Pairs (result, input register) of which the result may be written over the input; `free` as in `reusable`."""
    if i.op is REGION:
        pairs = reusable(i.attrs[0], free)
        return pairs if i.spec.device == "cpu" else [pair for pair in pairs if pair in replaceable(i.attrs[0])]
    return next(([(0, r)] for r in sorted(free[0]) if graph.spec_of(i.inputs[r]) is i.spec), [])


def _dense_values(graph: Graph, results: list[list[_Allocation]]) -> set[int]:
    """Values that lie in all of their memory in the order of their elements: leaves, and what is no view of a part."""
    dense = set(range(len(graph.leaves)))
    for number, (i, made) in enumerate(zip(graph.instructions, results, strict=True), graph.first):
        if (
            i.op is ITEM
            or (made and i.op is not REGION)
            or (i.op.name == "reshape" and graph.first <= i.inputs[0] in dense)
        ):
            dense.add(number)
    return dense


def _assign_offsets(allocations: Sequence[_Allocation]) -> int:
    """First fit, the largest first; returns the bytes of the whole."""
    placed: list[_Allocation] = []
    total = 0
    for a in sorted(allocations, key=lambda a: (-a.nbytes, a.first)):
        size = -(-a.nbytes // ALIGNMENT) * ALIGNMENT
        start = 0
        for b in placed:
            if b.first <= a.last and a.first <= b.last:
                if b.offset - start >= size:
                    break
                start = max(start, b.offset + -(-b.nbytes // ALIGNMENT) * ALIGNMENT)
        a.offset = start
        total = max(total, start + size)
        placed.append(a)
        placed.sort(key=lambda b: b.offset)
    return total
