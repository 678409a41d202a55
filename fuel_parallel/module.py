"""Models: variables that can be rebound, and modules that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fuel_parallel.errors import ArgumentError, DTypeError, ShapeError
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.partitioning import partition


@dataclass(frozen=True)
class Shard:
    """Which part of a larger tensor a variable of this rank is: a box, of which other ranks hold the rest.

    Args:
        global_shape: The shape of the whole.
        start: The position of the variable's first element in it.
        owned: Where ranks hold copies of each other's elements: the slice of the variable, in each dimension, that is
            counted for this rank. All owned slices together are the whole, each element once. None for all of it.
    """

    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    owned: tuple[slice, ...] | None = None

    @classmethod
    def along(cls, global_shape: tuple[int, ...], dim: int, part: int, parts: int) -> Shard:
        """The part that rank `part` of `parts` gets when `dim` is cut by `partition`.

        >>> Shard.along((4, 6), 1, part=1, parts=2)
        Shard(global_shape=(4, 6), start=(0, 3), owned=None)
        """
        start = [0] * len(global_shape)
        start[dim] = partition(global_shape[dim], parts)[part].start
        return cls(tuple(global_shape), tuple(start))

    def counted(self, shape: tuple[int, ...]) -> tuple[range, ...]:
        """Which elements of a variable of this shape count for this rank: a range of positions in each dimension.

        >>> Shard((6,), (3,), owned=(slice(1, None),)).counted((3,))
        (range(1, 3),)
        """
        slices = (slice(None),) * len(shape) if self.owned is None else self.owned
        return tuple(range(extent)[own] for own, extent in zip(slices, shape, strict=True))

    def holds(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape fits at `start`."""
        return len(shape) == len(self.global_shape) == len(self.start) and all(
            first >= 0 and first + extent <= whole
            for first, extent, whole in zip(self.start, shape, self.global_shape, strict=True)
        )


@dataclass(frozen=True)
class RowShard(Shard):
    """The rows that this rank holds of a parameter that data-parallel ranks share (ZeRO).

    Args:
        outer: Which part of a larger tensor that parameter is itself, under tensor parallelism; None if it is whole.
    """

    outer: Shard | None = None


class Variable(Tensor):
    """A tensor that can be pointed at a new value: the state of a model or of an optimizer.

    Realizing a variable makes it a leaf: gradients end there.

    Args:
        value: What it holds at first.
        shard: Which part of a larger tensor it is; None if it is the whole. `checkpoint` reads that.

    >>> count = Variable(0)
    >>> count.assign(count + 1)
    >>> count.item()
    1
    """

    __slots__ = ("shard",)
    is_state = True

    def __init__(self, value: Any, *, shard: Shard | None = None) -> None:
        super().__init__(creation.asarray(value).node)
        if shard is not None and not shard.holds(self.shape):
            raise ShapeError(
                f"{type(self).__name__}: a shard of shape {self.shape} at {shard.start} does not lie in a tensor of "
                f"shape {shard.global_shape}"
            )
        self.shard = shard

    def assign(self, value: Tensor) -> None:
        """Takes the (lazy) value from now on; shape and dtype must be its own."""
        if not isinstance(value, Tensor):
            raise ArgumentError(f"assign: expected a tensor, not {type(value).__name__}; asarray makes one of it")
        if value.shape != self.shape:
            raise ShapeError(f"assign: the variable has shape {self.shape}, the new value {value.shape}")
        if value.dtype is not self.dtype:
            raise DTypeError(f"assign: the variable is {self.dtype.name}, the new value {value.dtype.name}; use astype")
        self.node = value.node


class Parameter(Variable):
    """A variable that is trained."""

    how_to_get: ClassVar[str] = "such as model.parameters() gives them"
    __slots__ = ()


class Module:
    """A part of a model. Parameters are found in its attributes, and in lists, tuples and dicts of them, in order.

    >>> class Affine(Module):
    ...     def __init__(self):
    ...         self.scale = Parameter(2.0)
    ...         self.shift = Parameter(1.0)
    ...     def __call__(self, x):
    ...         return x * self.scale + self.shift
    >>> model = Affine()
    >>> [name for name, _ in model.named_parameters()], model(creation.asarray(3.0)).item()
    (['scale', 'shift'], 7.0)
    """

    weight_axis: ClassVar[int | None] = None
    """For layers that do no more with their `weight` than multiply with it, 0, or look rows up in it, 1: `quantize` may
    store it in blocks along that axis."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module applied to its inputs; subclasses say what that is."""
        raise NotImplementedError(f"{type(self).__name__} does not define __call__")

    def named_variables(self) -> dict[str, Variable]:
        """All variables by dotted name, each once, in the order of the attributes."""
        found: dict[str, Variable] = {}
        seen: set[int] = set()
        for name, variable in _walk("", self, set()):
            if isinstance(variable, Variable) and id(variable) not in seen:
                seen.add(id(variable))
                found[name] = variable
        return found

    def named_modules(self) -> dict[str, Module]:
        """The module itself, as "", and all modules below it by dotted name, each once, before what it holds."""
        return {name: module for name, module in _walk("", self, set()) if isinstance(module, Module)}

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """All parameters with their dotted names, each once."""
        return [(name, v) for name, v in self.named_variables().items() if isinstance(v, Parameter)]

    def parameters(self) -> list[Parameter]:
        """All parameters, each once."""
        return [parameter for _, parameter in self.named_parameters()]

    def load(self, values: Mapping[str, Any]) -> None:
        """Sets all variables by name, or none: names and shapes must be those of the module."""
        if not isinstance(values, Mapping):
            raise ArgumentError(f"load: expected a dict of values by name, not {type(values).__name__}")
        variables = self.named_variables()
        missing, unknown = sorted(variables.keys() - values.keys()), sorted(values.keys() - variables.keys())
        if missing or unknown:
            raise ArgumentError(f"load: names do not match; missing: {missing or 'none'}, unknown: {unknown or 'none'}")
        loaded = {name: creation.asarray(values[name], dtype=v.dtype) for name, v in variables.items()}
        for name, variable in variables.items():
            if loaded[name].shape != variable.shape:
                raise ShapeError(f"load: {name} has shape {variable.shape}, the value for it {loaded[name].shape}")
        for name, variable in variables.items():
            variable.assign(loaded[name])

    def __state__(self) -> dict[str, Any]:
        """What a checkpoint keeps; with `__restore__`, for a subclass that has more than variables to keep."""
        return dict(self.named_variables())

    def __restore__(self, state: dict[str, Any]) -> None:
        """Called when a checkpoint was loaded; the variables have their values by then."""

    def __tensors__(self) -> list[Variable]:
        return list(self.named_variables().values())

    def __repr__(self) -> str:
        rows = [f"  {name}: {v.dtype.name}{list(v.shape)}" for name, v in self.named_variables().items()]
        return "\n".join([f"{type(self).__name__}(", *rows, ")"])


def _walk(prefix: str, value: Any, walked: set[int]) -> Iterator[tuple[str, Variable | Module]]:
    """Variables and modules of a module or container. Modules may refer to each other: each is walked once."""
    if isinstance(value, Variable):
        yield prefix, value
        return
    if isinstance(value, Module):
        if id(value) in walked:
            return
        walked.add(id(value))
        yield prefix, value
        value = vars(value)
    if isinstance(value, list | tuple):
        value = {str(index): item for index, item in enumerate(value)}
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(f"{prefix}.{name}" if prefix else str(name), item, walked)
