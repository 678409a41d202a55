"""Indexing, reading and writing: slices, integers, None, Ellipsis, integer tensors, and bool masks.

`Key` takes a key apart, once. Reading and accumulating into are two ops that are each other's vjp, for slices and for
index tensors.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np

from fuel_parallel.errors import DTypeError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Op, Shape, Spec, apply, by_copy, define
from fuel_parallel.lazy.ops import binary, creation, manipulation
from fuel_parallel.lazy.ops.keys import Key, Window, check_index, check_item, check_mask, is_mask, is_scalar_mask
from fuel_parallel.lazy.tensor import Tensor


def _keys(window: Window) -> tuple[slice, ...]:
    keys = []
    for start, step, count in window:
        stop = start + step * count
        keys.append(slice(start, stop if stop >= 0 else None, step) if count else slice(0, 0))
    return tuple(keys)


def _infer_slice(x: Spec, window: Window) -> Spec:
    return Spec(tuple(count for _, _, count in window), x.dtype, x.device)


def _unslice_kernel(xp: Any, g: Any, shape: Shape, window: Window) -> Any:
    result = xp.zeros(shape, dtype=g.dtype)
    result[_keys(window)] = g
    return result


def _update_slice(xp: Any, x: Any, value: Any, window: Window) -> None:
    x[_keys(window)] = value


SLICE = define(
    Op(
        "slice",
        _infer_slice,
        kernel=lambda xp, x, window: x[_keys(window)],
        vjp=(lambda g, y, x, window: Tensor(apply(UNSLICE, (g.node,), x.shape, window)),),
        attr_names=("window",),
        shapes="[...] -> the counts of window",
    )
)
UNSLICE: Op = define(
    Op(
        "unslice",
        infer=lambda g, shape, window: Spec(shape, g.dtype, g.device),
        kernel=_unslice_kernel,
        vjp=(lambda h, y, g, shape, window: _slice(h, window),),
        aliases=False,
        attr_names=("shape", "window"),
        shapes="the counts of window -> shape",
    )
)
SLICE_UPDATE = define(
    Op(
        "slice_update",
        infer=lambda x, value, window: x,
        kernel=by_copy(_update_slice),
        update=_update_slice,
        vjp=(
            lambda g, y, x, value, window: _slice_update(g, creation.zeros_like(value), window),
            lambda g, y, x, value, window: _slice(g, window),
        ),
        aliases=False,
        attr_names=("window",),
        shapes="[...], the counts of window -> [...]",
    )
)


def _slice(x: Tensor, window: Window) -> Tensor:
    return x if _is_whole(x, window) else Tensor(apply(SLICE, (x.node,), window))


def _is_whole(x: Tensor, window: Window) -> bool:
    return builtins.all(
        start == 0 and step == 1 and count == extent
        for (start, step, count), extent in zip(window, x.shape, strict=True)
    )


def _slice_update(x: Tensor, value: Tensor, window: Window) -> Tensor:
    if value.shape == x.shape and _is_whole(x, window):
        return value
    return Tensor(apply(SLICE_UPDATE, (x.node, value.node), window))


# Advanced indexing. `axes` are the dimensions of x that the index tensors stand for, in order.


def _indexed_shape(shape: Shape, axes: tuple[int, ...], indices: tuple[Spec, ...]) -> Shape:
    common = binary.broadcast_shapes("indexing", *(i.shape for i in indices))
    rest = [extent for d, extent in enumerate(shape) if d not in axes]
    adjacent = axes[-1] - axes[0] == len(axes) - 1
    place = axes[0] if adjacent else 0
    return (*rest[:place], *common, *rest[place:])


def _infer_index(inputs: tuple[Spec, ...], axes: tuple[int, ...]) -> Spec:
    x, *indices = inputs
    return Spec(_indexed_shape(x.shape, axes, tuple(indices)), x.dtype, x.device)


def _selector(ndim: int, axes: tuple[int, ...], indices: Any) -> tuple[Any, ...]:
    selector: list[Any] = [slice(None)] * ndim
    for axis, index in zip(axes, indices, strict=True):
        selector[axis] = index
    return tuple(selector)


def _index_kernel(xp: Any, inputs: Any, axes: tuple[int, ...]) -> Any:
    x, *indices = inputs
    if len(axes) == 1:
        return xp.take(x, indices[0], axis=axes[0])
    return x[_selector(x.ndim, axes, indices)]


def _index_add_kernel(xp: Any, inputs: Any, shape: Shape, axes: tuple[int, ...]) -> Any:
    g = inputs[0]
    result = xp.empty(shape, dtype=dtypes.accumulated_in(g.dtype))
    _index_add_into(xp, result, inputs, shape, axes)
    return result.astype(g.dtype, copy=False)


def _index_add_into(xp: Any, out: Any, inputs: Any, shape: Shape, axes: tuple[int, ...]) -> None:
    g, *indices = inputs
    out.fill(0)
    if axes == (0,) and g.size and xp is np:
        _add_rows(out, indices[0].reshape(-1), g.reshape(-1, *shape[1:]))
    elif g.size:
        xp.add.at(out, _selector(len(shape), axes, indices), g.astype(out.dtype, copy=False))


def _add_rows(result: Any, rows: Any, g: Any) -> None:
    """Adds `g[i]` to `result[rows[i]]`, in order. Rows are sorted: those that come once are copied, which takes a third
    of the time, and the others summed in one pass each.
    """
    rows = np.where(rows < 0, rows + result.shape[0], rows)
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    starts = np.concatenate(([True], rows[1:] != rows[:-1]))
    once = starts & np.concatenate((starts[1:], [True]))
    result[rows[once]] = g[order[once]]
    if once.all():
        return
    first = starts[~once].nonzero()[0]
    result[rows[~once][first]] = np.add.reduceat(g[order[~once]], first, axis=0, dtype=result.dtype)


INDEX = define(
    Op(
        "index",
        _infer_index,
        _index_kernel,
        vjp=lambda asked, g, y, inputs, axes: [
            Tensor(apply(INDEX_ADD, (g.node, *(t.node for t in inputs[1:])), inputs[0].shape, axes)),
            *[None] * (len(inputs) - 1),
        ],
        variadic=True,
        aliases=False,
        attr_names=("axes",),
        shapes="[...], indices -> [...] with axes replaced by what the indices broadcast to",
    )
)
INDEX_ADD: Op = define(
    Op(
        "index_add",
        infer=lambda inputs, shape, axes: Spec(shape, inputs[0].dtype, inputs[0].device),
        kernel=_index_add_kernel,
        into=_index_add_into,
        vjp=lambda asked, h, y, inputs, shape, axes: [_index(h, inputs[1:], axes), *[None] * (len(inputs) - 1)],
        variadic=True,
        aliases=False,
        attr_names=("shape", "axes"),
        shapes="the result of index, indices -> shape",
    )
)


def _update_index(xp: Any, inputs: Any, axes: tuple[int, ...]) -> None:
    x, value, *indices = inputs
    x[_selector(x.ndim, axes, indices)] = value


INDEX_UPDATE = define(
    Op(
        "index_update",
        infer=lambda inputs, axes: inputs[0],
        kernel=by_copy(_update_index, variadic=True),
        update=_update_index,
        vjp=lambda asked, g, y, inputs, axes: _index_update_vjp(asked, g, inputs, axes),
        variadic=True,
        aliases=False,
        attr_names=("axes",),
        shapes="[...], the result of index, indices -> [...]",
    )
)


def _index_update_vjp(
    asked: Sequence[builtins.bool], g: Tensor, inputs: tuple[Tensor, ...], axes: tuple[int, ...]
) -> list[Tensor | None]:
    return [
        _index_update(g, creation.zeros_like(inputs[1]), inputs[2:], axes) if asked[0] else None,
        _index(g, inputs[2:], axes) if asked[1] else None,
        *[None] * (len(inputs) - 2),
    ]


def _index(x: Tensor, indices: tuple[Tensor, ...], axes: tuple[int, ...]) -> Tensor:
    return Tensor(apply(INDEX, (x.node, *(t.node for t in indices)), axes))


def _index_update(x: Tensor, value: Tensor, indices: tuple[Tensor, ...], axes: tuple[int, ...]) -> Tensor:
    return Tensor(apply(INDEX_UPDATE, (x.node, value.node, *(t.node for t in indices)), axes))


def getitem(x: Tensor, key: Any) -> Tensor:
    """`x[key]`. A bool mask in the key is realized, since the shape of the result depends on it."""
    if isinstance(key, Tensor) and x.ndim and key.ndim and key.dtype != dtypes.bool_:
        return _index(x, (check_index(x, key),), (0,))
    if is_scalar_mask(key):
        # As if x and the mask had one more dimension, of extent 1.
        return getitem(manipulation.expand_dims(x, axis=0), manipulation.reshape(check_item(x, key), (1,)))
    parts = Key(x, key)
    view = _slice(x, parts.window)
    if not parts.indices:
        return _reshaped(view, parts.final)
    return _index(_reshaped(view, parts.expanded), tuple(parts.indices), parts.axes)


def setitem(x: Tensor, key: Any, value: Any) -> Tensor:
    """A tensor like `x` with `value` at `key`: what `x[key] = value` makes `x` point at."""
    value = creation.to_tensor("x[key] = value", value, x)
    if creation.result_type(x.dtype, value.dtype) != x.dtype:
        raise DTypeError(
            f"x[key] = value: cannot write {value.dtype.name} into {x.dtype.name}; cast the value with astype"
        )
    value = creation.astype(value, x.dtype)
    if isinstance(key, builtins.bool | np.bool_ | np.ndarray):
        key = check_item(x, key)
    if is_mask(key) and value.ndim == 0:
        return _fill(x, key, value)
    if is_scalar_mask(key):
        wide = setitem(manipulation.expand_dims(x, axis=0), manipulation.reshape(key, (1,)), value)
        return manipulation.reshape(wide, x.shape)
    parts = Key(x, key)
    window_shape = tuple(count for _, _, count in parts.window)
    if not parts.indices:
        filled = manipulation.reshape(manipulation.broadcast_to(value, parts.final), window_shape)
        return _slice_update(x, filled, parts.window)
    view = _reshaped(_slice(x, parts.window), parts.expanded)
    target = _indexed_shape(view.shape, parts.axes, tuple(i.node.spec for i in parts.indices))
    updated = _index_update(view, manipulation.broadcast_to(value, target), tuple(parts.indices), parts.axes)
    return _slice_update(x, _reshaped(updated, window_shape), parts.window)


def _reshaped(x: Tensor, shape: Shape) -> Tensor:
    return x if x.shape == shape else manipulation.reshape(x, shape)


def _fill(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """One value wherever the mask is true: no shape depends on the mask, so that nothing is realized."""
    check_mask(mask, x.shape, 0)
    if not mask.size:
        return x
    return binary.where(manipulation.reshape(mask, mask.shape + (1,) * (x.ndim - mask.ndim)), value, x)


def take(x: Tensor, indices: Any, /, *, axis: int | None = None) -> Tensor:
    """The slices of `x` along `axis` at `indices` (any shape); `axis` may be left out for a 1-d `x`."""
    from fuel_parallel.lazy.ops.reductions import normalize_axis

    if axis is None and x.ndim != 1:
        raise ShapeError(f"take: axis is needed for a tensor of shape {x.shape}")
    place = normalize_axis("take", 0 if axis is None else axis, x.ndim)
    positions = indices if isinstance(indices, Tensor) else creation.asarray(indices, device=x.device)
    return _index(x, (check_index(x, positions),), (place,))


def take_along_axis(x: Tensor, indices: Tensor, /, *, axis: int = -1) -> Tensor:
    """For each place the element of `x` whose position along `axis` stands in `indices` (same number of dimensions)."""
    from fuel_parallel.lazy.ops.reductions import normalize_axis

    place = normalize_axis("take_along_axis", axis, x.ndim)
    if indices.ndim != x.ndim:
        raise ShapeError(f"take_along_axis: x has shape {x.shape} and indices {indices.shape}: ndim must be equal")
    grid: list[Tensor] = []
    for d in range(x.ndim):
        if d == place:
            grid.append(check_index(x, indices))
            continue
        if indices.shape[d] not in (1, x.shape[d]) and x.shape[d] != 1:
            raise ShapeError(f"take_along_axis: x has shape {x.shape} and indices {indices.shape}, axis {place}")
        extent = x.shape[d]
        grid.append(
            manipulation.reshape(
                creation.arange(extent, device=x.device), (1,) * d + (extent,) + (1,) * (x.ndim - d - 1)
            )
        )
    return _index(x, tuple(grid), tuple(range(x.ndim)))


def one_hot(indices: Tensor, classes: int, /, *, dtype: Any = None) -> Tensor:
    """A new last axis of extent `classes`: one at the position given by `indices`, zero elsewhere."""
    hits = manipulation.expand_dims(indices, axis=-1) == creation.arange(
        classes, dtype=indices.dtype, device=indices.device
    )
    return creation.astype(hits, dtypes.default_float if dtype is None else dtype)
