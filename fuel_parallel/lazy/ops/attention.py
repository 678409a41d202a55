"""Attention without the matrix of all scores.

Blocks of queries meet blocks of keys, see `attention_blocks`. The forward op gives the result and, as one more column,
the logarithm of each query's sum of exponentials; the backward op recomputes the weights from it. Where there are few
keys, the weights themselves are as small as the inputs: then they are further columns, and nothing is computed twice.
But where both ops are kernels in C, weights never leave the chip.
Memory grows with the length, not with its square.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

from fuel_parallel.backends import backend_of
from fuel_parallel.errors import ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Op, Spec, apply, define
from fuel_parallel.lazy.ops import binary, creation, elementwise, manipulation, reductions
from fuel_parallel.lazy.ops.attention_blocks import attention_backward_into, attention_into
from fuel_parallel.lazy.ops.contraction import matmul
from fuel_parallel.lazy.ops.neural import softmax
from fuel_parallel.lazy.tensor import Tensor

KEPT = 512
"""Keys up to which weights may be kept; they are one block then."""


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
    to [..., heads, q, k]: bool (True is seen) or floating (added). A query that sees nothing gives zeros. Of a key that
    is not seen, only its value counts, times 0: that of a key without meaning must be finite. `scale` is 1 / sqrt(dim)
    by default.

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
    few = 0 < key.shape[-2] <= builtins.min(2 * query.shape[-1], KEPT)
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


def _attention_vjp(
    asked: Sequence[builtins.bool],
    g: Tensor,
    y: Tensor,
    inputs: tuple[Tensor, ...],
    causal: builtins.bool,
    scale: float,
    keeps: builtins.bool,
) -> list[Tensor | None]:
    nodes = (g[..., : inputs[2].shape[-1]].node, y.node, *(t.node for t in inputs))
    packed = Tensor(apply(ATTENTION_BACKWARD, nodes, causal, scale))
    parts: list[Tensor | None] = []
    start = 0
    for x, is_asked in zip(inputs[:3], asked, strict=False):
        parts.append(manipulation.reshape(packed[start : start + x.size], x.shape) if is_asked else None)
        start += x.size
    return [*parts, *[None] * (len(inputs) - 3)]


def _infer_backward(inputs: tuple[Spec, ...], causal: builtins.bool, scale: float) -> Spec:
    _, _, query, key, value = inputs[:5]
    return Spec((query.size + key.size + value.size,), query.dtype, query.device)


def _backward_kernel(xp: Any, inputs: Any, causal: builtins.bool, scale: float) -> Any:
    _, _, query, key, value = inputs[:5]
    out = xp.empty(query.size + key.size + value.size, dtype=query.dtype)
    attention_backward_into(xp, out, inputs, causal, scale)
    return out


def _backward_vjp(
    asked: Sequence[builtins.bool],
    h: Tensor,
    y: Tensor,
    inputs: tuple[Tensor, ...],
    causal: builtins.bool,
    scale: float,
) -> list[Tensor | None]:
    """By plain operations: the gradient of the dense gradient. The forward result is a function of the other inputs."""
    from fuel_parallel.lazy.autograd import grad

    # Inputs may depend on each other; here each is a variable of its own.
    own = [t if i == 5 else elementwise.positive(t) for i, t in enumerate(inputs)]
    g, _, query, key, value = own[:5]
    mask = own[5] if len(own) > 5 else None
    dense = dense_attention(query, key, value, mask, causal, scale)
    first = grad(dense, [query, key, value], cotangent=creation.astype(g, dense.dtype))
    packed = manipulation.concat([manipulation.reshape(d, (-1,)) for d in first])
    places = [place for place in (0, 2, 3, 4) if asked[place]]
    found = dict(zip(places, grad(packed, [own[place] for place in places], cotangent=h), strict=True))
    return [found.get(place) for place in range(len(inputs))]


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
