"""Attention over keys and values that lie in pages (Kwon et al., 2023, arXiv:2309.06180), and writing into pages.

A page has the keys, or values, of `page size` tokens: an array is [pages, page size, kv heads, dim], and the *slot* of
a token is page * page size + its place in the page. A batch is ragged: the query tokens of all sequences one after the
other, those of one sequence at the end of its context. What says where things lie (slots, page table, lengths, starts)
stays in host memory on every device, since the host makes it.

Keys are taken in blocks of pages that fit a core's cache, where they are copied together and cast; pages that follow
each other in memory are used where they are. The softmax is kept online, as in `attention`. On a GPU this is one kernel
in C.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fuel_parallel.errors import DTypeError, IndexingError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Op, Spec, apply, by_copy, define
from fuel_parallel.lazy.ops import elementwise
from fuel_parallel.lazy.tensor import Tensor

KEY_ELEMENTS = 1 << 18
"""Elements of the keys that are worked on at one time: a megabyte in float32."""
SCORES = 1 << 18
"""Scores that are computed at one time."""


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    /,
    *,
    scale: float | None = None,
    groups: Sequence[int] | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Causal attention of a ragged batch over pages: [tokens, heads, dim], like `query`.

    `keys` and `values` are [pages, page size, kv heads, dim], in any floating dtype, or int8 with `key_scales` and
    `value_scales` [pages, page size, kv heads]. Sequence s has the query tokens from `starts[s]` up to `starts[s + 1]`,
    which are the last ones of its `lengths[s]` tokens; these lie in the pages `page_table[s]`, in order. All three are
    integers, [sequences + 1], [sequences] and [sequences, most pages], on the CPU; what the table has beyond a
    sequence's length is not looked at. Tokens after the last start give zeros.

    `groups` says how many neighbouring query heads each key head serves, in order; equally many by default. `scale` is
    1 / sqrt(dim) by default. There is no gradient: caches serve inference.

    >>> from fuel_parallel.lazy import asarray, ones, reshape
    >>> values = reshape(asarray([1.0, 2.0, 3.0, 4.0]), (2, 2, 1, 1))          # two pages of two tokens
    >>> table, lengths, starts = asarray([[1, 0]]), asarray([3]), asarray([0, 2])   # tokens 3, 4, 1; two are queries
    >>> paged_attention(ones((2, 1, 1)), ones((2, 2, 1, 1)), values, table, lengths, starts).numpy().ravel().round(3)
    array([3.5  , 2.667], dtype=float32)
    """
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    scales = [t for t in (key_scales, value_scales) if t is not None]
    inputs = (query, keys, values, page_table, lengths, starts, *scales)
    served = None if groups is None else tuple(groups)
    return Tensor(apply(PAGED_ATTENTION, tuple(t.node for t in inputs), factor, served))


def write_pages(pages: Tensor, new: Tensor, slots: Tensor, /) -> Tensor:
    """`pages` [pages, page size, ...] with `new` [tokens, ...] at `slots` [tokens]; a negative slot is passed over.

    In place where nobody else holds `pages`, see docs/plans.md. Slots are integers on the CPU.

    >>> from fuel_parallel.lazy import asarray, zeros
    >>> write_pages(zeros((2, 2)), asarray([5.0, 6.0, 7.0]), asarray([3, 0, -1])).tolist()
    [[6.0, 0.0], [0.0, 5.0]]
    """
    return Tensor(apply(WRITE_PAGES, (pages.node, new.node, slots.node)))


def copy_pages(pages: Tensor, sources: Tensor, targets: Tensor, /) -> Tensor:
    """`pages` with copies of pages `sources` at `targets`, made one after the other; negative ones are passed over.

    In place where nobody else holds `pages`. Sources and targets are integers on the CPU.

    >>> from fuel_parallel.lazy import asarray
    >>> copy_pages(asarray([[1.0], [2.0], [3.0]]), asarray([0, 1]), asarray([1, 2])).tolist()
    [[1.0], [1.0], [1.0]]
    """
    return Tensor(apply(COPY_PAGES, (pages.node, sources.node, targets.node)))


