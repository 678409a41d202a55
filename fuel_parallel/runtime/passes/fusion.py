"""Fusion: elementwise operations, and reductions and normalizations along rows, become regions.

Instructions are taken in order. One that can lie over the grid of an existing group that makes one of its inputs, or
reads one of them too, and whose other inputs do not wait for that group, joins it; else it starts a group. A group is
then one instruction, placed where its last input is ready.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fuel_parallel.lazy.dtypes import uint8
from fuel_parallel.lazy.node import OPS, Attrs, Spec
from fuel_parallel.runtime.graph import Builder, Graph, Instruction
from fuel_parallel.runtime.passes.grid import Group, grid_of, lay, may_fuse
from fuel_parallel.runtime.program import BLOCK_ELEMENTS, ROW_DOT, Extent, Operation, Program
from fuel_parallel.runtime.region import ITEM, REGION

GROUP_LIMIT = 64
"""Operations of one region at most: beyond, its scratch leaves the cache."""

SMALL = 256
"""Values of fewer elements are not worth a region of their own on the CPU; elsewhere a kernel less always is."""


def fusion(graph: Graph) -> Graph:
    """Groups what can be run block by block into regions."""
    groups = _Grouping(graph).run()
    return _emit(graph, [g for g in groups if len(g.members) > 1 or _repeats(graph, g)])


def _repeats(graph: Graph, group: Group) -> bool:
    """Whether a lone elementwise operation reads something again and again: a region lays that out once."""
    (member,) = group.members
    i = graph.instructions[member - graph.first]
    return i.op.elementwise and any(group.extents[v] in (Extent.COLUMN, Extent.PERIODIC) for v in i.inputs)


class _Grouping:
    """Assigns instructions to groups. Units are groups and lone instructions; edges between them must stay acyclic."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.specs = graph.specs()
        self.waits = graph.waits()
        self.group_of: dict[int, Group] = {}
        self.groups: list[Group] = []
        self.readers = graph.consumers()

    def run(self) -> list[Group]:
        for number, i in enumerate(self.graph.instructions, self.graph.first):
            if not may_fuse(i, self.specs):
                continue
            candidates = self._candidates(i)
            joined = next((g for g in candidates if self._join(g, number, i)), None)
            if joined is None:
                self._start(number, i)
                continue
            for other in candidates:
                if other is not joined:
                    self._merge(joined, other)
        return [g for g in self.groups if g.members]

    def _candidates(self, i: Instruction) -> list[Group]:
        """Groups of the inputs, the youngest first, then groups that read one of the inputs as well."""
        found = {id(g): g for v in i.inputs if (g := self.group_of.get(v)) is not None}
        beside = {
            id(g): g
            for v in i.inputs
            if self.specs[v].size >= SMALL  # as all that covers a grid; parameters have thousands of readers
            for r in self.readers[v]
            if (g := self.group_of.get(r + self.graph.first)) is not None and g.extents[v] is Extent.FULL
        }
        beside = {key: g for key, g in beside.items() if key not in found}
        return [g for each in (found, beside) for g in sorted(each.values(), key=lambda g: -g.members[-1])]

    def _start(self, number: int, i: Instruction) -> None:
        shape = max((self.specs[number].shape, *(self.specs[v].shape for v in i.inputs)), key=math.prod)
        if not shape or math.prod(shape) < (SMALL if i.spec.device == "cpu" else 1):
            return
        group = Group(*grid_of(shape))
        if self._join(group, number, i):
            self.groups.append(group)

    def _join(self, group: Group, number: int, i: Instruction) -> bool:
        if len(group.members) >= GROUP_LIMIT:
            return False
        laid = lay(i, self.specs[number], self.specs, group)
        if laid is None:
            return False
        extent, inputs = laid
        outside = [v for v in i.inputs if self.group_of.get(v) is not group]
        if group.members and any(self._waits_for(v, group) for v in outside):
            return False
        group.members.append(number)
        group.extents[number] = extent
        for value, (kind, period) in inputs.items():
            group.extents.setdefault(value, kind)
            if kind is Extent.PERIODIC:
                group.periods[value] = period
        self.group_of[number] = group
        return True

    def _merge(self, group: Group, other: Group) -> None:
        """Takes the members of another group over if both lie over one grid and neither waits for the other."""
        if (group.rows, group.columns) != (other.rows, other.columns):
            return
        if len(group.members) + len(other.members) > GROUP_LIMIT:
            return
        if any(group.extents.get(v, extent) is not extent for v, extent in other.extents.items()):
            return
        if any(group.periods.get(v, period) != period for v, period in other.periods.items()):
            return
        if self._reads_after(group, other) or self._reads_after(other, group):
            return
        group.members = sorted(group.members + other.members)
        group.extents |= other.extents
        group.periods |= other.periods
        for member in other.members:
            self.group_of[member] = group
        other.members = []

    def _reads_after(self, group: Group, other: Group) -> bool:
        """Whether a member of the group waits for the other group by way of something in neither."""
        for member in group.members:
            for v in self.graph.instructions[member - self.graph.first].inputs:
                unit = self.group_of.get(v)
                if unit is other:
                    if other.extents[v] in (Extent.COLUMN_SUM, Extent.TOTAL):
                        return True
                elif unit is not group and self._waits_for(v, other):
                    return True
        return False

    def _waits_for(self, value: int, group: Group) -> bool:
        """Whether a value outside of the group depends on one of its members."""
        oldest = group.members[0]
        seen: set[int] = set()
        stack = [value]
        while stack:
            v = stack.pop()
            unit = self.group_of.get(v)
            if unit is group:
                return True
            key = v if unit is None else -1 - id(unit)
            if key in seen or v < self.graph.first or (unit is None and v < oldest):
                continue
            seen.add(key)
            for member in [v] if unit is None else unit.members:
                stack.extend(self.waits[member - self.graph.first])
        return False


