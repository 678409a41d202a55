"""Arguments of another kind than a function is annotated with are the user's mistake, told before anything is done.

`checked` is for functions and constructors that a script calls seldom, a few times a step at most; it looks at what its
annotations say: classes, numbers, unions, and the elements of lists and tuples. What it cannot tell, it lets pass: ops
check their operands themselves. Numbers and integers of NumPy are numbers and integers.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from fuel_parallel.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_NAMES = {
    bool: "True or False",
    float: "a number",
    int: "a whole number",
    str: "a string",
    type(None): "None",
    os.PathLike: "a path",
}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which raises `ArgumentError` for an argument that its annotation does not allow.

    >>> @checked
    ... def scaled(rates: Sequence[float], by: int = 1) -> list[float]:
    ...     return [rate * by for rate in rates]
    >>> scaled([0.5, 1], by=2)
    [1.0, 2]
    >>> scaled([0.5, "1"])
    Traceback (most recent call last):
        ...
    fuel_parallel.errors.ArgumentError: scaled: rates[1] is a number, not the str '1'
    """
    parameters = inspect.signature(function).parameters.values()
    names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))

    @functools.cache
    def kinds() -> dict[str, Any]:
        # When it is called first, not at import: annotations may name what is defined further down.
        return {**typing.get_type_hints(function), "return": Any}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            kind = kinds().get(name, Any)
            if not _allowed_by(kind)(value):
                raise ArgumentError(f"{_called(function, args)}: {_misfit(name, value, kind)}")
        return function(*args, **kwargs)

    return call


def whole(value: Any) -> int | None:
    """The integer that a value is, one of NumPy's included; None for anything else, bools too.

    >>> import numpy
    >>> whole(numpy.int64(3)), whole(3.0), whole(True)
    (3, None, None)
    """
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _called(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    return type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__


@functools.cache
def _allowed_by(kind: Any) -> Callable[[Any], bool]:
    """Says whether an annotation allows a value, or says nothing that could be checked; each is looked at once."""
    if kind is Any:
        return lambda value: True
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        alternatives = [_allowed_by(one) for one in inner]
        return lambda value: any(allows(value) for allows in alternatives)
    if origin is typing.Literal:
        return lambda value: value in inner
    if kind is float:
        return lambda value: hasattr(value, "__float__") and not hasattr(value, "__len__")
    if kind is int:
        return lambda value: whole(value) is not None
    if origin is Sequence:
        # An iterator will do where a sequence is asked for; of a string, each character is hardly what was meant.
        return lambda value: (
            isinstance(value, Iterable) and not isinstance(value, str | bytes) and _stranger(value, inner[0]) is None
        )
    checkable = origin if inspect.isclass(origin) else kind
    if not inspect.isclass(checkable) or getattr(checkable, "_is_protocol", False):
        return lambda value: True
    return lambda value: isinstance(value, checkable)


def _stranger(values: Iterable[Any], kind: Any) -> int | None:
    """The place of the first element that does not fit, in a list or tuple; others can perhaps be read only once."""
    if isinstance(values, list | tuple):
        allows = _allowed_by(kind)
        return next((n for n, one in enumerate(values) if not allows(one)), None)
    return None


def _misfit(name: str, value: Any, kind: Any) -> str:
    for one in _alternatives(kind):
        if typing.get_origin(one) is Sequence and isinstance(value, list | tuple):
            (inner,) = typing.get_args(one)
            place = _stranger(value, inner)
            if place is not None:
                return _misfit(f"{name}[{place}]", value[place], inner)
    if value is None or isinstance(value, bool | int | float):
        what = repr(value)
    else:
        shown = f" {value!r:.60}" if isinstance(value, str | bytes) else ""
        what = f"the {type(value).__name__}{shown}"
    return f"{name} is {' or '.join(map(_named, _alternatives(kind)))}, not {what}"


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _named(kind: Any) -> str:
    """What the user is to give. A class of ours may say in `how_to_get` where its objects come from."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if origin is Sequence:
        return f"a list, each {_named(inner[0])}"
    if origin in (Mapping, dict):
        return "a dict"
    if origin in (Iterable, Collection):
        return "something to loop over"
    if origin is Callable:
        return "a function"
    one = origin or kind
    name = _NAMES.get(one) or f"a {one.__name__}"
    return f"{name} ({one.how_to_get})" if hasattr(one, "how_to_get") else name
