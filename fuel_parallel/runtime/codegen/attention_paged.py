"""The kernels of attention over pages: a block has one head of keys of one sequence, and a tile of its queries.

Its rows are the queries of the heads that this head of keys serves, token by token, so that one pass over the pages
serves them all. Keys and values are cast, and int8 ones scaled, on their way into shared memory. Where a sequence has
one tile of queries, as in decoding, its keys are divided, too, or few blocks would read all of a long context (Dao et
al., 2023, Flash-Decoding); a second kernel puts the parts together, in their order. What is divided follows from the
lengths alone.

The host tells where things lie in one array of integers, as everywhere for pages: that is the only thing copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import Attrs, Spec
from fuel_parallel.lazy.ops.paged_attention import sequences_of
from fuel_parallel.runtime.codegen.attention_forward import LEAVE, ForwardWriter
from fuel_parallel.runtime.codegen.attention_writer import Form, source_for
from fuel_parallel.runtime.codegen.dialect import Dialect
from fuel_parallel.runtime.codegen.expressions import Unsupported
from fuel_parallel.runtime.codegen.launch import functions
from fuel_parallel.runtime.codegen.tiling import load

PAGED, PUT_TOGETHER = "paged_attention", "put_together"
"""Names of the kernels."""
CHUNK = 256
"""Tokens of a part of a context that is divided."""


@dataclass(frozen=True, slots=True)
class PagedForm(Form):
    """What a source is made for, with the dtype of pages and the tokens in one."""

    stored: DType
    page: int

    def stored_dtypes(self) -> tuple[DType, ...]:
        """See `Form.stored_dtypes`."""
        return self.dtype, self.stored


def paged_attention(inputs: Sequence[Spec], attrs: Attrs, spec: Spec, dialect: Dialect) -> Callable[..., Any]:
    """The function that computes the op `paged_attention`, called as its kernel is; `Unsupported` if there is none."""
    query, keys, _, page_table, lengths, *_ = inputs
    scale, groups = attrs
    (pages, page, kv_heads, dim), heads = keys.shape, query.shape[1]
    if not query.size or not keys.size or not lengths.size:
        raise Unsupported("there is nothing to compute")
    if max(pages * page, heads) >= 2**31:
        raise Unsupported("places of 64 bits are not written")
    served = groups or (heads // kv_heads,) * kv_heads
    form = PagedForm(query.dtype, dim, dim, False, None, keys.dtype, page)
    # What a step usually has: as many tokens of one sequence as of another.
    source = source_for(PagedWriter, form, -(-query.shape[0] // lengths.size) * max(served), dialect)
    rows, threads = source.tiling.rows, (source.tiling.threads,)
    first_heads = np.concatenate([[0], np.cumsum(served)])

    def run(xp: Any, arrays: Sequence[Any], *_: Any) -> Any:
        query, keys, values, table, lengths, starts, *scales = arrays
        make = xp.zeros if int(starts[-1]) < spec.shape[0] else xp.empty
        out = make(spec.shape, dtype=spec.dtype)
        sequences = sequences_of(table, lengths, starts, page, pages)
        work, tiles = _divided([(s, tokens, length) for s, tokens, length, _ in sequences], max(served), rows)
        if not work:
            return out
        told = [np.asarray(part).reshape(-1) for part in (table, lengths, starts, first_heads, work, tiles)]
        where = xp.asarray(np.concatenate(told).astype(np.int32))
        lengths_at, starts_at, heads_at, work_at, tiles_at = map(np.int32, np.cumsum([len(part) for part in told[:-1]]))
        divided = len(work) > len(tiles)
        parts = xp.empty((len(work) * kv_heads * rows, dim + 1) if divided else (1, 1), dtype=form.computed)
        pointers = [*(xp.ascontiguousarray(x) for x in (query, keys, values, *scales)), where, parts, out]
        counts = [np.int32(n) for n in (divided, heads, kv_heads)]
        places = [np.int32(page_table.shape[1]), lengths_at, starts_at, heads_at, work_at]
        kernel, put_together = functions(xp, source.text, (PAGED, PUT_TOGETHER))
        kernel((len(work) * kv_heads,), threads, (*pointers, *counts, *places, form.computed.type(scale)))
        if divided:
            numbers = (*counts[1:], starts_at, heads_at, tiles_at)
            put_together((len(tiles) * kv_heads,), threads, (where, parts, out, *numbers))
        return out

    return run


def _divided(
    sequences: list[tuple[int, slice, int]], served: int, rows: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The work of blocks as (sequence, first row, first key, key behind the last), and tiles as (sequence, first row,
    first of their work, how much of it). `sequences` are (number, query tokens, length).
    """
    work: list[tuple[int, ...]] = []
    tiles: list[tuple[int, ...]] = []
    for s, tokens, length in sequences:
        firsts = range(0, (tokens.stop - tokens.start) * served, rows)
        chunk = CHUNK if len(firsts) == 1 else length
        for first in firsts:
            parts = [(s, first, start, start + chunk) for start in range(0, length, chunk)]
            tiles.append((s, first, len(work), len(parts)))
            work += parts
    return work, tiles


