"""The functions of neural networks: softmax, norms, losses, embedding."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from fuel_parallel.errors import ArgumentError, DTypeError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Op, Spec, apply, define
from fuel_parallel.lazy.ops import binary, creation, elementwise, indexing, manipulation, reductions
from fuel_parallel.lazy.ops.call import called
from fuel_parallel.lazy.ops.elementwise import in_float32
from fuel_parallel.lazy.tensor import Tensor


def _along_axis(name: str, kernel: Callable[..., Any], vjp: Callable[..., Tensor]) -> Op:
    def infer(x: Spec, axis: int) -> Spec:
        elementwise.check_domain(name, x.dtype, dtypes.FLOATING)
        return x

    return define(
        Op(
            name,
            infer,
            in_float32(kernel),
            (vjp,),
            attr_names=("axis",),
            shapes="[...] -> [...]",
            domain=dtypes.FLOATING,
        )
    )


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


def _deviation(x: Tensor, eps: float, centered: builtins.bool) -> tuple[Tensor, Tensor]:
    """What is scaled, and by what."""
    deviation = x - reductions.mean(x, axis=-1, keepdims=True) if centered else x
    return deviation, elementwise.rsqrt(reductions.mean(elementwise.square(deviation), axis=-1, keepdims=True) + eps)


def normalize_by_parts(x: Tensor, eps: float, centered: builtins.bool) -> Tensor:
    """The same by elementary operations, which its derivative shares."""
    deviation, inverse = _deviation(x, eps, centered)
    return deviation * inverse


@called
def _normalize_backward(g: Tensor, y: Tensor, x: Tensor, eps: float, centered: builtins.bool) -> Tensor:
    _, inverse = _deviation(x, eps, centered)
    inner = g - y * reductions.mean(g * y, axis=-1, keepdims=True)
    if centered:
        inner = inner - reductions.mean(g, axis=-1, keepdims=True)
    return inner * inverse


NORMALIZE = define(
    Op(
        "normalize",
        _infer_normalize,
        in_float32(_normalize_kernel),
        (_normalize_backward,),
        attr_names=("eps", "centered"),
        shapes="[..., n] -> [..., n]",
        domain=dtypes.FLOATING,
    )
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
        shapes="[..., classes], [...] -> [...]",
    )
)
UNPICK: Op = define(
    Op(
        "unpick",
        infer=lambda g, index, classes: Spec((*g.shape, classes), g.dtype, g.device),
        kernel=_unpick_kernel,
        vjp=(lambda h, y, g, index, classes: pick(h, index), lambda h, y, g, index, classes: None),
        attr_names=("classes",),
        shapes="[...], [...] -> [..., classes]",
    )
)


def pick(x: Tensor, index: Tensor, /) -> Tensor:
    """For each integer of `index` [...] that element of the last dimension of `x` [..., classes]."""
    return Tensor(apply(PICK, (x.node, index.node)))


def nll_by_parts(x: Tensor, index: Tensor) -> Tensor:
    """The negative log-likelihood by elementary operations, which its derivative shares."""
    shifted, _, total = exponentials(x, -1)
    return manipulation.squeeze(elementwise.log(total), -1) - pick(shifted, index)


def nll_backward_by_parts(g: Tensor, x: Tensor, index: Tensor) -> Tensor:
    """g * (softmax(x) - one at the index), in one pass over the exponentials."""
    _, e, total = exponentials(x, -1)
    rows = manipulation.expand_dims(g, axis=-1) / total
    return Tensor(apply(SCALE_AND_SUBTRACT, (e.node, rows.node, g.node, index.node)))


def exponentials(x: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """x less its maximum along an axis, the exponentials of that, and their sum."""
    shifted = x - reductions.max(x, axis=axis, keepdims=True)
    e = elementwise.exp(shifted)
    return shifted, e, reductions.sum(e, axis=axis, keepdims=True)


def _nll_kernel(xp: Any, x: Any, index: Any) -> Any:
    return -_pick_kernel(xp, _log_softmax_kernel(xp, x, -1), index)


def _nll_backward_kernel(xp: Any, g: Any, x: Any, index: Any) -> Any:
    return _subtract_kernel(xp, _softmax_kernel(xp, x, -1), g[..., None], g, index)


def _subtract_kernel(xp: Any, e: Any, rows: Any, g: Any, index: Any) -> Any:
    result = (e * rows).reshape(-1, e.shape[-1])
    result[xp.arange(g.size), index.reshape(-1)] -= g.reshape(-1)
    return result.reshape(e.shape)


def _as_composite(function: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
    """The vjp, for input `place`, of an op that computes `function` of floating inputs and a last one of integers."""

    def vjp(h: Tensor, y: Tensor, *inputs: Tensor) -> Tensor:
        from fuel_parallel.lazy.autograd import grad

        # Inputs may depend on each other; here each is a variable of its own.
        own = [elementwise.positive(t) for t in inputs[:-1]]
        result: Tensor = grad(function(*own, inputs[-1]), own[place], cotangent=h)
        return result

    return vjp


def _no_gradient(*_: Any) -> None:
    return None


def _infer_nll(x: Spec, index: Spec) -> Spec:
    elementwise.check_domain("cross_entropy", x.dtype, dtypes.FLOATING)
    return Spec(index.shape, x.dtype, x.device)


NLL = define(
    Op(
        "nll",
        _infer_nll,
        in_float32(_nll_kernel),
        vjp=(lambda g, y, x, index: Tensor(apply(NLL_BACKWARD, (g.node, x.node, index.node))), _no_gradient),
        aliases=False,
        shapes="[..., classes], [...] -> [...]",
        domain=dtypes.FLOATING,
    )
)
NLL_BACKWARD: Op = define(
    Op(
        "nll_backward",
        infer=lambda g, x, index: x,
        kernel=in_float32(_nll_backward_kernel),
        vjp=(_as_composite(nll_backward_by_parts, 0), _as_composite(nll_backward_by_parts, 1), _no_gradient),
        aliases=False,
        shapes="[...], [..., classes], [...] -> [..., classes]",
        domain=dtypes.FLOATING,
    )
)
SCALE_AND_SUBTRACT = define(
    Op(
        "scale_and_subtract",
        infer=lambda e, rows, g, index: e,
        kernel=_subtract_kernel,
        vjp=(
            lambda h, y, e, rows, g, index: h * rows,
            lambda h, y, e, rows, g, index: reductions.sum(h * e, axis=-1, keepdims=True),
            lambda h, y, e, rows, g, index: -pick(h, index),
            _no_gradient,
        ),
        aliases=False,
        shapes="[..., classes], [..., 1], [...], [...] -> [..., classes]",
    )
)
"""e * rows, less g at the index: [..., classes], [..., 1], [...], integers [...]."""


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
    losses = Tensor(apply(NLL, (logits.node, safe.node)))
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
