"""State: a nest of what a checkpoint keeps, and the name of each thing in it.

A state is a dict, a list, a module, an optimizer, or a nest of these. Its leaves are tensors and numpy arrays, and
plain values: None, bools, numbers, strings and lists of these. A leaf is named by the way to it:
`model.blocks.0.norm.weight`.

Any object takes part that has `__state__()`, which gives a dict of its parts, and `__restore__(parts)`, which takes
such a dict with the plain values that were read; its variables hold what was read by then. A key of the dict may be a
parameter: what stands under it is named after that parameter, and cut as it is if it has the same shape. So the state
of an optimizer does not depend on the order of its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuel_parallel.checkpoint.boxes import Box, whole
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module, Parameter, Shard, Variable

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Held:
    """A tensor of this rank: the leaf, what part of which tensor it is, and what of that counts for this rank."""

    leaf: Tensor | Array
    dtype: dtypes.DType
    global_shape: tuple[int, ...]
    box: Box
    owned: Box

    def array(self) -> Array:
        """Its value in host memory, contiguous; not to be written into."""
        value = self.leaf.numpy() if isinstance(self.leaf, Tensor) else self.leaf
        return np.asarray(value, dtype=self.dtype, order="C")


@dataclass(frozen=True)
class Named:
    """The leaves of a state by name."""

    tensors: dict[str, Held]
    values: dict[str, Any]

    def lazy(self) -> list[Tensor]:
        """The tensors of the library among them."""
        return [held.leaf for held in self.tensors.values() if isinstance(held.leaf, Tensor)]


def named(state: Any) -> Named:
    """The leaves of a state by name.

    Raises `ArgumentError` for what cannot be kept, and for a name that is there twice.
    """
    found = Named({}, {})

    def note(name: str, leaf: Any, shard: Shard | None) -> Any:
        if name in found.tensors or name in found.values:
            raise ArgumentError(f"checkpoint: two parts of the state are named {name!r}; rename one of their keys")
        if isinstance(leaf, Tensor | np.ndarray):
            found.tensors[name] = _held(leaf, shard)
        else:
            found.values[name] = leaf
        return leaf

    _visit("", state, note, _names_of_parameters(state), None, restore=False)
    return found


def rebuilt(state: Any, tensors: dict[str, Any], values: dict[str, Any]) -> Any:
    """The nest with the leaves of these names; objects in it are told by `__restore__` and stay what they are."""

    def put(name: str, leaf: Any, shard: Shard | None) -> Any:
        if isinstance(leaf, Tensor | np.ndarray):
            return tensors.get(name, leaf)
        return tuple(values[name]) if isinstance(leaf, tuple) else values[name]

    return _visit("", state, put, _names_of_parameters(state), None, restore=True)


Visit = Callable[[str, Any, Shard | None], Any]


def _visit(
    path: str, value: Any, visit: Visit, names: dict[int, str] | None, shard: Shard | None, restore: bool
) -> Any:
    """The nest with `visit(name, leaf, shard)` in place of each leaf.

    Without names, what is under parameters is left out.
    """

    def below(key: Any, part: Any) -> Any:
        inherited = shard
        if isinstance(key, Parameter):
            if names is None:
                return part
            if id(key) not in names:
                raise ArgumentError(
                    f"checkpoint: {path} has a part for a parameter of shape {key.shape} that no module or optimizer "
                    "of the state holds; put its module into the state"
                )
            key, inherited = names[id(key)], key.shard if _same_shape(key, part) else None
        return _visit(f"{path}.{key}" if path else str(key), part, visit, names, inherited, restore)

    if isinstance(value, Tensor | np.ndarray | np.generic) or _is_plain(value):
        if not path:
            raise ArgumentError(f"checkpoint: a state is a dict, a list, a module or the like, not {value!r}")
        leaf = np.asarray(value) if isinstance(value, np.generic) else value
        return visit(path, leaf, shard)
    if isinstance(value, np.random.Generator):
        words = visit(path, _as_plain(value.bit_generator.state), None)
        if restore:
            value.bit_generator.state = _like(value.bit_generator.state, words, path)
        return value
    if hasattr(value, "__state__"):
        parts = {key: below(key, part) for key, part in value.__state__().items()}
        if restore:
            value.__restore__(parts)
        return value
    if isinstance(value, dict):
        return {key: below(key, part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        items = [below(index, part) for index, part in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    raise ArgumentError(
        f"checkpoint: {path or 'the state'} is a {type(value).__name__}, which cannot be kept; expected tensors, "
        "arrays, numbers, strings, nests of these, modules, optimizers and generators, or an object with __state__ "
        "and __restore__"
    )


def _names_of_parameters(state: Any) -> dict[int, str]:
    """The name of each variable, by its identity. Those of no module in the state are numbered by their optimizer."""
    names: dict[int, str] = {}

    def note(name: str, leaf: Any, shard: Shard | None) -> Any:
        if isinstance(leaf, Variable):
            names.setdefault(id(leaf), name)
        return leaf

    _visit("", state, note, None, None, restore=False)
    for optimizer in _with_parameters(state):
        for index, parameter in enumerate(optimizer.parameters):
            names.setdefault(id(parameter), str(index))
    return names


def _with_parameters(state: Any) -> list[Any]:
    """The optimizers in a nest."""
    if isinstance(state, dict):
        return [one for part in state.values() for one in _with_parameters(part)]
    if isinstance(state, list | tuple):
        return [one for part in state for one in _with_parameters(part)]
    is_optimizer = isinstance(getattr(state, "parameters", None), list) and not isinstance(state, Module)
    return [state] if is_optimizer else []


def _same_shape(parameter: Parameter, part: Any) -> bool:
    return isinstance(part, Tensor) and part.shape == parameter.shape


def _held(leaf: Tensor | Array, inherited: Shard | None) -> Held:
    own = leaf.shard if isinstance(leaf, Variable) else None
    shard = own or inherited
    dtype = leaf.dtype if isinstance(leaf, Tensor) else dtypes.dtype(leaf.dtype)
    shape = tuple(leaf.shape)
    if shard is None:
        return Held(leaf, dtype, shape, whole(shape), whole(shape))
    spans = shard.counted(shape)
    start = tuple(first + span.start for first, span in zip(shard.start, spans, strict=True))
    owned = Box(start, tuple(map(len, spans)))
    return Held(leaf, dtype, shard.global_shape, Box(shard.start, shape), owned)


# Plain values.

_NOT_FINITE = "not finite"  # JSON has no infinities and NaNs


def _is_plain(value: Any) -> bool:
    """Scalars, and lists of scalars and of nests of these: a list may have another length when it is read."""
    if value is None or isinstance(value, bool | int | float | str):
        return not isinstance(value, np.generic)
    return isinstance(value, list | tuple) and not hasattr(value, "_fields") and all(map(_is_plain_item, value))


def _is_plain_item(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain_item(part) for key, part in value.items())
    return _is_plain(value)


def encoded(value: Any) -> Any:
    """A plain value as JSON holds it, whatever the float."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_NOT_FINITE: repr(value)}
    if isinstance(value, list | tuple):
        return [encoded(part) for part in value]
    if isinstance(value, dict):
        return {key: encoded(part) for key, part in value.items()}
    return value