class PagedWriter(ForwardWriter):
    """Writes `paged_attention`."""

    form: PagedForm

    def kernels(self) -> list[str]:
        """See `AttentionWriter.kernels`."""
        form = self.form
        pointers = (("where", dtypes.int32, True), ("parts", form.computed, True), ("out", form.dtype, False))
        counts = ("heads", "kv_heads", "starts_at", "heads_at", "tiles_at")
        head = self.named(PUT_TOGETHER, pointers, counts)
        rows = self.filled(_ROWS)
        together = self.filled(
            _PUT_TOGETHER, head=head, rows=rows, element=self.stored("result[e] / total"), out_at=_OUT
        )
        return [f"#define DIM {form.dim}", *super().kernels(), together]

    def parts(self) -> dict[str, object]:
        """See `ForwardWriter.parts`."""
        form, row = self.form, "(first + group * OWN + r)"
        query = "query[((position)(token + $row / served) * heads + head + $row % served) * DIM + c]"
        if dtypes.is_half(form.dtype):
            query = f"load_{form.dtype.name}({query})"
        key = "(start + lane + c * LANES)"
        parts_at = "(position)$block * ROWS + group * OWN + r"
        return super().parts() | {
            "head": self._head(),
            "begin": self.filled(_BEGIN, page=form.page, rows=self.filled(_ROWS)),
            "load_queries": load("own", "ROWS", self.row, f"{query} * scale", "first", "rows", self.words),
            "seen": _SEEN.strip(),
            "load_keys": self._load("keys"),
            "load_values": self._load("values"),
            "is_hidden": f"{row} >= rows || {key} >= seen || {key} > {row} / served + keys - queries",
            "from": "where[work + 2]",
            "rows": "rows",
            "leave": self.filled(
                _LEAVE,
                leave_part=self.filled(LEAVE, out="parts", at=self.filled(parts_at)),
                element=self.stored("result[r][e] / by"),
                out_at=_OUT,
            ),
        }

    def _load(self, array: str) -> str:
        stored = self.form.stored
        element = f"{array}_in_pages[SLOT($row) * DIM + c]"
        if dtypes.is_half(stored):
            element = f"load_{stored.name}({element})"
        if stored == dtypes.int8:
            element = f"{element} * scales_of_{array}[SLOT($row)]"
        return load("passing", "COLUMNS", self.row, f"({self.words['T']})({element})", "start", "keys", self.words)

    def _head(self) -> str:
        form = self.form
        arrays = [("query", form.dtype), ("keys_in_pages", form.stored), ("values_in_pages", form.stored)]
        if form.stored == dtypes.int8:
            arrays += [("scales_of_keys", dtypes.float32), ("scales_of_values", dtypes.float32)]
        arrays.append(("where", dtypes.int32))
        outputs = (("parts", form.computed, False), ("out", form.dtype, False))
        counts = ("divided", "heads", "kv_heads", "most", "lengths_at", "starts_at", "heads_at", "work_at")
        pointers = (*((name, dtype, True) for name, dtype in arrays), *outputs)
        return self.named(PAGED, pointers, counts, (f"const {self.words['T']} scale",))


_ROWS = """
const int thread = (int)$thread, lane = thread % LANES, group = thread / LANES;
const int kv_head = (int)($block % kv_heads);
const int sequence = where[work], first = where[work + 1];
const int token = where[starts_at + sequence], queries = where[starts_at + sequence + 1] - token;
const int head = where[heads_at + kv_head], served = where[heads_at + kv_head + 1] - head, rows = queries * served;
"""
_BEGIN = """
#define SLOT(at) (((position)where[sequence * most + (at) / $page] * $page + (at) % $page) * kv_heads + kv_head)
const int work = work_at + (int)($block / kv_heads) * 4;
$rows
const int keys = where[lengths_at + sequence], end = where[work + 3];
$exchange
if (first >= rows) return;
"""
_SEEN = """
const int last = first + ROWS < rows ? first + ROWS : rows;
const int before = (last - 1) / served + keys - queries + 1, seen = before < end ? before : end;
"""
_OUT = "((position)(token + row / served) * heads + head + row % served) * DIM"
_LEAVE = """
if (divided) {
    $leave_part
} else {
    $unroll
    for (int e = 0; e < $value_per_lane; ++e)
        if ($value_column < DIM) out[$out_at + $value_column] = $element;
}
"""

_PUT_TOGETHER = """
$head {
    const int work = tiles_at + (int)($block / kv_heads) * 4;
    $rows
    const int count = where[work + 3];
    const position step = (position)kv_heads * ROWS * $width;
    for (int r = 0; r < OWN; ++r) {
        const int row = first + group * OWN + r;
        position at = (((position)where[work + 2] * kv_heads + kv_head) * ROWS + group * OWN + r) * $width;
        if (row < rows) {
            $T top = $infinite, total = 0, result[$value_per_lane] = {0};
            for (int n = 0; n < count; ++n) {
                const $T level = parts[at + n * step + DIM];
                top = level >= $hidden || level <= top || top != top ? top : level;
            }
            for (int n = 0; n < count; ++n, at += step) {
                const $T level = parts[at + DIM];
                const $T weight = level >= $hidden ? 0 : $exp(level - top);
                total += weight;
                $unroll
                for (int e = 0; e < $value_per_lane; ++e)
                    if ($value_column < DIM) result[e] = $fma(weight, parts[at + $value_column], result[e]);
            }
            $unroll
            for (int e = 0; e < $value_per_lane; ++e)
                if ($value_column < DIM) out[$out_at + $value_column] = $element;
        }
    }
}
"""
