"""Shapes rearranged: reshape, permute, broadcast, join, repeat. None of these computes anything."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Op, Shape, Spec, apply, define
from fuel_parallel.lazy.ops import binary, creation
from fuel_parallel.lazy.tensor import Tensor

RESHAPE = define(
    Op(
        "reshape",
        infer=lambda x, shape: Spec(shape, x.dtype, x.device),
        kernel=lambda xp, x, shape: x.reshape(shape),
        vjp=(lambda g, y, x, shape: reshape(g, x.shape),),
        attr_names=("shape",),
        shapes="[...] -> shape",
    )
)


def reshape(x: Tensor, /, shape: Any, *, copy: builtins.bool | None = None) -> Tensor:
    """The same elements, in row-major order, in another shape; one extent may be -1.

    >>> reshape(creation.arange(6), (2, -1)).shape
    (2, 3)
    """
    x = creation.to_tensor("reshape", x)
    return Tensor(apply(RESHAPE, (x.node,), _complete(x.shape, shape)))


def _complete(old: Shape, shape: Any) -> Shape:
    given = (shape,) if isinstance(shape, int) else tuple(shape)
    try:
        extents = tuple(int(extent.__index__()) for extent in given)
    except AttributeError:
        raise ShapeError(f"reshape: a shape is a tuple of ints, not {shape!r}") from None
    size = 1
    for extent in old:
        size *= extent
    if extents.count(-1) > 1 or any(extent < -1 for extent in extents):
        raise ShapeError(f"reshape: only one extent may be -1 and none below, but the new shape is {extents}")
    known = 1
    for extent in extents:
        known *= extent if extent != -1 else 1
    if -1 in extents and known and size % known == 0:
        return tuple(size // known if extent == -1 else extent for extent in extents)
    if known != size or -1 in extents:
        raise ShapeError(f"reshape: cannot give {size} elements of shape {old} the shape {extents}")
    return extents


def _infer_permute(x: Spec, axes: tuple[int, ...]) -> Spec:
    return Spec(tuple(x.shape[a] for a in axes), x.dtype, x.device)


PERMUTE = define(
    Op(
        "permute_dims",
        _infer_permute,
        kernel=lambda xp, x, axes: x.transpose(axes),
        vjp=(lambda g, y, x, axes: permute_dims(g, tuple(axes.index(i) for i in range(len(axes)))),),
        attr_names=("axes",),
        shapes="[...] -> [...], the extents in the order of axes",
    )
)


def permute_dims(x: Tensor, /, axes: Sequence[int]) -> Tensor:
    """Dimension i of the result is dimension `axes[i]` of x."""
    from fuel_parallel.lazy.ops.reductions import normalize_axis

    order = tuple(normalize_axis("permute_dims", a, x.ndim) for a in axes)
    if sorted(order) != list(range(x.ndim)):
        raise ShapeError(f"permute_dims: axes {tuple(axes)} is not an order of the {x.ndim} dimensions of {x.shape}")
    return x if order == tuple(range(x.ndim)) else Tensor(apply(PERMUTE, (x.node,), order))


def matrix_transpose(x: Tensor, /) -> Tensor:
    """The last two dimensions exchanged."""
    if x.ndim < 2:
        raise ShapeError(f"matrix_transpose: expected at least 2 dimensions, but x has shape {x.shape}")
    return permute_dims(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def moveaxis(x: Tensor, source: int | Sequence[int], destination: int | Sequence[int], /) -> Tensor:
    """The dimensions `source` moved to the places `destination`, the others keep their order."""
    from fuel_parallel.lazy.ops.reductions import normalize_axis

    sources = [source] if isinstance(source, int) else list(source)
    destinations = [destination] if isinstance(destination, int) else list(destination)
    if len(sources) != len(destinations):
        raise ShapeError(f"moveaxis: {source!r} and {destination!r} must have the same number of axes")
    sources = [normalize_axis("moveaxis", a, x.ndim) for a in sources]
    destinations = [normalize_axis("moveaxis", a, x.ndim) for a in destinations]
    order = [i for i in range(x.ndim) if i not in sources]
    for place, axis in sorted(zip(destinations, sources, strict=True)):
        order.insert(place, axis)
    return permute_dims(x, order)


def _infer_broadcast(x: Spec, shape: Shape) -> Spec:
    if binary.broadcast_shapes("broadcast_to", x.shape, shape) != shape:
        raise ShapeError(f"broadcast_to: shape {x.shape} does not broadcast to {shape}")
    return Spec(shape, x.dtype, x.device)


BROADCAST = define(
    Op(
        "broadcast_to",
        _infer_broadcast,
        kernel=lambda xp, x, shape: xp.broadcast_to(x, shape),
        vjp=(lambda g, y, x, shape: binary.sum_to(g, x.shape),),
        attr_names=("shape",),
        shapes="[...] -> shape",
    )
)


def broadcast_to(x: Tensor, /, shape: Any) -> Tensor:
    """`x` repeated along new dimensions and dimensions of extent 1 until it has `shape`."""
    wanted = creation.check_shape("broadcast_to", shape)
    return x if x.shape == wanted else Tensor(apply(BROADCAST, (x.node,), wanted))


def broadcast_arrays(*arrays: Tensor) -> list[Tensor]:
    """All tensors broadcast to their common shape."""
    shape = binary.broadcast_shapes("broadcast_arrays", *(a.shape for a in arrays))
    return [broadcast_to(a, shape) for a in arrays]


def expand_dims(x: Tensor, /, axis: int | Sequence[int] = 0) -> Tensor:
    """`x` with new dimensions of extent 1 at the places `axis` of the result."""
    from fuel_parallel.lazy.ops.reductions import normalize_axes

    count = 1 if isinstance(axis, int) else len(tuple(axis))
    places = normalize_axes("expand_dims", axis if isinstance(axis, int) else tuple(axis), x.ndim + count)
    old = iter(x.shape)
    return reshape(x, tuple(1 if i in places else next(old) for i in range(x.ndim + count)))


def squeeze(x: Tensor, /, axis: int | tuple[int, ...]) -> Tensor:
    """`x` without the dimensions `axis`, each of which must have extent 1."""
    from fuel_parallel.lazy.ops.reductions import normalize_axes, reduced_shape

    axes = normalize_axes("squeeze", axis, x.ndim)
    if any(x.shape[a] != 1 for a in axes):
        raise ShapeError(f"squeeze: every dimension of {axis} must have extent 1, but x has shape {x.shape}")
    return reshape(x, reduced_shape(x.shape, axes, False))


def _infer_concat(xs: tuple[Spec, ...], axis: int) -> Spec:
    first = xs[0].shape
    for x in xs[1:]:
        if len(x.shape) != len(first) or any(
            a != b for i, (a, b) in enumerate(zip(first, x.shape, strict=True)) if i != axis
        ):
            listed = " and ".join(str(s.shape) for s in xs)
            raise ShapeError(f"concat: shapes {listed} may differ along axis {axis} only")
    total = 0
    for x in xs:
        total += x.shape[axis]
    return Spec((*first[:axis], total, *first[axis + 1 :]), xs[0].dtype, xs[0].device)


def _concat_vjp(
    asked: Sequence[builtins.bool], g: Tensor, y: Tensor, xs: tuple[Tensor, ...], axis: int
) -> list[Tensor | None]:
    parts: list[Tensor | None] = []
    start = 0
    for x, is_asked in builtins.zip(xs, asked, strict=True):
        stop = start + x.shape[axis]
        parts.append(g[(slice(None),) * axis + (slice(start, stop),)] if is_asked else None)
        start = stop
    return parts


CONCAT = define(
    Op(
        "concat",
        _infer_concat,
        kernel=lambda xp, xs, axis: xp.concatenate(xs, axis=axis),
        vjp=_concat_vjp,
        variadic=True,
        into=lambda xp, out, xs, axis: xp.concatenate(xs, axis=axis, out=out),
        aliases=False,
        attr_names=("axis",),
        shapes="[..., n, ...] of each -> [..., sum of n, ...] along axis",
    )
)


def concat(arrays: Sequence[Tensor], /, *, axis: int | None = 0) -> Tensor:
    """The tensors joined along an existing axis; flattened first if `axis` is None."""
    from fuel_parallel.lazy.ops.reductions import normalize_axis

    if not arrays:
        raise ArgumentError("concat: expected at least one tensor, got none")
    parts = [creation.to_tensor("concat", a) for a in arrays]
    if axis is None:
        parts, axis = [reshape(p, (-1,)) for p in parts], 0
    common = creation.result_type(*parts)
    place = normalize_axis("concat", axis, parts[0].ndim)
    return Tensor(apply(CONCAT, tuple(creation.astype(p, common).node for p in parts), place))


def stack(arrays: Sequence[Tensor], /, *, axis: int = 0) -> Tensor:
    """Tensors of one shape joined along a new axis."""
    if not arrays:
        raise ArgumentError("stack: expected at least one tensor, got none")
    parts = [creation.to_tensor("stack", a) for a in arrays]
    if len({p.shape for p in parts}) > 1:
        raise ShapeError(f"stack: all shapes must be equal, but they are {' and '.join(str(p.shape) for p in parts)}")
    return concat([expand_dims(p, axis=axis) for p in parts], axis=axis)


def unstack(x: Tensor, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices of `x` along `axis`."""
    from fuel_parallel.lazy.ops.reductions import normalize_axis

    before = (slice(None),) * normalize_axis("unstack", axis, x.ndim)
    return tuple(x[(*before, i)] for i in range(x.shape[axis]))


