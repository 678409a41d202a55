"""Attention without the matrix of all scores.

Blocks of queries meet blocks of keys; the softmax is kept online, by a running maximum and sum (Milakov and Gimelshein,
2018, arXiv:1805.02867; Dao et al., 2022, arXiv:2205.14135). The forward op gives the result and, as one more column,
the logarithm of each query's sum of exponentials; the backward op recomputes the weights from it. Where there are few
keys, the weights themselves are as small as the inputs: then they are further columns, and nothing is computed twice.
But where both ops are kernels in C, weights never leave the chip.
Memory grows with the length, not with its square.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fuel_parallel.backends import backend_of
from fuel_parallel.errors import ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Op, Shape, Spec, apply, define
from fuel_parallel.lazy.ops import binary, creation, elementwise, manipulation, reductions
from fuel_parallel.lazy.ops.contraction import matmul
from fuel_parallel.lazy.ops.neural import softmax
from fuel_parallel.lazy.tensor import Tensor

QUERY_BLOCK = 256
KEY_BLOCK = 512
KEPT = 512
"""Keys up to which weights may be kept; they are one block then."""
SCORES = 1 << 16
"""Scores computed at one time: a quarter of a megabyte in float32."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    /,
    *,
    mask: Tensor | None = None,
    causal: builtins.bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(query @ key.T * scale) @ value (Vaswani et al., 2017, arXiv:1706.03762).

    `query` is [..., heads, q, dim], `key` [..., kv heads, k, dim], `value` [..., kv heads, k, value dim]; `heads` is a
    multiple of `kv heads` and each key head serves a group of neighbouring query heads (Ainslie et al., 2023,
    arXiv:2305.13245). `causal`: query i sees keys up to i + k - q, so that the last query sees all. `mask` broadcasts
    to [..., heads, q, k]: bool (True is seen) or floating (added). A query that sees nothing gives zeros. `scale` is
    1 / sqrt(dim) by default.

    >>> q = creation.ones((1, 2, 3, 4))
    >>> scaled_dot_product_attention(q, q, q, causal=True).shape
    (1, 2, 3, 4)
    """
    check_attention("scaled_dot_product_attention", query, key, value, mask)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    common = creation.result_type(query, key, value)
    query, key, value = (creation.astype(t, common) for t in (query, key, value))
    if mask is not None and mask.dtype != dtypes.bool_:
        # An added mask may want a gradient of its own, which is a matrix of all scores in any case.
        return dense_attention(query, key, value, mask, causal, factor)
    inputs = (query, key, value) if mask is None else (query, key, value, mask)
    return creation.astype(extended_attention(inputs, causal, factor)[..., : value.shape[-1]], common)


def extended_attention(inputs: Sequence[Tensor], causal: builtins.bool, scale: float) -> Tensor:
    """What the op gives for query, key, value and maybe a bool mask. Weights are kept where that is faster."""
    query, key = inputs[:2]
    few = key.shape[-2] <= builtins.min(2 * query.shape[-1], KEPT)
    keeps = few and not backend_of(query.device).dialect
    return Tensor(apply(ATTENTION, tuple(t.node for t in inputs), causal, scale, keeps))


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: builtins.bool, scale: float
) -> Tensor:
    """The same by plain operations on the matrix of all scores: for added masks, and for derivatives of derivatives."""
    groups = query.shape[-3] // key.shape[-3]
    heads, q, dim = query.shape[-3:]
    k = key.shape[-2]
    if groups > 1:
        # Query heads of one group become rows of one product: keys and values are not repeated.
        query = manipulation.reshape(query, (*query.shape[:-3], heads // groups, groups * q, dim))
    scores = matmul(query * scale, key.mT)
    scores = manipulation.reshape(scores, (*scores.shape[:-3], heads, q, k))
    seen = creation.tril(creation.ones((q, k), dtype=dtypes.bool_, device=query.device), k=k - q) if causal else None
    if mask is not None and mask.dtype == dtypes.bool_:
        seen = mask if seen is None else seen & mask
    elif mask is not None:
        scores = scores + creation.astype(mask, scores.dtype)
    if seen is not None:
        scores = binary.where(seen, scores, -math.inf)
    # A row without any visible key is set to 0, so that its softmax has no NaN, and its weights to 0 afterwards.
    blind = creation.stop_gradient(reductions.max(scores, axis=-1, keepdims=True)) == -math.inf
    weights = binary.where(blind, 0.0, softmax(binary.where(blind, 0.0, scores)))
    if groups > 1:
        weights = manipulation.reshape(weights, (*weights.shape[:-3], heads // groups, groups * q, k))
    result = matmul(weights, value)
    return manipulation.reshape(result, (*result.shape[:-3], heads, q, value.shape[-1]))


def check_attention(name: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> None:
    """Raises the user's error, in the name of a function, where shapes or dtypes do not fit together."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if builtins.min(query.ndim, key.ndim, value.ndim) < 3:
        raise ShapeError(f"{name}: expected [..., heads, length, dim], got {shapes}")
    if query.shape[-1] != key.shape[-1] or key.shape[-3:-1] != value.shape[-3:-1]:
        raise ShapeError(
            f"{name}: query and key must have the same last extent, key and value the same heads and length; "
            f"got {shapes}"
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ShapeError(f"{name}: the dimensions before the heads must be equal; got {shapes}")
    groups, rest = divmod(query.shape[-3], key.shape[-3]) if key.shape[-3] else (0, 1)
    if rest or not groups:
        raise ShapeError(f"{name}: query heads must be a multiple of key heads; got {shapes}")
    for t in (query, key, value):
        elementwise.check_domain(name, t.dtype, dtypes.FLOATING)
    if mask is not None:
        whole = (*query.shape[:-1], key.shape[-2])
        if binary.broadcast_shapes(f"{name}, mask", mask.shape, whole) != whole:
            raise ShapeError(f"{name}: mask of shape {mask.shape} does not broadcast to the scores {whole}")


# The ops. Inputs are query, key, value and maybe a bool mask.


def _infer_attention(inputs: tuple[Spec, ...], causal: builtins.bool, scale: float, keeps: builtins.bool) -> Spec:
    query, key, value = inputs[:3]
    return Spec((*query.shape[:-1], _width(key, value, keeps)), dtypes.accumulated_in(query.dtype), query.device)


def _width(key: Any, value: Any, keeps: builtins.bool) -> int:
    """The last extent of what the op gives: the result, the logarithm of the sum, and the weights if they are kept."""
    return int(value.shape[-1]) + 1 + (int(key.shape[-2]) if keeps else 0)


def _attention_kernel(xp: Any, inputs: Any, causal: builtins.bool, scale: float, keeps: builtins.bool) -> Any:
    query, key, value = inputs[:3]
    out = xp.empty((*query.shape[:-1], _width(key, value, keeps)), dtype=dtypes.accumulated_in(query.dtype))
    attention_into(xp, out, inputs, causal, scale, keeps)
    return out


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
                _hide(xp, scores, visible, rows, columns, diagonal)
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


def _hide(xp: Any, scores: Any, visible: Any, rows: slice, columns: slice, diagonal: int | None) -> None:
    """Sets the scores of keys that a query may not see to -inf."""
    if diagonal is not None and columns.stop - 1 > rows.start + diagonal:
        hidden = slice(builtins.max(columns.start, rows.start + diagonal + 1), columns.stop)
        part = scores[..., hidden.start - columns.start :]
        part += _causal_tile(xp, rows, hidden, diagonal, scores.dtype)
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


def _attention_vjp(
    index: int,
    g: Tensor,
    y: Tensor,
    inputs: tuple[Tensor, ...],
    causal: builtins.bool,
    scale: float,
    keeps: builtins.bool,
) -> Tensor | None:
    if index == 3:
        return None
    nodes = (g[..., : inputs[2].shape[-1]].node, y.node, *(t.node for t in inputs))
    packed = Tensor(apply(ATTENTION_BACKWARD, nodes, causal, scale))
    start = builtins.sum(t.size for t in inputs[:index])
    return manipulation.reshape(packed[start : start + inputs[index].size], inputs[index].shape)


def _infer_backward(inputs: tuple[Spec, ...], causal: builtins.bool, scale: float) -> Spec:
    _, _, query, key, value = inputs[:5]
    return Spec((query.size + key.size + value.size,), query.dtype, query.device)


def _backward_kernel(xp: Any, inputs: Any, causal: builtins.bool, scale: float) -> Any:
    _, _, query, key, value = inputs[:5]
    out = xp.empty(query.size + key.size + value.size, dtype=query.dtype)
    attention_backward_into(xp, out, inputs, causal, scale)
    return out


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
            if not any(True for _ in _seen_blocks(rows, k, diagonal, KEY_BLOCK)):
                to_query[..., rows, :] = 0
            inner = xp.einsum("...i,...i->...", toward, result[..., rows, :])[..., None]
            for columns in _seen_blocks(rows, k, diagonal, k if keeps else KEY_BLOCK):
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


def _backward_vjp(
    index: int, h: Tensor, y: Tensor, inputs: tuple[Tensor, ...], causal: builtins.bool, scale: float
) -> Tensor | None:
    """By plain operations: the gradient of the dense gradient. The forward result is a function of the other inputs."""
    from fuel_parallel.lazy.autograd import grad

    if index in (1, 5):
        return None
    # Inputs may depend on each other; here each is a variable of its own.
    own = [t if i == 5 else elementwise.positive(t) for i, t in enumerate(inputs)]
    g, _, query, key, value = own[:5]
    mask = own[5] if len(own) > 5 else None
    dense = dense_attention(query, key, value, mask, causal, scale)
    first = grad(dense, [query, key, value], cotangent=creation.astype(g, dense.dtype))
    packed = manipulation.concat([manipulation.reshape(d, (-1,)) for d in first])
    result: Tensor = grad(packed, own[index], cotangent=h)
    return result


ATTENTION = define(
    Op(
        "attention",
        _infer_attention,
        _attention_kernel,
        vjp=_attention_vjp,
        variadic=True,
        into=attention_into,
        aliases=False,
        attr_names=("causal", "scale", "keeps"),
        shapes="[..., heads, m, d], [..., groups, n, d], [..., groups, n, v] -> [..., heads, m, v + 1 and more]",
        domain=dtypes.FLOATING,
    )
)
ATTENTION_BACKWARD = define(
    Op(
        "attention_backward",
        _infer_backward,
        _backward_kernel,
        vjp=_backward_vjp,
        variadic=True,
        into=attention_backward_into,
        aliases=False,
        attr_names=("causal", "scale"),
        shapes="cotangent, result and inputs of attention -> [elements of query, key and value]",
        domain=dtypes.FLOATING,
    )
)
