"""Attention by an array module, without the matrix of all scores: the kernels of the ops in `attention`.

Blocks of queries meet blocks of keys; the softmax is kept online, by a running maximum and sum (Milakov and Gimelshein,
2018, arXiv:1805.02867; Dao et al., 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Shape

QUERY_BLOCK = 256
KEY_BLOCK = 512
SCORES = 1 << 16
"""Scores computed at one time: a quarter of a megabyte in float32."""


def attention_into(
    xp: Any, out: Any, inputs: Any, causal: builtins.bool, scale: float, keeps: builtins.bool = False
) -> None:
    """What the op gives: the result, the logarithm of each query's sum, and the weights if they are kept."""
    query, key, value, mask = _unpack(xp, inputs)
    out = _batched(out)
    q, k, dim = query.shape[-2], key.shape[-2], value.shape[-1]
    diagonal = k - q if causal else None
    lowest = _LOWEST[query.dtype]
    ones = xp.ones(k, dtype=query.dtype)
    for heads, kv_heads in _chunks(query, key, causal):
        scaled = query[heads] * query.dtype.type(scale)
        keys, values = _transposed(xp, key[kv_heads]), value[kv_heads]
        target = out[heads]
        visible = None if mask is None else mask[heads]
        for rows in _blocks(q, _query_block(k, causal)):
            block = target[..., rows, :]
            top: Any = None
            total: Any = None
            sums: Any = None
            for columns in _seen_blocks(rows, k, diagonal, k if keeps else KEY_BLOCK):
                scores = xp.matmul(scaled[..., rows, :], keys[..., columns])
                bound = _bound(xp, scores) if keeps else None
                _hide(xp, scores, visible, rows, columns, diagonal, finite=bound is not None)
                highest = scores.max(axis=-1, keepdims=True) if bound is None else bound
                if top is not None:
                    highest = xp.maximum(highest, top)
                anchor = xp.maximum(highest, lowest)
                scores -= anchor
                xp.exp(scores, out=scores)
                count = xp.matmul(scores, ones[: scores.shape[-1]])[..., None]
                if keeps:
                    # The only block of keys, so that the sum is known.
                    weights = block[..., dim + 1 : dim + 1 + scores.shape[-1]]
                    total, sums = xp.divide(scores, _seen(count), out=weights), count
                    xp.matmul(weights, values[..., columns, :], out=block[..., :dim])
                elif top is None:
                    total, sums = xp.matmul(scores, values[..., columns, :]), count
                else:
                    fade = xp.exp(top - anchor)
                    total, sums = total * fade + xp.matmul(scores, values[..., columns, :]), sums * fade + count
                top = highest
            if top is None:
                block[...] = 0
                block[..., dim] = _HIDDEN
                continue
            blind = sums == 0
            sums = _seen(sums)
            if not keeps:
                xp.divide(total, sums, out=block[..., :dim])
            level = xp.log(sums) + xp.maximum(top, lowest)
            level[blind] = _HIDDEN
            block[..., dim : dim + 1] = level


def attention_backward_into(xp: Any, out: Any, inputs: Any, causal: builtins.bool, scale: float) -> None:
    """The cotangents of query, key and value, one after the other in one flat array.

    `inputs` are the cotangent of the result, what the op gave, query, key, value and maybe a mask. Where it kept no
    weights, the logarithms may be those of sums over more keys than are here.
    """
    g, y = (_batched(x) for x in inputs[:2])
    query, key, value, mask = _unpack(xp, inputs[2:])
    q, k, dim = query.shape[-2], key.shape[-2], value.shape[-1]
    diagonal = k - q if causal else None
    sums = out if out.dtype == query.dtype else xp.empty(out.shape, dtype=query.dtype)
    d_query, d_key, d_value = _parts(sums, query.shape, key.shape, value.shape)
    keeps = y.shape[-1] > dim + 1
    factor = query.dtype.type(scale)
    groups = query.shape[-3] // key.shape[-3] if query.size else 1
    if not q:
        sums[...] = 0
    for heads, kv_heads in _chunks(query, key, causal):
        scaled = query[heads] * factor
        keys, values = key[kv_heads], _transposed(xp, value[kv_heads])
        result, level, kept = y[heads][..., :dim], y[heads][..., dim : dim + 1], y[heads][..., dim + 1 :]
        cotangent = g[heads]
        to_query, to_key, to_value = d_query[heads], d_key[kv_heads], d_value[kv_heads]
        visible = None if mask is None else mask[heads]
        of_new_keys = groups == 1 or heads[-1].start % groups == 0
        # The last queries come first: they see all keys, so each block of a result is written once, then added to.
        for rows in reversed(list(_blocks(q, _query_block(k, causal)))):
            queries, toward = scaled[..., rows, :], cotangent[..., rows, :]
            new = of_new_keys and rows.stop == q
            seen = list(_seen_blocks(rows, k, diagonal, k if keeps else KEY_BLOCK))
            if not seen:
                to_query[..., rows, :] = 0
            inner = xp.einsum("...i,...i->...", toward, result[..., rows, :])[..., None]
            for columns in seen:
                if keeps:
                    weights = kept[..., rows, columns]
                else:
                    weights = xp.matmul(queries, keys[..., columns, :].swapaxes(-1, -2))
                    _hide(xp, weights, visible, rows, columns, diagonal)
                    weights -= level[..., rows, :]
                    xp.exp(weights, out=weights)
                _product(xp, weights.swapaxes(-1, -2), toward, to_value[..., columns, :], new)
                d_scores = xp.matmul(toward, values[..., columns])
                d_scores -= inner
                d_scores *= weights
                _product(xp, d_scores, keys[..., columns, :], to_query[..., rows, :], columns.start == 0)
                _product(xp, d_scores.swapaxes(-1, -2), queries, to_key[..., columns, :], new)
        to_query *= factor
    if sums is not out:
        out[...] = sums