# Writing.


def _infer_write(pages: Spec, new: Spec, slots: Spec) -> Spec:
    _check_integers("write_pages", slots=slots)
    if len(pages.shape) < 2 or len(slots.shape) != 1 or new.shape != (*slots.shape, *pages.shape[2:]):
        raise ShapeError(
            "write_pages: expected pages [pages, page size, ...], new tokens [tokens, ...] and slots [tokens]; got "
            f"{pages.shape}, {new.shape} and {slots.shape}"
        )
    if new.dtype != pages.dtype:
        raise DTypeError(f"write_pages: pages are {pages.dtype.name}, the new tokens {new.dtype.name}; use astype")
    return pages


def _write(xp: Any, pages: Any, new: Any, slots: Any) -> None:
    flat = pages.reshape((pages.shape[0] * pages.shape[1], *pages.shape[2:]))
    written = (slots >= 0).nonzero()[0]
    if len(written) < len(slots):
        slots, new = slots[written], new[xp.asarray(written)]
    if len(slots):
        _check_below("slot", int(slots.max()), flat.shape[0])
        flat[xp.asarray(slots)] = new


def _infer_copy(pages: Spec, sources: Spec, targets: Spec) -> Spec:
    _check_integers("copy_pages", sources=sources, targets=targets)
    if not pages.shape or len(sources.shape) != 1 or sources.shape != targets.shape:
        raise ShapeError(
            "copy_pages: expected pages [pages, ...] and as many sources as targets; got "
            f"{pages.shape}, {sources.shape} and {targets.shape}"
        )
    return pages


def _copy(xp: Any, pages: Any, sources: Any, targets: Any) -> None:
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        if source >= 0 and target >= 0:
            _check_below("page", max(source, target), pages.shape[0])
            pages[target] = pages[source]


def _check_integers(name: str, **specs: Spec) -> None:
    for what, spec in specs.items():
        if dtypes.kind(spec.dtype) != "integral" or spec.device != "cpu":
            raise DTypeError(f"{name}: {what} must be integers on the CPU, not {spec} on {spec.device}")


def _check_below(what: str, highest: int, count: int) -> None:
    if highest >= count:
        raise IndexingError(f"there is no {what} {highest}: these pages have {count}, from 0 on")


WRITE_PAGES = define(
    Op(
        "write_pages",
        _infer_write,
        by_copy(_write),
        update=_write,
        aliases=False,
        on_host=(2,),
        shapes="[pages, page size, ...], [tokens, ...], [tokens] -> that of the pages",
    )
)
COPY_PAGES = define(
    Op(
        "copy_pages",
        _infer_copy,
        by_copy(_copy),
        update=_copy,
        aliases=False,
        on_host=(1, 2),
        shapes="[pages, ...], [copies], [copies] -> that of the pages",
    )
)


# Attention. Inputs are query, keys, values, page table, lengths, starts, and maybe the scales of keys and values.