# From groups to instructions.


def _emit(graph: Graph, groups: list[Group]) -> Graph:
    builder = Builder(graph)
    group_of = {member: group for group in groups for member in group.members}
    readers = graph.consumers()
    waits = graph.waits()
    outputs = set(graph.outputs)
    at: dict[int, int] = {v: builder.at[v] for v in range(graph.first)}
    specs = graph.specs()

    # Units are visited in order of their first member, after what they wait for: a depth-first walk without recursion.
    for number in range(graph.first, graph.first + len(graph.instructions)):
        stack = [number]
        while stack:
            value = stack[-1]
            if value in at:
                stack.pop()
                continue
            group = group_of.get(value)
            members = [value] if group is None else group.members
            inside = set(members)
            needs = [v for m in members for v in waits[m - graph.first] if v not in inside and v not in at]
            if needs:
                stack.extend(needs)
                continue
            stack.pop()
            if group is None:
                i = graph.instructions[value - graph.first]
                at[value] = builder.add(i.op, [at[v] for v in i.inputs], i.attrs, i.spec, i.origin)
            else:
                leaving = [m for m in members if m in outputs or any(r + graph.first not in inside for r in readers[m])]
                _emit_region(graph, group, leaving, builder, at, specs)
    builder.at = [at.get(v, 0) for v in range(len(specs))]
    return builder.finish()


