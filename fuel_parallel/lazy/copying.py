"""Copies of tensors, and pickles.

Values never change, so copies share them. A copy is a tensor of its own where it matters: it can be pointed at another
value, and a deep copy is a leaf, through which no gradient reaches the original.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import numpy as np

from fuel_parallel.backends import backend_of
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Node, Spec, apply, data_node
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.tensor import Tensor, to_numpy

T = TypeVar("T", bound=Tensor)


def shallow_copy(x: T) -> T:
    """Another handle on the same node."""
    return _handle(type(x), x.node, _attributes(x))


def deep_copy(x: T, memo: dict[int, Any]) -> T:
    """A handle on a new leaf with the same value. Nothing is computed: what is lazy stays so.

    Within one `copy.deepcopy`, handles on one node become handles on one leaf.
    """
    node = x.node
    leaf = memo.get(id(node))
    if leaf is None:
        value = node.value
        leaf = apply(creation.STOP_GRADIENT, (node,)) if value is None else data_node(value, node.spec)
        memo[id(node)] = leaf
    return _handle(type(x), leaf, copy.deepcopy(_attributes(x), memo))


def reduced(x: Tensor) -> tuple[Any, ...]:
    """For pickle: the value, which is computed now, and what else the handle holds."""
    node = x.realized_node()
    return restored, (type(x), to_numpy(node), node.spec.device, _attributes(x))


def restored(kind: type[T], array: np.ndarray[Any, Any], device: str, attributes: dict[str, Any]) -> T:
    """What `reduced` took apart. Raises `ArgumentError` where the device is not there."""
    spec = Spec(array.shape, dtypes.dtype(array.dtype), device)
    value = backend_of(device).from_host(array.astype(spec.dtype, order="C", copy=False))
    return _handle(kind, data_node(value, spec), attributes)


def _attributes(x: Tensor) -> dict[str, Any]:
    """All that a handle of a subclass holds besides the node, from its dictionary and its slots."""
    state: Any = x.__getstate__()
    parts = state if isinstance(state, tuple) else (state,)
    held = {name: value for part in parts if part for name, value in part.items()}
    del held["node"]
    return held


def _handle(kind: type[T], node: Node, attributes: dict[str, Any]) -> T:
    made = kind.__new__(kind)
    made.node = node
    for name, value in attributes.items():
        setattr(made, name, value)
    return made
