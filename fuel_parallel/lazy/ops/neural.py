"""The functions of neural networks: softmax, norms, losses, embedding, attention."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from fuel_parallel.errors import ArgumentError, DTypeError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Op, Spec, apply, define
from fuel_parallel.lazy.ops import binary, creation, elementwise, indexing, manipulation, reductions
from fuel_parallel.lazy.ops.contraction import matmul
from fuel_parallel.lazy.ops.elementwise import in_float32
from fuel_parallel.lazy.tensor import Tensor


def _along_axis(name: str, kernel: Callable[..., Any], vjp: Callable[..., Tensor]) -> Op:
    def infer(x: Spec, axis: int) -> Spec:
        elementwise.check_domain(name, x.dtype, dtypes.FLOATING)
        return x

    return define(Op(name, infer, in_float32(kernel), (vjp,), attr_names=("axis",)))


def _softmax_kernel(xp: Any, x: Any, axis: int) -> Any:
    if not x.size:
        return x
    top = x.max(axis=axis, keepdims=True)
    shifted = x - top
    xp.exp(shifted, out=shifted)
    shifted /= shifted.sum(axis=axis, keepdims=True)
    return shifted


def _log_softmax_kernel(xp: Any, x: Any, axis: int) -> Any:
    if not x.size:
        return x
    shifted = x - x.max(axis=axis, keepdims=True)
    shifted -= xp.log(xp.exp(shifted).sum(axis=axis, keepdims=True))
    return shifted


SOFTMAX = _along_axis(
    "softmax", _softmax_kernel, lambda g, y, x, axis: y * (g - reductions.sum(g * y, axis=axis, keepdims=True))
)
LOG_SOFTMAX = _along_axis(
    "log_softmax",
    _log_softmax_kernel,
    lambda g, y, x, axis: g - elementwise.exp(y) * reductions.sum(g, axis=axis, keepdims=True),
)


def softmax(x: Tensor, /, *, axis: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along `axis`, without overflow.

    >>> softmax(creation.asarray([0.0, 0.0])).tolist()
    [0.5, 0.5]
    """
    return Tensor(apply(SOFTMAX, (x.node,), reductions.normalize_axis("softmax", axis, x.ndim)))


def log_softmax(x: Tensor, /, *, axis: int = -1) -> Tensor:
    """log(softmax(x)) along `axis`, without overflow."""
    return Tensor(apply(LOG_SOFTMAX, (x.node,), reductions.normalize_axis("log_softmax", axis, x.ndim)))


# Norms over the last dimension. The op normalizes; scale and shift are a multiply and an add.


def _infer_normalize(x: Spec, eps: float, centered: builtins.bool) -> Spec:
    elementwise.check_domain("layer_norm/rms_norm", x.dtype, dtypes.FLOATING)
    if not x.shape or not x.shape[-1]:
        raise ShapeError(f"layer_norm/rms_norm: expected a last dimension with elements, but x has shape {x.shape}")
    return x


def _normalize_kernel(xp: Any, x: Any, eps: float, centered: builtins.bool) -> Any:
    normed = x - x.mean(axis=-1, keepdims=True) if centered else x.copy()
    variance = xp.einsum("...i,...i->...", normed, normed)[..., None] / x.shape[-1]
    variance += eps
    normed /= xp.sqrt(variance)
    return normed


def _normalize_vjp(g: Tensor, y: Tensor, x: Tensor, eps: float, centered: builtins.bool) -> Tensor:
    deviation = x - reductions.mean(x, axis=-1, keepdims=True) if centered else x
    inverse = elementwise.rsqrt(reductions.mean(elementwise.square(deviation), axis=-1, keepdims=True) + eps)
    inner = g - y * reductions.mean(g * y, axis=-1, keepdims=True)
    if centered:
        inner = inner - reductions.mean(g, axis=-1, keepdims=True)
    return inner * inverse


NORMALIZE = define(
    Op("normalize", _infer_normalize, in_float32(_normalize_kernel), (_normalize_vjp,), attr_names=("eps", "centered"))
)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, /, *, eps: float = 1e-5) -> Tensor:
    """The last dimension shifted to mean 0 and scaled to variance 1 (Ba et al., 2016, arXiv:1607.06450).

    `weight` and `bias` have the shape of the last dimension.
    """
    return _scale_and_shift("layer_norm", Tensor(apply(NORMALIZE, (x.node,), eps, True)), weight, bias)


def rms_norm(x: Tensor, weight: Tensor | None = None, /, *, eps: float = 1e-6) -> Tensor:
    """The last dimension scaled to mean square 1 (Zhang and Sennrich, 2019, arXiv:1910.07467)."""
    return _scale_and_shift("rms_norm", Tensor(apply(NORMALIZE, (x.node,), eps, False)), weight, None)