def decoded(value: Any) -> Any:
    """The reverse of `encoded`; tuples come back as lists."""
    if isinstance(value, list):
        return [decoded(part) for part in value]
    if isinstance(value, dict):
        if list(value) == [_NOT_FINITE]:
            return float(value[_NOT_FINITE])
        return {key: decoded(part) for key, part in value.items()}
    return value


def _as_plain(words: Any) -> Any:
    """The state of a bit generator of numpy without arrays."""
    if isinstance(words, dict):
        return {key: _as_plain(part) for key, part in words.items()}
    return words.tolist() if isinstance(words, np.ndarray | np.generic) else words


def _like(words: Any, plain: Any, path: str) -> Any:
    """The reverse, for a bit generator whose own state is `words`."""
    if isinstance(words, dict):
        if not isinstance(plain, dict) or words.keys() != plain.keys() or _kind(words) != _kind(plain):
            raise ArgumentError(
                f"checkpoint: {path} holds the state of another kind of numpy generator ({_kind(plain)}) than the "
                "one to "
                f"restore ({_kind(words)}); make one of that kind"
            )
        return {key: _like(words[key], plain[key], path) for key in words}
    return np.asarray(plain, dtype=words.dtype) if isinstance(words, np.ndarray) else plain


def _kind(words: Any) -> Any:
    return words.get("bit_generator") if isinstance(words, dict) else type(words).__name__