def _emit_region(
    graph: Graph, group: Group, leaving: list[int], builder: Builder, at: dict[int, int], specs: list[Spec]
) -> None:
    inside = set(group.members)
    instructions = [graph.instructions[m - graph.first] for m in group.members]
    forms, leaving = _one_of_each(graph, inside, leaving)
    sources = list(dict.fromkeys(v for i in instructions for v in i.inputs if v not in inside))
    register = {v: r for r, v in enumerate([*sources, *group.members])}
    operations = tuple(
        Operation(i.op, tuple(register[v] for v in i.inputs), _on_blocks(i), i.spec.dtype, group.extents[m])
        for m, i in zip(group.members, instructions, strict=True)
    )
    rows, columns = group.rows, group.columns
    inputs = tuple((group.extents[v], group.periods.get(v, 0)) for v in sources)
    operations, left = _with_row_dots(operations, [kind for kind, _ in inputs], [register[m] for m in leaving])
    kinds = {kind for kind, _ in inputs} | {o.extent for o in operations}
    if kinds <= {Extent.FULL, Extent.SCALAR} and all(o.op.elementwise or o.op.name == "reshape" for o in operations):
        # Purely elementwise: rows are of no account, so they are as long as a block.
        rows, columns = rows * columns, 1
    program = Program(
        rows,
        columns,
        inputs,
        tuple(specs[v].dtype for v in sources),
        operations,
        tuple((r, specs[m].shape) for r, m in zip(left, leaving, strict=True)),
        _block_rows(rows, columns, [p for _, p in inputs if p]),
    )
    origin = instructions[-1].origin
    region = builder.add(REGION, [at[v] for v in sources], (program,), _bundle(specs, leaving), origin)
    for index, m in enumerate(leaving):
        at[m] = builder.add(ITEM, (region,), (index,), specs[m], graph.instructions[m - graph.first].origin)
    for m, written in forms.items():
        i = graph.instructions[m - graph.first]
        at[m] = builder.add(OPS["reshape"], (at[written],), (i.spec.shape,), i.spec, i.origin)
    for m in group.members:
        at.setdefault(m, region)


def _one_of_each(graph: Graph, inside: set[int], leaving: list[int]) -> tuple[dict[int, int], list[int]]:
    """Values that leave in several shapes are written once: which are views of which, and those that are written."""
    written: dict[int, int] = {}
    forms: dict[int, int] = {}
    for m in leaving:
        source = m
        while source in inside and graph.instructions[source - graph.first].op.name == "reshape":
            (source,) = graph.instructions[source - graph.first].inputs
        first = written.setdefault(source, m)
        if first != m:
            forms[m] = first
    return forms, [m for m in leaving if m not in forms]


def _with_row_dots(
    operations: Sequence[Operation], extents: Sequence[Extent], leaving: Sequence[int]
) -> tuple[tuple[Operation, ...], list[int]]:
    """Sums and means along rows of a product that nothing else reads become one operation.

    `extents` are those of the inputs, `leaving` the registers that leave the region. Gives the operations and where
    these registers are now.
    """
    first = len(extents)
    kinds = [*extents, *(o.extent for o in operations)]
    uses = Counter([*(v for o in operations for v in o.inputs), *leaving])
    factors: dict[int, tuple[int, ...]] = {}
    for register, o in enumerate(operations, first):
        if o.op.name in ("multiply", "square") and uses[register] == 1 and o.dtype.kind == "f":
            pair = o.inputs * (3 - len(o.inputs))
            if all(kinds[v] in (Extent.FULL, Extent.COLUMN) for v in pair):
                factors[register] = pair
    dots = {
        register: o.inputs[0]
        for register, o in enumerate(operations, first)
        if o.op.name in ("sum", "mean") and o.extent is Extent.ROW and o.inputs[0] in factors
    }
    products = set(dots.values())
    at = list(range(first))
    result: list[Operation] = []
    for register, o in enumerate(operations, first):
        at.append(first + len(result))
        if register in products:
            continue
        if register in dots:
            o = Operation(ROW_DOT, factors[dots[register]], (o.op.name,), o.dtype, o.extent)
        result.append(replace(o, inputs=tuple(at[v] for v in o.inputs)))
    return tuple(result), [at[r] for r in leaving]


def _on_blocks(i: Instruction) -> Attrs:
    """The attributes of an operation on blocks, which have two dimensions."""
    return (1,) if i.op.name in ("softmax", "log_softmax") else i.attrs


def _bundle(specs: list[Spec], leaving: list[int]) -> Spec:
    """A stand-in spec for all outputs together: their size in bytes."""
    return Spec((sum(specs[m].nbytes for m in leaving),), uint8, specs[leaving[0]].device if leaving else "cpu")


def _block_rows(rows: int, columns: int, periods: list[int]) -> int:
    wanted = max(1, BLOCK_ELEMENTS // max(columns, 1))
    for period in periods:
        if wanted >= period:
            wanted -= wanted % period
        else:
            while period % wanted:
                wanted -= 1
    fits = all(wanted % p == 0 or p % wanted == 0 for p in periods)
    return min(wanted, rows) if fits else math.gcd(*periods)