def _scale_and_shift(function: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and p.shape != x.shape[-1:]:
            raise ShapeError(
                f"{function}: {name} must have shape {x.shape[-1:]} like x's last dimension, not {p.shape}"
            )
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


# Tables and losses.


def embedding(indices: Tensor, table: Tensor, /) -> Tensor:
    """The rows of `table` [vocabulary, dim] at integer `indices` of any shape: shape [*indices.shape, dim]."""
    if table.ndim != 2:
        raise ShapeError(f"embedding: the table must have shape [vocabulary, dim], not {table.shape}")
    return indexing.take(table, indices, axis=0)


def _pick_kernel(xp: Any, x: Any, index: Any) -> Any:
    return xp.take_along_axis(x, index[..., None], axis=-1)[..., 0]


def _unpick_kernel(xp: Any, g: Any, index: Any, classes: int) -> Any:
    result = xp.zeros((g.size, classes), dtype=g.dtype)
    result[xp.arange(g.size), index.reshape(-1)] = g.reshape(-1)
    return result.reshape(*g.shape, classes)


PICK = define(
    Op(
        "pick",
        infer=lambda x, index: Spec(index.shape, x.dtype, x.device),
        kernel=_pick_kernel,
        vjp=(
            lambda g, y, x, index: Tensor(apply(UNPICK, (g.node, index.node), x.shape[-1])),
            lambda g, y, x, index: None,
        ),
    )
)
UNPICK: Op = define(
    Op(
        "unpick",
        infer=lambda g, index, classes: Spec((*g.shape, classes), g.dtype, g.device),
        kernel=_unpick_kernel,
        vjp=(lambda h, y, g, index, classes: pick(h, index), lambda h, y, g, index, classes: None),
        attr_names=("classes",),
    )
)


def pick(x: Tensor, index: Tensor, /) -> Tensor:
    """For each integer of `index` [...] that element of the last dimension of `x` [..., classes]."""
    return Tensor(apply(PICK, (x.node, index.node)))


def cross_entropy(
    logits: Tensor, targets: Tensor, /, *, ignore_index: int | None = None, reduction: str = "mean"
) -> Tensor:
    """The negative log-likelihood of integer `targets` [...] under `logits` [..., classes].

    Targets equal to `ignore_index` count for nothing: `mean` divides by the number of the others (the loss is 0 if
    there are none). `reduction` is 'mean', 'sum' or 'none'.

    >>> round(cross_entropy(creation.zeros((2, 4)), creation.asarray([0, 3])).item(), 4)
    1.3863
    """
    if logits.ndim < 1 or targets.shape != logits.shape[:-1]:
        raise ShapeError(
            f"cross_entropy: targets must have the shape of logits without the last dimension, {logits.shape[:-1]}, "
            f"but logits has shape {logits.shape} and targets {targets.shape}"
        )
    if dtypes.kind(targets.dtype) != "integral":
        raise DTypeError(f"cross_entropy: targets must be integers (class numbers), not {targets.dtype.name}")
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError(f"cross_entropy: reduction is 'mean', 'sum' or 'none', not {reduction!r}")
    kept = None if ignore_index is None else targets != ignore_index
    safe = targets if kept is None else binary.where(kept, targets, 0)
    losses = -pick(log_softmax(logits), safe)
    if kept is not None:
        losses = binary.where(kept, losses, 0.0)
    if reduction == "none":
        return losses
    total = reductions.sum(losses)
    if reduction == "sum":
        return total
    if kept is None:
        return total * (1 / targets.size) if targets.size else total
    return total / binary.maximum(creation.astype(reductions.count_nonzero(kept), total.dtype), 1.0)


# Attention.


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

    `query` is [..., heads, q, dim], `key` [..., kv heads, k, dim], `value` [..., kv heads, k, value dim]; `heads` is
    a multiple of `kv heads` and each key head serves a group of neighbouring query heads (Ainslie et al., 2023,
    arXiv:2305.13245). `causal`: query i sees keys up to i + k - q, so that the last query sees all. `mask` broadcasts
    to [..., heads, q, k]: bool (True is seen) or floating (added). A query to which `causal` or a bool mask leaves no
    key gives zeros. `scale` is 1 / sqrt(dim) by default.
    """
    groups = _check_attention(query, key, value)
    heads, q, dim = query.shape[-3:]
    k = key.shape[-2]
    if groups > 1:
        # Query heads of one group become rows of one product: keys and values are not repeated.
        query = manipulation.reshape(query, (*query.shape[:-3], heads // groups, groups * q, dim))
    scores = matmul(query * (1 / math.sqrt(dim) if scale is None else scale), key.mT)
    batch = scores.shape[:-3]
    if groups > 1:
        scores = manipulation.reshape(scores, (*batch, heads, q, k))
    seen = None
    if causal:
        seen = creation.tril(creation.ones((q, k), dtype=dtypes.bool_, device=scores.device), k=k - q)
    if mask is not None and mask.dtype == dtypes.bool_:
        seen = mask if seen is None else seen & mask
    elif mask is not None:
        scores = scores + creation.astype(mask, scores.dtype)
    if seen is not None:
        scores = binary.where(seen, scores, -math.inf)
    weights = softmax(_finite_rows(scores) if seen is not None and (mask is not None or k < q) else scores)
    if seen is not None and (mask is not None or k < q):
        weights = binary.where(seen, weights, 0.0)
    if groups > 1:
        weights = manipulation.reshape(weights, (*batch, heads // groups, groups * q, k))
    result = matmul(weights, value)
    return manipulation.reshape(result, (*result.shape[:-3], heads, q, value.shape[-1])) if groups > 1 else result


def _finite_rows(scores: Tensor) -> Tensor:
    """Rows without any visible key set to 0, so that their softmax has no NaN."""
    blind = reductions.max(scores, axis=-1, keepdims=True) == -math.inf
    return binary.where(creation.stop_gradient(blind), 0.0, scores)


def _check_attention(query: Tensor, key: Tensor, value: Tensor) -> int:
    """The number of query heads a key head serves, or the user's error."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if min(query.ndim, key.ndim, value.ndim) < 3:
        raise ShapeError(f"scaled_dot_product_attention: expected [..., heads, length, dim], got {shapes}")
    if query.shape[-1] != key.shape[-1] or key.shape[-3:-1] != value.shape[-3:-1]:
        raise ShapeError(
            "scaled_dot_product_attention: query and key must have the same last extent, key and value the same heads "
            f"and length; got {shapes}"
        )
    groups, rest = divmod(query.shape[-3], key.shape[-3])
    if rest or not groups:
        raise ShapeError(f"scaled_dot_product_attention: query heads must be a multiple of key heads; got {shapes}")
    return groups
