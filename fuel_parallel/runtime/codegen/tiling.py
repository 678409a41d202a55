"""Tiles of matrices in shared memory, and the two products of tiles that kernels are made of, in C.

A block has a tile of rows of its own; tiles of other rows pass by. `LANES` neighbouring threads share `OWN` rows. In
`dot` a thread has every `LANES`-th of the passing rows, in `accumulate` its part of the columns. What threads read side
by side lies side by side, 16 bytes a thread: a row of a tile is padded to an odd number of such pieces, so that rows
begin in different banks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template

from fuel_parallel.lazy.dtypes import DType


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows of a block's own tile and of those that pass, and how threads share them."""

    rows: int
    columns: int
    lanes: int
    groups: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.groups

    @property
    def own(self) -> int:
        """Own rows of a thread."""
        return self.rows // self.groups

    @property
    def passing(self) -> int:
        """Passing rows that a thread meets its own with."""
        return self.columns // self.lanes


TILINGS = (
    Tiling(64, 32, 8, 16),
    Tiling(32, 32, 8, 16),
    Tiling(16, 16, 8, 8),
    Tiling(8, 32, 32, 4),
    Tiling(8, 8, 8, 4),
    Tiling(4, 8, 8, 4),
)
"""From the one that reads global memory least to the one that fits the most columns. Few rows have many threads."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of `dim` elements in a tile: `depth` with zeros at the end, `stride` elements from one to the next."""

    dim: int
    depth: int
    stride: int
    per_lane: int
    """Columns of a thread."""
    together: int
    """Columns of a thread that lie side by side."""


def row_of(dim: int, tiling: Tiling, dtype: DType) -> Row:
    """How a row lies in a tile of the dtype in which is computed."""
    piece = 16 // dtype.itemsize
    per_lane = -(-dim // tiling.lanes)
    depth = -(-per_lane * tiling.lanes // piece) * piece
    together = next(n for n in (piece, 2, 1) if per_lane % n == 0)
    return Row(dim, depth, depth + (piece if depth // piece % 2 == 0 else 0), per_lane, together)


def column_of(row: Row, lanes: int, e: str) -> str:
    """The column that is a thread's e-th."""
    if row.together == 1:
        return f"{e} * {lanes} + lane"
    return f"({e} / {row.together} * {lanes} + lane) * {row.together} + {e} % {row.together}"


def filled(template: str, words: Mapping[str, object]) -> str:
    """A template with its words; a text of several lines takes the place of a line, indented like it."""
    for name, word in words.items():
        lines = str(word).strip("\n").split("\n")
        template = re.sub(
            rf"^( *)\${name}$",
            lambda found, lines=lines: "\n".join(found[1] + line if line else line for line in lines),  # type: ignore[misc]
            template,
            flags=re.MULTILINE,
        )
    return Template(template).substitute(**{name: str(word) for name, word in words.items()})


_LOAD = """
$unroll 8
for (int i = thread; i < $rows * $depth; i += THREADS) {
    const int r = i / $depth, c = i % $depth;
    $tile[r * $stride + c] = $there ? $value : 0;
}
"""


def load(tile: str, rows: str, row: Row, element: str, first: str, count: str, words: Mapping[str, object]) -> str:
    """The loop that fills a tile from row `first` of `count` on. `element` is that of `$row` and the column c.

    Several elements are under way at one time.
    """
    there = f"{first} + r < {count}" + (f" && c < {row.dim}" if row.depth > row.dim else "")
    value = element.replace("$row", f"({first} + r)")
    sizes = {"depth": row.depth, "stride": row.stride}
    return filled(_LOAD, {**words, "tile": tile, "rows": rows, **sizes, "there": there, "value": value})


_DOT = """
$T $result[OWN][PASSING] = {0};
for (int d = 0; d < $depth; d += PIECE) {
    $T left[OWN][PIECE], right[PASSING][PIECE];
    $unroll
    for (int r = 0; r < OWN; ++r)
        $unroll
        for (int p = 0; p < PIECE; ++p) left[r][p] = $own[(group * OWN + r) * $stride + d + p];
    $unroll
    for (int c = 0; c < PASSING; ++c)
        $unroll
        for (int p = 0; p < PIECE; ++p) right[c][p] = $other[(lane + c * LANES) * $stride + d + p];
    $unroll
    for (int r = 0; r < OWN; ++r)
        $unroll
        for (int c = 0; c < PASSING; ++c)
            $unroll
            for (int p = 0; p < PIECE; ++p) $result[r][c] = $fma(left[r][p], right[c][p], $result[r][c]);
}
"""


def dot(result: str, own: str, other: str, row: Row, words: Mapping[str, object]) -> str:
    """Declares `result`, the products of own and passing rows."""
    names = {"result": result, "own": own, "other": other}
    return filled(_DOT, {**words, **names, "depth": row.depth, "stride": row.stride})


_ACCUMULATE = """
for (int j = 0; j < COLUMNS; j += PIECE) {
    $T weight[OWN][PIECE];
    $unroll
    for (int r = 0; r < OWN; ++r)
        $unroll
        for (int p = 0; p < PIECE; ++p) weight[r][p] = $weights[(group * OWN + r) * WEIGHT_STRIDE + j + p];
    $unroll
    for (int p = 0; p < PIECE; ++p) {
        $T element[$per_lane];
        $unroll
        for (int e = 0; e < $per_lane; ++e) element[e] = $other[(j + p) * $stride + $column];
        $unroll
        for (int r = 0; r < OWN; ++r)
            $unroll
            for (int e = 0; e < $per_lane; ++e) $result[r][e] = $fma(weight[r][p], element[e], $result[r][e]);
    }
}
"""


def accumulate(result: str, weights: str, other: str, row: Row, lanes: int, words: Mapping[str, object]) -> str:
    """Adds the passing rows, times their weights, to the thread's columns of `result`."""
    names = {"result": result, "weights": weights, "other": other}
    sizes = {"per_lane": row.per_lane, "stride": row.stride, "column": column_of(row, lanes, "e")}
    return filled(_ACCUMULATE, {**words, **names, **sizes})


def defines(tiling: Tiling, dtype: DType) -> str:
    """The numbers that the texts above name."""
    piece = 16 // dtype.itemsize
    numbers: Sequence[tuple[str, int]] = (
        ("ROWS", tiling.rows),
        ("COLUMNS", tiling.columns),
        ("LANES", tiling.lanes),
        ("THREADS", tiling.threads),
        ("OWN", tiling.own),
        ("PASSING", tiling.passing),
        ("PIECE", piece),
        ("WEIGHT_STRIDE", weight_stride(tiling, dtype)),
    )
    return "\n".join(f"#define {name} {number}" for name, number in numbers)


def weight_stride(tiling: Tiling, dtype: DType) -> int:
    """Elements from one row of weights to the next."""
    return tiling.columns + 16 // dtype.itemsize