def _infer_attention(inputs: tuple[Spec, ...], scale: float, groups: tuple[int, ...] | None) -> Spec:
    query, keys, values, page_table, lengths, starts, *scales = inputs
    _check_integers("paged_attention", page_table=page_table, lengths=lengths, starts=starts)
    elementwise.check_domain("paged_attention", query.dtype, dtypes.FLOATING)
    if len(query.shape) != 3 or len(keys.shape) != 4 or keys.shape != values.shape or query.shape[2] != keys.shape[3]:
        raise ShapeError(
            "paged_attention: expected query [tokens, heads, dim], keys and values [pages, page size, kv heads, dim]; "
            f"got {query.shape}, {keys.shape} and {values.shape}"
        )
    sequences = lengths.shape[0] if len(lengths.shape) == 1 else -1
    if starts.shape != (sequences + 1,) or len(page_table.shape) != 2 or page_table.shape[0] != sequences:
        raise ShapeError(
            "paged_attention: expected page_table [sequences, most pages], lengths [sequences] and starts "
            f"[sequences + 1]; got {page_table.shape}, {lengths.shape} and {starts.shape}"
        )
    heads, kv_heads = query.shape[1], keys.shape[2]
    fits = heads % kv_heads == 0 if groups is None else len(groups) == kv_heads and sum(groups) == heads
    if not kv_heads or not heads or not fits:
        raise ShapeError(f"paged_attention: {heads} query heads cannot be served by {kv_heads} key heads as {groups}")
    if len(scales) != (2 if keys.dtype == dtypes.int8 else 0) or any(s.shape != keys.shape[:3] for s in scales):
        raise DTypeError(
            "paged_attention: int8 needs key_scales and value_scales [pages, page size, kv heads], other dtypes take "
            f"none; got {keys}, and {list(scales) or 'none'}"
        )
    if keys.dtype != values.dtype or keys.dtype not in (dtypes.int8, *dtypes.FLOATING):
        raise DTypeError(f"paged_attention: keys and values are of one floating dtype or int8, not {keys}, {values}")
    return query


def _attention_kernel(xp: Any, inputs: Any, scale: float, groups: tuple[int, ...] | None) -> Any:
    query = inputs[0]
    out = xp.empty(query.shape, dtype=query.dtype)
    _attention_into(xp, out, inputs, scale, groups)
    return out


