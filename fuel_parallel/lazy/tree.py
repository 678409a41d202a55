"""Nested containers of tensors: lists, tuples, dicts, and objects that list their own tensors.

An object takes part by a method `__tensors__()` that returns a container; modules and optimizers have one.
"""

from __future__ import annotations

from typing import Any

from fuel_parallel.lazy.tensor import Tensor

Structure = Any


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of a nest in order, and its structure.

    >>> flatten({"a": [1, 2], "b": 3})[0]
    [1, 2, 3]
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves)


def _flatten(tree: Any, leaves: list[Any]) -> Structure:
    if isinstance(tree, Tensor):
        leaves.append(tree)
        return None
    if hasattr(tree, "__tensors__"):
        tree = tree.__tensors__()
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return (lambda *parts: type(tree)(*parts)), [_flatten(t, leaves) for t in tree]
    if isinstance(tree, list | tuple):
        kind = type(tree)
        return (lambda *parts: kind(parts)), [_flatten(t, leaves) for t in tree]
    if isinstance(tree, dict):
        keys = list(tree)
        return (lambda *parts: dict(zip(keys, parts, strict=True))), [_flatten(t, leaves) for t in tree.values()]
    leaves.append(tree)
    return None


def unflatten(structure: Structure, leaves: list[Any]) -> Any:
    """The nest of that structure with these leaves."""
    return _build(structure, iter(leaves))


def _build(structure: Structure, leaves: Any) -> Any:
    if structure is None:
        return next(leaves)
    make, parts = structure
    return make(*[_build(part, leaves) for part in parts])


def tensors_of(*trees: Any) -> list[Tensor]:
    """All tensors in a nest; other leaves are passed over."""
    return [leaf for leaf in flatten(trees)[0] if isinstance(leaf, Tensor)]
