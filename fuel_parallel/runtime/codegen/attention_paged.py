"""The kernel of attention over pages: a block has one head of keys of one sequence, and a tile of its queries.

Its rows are the queries of the heads that this head of keys serves, token by token, so that one pass over the pages
serves them all. Keys and values are cast, and int8 ones scaled, on their way into shared memory. The host tells where
things lie in one array of integers, as it does everywhere for pages: that is the only thing copied.
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
from fuel_parallel.runtime.codegen.attention_forward import ForwardWriter
from fuel_parallel.runtime.codegen.attention_writer import Form, source_for
from fuel_parallel.runtime.codegen.dialect import Dialect
from fuel_parallel.runtime.codegen.expressions import Unsupported
from fuel_parallel.runtime.codegen.launch import functions
from fuel_parallel.runtime.codegen.tiling import load

PAGED = "paged_attention"
"""Name of the kernel."""


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
    rows = source.tiling.rows
    first_heads = np.concatenate([[0], np.cumsum(served)])

    def run(xp: Any, arrays: Sequence[Any], *_: Any) -> Any:
        query, keys, values, table, lengths, starts, *scales = arrays
        work = [
            (s, first)
            for s, tokens, *_ in sequences_of(table, lengths, starts, page, pages)
            for first in range(0, (tokens.stop - tokens.start) * max(served), rows)
        ]
        make = xp.zeros if int(starts[-1]) < spec.shape[0] else xp.empty
        out = make(spec.shape, dtype=spec.dtype)
        if not work:
            return out
        told = [np.asarray(part).reshape(-1) for part in (table, lengths, starts, first_heads, work)]
        ends = np.cumsum([len(part) for part in told[:-1]])
        pointers = [xp.ascontiguousarray(x) for x in (query, keys, values, *scales)]
        counts = [np.int32(n) for n in (heads, kv_heads, page_table.shape[1], *ends)]
        (kernel,) = functions(xp, source.text, (PAGED,))
        where = xp.asarray(np.concatenate(told).astype(np.int32))
        blocks, factor = (len(work) * kv_heads,), form.computed.type(scale)
        kernel(blocks, (source.tiling.threads,), (*pointers, where, out, *counts, factor))
        return out

    return run


class PagedWriter(ForwardWriter):
    """Writes `paged_attention`."""

    form: PagedForm

    def parts(self) -> dict[str, object]:
        """See `ForwardWriter.parts`."""
        form, row = self.form, "(first + group * OWN + r)"
        query = "query[((position)(token + $row / served) * heads + head + $row % served) * DIM + c]"
        if dtypes.is_half(form.dtype):
            query = f"load_{form.dtype.name}({query})"
        key = "(start + lane + c * LANES)"
        return super().parts() | {
            "head": self._head(),
            "begin": self.filled(_BEGIN, dim=form.dim, page=form.page),
            "load_queries": load("own", "ROWS", self.row, f"{query} * scale", "first", "rows", self.words),
            "seen": "const int last = first + ROWS < rows ? first + ROWS : rows;\n"
            "const int seen = (last - 1) / served + keys - queries + 1;",
            "load_keys": self._load("keys"),
            "load_values": self._load("values"),
            "is_hidden": f"{row} >= rows || {key} >= keys || {key} > {row} / served + keys - queries",
            "rows": "rows",
            "out_at": "((position)(token + row / served) * heads + head + row % served) * DIM",
            "element": self.stored("result[r][e] / by"),
            "leave_level": "",
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
        dialect, form = self.dialect, self.form
        arrays = [("query", form.dtype), ("keys_in_pages", form.stored), ("values_in_pages", form.stored)]
        if form.stored == dtypes.int8:
            arrays += [("scales_of_keys", dtypes.float32), ("scales_of_values", dtypes.float32)]
        arrays.append(("where", dtypes.int32))
        texts = [f"{dialect.const_pointer.format(type=dialect.storage(dtype))} {name}" for name, dtype in arrays]
        texts.append(f"{dialect.pointer.format(type=dialect.storage(form.dtype))} out")
        counts = ("heads", "kv_heads", "most", "lengths_at", "starts_at", "heads_at", "work_at")
        texts += [*(f"const int {count}" for count in counts), f"const {self.words['T']} scale"]
        bounds = dialect.launch_bounds.format(threads=self.tiling.threads)
        return f"{dialect.kernel} {bounds} {PAGED}({', '.join(texts)})"


_BEGIN = """
#define DIM $dim
#define SLOT(at) (((position)where[sequence * most + (at) / $page] * $page + (at) % $page) * kv_heads + kv_head)
const int thread = (int)$thread, lane = thread % LANES, group = thread / LANES;
const int kv_head = (int)($block % kv_heads), work = work_at + (int)($block / kv_heads) * 2;
const int sequence = where[work], first = where[work + 1];
const int token = where[starts_at + sequence], queries = where[starts_at + sequence + 1] - token;
const int keys = where[lengths_at + sequence];
const int head = where[heads_at + kv_head], served = where[heads_at + kv_head + 1] - head, rows = queries * served;
$exchange
if (first >= rows) return;
"""