def _attention_into(xp: Any, out: Any, inputs: Any, scale: float, groups: tuple[int, ...] | None) -> None:
    query, keys, values, page_table, lengths, starts, *scales = inputs
    wide = np.dtype(np.float64 if query.dtype == np.float64 else np.float32)
    key_scales, value_scales = scales or (None, None)
    places = None if groups is None else xp.asarray(_places(groups))
    width = keys.shape[2] * (query.shape[1] // keys.shape[2] if groups is None else max(groups))
    for _, rows, length, pages in sequences_of(page_table, lengths, starts, keys.shape[1], keys.shape[0]):
        heads = query[rows].astype(wide) * wide.type(scale)
        if places is not None:
            spread = xp.zeros((len(heads), width, query.shape[2]), dtype=wide)
            spread[:, places] = heads
            heads = spread
        seen, content = _Blocks(xp, keys, key_scales, pages, wide), _Blocks(xp, values, value_scales, pages, wide)
        result = _attend(xp, heads, seen, content, length)
        out[rows] = result if places is None else result[:, places]
    out[int(starts[-1]) :] = 0


def sequences_of(
    page_table: Any, lengths: Any, starts: Any, page: int, count: int
) -> Iterator[tuple[int, slice, int, Any]]:
    """The sequences that have query tokens: number, rows of these, length, pages. Raises the user's errors.

    There are `count` pages of `page` tokens.
    """
    firsts = starts.tolist()
    for s, length in enumerate(lengths.tolist()):
        rows = slice(firsts[s], firsts[s + 1])
        tokens = rows.stop - rows.start
        if tokens <= 0:
            continue
        pages = page_table[s, : -(-length // page)]
        if tokens > length or len(pages) * page < length:
            raise ShapeError(
                f"paged_attention: sequence {s} has {tokens} query tokens, {length} tokens, and pages for "
                f"{len(pages) * page}"
            )
        _check_below("page", int(pages.max()), count)
        yield s, rows, length, pages


def _places(groups: tuple[int, ...]) -> list[int]:
    """Where each query head goes when all key heads serve as many as the one that serves most."""
    most = max(groups)
    return [head * most + i for head, count in enumerate(groups) for i in range(count)]


class _Blocks:
    """The pages of one sequence, as [kv heads, tokens, dim] of some tokens at a time."""

    def __init__(self, xp: Any, pages: Any, scales: Any, table: Any, wide: Any) -> None:
        self.xp, self.pages, self.scales, self.table, self.wide = xp, pages, scales, table, wide

    def block(self, start: int, stop: int) -> Any:
        """The tokens from `start`, where a page begins, up to `stop`."""
        page = self.pages.shape[1]
        table = self.table[start // page : -(-stop // page)]
        found = self._taken(self.pages, table, stop - start).swapaxes(0, 1)
        return found if found.dtype == self.wide else found.astype(self.wide)

    def scale(self, scores: Any, start: int, stop: int) -> None:
        """Multiplies [kv heads, ..., tokens] by the tokens' scales, if there are any: less work than on a block."""
        if self.scales is not None:
            page = self.pages.shape[1]
            table = self.table[start // page : -(-stop // page)]
            scores *= self._taken(self.scales, table, stop - start).swapaxes(0, 1)[:, None, None]

    def _taken(self, pages: Any, table: Any, tokens: int) -> Any:
        first, count = int(table[0]), len(table)
        if (np.diff(table) == 1).all():
            found = pages[first : first + count]
        else:
            found = self.xp.take(pages, self.xp.asarray(table), axis=0)
        return found.reshape((count * pages.shape[1], *pages.shape[2:]))[:tokens]


def _attend(xp: Any, query: Any, keys: _Blocks, values: _Blocks, length: int) -> Any:
    """[queries, heads, dim], of which query i sees keys up to i + length - queries. `query` is scaled."""
    count, heads, dim = query.shape
    _, page, kv_heads, _ = keys.pages.shape
    group, first = heads // kv_heads, length - count
    # [kv heads, group, queries, dim]: the queries of a group are rows of one product.
    query = query.reshape((count, kv_heads, group, dim)).transpose((1, 2, 0, 3))
    step = builtins.max(1, KEY_ELEMENTS // (kv_heads * dim * page)) * page
    together = builtins.max(1, SCORES // (heads * builtins.min(step, length)))
    total = xp.empty(query.shape, dtype=query.dtype)
    sums, top = (xp.empty((*query.shape[:3], 1), dtype=query.dtype) for _ in range(2))
    for start in range(0, length, step):
        stop = builtins.min(start + step, length)
        block, content = keys.block(start, stop).swapaxes(-1, -2), values.block(start, stop)
        # Queries before the block's first key see nothing of it.
        for begin in range(builtins.max(0, start - first), count, together):
            rows = slice(begin, builtins.min(begin + together, count))
            shape = (kv_heads, group, rows.stop - begin)
            scores = xp.matmul(query[:, :, rows].reshape((kv_heads, -1, dim)), block).reshape((*shape, -1))
            keys.scale(scores, start, stop)
            if stop - 1 > first + begin:
                future = xp.arange(start, stop) > xp.arange(first + begin, first + rows.stop)[:, None]
                xp.copyto(scores, scores.dtype.type(-math.inf), where=future)
            highest = scores.max(axis=-1, keepdims=True)
            if start:
                before = top[:, :, rows]
                highest = xp.maximum(highest, before)
                fade = xp.exp(before - highest)
            scores -= highest
            xp.exp(scores, out=scores)
            mass = scores.sum(axis=-1, keepdims=True)
            values.scale(scores, start, stop)
            part = xp.matmul(scores.reshape((kv_heads, -1, stop - start)), content).reshape((*shape, dim))
            if start:
                mass += sums[:, :, rows] * fade
                part += total[:, :, rows] * fade
            total[:, :, rows], sums[:, :, rows], top[:, :, rows] = part, mass, highest
    total /= sums
    return total.transpose((2, 0, 1, 3)).reshape((count, heads, dim))


PAGED_ATTENTION = define(
    Op(
        "paged_attention",
        _infer_attention,
        _attention_kernel,
        variadic=True,
        on_host=(3, 4, 5),
        into=_attention_into,
        aliases=False,
        attr_names=("scale", "groups"),
        shapes="[tokens, heads, d], keys and values [pages, page size, kv heads, d], page table, lengths, starts, "
        "scales -> [tokens, heads, d]",
        domain=dtypes.FLOATING,
    )
)
