"""How a kernel's threads lie over the grid of a region, and what each pass over a row computes, holds or repeats."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fuel_parallel.runtime.codegen.expressions import has_place
from fuel_parallel.runtime.codegen.lowering import Accumulation, Body, Element, Load, Pick, RowReduction
from fuel_parallel.runtime.program import Extent

FULL_LIKE = (Extent.FULL, Extent.COLUMN, Extent.PERIODIC)
"""Extents of values that have columns."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a block may have. `row_words` are the 32-bit registers that hold values of rows, for all its threads."""

    threads: int = 256
    lanes: int = 1024
    columns_per_lane: int = 4
    row_words: int = 32768
    words_per_thread: int = 64
    blocks: int = 1 << 20
    blocks_with_total: int = 1024
    blocks_with_column_sum: int = 512


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Threads and passes.

    Without `by_rows` there is one thread for an element. Else `lanes` threads share a row, in `steps` steps over its
    columns, and a block takes `block_rows` rows at a time. `passes[level]` are the values computed in that pass over
    the columns; those of them in `held` stay in registers for later passes.
    """

    by_rows: bool
    needs_column: bool
    threads: int
    lanes: int
    steps: int
    levels: int
    passes: tuple[tuple[int, ...], ...]
    held: frozenset[int]
    sums_in_registers: bool
    most_blocks: int

    @property
    def block_rows(self) -> int:
        """Rows that a block takes at a time."""
        return self.threads // self.lanes

    def blocks(self, rows: int, columns: int) -> int:
        """Blocks of the grid."""
        work = -(-rows // self.block_rows) if self.by_rows else -(-rows * columns // self.threads)
        return max(1, min(work, self.most_blocks))

    def partial_rows(self, rows: int, columns: int) -> int:
        """Partial results of a sum over rows: one a block, or one for each group of threads that has a row."""
        blocks = self.blocks(rows, columns)
        return blocks if self.sums_in_registers else min(blocks * self.block_rows, rows)


def arrange(body: Body, limits: Limits) -> Arrangement:
    """The arrangement for a region's values."""
    values, columns = body.values, body.columns
    column_sums = [v for v in values if v.extent is Extent.COLUMN_SUM]
    by_rows = bool(column_sums) or any(isinstance(v, RowReduction | Pick) for v in values)
    has_total = any(v.extent is Extent.TOTAL for v in values)
    most_blocks = (
        limits.blocks_with_column_sum
        if column_sums
        else limits.blocks_with_total
        if has_total
        else limits.blocks
    )  # fmt: skip
    if not by_rows:
        whole = all(v.extent in (Extent.FULL, Extent.SCALAR, Extent.TOTAL) for v in values)
        needs = not whole or any(isinstance(v, Element) and has_place(v.name) for v in values)
        return Arrangement(False, needs, limits.threads, 1, 1, 1, (), frozenset(), False, most_blocks)

    short = min(_power_of_two(columns), 32)
    lanes = min(limits.lanes, max(short, _power_of_two(-(-columns // limits.columns_per_lane))))
    threads = max(limits.threads, lanes)
    steps = -(-columns // lanes)
    levels = 1 + max(v.level for v in values)
    budget = min(limits.words_per_thread, limits.row_words // threads) // steps
    sum_words = sum(_words(v.dtype.itemsize) for v in column_sums)
    sums_in_registers = bool(column_sums) and 2 * sum_words <= budget
    if sums_in_registers:
        budget -= sum_words
    kept = _keep_what_fits(body, levels, budget)
    return Arrangement(
        True, True, threads, lanes, steps, levels, kept.passes, kept.held, sums_in_registers, most_blocks
    )


def _power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _words(itemsize: int) -> int:
    return 2 if itemsize == 8 else 1


@dataclass(frozen=True, slots=True)
class _Passes:
    """What each pass computes, what is held between passes, and the most words a column that are held at a time.

    `cost`: how many whole arrays are read, and how many operations are done, in all passes.
    """

    passes: tuple[tuple[int, ...], ...]
    held: frozenset[int]
    words: int
    cost: tuple[int, int]


def _keep_what_fits(body: Body, levels: int, budget: int) -> _Passes:
    """Holds all that a later pass reads if that fits; else, one by one, what saves most."""
    best = _passes(body, levels, frozenset(range(len(body.values))))
    if best.words <= budget:
        return best
    best = _passes(body, levels, frozenset())
    while True:
        times = Counter(n for one in best.passes for n in one)
        tried = [_passes(body, levels, best.held | {n}) for n, count in times.items() if count > 1]
        better = [one for one in tried if one.words <= budget and one.cost < best.cost]
        if not better:
            return best
        best = min(better, key=lambda one: one.cost)


def _passes(body: Body, levels: int, may_hold: frozenset[int]) -> _Passes:
    values = body.values
    computed_in: dict[int, int] = {}
    last_read: dict[int, int] = {}
    passes = []
    for level in range(levels):
        here: set[int] = set()
        stack = _roots(body, level)
        while stack:
            n = stack.pop()
            value = values[n]
            if n in here or value.extent not in FULL_LIKE:
                continue
            # What repeats over rows is small and stays in the cache: it is read again.
            if n in may_hold and computed_in.get(n, level) < level and value.extent is Extent.FULL:
                last_read[n] = level
                continue
            here.add(n)
            computed_in.setdefault(n, level)
            stack.extend(value.inputs)
        passes.append(tuple(sorted(here)))
    between = [
        sum(_words(values[n].dtype.itemsize) for n, last in last_read.items() if computed_in[n] < level <= last)
        for level in range(1, levels)
    ]
    everything = [values[n] for one in passes for n in one]
    reads = sum(isinstance(value, Load) and value.extent is Extent.FULL for value in everything)
    return _Passes(tuple(passes), frozenset(last_read), max(between, default=0), (reads, len(everything)))


def _roots(body: Body, level: int) -> list[int]:
    """What must be computed in a pass: what leaves, is summed, or is reduced at that level."""
    values = body.values
    roots = [v for v, _ in body.outputs if values[v].level == level and not isinstance(values[v], Accumulation)]
    for value in values:
        if (isinstance(value, Accumulation) and value.level == level) or (
            isinstance(value, RowReduction | Pick) and value.level == level + 1
        ):
            roots.append(value.inputs[0])
    return [v for v in roots if isinstance(values[v], Element | Load)]
