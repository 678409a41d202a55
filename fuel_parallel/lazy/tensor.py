"""The lazy Tensor: a handle on a node of the graph.

Operators build nodes and return at once; `item()`, `numpy()`, `bool(x)`, printing and `fp.realize` compute. A tensor
never changes its value. `x[key] = v` and the rebinding of parameters point the handle at a new node and leave the old
one as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fuel_parallel.errors import ShapeError, UnknownNameError
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.in_place import InPlace
from fuel_parallel.lazy.node import Node, Shape
from fuel_parallel.names_elsewhere import remedy

Scalar = bool | int | float | complex


class Tensor(InPlace):
    """An immutable array that is computed when its value is asked for.

    Made by the functions of `fuel_parallel.lazy` (`asarray`, `zeros`, …), not by calling this class.

    >>> import fuel_parallel.lazy as ft
    >>> x = ft.asarray([[1.0, 2.0], [3.0, 4.0]])
    >>> y = (x @ x.T).sum()
    >>> y.shape, y.dtype.name, y.item()
    ((), 'float32', 52.0)
    """

    __slots__ = ("__weakref__",)
    __array_priority__ = 1000
    __array_ufunc__ = None
    is_state = False
    """Whether this is a variable of a model or an optimizer: realizing one ends its history for gradients."""

    def __init__(self, node: Node) -> None:
        self.node = node

    if not TYPE_CHECKING:  # to a type checker a tensor has the attributes that it has

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)  # asked for by those who look what an object can do
            from fuel_parallel import lazy

            written = remedy(name, lazy.__all__, [n for n in dir(Tensor) if not n.startswith("_")])
            raise UnknownNameError(f"a tensor has no {name!r}{written}")

    @property
    def shape(self) -> Shape:
        """Length of each dimension."""
        return self.node.spec.shape

    @property
    def dtype(self) -> DType:
        """Data type of the elements."""
        return self.node.spec.dtype

    @property
    def device(self) -> str:
        """Where the value is computed and kept, such as `cpu`."""
        return self.node.spec.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.node.spec.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.node.spec.size

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.node.spec.nbytes

    @property
    def T(self) -> Tensor:
        """The transpose of a matrix; for more dimensions use `mT` or `permute_dims`."""
        if self.ndim != 2:
            raise ShapeError(f"x.T needs 2 dimensions, but x has shape {self.shape}; use x.mT or permute_dims")
        return manipulation.permute_dims(self, (1, 0))

    @property
    def mT(self) -> Tensor:
        """The last two dimensions exchanged."""
        return manipulation.matrix_transpose(self)

    @property
    def is_realized(self) -> bool:
        """Whether the value has been computed."""
        return self.node.value is not None

    def realize(self) -> Tensor:
        """Computes the value now and returns the tensor itself."""
        from fuel_parallel.runtime.realize import realize

        realize(self)
        return self

    def realized_node(self) -> Node:
        """The node, with its value."""
        self.realize()
        while (node := self.node).value is None:  # another thread has pointed the handle elsewhere
            self.realize()
        return node

    def numpy(self) -> np.ndarray[Any, Any]:
        """The value as a read-only numpy array."""
        return to_numpy(self.realized_node())

    def item(self) -> Scalar:
        """The value of a tensor of one element as a Python scalar."""
        if self.size != 1:
            raise ShapeError(f"item() needs a tensor of one element, but this one has shape {self.shape}")
        value: Scalar = self.numpy().item()
        return value

    def tolist(self) -> Any:
        """The value as nested lists of Python scalars."""
        return self.numpy().tolist()

    def astype(self, dtype: Any) -> Tensor:
        """The same values in another dtype."""
        return creation.astype(self, dtype)

    def to(self, device: str, /) -> Tensor:
        """The same values on another device, `cuda:1` say: a Copy node, or two between two vendors."""
        return creation.to_device(self, device)

    def to_device(self, device: str, /, *, stream: Any = None) -> Tensor:
        """The array API's name of `to`."""
        return self.to(device)

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in another shape; one extent may be -1. See `fuel_parallel.lazy.reshape`."""
        return manipulation.reshape(self, shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)

    def sum(self, axis: Any = None, *, keepdims: bool = False) -> Tensor:
        """See `fuel_parallel.lazy.sum`."""
        return reductions.sum(self, axis=axis, keepdims=keepdims)

    def mean(self, axis: Any = None, *, keepdims: bool = False) -> Tensor:
        """See `fuel_parallel.lazy.mean`."""
        return reductions.mean(self, axis=axis, keepdims=keepdims)

    def max(self, axis: Any = None, *, keepdims: bool = False) -> Tensor:
        """See `fuel_parallel.lazy.max`."""
        return reductions.max(self, axis=axis, keepdims=keepdims)

    def min(self, axis: Any = None, *, keepdims: bool = False) -> Tensor:
        """See `fuel_parallel.lazy.min`."""
        return reductions.min(self, axis=axis, keepdims=keepdims)

    # Conversions: these compute.

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        value = self.numpy()
        if dtype is not None and np.dtype(dtype) != value.dtype:
            return value.astype(dtype)
        return value.copy() if copy else value

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The value as a DLPack capsule: read-only, or a copy where the consumer's DLPack knows no such memory.

        With `copy=False` such a consumer gets the memory itself, and must not write into it.
        """
        from fuel_parallel.backends import backend_of

        if copy is None and (max_version is None or max_version < (1, 0)):
            copy = True
        options = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        return backend_of(self.device).dlpack(
            self.realized_node().value, **{name: option for name, option in options.items() if option is not None}
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        from fuel_parallel.backends import backend_of

        return backend_of(self.device).dlpack_device

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        import fuel_parallel.lazy as namespace

        return namespace

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())  # type: ignore[arg-type]

    def __float__(self) -> float:
        return float(self.item())  # type: ignore[arg-type]

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        if not np.issubdtype(self.dtype, np.integer):
            raise TypeError(f"only an integer tensor can be used as an index, not {self.dtype.name}")
        return int(self.item())  # type: ignore[arg-type]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        if not self.shape:
            raise TypeError("iteration over a 0-d tensor")
        return (self[i] for i in range(self.shape[0]))

    def __repr__(self) -> str:
        return display.text(self)

    def _repr_html_(self) -> str:
        return display.html(self)

    # Copies share the value; see `copying`.

    def __copy__(self) -> Self:
        return copying.shallow_copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copying.deep_copy(self, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return copying.reduced(self)

    # Indexing. What is assigned is a new node; the handle is pointed at it.

    def __getitem__(self, key: Any) -> Tensor:
        return indexing.getitem(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.node = indexing.setitem(self, key, value).node

    # Operators. Comparison gives tensors, so tensors hash by identity.

    __hash__ = object.__hash__

    def __add__(self, other: Any) -> Tensor:
        return binary.add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return binary.add(other, self)

    def __sub__(self, other: Any) -> Tensor:
        return binary.subtract(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return binary.subtract(other, self)

    def __mul__(self, other: Any) -> Tensor:
        return binary.multiply(self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return binary.multiply(other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return binary.divide(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return binary.divide(other, self)

    def __floordiv__(self, other: Any) -> Tensor:
        return binary.floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return binary.floor_divide(other, self)

    def __mod__(self, other: Any) -> Tensor:
        return binary.remainder(self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return binary.remainder(other, self)

    def __pow__(self, other: Any) -> Tensor:
        return binary.pow(self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return binary.pow(other, self)

    def __matmul__(self, other: Any) -> Tensor:
        if not isinstance(other, Tensor) and getattr(other, "__array_ufunc__", other) is None:
            return NotImplemented  # as numpy does: such an operand multiplies by itself
        return contraction.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return contraction.matmul(other, self)

    def __and__(self, other: Any) -> Tensor:
        return binary.bitwise_and(self, other)

    def __rand__(self, other: Any) -> Tensor:
        return binary.bitwise_and(other, self)

    def __or__(self, other: Any) -> Tensor:
        return binary.bitwise_or(self, other)

    def __ror__(self, other: Any) -> Tensor:
        return binary.bitwise_or(other, self)

    def __xor__(self, other: Any) -> Tensor:
        return binary.bitwise_xor(self, other)

    def __rxor__(self, other: Any) -> Tensor:
        return binary.bitwise_xor(other, self)

    def __lshift__(self, other: Any) -> Tensor:
        return binary.bitwise_left_shift(self, other)

    def __rlshift__(self, other: Any) -> Tensor:
        return binary.bitwise_left_shift(other, self)

    def __rshift__(self, other: Any) -> Tensor:
        return binary.bitwise_right_shift(self, other)

    def __rrshift__(self, other: Any) -> Tensor:
        return binary.bitwise_right_shift(other, self)

    def __neg__(self) -> Tensor:
        return elementwise.negative(self)

    def __pos__(self) -> Tensor:
        return elementwise.positive(self)

    def __abs__(self) -> Tensor:
        return elementwise.abs(self)

    def __invert__(self) -> Tensor:
        return elementwise.bitwise_invert(self)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return binary.equal(self, other)

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return binary.not_equal(self, other)

    def __lt__(self, other: Any) -> Tensor:
        return binary.less(self, other)

    def __le__(self, other: Any) -> Tensor:
        return binary.less_equal(self, other)

    def __gt__(self, other: Any) -> Tensor:
        return binary.greater(self, other)

    def __ge__(self, other: Any) -> Tensor:
        return binary.greater_equal(self, other)


def to_numpy(node: Node) -> np.ndarray[Any, Any]:
    """A read-only host view of the value of a realized node."""
    from fuel_parallel.backends import backend_of

    value: np.ndarray[Any, Any] = backend_of(node.spec.device).to_host(node.value)
    view = value.view()
    view.flags.writeable = False
    return view


# The functions behind the operators are built on Tensor, so they come after it.
from fuel_parallel.lazy import copying, display  # noqa: E402
from fuel_parallel.lazy.ops import (  # noqa: E402
    binary,
    contraction,
    creation,
    elementwise,
    indexing,
    manipulation,
    reductions,
)
