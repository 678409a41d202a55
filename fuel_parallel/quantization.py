"""Weights in fewer bytes: half precision, int8, or 4-bit integers in blocks, two to a byte.

A `StoredWeight` stands where a layer has its weight, and is read-only: nothing is learnt in it, but gradients pass
through to what it is multiplied with. The product decodes a few rows at a time, so that the whole weight is never there
as floats.

| storage | an element is | bytes of [in, out] |
|---|---|---|
| `float32`, `float16`, `bfloat16` | itself, rounded | 4 or 2 in out |
| `int8` | code * scale, a scale for each output | in out + 4 out |
| `int8` with `block` | the same, a scale for each block of inputs of each output | (1 + 4 / block) in out |
| `int4` | the same | (1 / 2 + 4 / block) in out |

With `minimum`, it is code * scale + minimum: codes cover the block from its least to its greatest element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fuel_parallel.arguments import checked
from fuel_parallel.errors import ArgumentError, DTypeError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import apply
from fuel_parallel.lazy.ops import binary, creation, elementwise, manipulation, reductions
from fuel_parallel.lazy.ops.contraction import matmul
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module, Parameter, Shard, Variable
from fuel_parallel.stored_matmul import LEVELS, STORED_MATMUL

STORAGES = ("float32", "float16", "bfloat16", "int8", "int4")


@checked
def quantize(
    module: Module,
    storage: str,
    *,
    block: int | None = None,
    minimum: bool = False,
    only: Callable[[str], bool] | None = None,
) -> Module:
    """Puts a `StoredWeight` into each linear layer and embedding of a module, in place, also into those cut over ranks.

    Biases, norms and other parameters stay. The weights are computed with the next `realize` of the module, which then
    lets the old ones go.

    Args:
        module: The model, or a layer.
        storage: 'float32', 'float16', 'bfloat16', 'int8' or 'int4'.
        block: How many neighbouring inputs share a scale, an even number; None for 64 with 'int4', for all with 'int8'.
        minimum: Blocks have a least element besides the scale.
        only: Which layers, by the dotted name of the weight; None for all.

    A part of a weight is stored as that part of the stored whole. Raises `ArgumentError` where it cannot be, since
    ranks would share a block, and for a module without such layers.

    >>> from fuel_parallel.layers import Linear
    >>> from fuel_parallel.lazy.random import Generator
    >>> layer = quantize(Linear(128, 64, Generator(0)), "int4", block=32)
    >>> layer.weight.shape, layer.weight.nbytes, layer(creation.ones((2, 128))).shape
    ((128, 64), 5120, (2, 64))
    """
    stored: dict[tuple[int, int], StoredWeight] = {}
    found = 0
    for path, layer in module.named_modules().items():
        axis = layer.weight_axis
        if axis is None:
            continue
        name, weight = f"{path}.weight" if path else "weight", vars(layer)["weight"]
        if not isinstance(weight, Parameter) or (only is not None and not only(name)):
            continue
        key = (id(weight), axis)
        if key not in stored:
            stored[key] = StoredWeight(weight, storage, block=block, minimum=minimum, axis=axis, name=name)
        vars(layer)["weight"] = stored[key]
        found += 1
    if not found:
        raise ArgumentError(
            f"quantize: {type(module).__name__} has no linear layer or embedding whose weight could be stored"
            + ("" if only is None else ", or only= takes none of them")
        )
    return module


class StoredWeight(Module):
    """A read-only matrix in a storage of `STORAGES`. `x @ stored` multiplies, `stored[indices]` looks rows up.

    Args:
        weight: [in, out], or the table of an embedding [vocabulary, dim].
        storage: How.
        block: How many neighbours along `axis` share a scale; see `quantize`.
        minimum: Whether a block has a least element besides the scale.
        axis: Along which blocks lie: 0 for a matrix to multiply with, 1 for a table.
        name: Of the weight, for errors.
    """

    __array_ufunc__ = None  # `x @ stored` of a tensor or an array is left to `__rmatmul__`

    def __init__(
        self,
        weight: Tensor,
        storage: str,
        *,
        block: int | None = None,
        minimum: bool = False,
        axis: int = 0,
        name: str = "weight",
    ) -> None:
        _check(name, weight, storage, block, minimum)
        self.shape, self.dtype, self.storage, self.axis = weight.shape, weight.dtype, storage, axis
        shard = weight.shard if isinstance(weight, Variable) else None
        self.scales: Variable | None = None
        self.minima: Variable | None = None
        extent = weight.shape[axis]
        if storage not in LEVELS:
            self.block = max(extent, 1)
            self.codes = Variable(creation.astype(creation.stop_gradient(weight), storage), shard=shard)
            return
        per_channel = block is None and storage == "int8"
        whole = extent if shard is None else shard.global_shape[axis]
        self.block = max(whole, 1) if per_channel else block or 64
        blocks_shard = None if shard is None else _shard_of_blocks(name, shard, weight.shape, axis, self.block)
        codes, scales, minima = _encode(creation.stop_gradient(weight), storage, minimum, axis, self.block)
        self.codes = Variable(codes, shard=_along(blocks_shard, axis, codes.shape[axis + 1]))
        self.scales = Variable(scales, shard=_along(blocks_shard, axis, 1))
        self.minima = None if minima is None else Variable(minima, shard=_along(blocks_shard, axis, 1))

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return sum(variable.nbytes for variable in self.named_variables().values())

    @property
    def mT(self) -> Tensor:
        """The whole matrix, decoded and transposed: for a head that shares the table of an embedding."""
        return self.dequantize().mT

    def dequantize(self, dtype: Any = None) -> Tensor:
        """The whole matrix as floats; in the dtype that the weight had, unless another is given."""
        return self._decoded(self.codes, self.scales, self.minima, self.axis, dtype)

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Rows of a table: integers [...] to [..., dim]. Only these are decoded."""
        if self.axis != 1:
            raise ArgumentError("StoredWeight: rows are looked up in tables (axis=1); use dequantize() for others")
        indices = creation.to_tensor("StoredWeight", indices)
        picked = [None if part is None else part[indices] for part in (self.codes, self.scales, self.minima)]
        return self._decoded(picked[0], picked[1], picked[2], indices.ndim, None)  # type: ignore[arg-type]

    def __rmatmul__(self, x: Any) -> Tensor:
        """[..., in] to [..., out], in the dtype of x."""
        x = creation.to_tensor("matmul", x)
        elementwise.check_domain("matmul", x.dtype, dtypes.FLOATING)
        if x.ndim < 1 or x.shape[-1] != self.shape[0]:
            raise ShapeError(f"matmul: shapes {x.shape} and {self.shape} do not fit: the last extent must be the first")
        if self.axis != 0:
            return matmul(x, self.dequantize(x.dtype))
        rows = manipulation.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
        parts = [part.node for part in (self.codes, self.scales, self.minima) if part is not None]
        product = Tensor(apply(STORED_MATMUL, (rows.node, *parts), self.storage, self.shape, self.block))
        return manipulation.reshape(product, (*x.shape[:-1], self.shape[1]))

    def _decoded(self, codes: Tensor, scales: Tensor | None, minima: Tensor | None, axis: int, dtype: Any) -> Tensor:
        wanted = self.dtype if dtype is None else dtypes.dtype(dtype)
        if scales is None:
            return creation.astype(creation.stop_gradient(codes), wanted)
        wide = creation.result_type(wanted, "float32")
        if self.storage == "int4":
            codes = manipulation.concat([codes & 15, codes >> 4], axis=axis + 1)
        values = creation.astype(codes, wide)
        if minima is None:
            values = (values - LEVELS[self.storage][1]) * creation.astype(scales, wide)
        else:
            values = values * creation.astype(scales, wide) + creation.astype(minima, wide)
        shape = values.shape
        joined = manipulation.reshape(values, (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]))
        within = (*(slice(None),) * axis, slice(0, self.shape[self.axis]))
        return creation.astype(creation.stop_gradient(joined[within]), wanted)

    def __repr__(self) -> str:
        return f"StoredWeight({self.storage}{list(self.shape)}, {self.nbytes} bytes)"


