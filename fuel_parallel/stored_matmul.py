"""The product with a stored weight, which decodes some rows of it at a time. See `quantization` for what is stored.

Inputs of the ops are x [rows, in], the codes [blocks, elements of a block, out], and maybe scales and minima
[blocks, 1, out]; of a weight that is stored as floats, x and the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Attrs, Op, Spec, apply, define
from fuel_parallel.lazy.tensor import Tensor

LEVELS = {"int8": (255, 128), "int4": (15, 8)}
"""Steps between the least and the greatest code, and the code of zero. Symmetric codes leave the lowest one out."""
DECODED = 1 << 18
"""Elements that are decoded at one time: few enough to stay in a cache until they have been multiplied."""

Array = Any


def _infer(inputs: tuple[Spec, ...], storage: str, shape: tuple[int, int], block: int) -> Spec:
    return Spec((inputs[0].shape[0], shape[1]), inputs[0].dtype, inputs[0].device)


def _infer_transposed(inputs: tuple[Spec, ...], storage: str, shape: tuple[int, int], block: int) -> Spec:
    return Spec((inputs[0].shape[0], shape[0]), inputs[0].dtype, inputs[0].device)


def _pieces(
    xp: Any, stored: tuple[Array, ...], dtype: Any, storage: str, shape: tuple[int, int], block: int
) -> Iterator[tuple[slice, Array]]:
    """Some rows of the matrix at a time, and their elements."""
    rows = max(1, DECODED // max(shape[1], 1))
    if storage not in LEVELS or (storage == "int8" and block >= shape[0] > 0):
        # Nothing is packed, and there is one scale for each column at most.
        whole = tuple(part if part.ndim == 2 else part[0] for part in stored)
        for start in range(0, shape[0], rows):
            part = slice(start, min(start + rows, shape[0]))
            yield part, _decode(xp, (whole[0][part], *whole[1:]), dtype, storage)
        return
    together = max(1, rows // block)
    for first in range(0, stored[0].shape[0], together):
        chunk = tuple(part[first : first + together] for part in stored)
        part = slice(first * block, min((first + together) * block, shape[0]))
        values = _decode(xp, chunk, dtype, storage)
        yield part, values.reshape(values.shape[0] * values.shape[1], shape[1])[: part.stop - part.start]


def _decode(xp: Any, stored: tuple[Array, ...], dtype: Any, storage: str) -> Array:
    codes = stored[0]
    if storage not in LEVELS:
        return codes.astype(dtype, copy=False)
    if storage == "int4":
        half = codes.shape[1]
        values = xp.empty((codes.shape[0], 2 * half, *codes.shape[2:]), dtype=dtype)
        values[:, :half] = codes & 15
        values[:, half:] = codes >> 4
    else:
        values = codes.astype(dtype)
    if len(stored) == 2:
        values -= LEVELS[storage][1]
        values *= stored[1]
    else:
        values *= stored[1]
        values += stored[2]
    return values


def _kernel(xp: Any, inputs: tuple[Array, ...], storage: str, shape: tuple[int, int], block: int) -> Array:
    wide = dtypes.accumulated_in(inputs[0].dtype)
    x = inputs[0].astype(wide, copy=False)
    out = xp.zeros((x.shape[0], shape[1]), dtype=wide)
    for rows, values in _pieces(xp, inputs[1:], wide, storage, shape, block):
        out += x[:, rows] @ values
    return out.astype(inputs[0].dtype, copy=False)


def _transposed_kernel(xp: Any, inputs: tuple[Array, ...], storage: str, shape: tuple[int, int], block: int) -> Array:
    wide = dtypes.accumulated_in(inputs[0].dtype)
    g = inputs[0].astype(wide, copy=False)
    out = xp.empty((g.shape[0], shape[0]), dtype=wide)
    for rows, values in _pieces(xp, inputs[1:], wide, storage, shape, block):
        out[:, rows] = g @ values.T
    return out.astype(inputs[0].dtype, copy=False)


def _vjp(asked: Any, g: Tensor, y: Tensor, inputs: tuple[Tensor, ...], *attrs: Any) -> list[Tensor | None]:
    return _of_the_first(STORED_MATMUL_TRANSPOSED, g, inputs, attrs)


def _transposed_vjp(asked: Any, h: Tensor, y: Tensor, inputs: tuple[Tensor, ...], *attrs: Any) -> list[Tensor | None]:
    return _of_the_first(STORED_MATMUL, h, inputs, attrs)


def _of_the_first(op: Op, g: Tensor, inputs: tuple[Tensor, ...], attrs: Attrs) -> list[Tensor | None]:
    """The cotangent of the activations; a stored matrix has none."""
    return [Tensor(apply(op, (g.node, *(t.node for t in inputs[1:])), *attrs)), *[None] * (len(inputs) - 1)]


_ATTRIBUTES = ("storage", "shape", "block")
STORED_MATMUL = define(
    Op(
        "stored_matmul",
        _infer,
        _kernel,
        vjp=_vjp,
        variadic=True,
        aliases=False,
        attr_names=_ATTRIBUTES,
        shapes="[rows, in], parts of a stored matrix -> [rows, out]",
    )
)
STORED_MATMUL_TRANSPOSED = define(
    Op(
        "stored_matmul_transposed",
        _infer_transposed,
        _transposed_kernel,
        vjp=_transposed_vjp,
        variadic=True,
        aliases=False,
        attr_names=_ATTRIBUTES,
        shapes="[rows, out], parts of a stored matrix -> [rows, in]",
    )
)