def split(x: Tensor, /, sections: int, *, axis: int = 0) -> tuple[Tensor, ...]:
    """`x` cut along `axis` into `sections` contiguous parts whose sizes differ by one at most, larger first."""
    from fuel_parallel.lazy.ops.reductions import normalize_axis
    from fuel_parallel.partitioning import partition

    place = normalize_axis("split", axis, x.ndim)
    before = (slice(None),) * place
    return tuple(x[(*before, slice(r.start, r.stop))] for r in partition(x.shape[place], sections))


def flip(x: Tensor, /, *, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """`x` in reverse order along `axis` (all axes by default)."""
    from fuel_parallel.lazy.ops.reductions import normalize_axes

    axes = normalize_axes("flip", axis, x.ndim)
    return x[tuple(slice(None, None, -1) if i in axes else slice(None) for i in range(x.ndim))]


def roll(x: Tensor, /, shift: int | tuple[int, ...], *, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """`x` moved by `shift` places along `axis`; what leaves at the end comes back at the start."""
    from fuel_parallel.lazy.ops.reductions import normalize_axis

    if axis is None:
        if not isinstance(shift, int):
            raise ArgumentError("roll: shift must be an int when no axis is given")
        return reshape(roll(reshape(x, (-1,)), shift, axis=0), x.shape)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    shifts = (shift,) * len(axes) if isinstance(shift, int) else tuple(shift)
    if len(shifts) != len(axes):
        raise ArgumentError(f"roll: shift {shifts} and axis {axes} must have the same length")
    for a, s in zip(axes, shifts, strict=True):
        place = normalize_axis("roll", a, x.ndim)
        extent = x.shape[place]
        if extent and s % extent:
            before = (slice(None),) * place
            cut = extent - s % extent
            x = concat([x[(*before, slice(cut, None))], x[(*before, slice(None, cut))]], axis=place)
    return x


def repeat(x: Tensor, repeats: int | Tensor, /, *, axis: int | None = None) -> Tensor:
    """Each element along `axis` repeated `repeats` times, in place.

    >>> repeat(creation.asarray([1, 2]), 2).tolist()
    [1, 1, 2, 2]
    """
    from fuel_parallel.lazy.ops.reductions import normalize_axis

    if isinstance(repeats, Tensor):
        return _repeat_each(x, repeats, axis)
    if repeats < 0:
        raise ArgumentError(f"repeat: repeats must not be negative, but is {repeats}")
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    place = normalize_axis("repeat", axis, x.ndim) + 1
    wide = expand_dims(x, axis=place)
    wide = broadcast_to(wide, (*x.shape[:place], repeats, *x.shape[place:]))
    return reshape(wide, (*x.shape[: place - 1], x.shape[place - 1] * repeats, *x.shape[place:]))


def _repeat_each(x: Tensor, repeats: Tensor, axis: int | None) -> Tensor:
    """Repeats that differ by element: the shape depends on their values, so they are realized here."""
    import numpy as np

    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    counts = np.broadcast_to(repeats.numpy(), (x.shape[axis],))
    return take_rows(x, np.repeat(np.arange(x.shape[axis]), counts), axis)


def take_rows(x: Tensor, positions: Any, axis: int) -> Tensor:
    """The slices of `x` along `axis` at the positions of a numpy array."""
    from fuel_parallel.lazy.ops.indexing import take

    return take(x, creation.asarray(positions, device=x.device), axis=axis)


def tile(x: Tensor, repetitions: Sequence[int], /) -> Tensor:
    """`x` as a whole repeated `repetitions[i]` times along dimension i.

    >>> tile(creation.asarray([1, 2]), (2,)).tolist()
    [1, 2, 1, 2]
    """
    counts = creation.check_shape("tile", repetitions)
    ndim = builtins.max(x.ndim, len(counts))
    counts = (1,) * (ndim - len(counts)) + counts
    shape = (1,) * (ndim - x.ndim) + x.shape
    spread: list[int] = []
    wide: list[int] = []
    for extent, count in zip(shape, counts, strict=True):
        spread += [1, extent]
        wide += [count, extent]
    result = tuple(extent * count for extent, count in zip(shape, counts, strict=True))
    return reshape(broadcast_to(reshape(x, tuple(spread)), tuple(wide)), result)


def pad(x: Tensor, widths: Sequence[tuple[int, int]], /, *, value: float = 0) -> Tensor:
    """`x` with `widths[i] = (before, after)` elements of `value` added at both ends of dimension i."""
    if len(widths) != x.ndim or any(b < 0 or a < 0 for b, a in widths):
        raise ArgumentError(f"pad: expected {x.ndim} pairs of non-negative widths for shape {x.shape}, got {widths!r}")
    for axis, (before, after) in enumerate(widths):
        if before or after:
            ends = [(*x.shape[:axis], width, *x.shape[axis + 1 :]) for width in (before, after)]
            low, high = (creation.full(shape, value, dtype=x.dtype, device=x.device) for shape in ends)
            x = concat([low, x, high], axis=axis)
    return x


def diff(
    x: Tensor, /, *, axis: int = -1, n: int = 1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    """The `n`-th difference of neighbours along `axis`."""
    from fuel_parallel.lazy.ops.reductions import normalize_axis

    place = normalize_axis("diff", axis, x.ndim)
    parts = [p for p in (prepend, x, append) if p is not None]
    x = concat(parts, axis=place) if len(parts) > 1 else x
    before = (slice(None),) * place
    for _ in range(n):
        high, low = x[(*before, slice(1, None))], x[(*before, slice(None, -1))]
        x = binary.logical_xor(high, low) if x.dtype == dtypes.bool_ else high - low
    return x