def _check(name: str, weight: Tensor, storage: str, block: int | None, minimum: bool) -> None:
    if storage not in STORAGES:
        raise ArgumentError(f"quantize: storage is one of {', '.join(map(repr, STORAGES))}, not {storage!r}")
    if weight.ndim != 2:
        raise ShapeError(f"quantize: {name} must be a matrix, but has shape {weight.shape}")
    if dtypes.kind(weight.dtype) != "real floating":
        raise DTypeError(f"quantize: {name} must be floating, not {weight.dtype.name}")
    if storage not in LEVELS and (block is not None or minimum):
        raise ArgumentError(f"quantize: block and minimum go with 'int8' and 'int4', not with {storage!r}")
    if block is not None and (block < 2 or block % 2):
        raise ArgumentError(f"quantize: block is an even number such as 32 or 64, not {block}")


def _shard_of_blocks(name: str, shard: Shard, shape: tuple[int, ...], axis: int, block: int) -> Shard:
    """Where a part lies in the stored whole, [..., blocks, elements of a block, ...]."""
    whole, start = shard.global_shape[axis], shard.start[axis]
    stop = start + shape[axis]
    if start % block or (stop % block and stop != whole) or (shard.owned and shard.owned[axis] != slice(None)):
        raise ArgumentError(
            f"quantize: {name} is the part from {start} to {stop} of {whole} inputs, which cuts through blocks of "
            f"{block}; cut the layer between blocks, as with RowParallel(..., block=64) and quantize(..., block=64)"
        )
    owned = None if shard.owned is None else (*shard.owned[: axis + 1], slice(None), *shard.owned[axis + 1 :])
    return Shard(
        (*shard.global_shape[:axis], -(-whole // block), 0, *shard.global_shape[axis + 1 :]),
        (*shard.start[:axis], start // block, 0, *shard.start[axis + 1 :]),
        owned,
    )


def _along(shard: Shard | None, axis: int, extent: int) -> Shard | None:
    """The same with blocks of `extent`."""
    if shard is None:
        return None
    whole = (*shard.global_shape[: axis + 1], extent, *shard.global_shape[axis + 2 :])
    return Shard(whole, shard.start, shard.owned)


def _encode(weight: Tensor, storage: str, minimum: bool, axis: int, block: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and minima of a matrix as [..., blocks, elements of a block, ...]. The last element fills up."""
    extent = weight.shape[axis]
    count = -(-extent // block)
    wide = creation.astype(weight, creation.result_type(weight, "float32"))
    missing = count * block - extent
    if missing:
        before = (slice(None),) * axis
        last = wide[(*before, slice(extent - 1, extent))]
        shape = (*wide.shape[:axis], missing, *wide.shape[axis + 1 :])
        wide = manipulation.concat([wide, manipulation.broadcast_to(last, shape)], axis=axis)
    blocks = manipulation.reshape(wide, (*wide.shape[:axis], count, block, *wide.shape[axis + 1 :]))
    steps, zero = LEVELS[storage]
    least = None
    if minimum:
        least = _float32(reductions.min(blocks, axis=axis + 1, keepdims=True))
        spread = reductions.max(blocks, axis=axis + 1, keepdims=True) - creation.astype(least, blocks.dtype)
        scales = _float32(spread * (1 / steps))
        values = (blocks - creation.astype(least, blocks.dtype)) / _nonzero(scales, blocks)
        values = binary.clip(elementwise.round(values), 0, steps)
    else:
        greatest = reductions.max(elementwise.abs(blocks), axis=axis + 1, keepdims=True)
        scales = _float32(greatest * (1 / (zero - 1)))
        values = binary.clip(elementwise.round(blocks / _nonzero(scales, blocks)), 1 - zero, zero - 1) + zero
    codes = creation.astype(values, "uint8")
    if storage == "int4":
        before = (slice(None),) * (axis + 1)
        codes = codes[(*before, slice(0, block // 2))] | (codes[(*before, slice(block // 2, block))] << 4)
    return codes, scales, least


def _float32(x: Tensor) -> Tensor:
    return creation.astype(x, "float32")


def _nonzero(scales: Tensor, like: Tensor) -> Tensor:
    """Where all elements of a block are equal, any step will do."""
    return creation.astype(binary.where(scales == 0, 1.0, scales), like.dtype)