def _product(xp: Any, a: Any, b: Any, out: Any, new: builtins.bool) -> None:
    """a @ b, written or, if it is not the first of its place, added."""
    if new:
        xp.matmul(a, b, out=out)
    else:
        out += xp.matmul(a, b)


def _parts(flat: Any, *shapes: Shape) -> list[Any]:
    parts, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        parts.append(flat[start : start + size].reshape(shape))
        start += size
    return parts


# What both need.


def _transposed(xp: Any, x: Any) -> Any:
    """The last two dimensions exchanged, in memory: OpenBLAS multiplies small matrices by that nearly twice as fast."""
    # A transposing copy is slow unless its source is dense.
    return np.ascontiguousarray(np.ascontiguousarray(x).swapaxes(-1, -2)) if xp is np else x.swapaxes(-1, -2)


SPREAD = 60
"""How far below the number that is subtracted a query's highest score may lie: exp(-60) is far from being lost."""


def _bound(xp: Any, scores: Any) -> Any:
    """The highest score of all where that serves every query, else None.

    It is found ten times as fast as that of each query. On a GPU, whoever asks for it waits.
    """
    if xp is not np or not scores.size:
        return None
    highest = scores.max()
    return highest if highest - scores.min() < SPREAD else None


def _seen(sums: Any) -> Any:
    """The sums to divide by. A query that saw nothing has sum 0: its result is 0, and so are its weights."""
    return sums + (sums == 0)


_HIDDEN = 1e30
"""Stands for the logarithm of a sum over no key: exp(score - 1e30) is 0."""
_LOWEST = {np.dtype(np.float32): np.float32(-1e30), np.dtype(np.float64): np.float64(-1e30)}
"""Below any score that is seen: subtracting it from -inf gives -inf, not NaN."""


def _unpack(xp: Any, inputs: Any) -> tuple[Any, Any, Any, Any]:
    """Query, key, value and mask with at least one dimension before the heads."""
    query, key, value = (_batched(x.astype(dtypes.accumulated_in(x.dtype), copy=False)) for x in inputs[:3])
    mask = inputs[3] if len(inputs) > 3 else None
    return query, key, value, None if mask is None else xp.broadcast_to(mask, (*query.shape[:-1], key.shape[-2]))


def _batched(x: Any) -> Any:
    return x if x.ndim > 3 else x[None]


def _chunks(query: Any, key: Any, causal: builtins.bool) -> Iterator[tuple[Any, Any]]:
    """Indices of as many query heads, and of their key heads, as are worked on at one time."""
    batch, heads = query.shape[-4:-2]
    groups = heads // key.shape[-3]
    k = key.shape[-2]
    scores = builtins.min(query.shape[-2], _query_block(k, causal)) * builtins.min(k, KEY_BLOCK)
    together = builtins.max(1, SCORES // builtins.max(scores, 1))
    per_head = 1 if groups > 1 else builtins.min(heads, together)
    per_batch = builtins.max(1, together // per_head)
    for outer in np.ndindex(*query.shape[:-4]):
        for b in _blocks(batch, per_batch):
            for h in _blocks(heads, per_head):
                kv = h if groups == 1 else slice(h.start // groups, h.start // groups + 1)
                yield (*outer, b, h), (*outer, b, kv)


def _query_block(k: int, causal: builtins.bool) -> int:
    """Queries of a block; where each sees keys up to itself, blocks are short, or much is computed to be hidden."""
    return builtins.min(QUERY_BLOCK, builtins.max(64, k // 8)) if causal else QUERY_BLOCK


def _blocks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, builtins.min(start + size, length))


def _seen_blocks(rows: slice, k: int, diagonal: int | None, size: int) -> Iterator[slice]:
    """Blocks of the keys that some query of `rows` sees; query i sees up to key i + `diagonal`."""
    return _blocks(k if diagonal is None else builtins.max(0, builtins.min(k, rows.stop + diagonal)), size)


def _hide(
    xp: Any,
    scores: Any,
    visible: Any,
    rows: slice,
    columns: slice,
    diagonal: int | None,
    *,
    finite: builtins.bool = False,
) -> None:
    """Sets the scores of keys that a query may not see to -inf, whatever they are; `finite` says that all are."""
    if diagonal is not None and columns.stop - 1 > rows.start + diagonal:
        hidden = slice(builtins.max(columns.start, rows.start + diagonal + 1), columns.stop)
        part = scores[..., hidden.start - columns.start :]
        tile = _causal_tile(xp, rows, hidden, diagonal, scores.dtype)
        if finite:
            part += tile  # which takes a fifth of the time
        else:
            xp.copyto(part, scores.dtype.type(-math.inf), where=tile < 0)
    if visible is not None:
        xp.copyto(scores, scores.dtype.type(-math.inf), where=~visible[..., rows, columns])


_tiles: dict[Any, Any] = {}


def _causal_tile(xp: Any, rows: slice, columns: slice, diagonal: int, dtype: Any) -> Any:
    """0 where the key is seen and -inf where it lies in the query's future; a few tiles of the host are kept."""
    own = rows.start + diagonal - columns.start
    key = (rows.stop - rows.start, columns.stop - columns.start, own, dtype)
    tile = _tiles.get(key) if xp is np else None
    if tile is None:
        seen = xp.tril(xp.ones(key[:2], dtype=bool), own)
        tile = xp.where(seen, dtype.type(0), dtype.type(-math.inf))
        if xp is np:
            if len(_tiles) > 64:
                _tiles.clear()
            _tiles[key] = tile
    return tile
