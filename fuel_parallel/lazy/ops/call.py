"""Calls: a function of tensors whose graph is built once, and then stands for itself as one node for each result.

An update of a parameter is a dozen operations, the same for each parameter and at each step. Building these, and
looking at them again while a plan is found, took longer than anything else that is not computing. A plan is made of the
operations themselves: see `runtime.calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np

from fuel_parallel.lazy.node import Op, Spec, apply, data_node, define, topological
from fuel_parallel.lazy.tensor import Tensor

Function = Callable[..., Sequence[Tensor]]


class Body:
    """The graph of a function for arguments of certain specs. `results` are nodes, of which each is there once."""

    __slots__ = ("arguments", "name", "places", "reads", "results")

    def __init__(self, function: Function, specs: Sequence[Spec], settings: tuple[Any, ...]) -> None:
        self.name = function.__name__.lstrip("_")
        given = [data_node(np.empty(0), spec) for spec in specs]
        found = [t.node for t in function(*map(Tensor, given), *settings)]
        self.results = tuple(dict.fromkeys(found))
        self.places = tuple(self.results.index(node) for node in found)
        """For each value that the function returns its place among the results."""
        below = topological(self.results)
        read = set(below)
        self.reads = tuple(n for n, node in enumerate(given) if node in read)
        """Which of the arguments that the function is given its results are computed from: `arguments` are these."""
        self.arguments = tuple(given[n] for n in self.reads)
        for node in below:
            if node.op.crosses_ranks or node.op.has_effect or (node.value is not None and node not in self.arguments):
                raise RuntimeError(
                    f"call: {self.name} holds {node}; it may only compute something of its arguments, for it is built "
                    "once and used again and again"
                )

    def built_on(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results for other arguments, built operation by operation."""
        at = {argument: t.node for argument, t in zip(self.arguments, inputs, strict=True)}
        for node in topological(self.results):
            if node not in at:
                at[node] = apply(node.op, tuple(at[i] for i in node.inputs), *node.attrs)
        return [Tensor(at[node]) for node in self.results]

    def __repr__(self) -> str:
        return self.name


def call(function: Function, arguments: Sequence[Tensor], *settings: Any) -> list[Tensor]:
    """`function(*arguments, *settings)`, a sequence of tensors, each as one node.

    The graph is built for the first arguments of these shapes, dtypes and devices and these settings, which must be
    hashable; so the function depends on nothing else. It is one that lives long, of a module and not of a call.
    Arguments that it does not read, but for their shapes, are not inputs of the nodes and are not kept for them.

    >>> from fuel_parallel.lazy.ops import creation
    >>> def both(a, b):
    ...     return a + b, a * b
    >>> [t.item() for t in call(both, [creation.asarray(2.0), creation.asarray(3.0)])]
    [5.0, 6.0]
    """
    nodes = [t.node for t in arguments]
    specs = tuple([node.spec for node in nodes])
    key = (function, settings, specs)
    body = _bodies.get(key)
    if body is None:
        if len(_bodies) >= _BODIES_LIMIT:
            _bodies.clear()
        body = _bodies[key] = Body(function, specs, settings)
    # A tuple of its own for each: whether somebody else needs an argument is seen from the references to it.
    return [Tensor(apply(CALL, tuple([nodes[n] for n in body.reads]), body, place)) for place in body.places]


def called(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, of one result, as one node: see `call`. It is given tensors first, and then settings.

    >>> from fuel_parallel.lazy.ops import creation
    >>> @called
    ... def scaled_sum(a, b, scale):
    ...     return (a + b) * scale
    >>> scaled_sum(creation.asarray(2.0), creation.asarray(3.0), 4.0).node.op.name
    'call'
    """

    @wraps(function)
    def several(*given: Any) -> tuple[Tensor]:
        return (function(*given),)

    @wraps(function)
    def one_node(*given: Any) -> Tensor:
        tensors = [x for x in given if isinstance(x, Tensor)]
        return call(several, tensors, *given[len(tensors) :])[0]

    return one_node


_bodies: dict[tuple[Function, tuple[Any, ...], tuple[Spec, ...]], Body] = {}
_BODIES_LIMIT = 1 << 12


def _infer(inputs: tuple[Spec, ...], body: Body, place: int) -> Spec:
    return body.results[place].spec


def _no_kernel(*_: Any) -> Any:
    raise RuntimeError("a call is replaced by its operations when a plan is made")


def _vjp(
    asked: Sequence[bool], g: Tensor, y: Tensor, inputs: tuple[Tensor, ...], body: Body, place: int
) -> list[Tensor | None]:
    from fuel_parallel.lazy.autograd import grad
    from fuel_parallel.lazy.ops.elementwise import positive

    # Inputs may depend on each other; here each is a variable of its own.
    own = [positive(t) if is_asked else t for t, is_asked in zip(inputs, asked, strict=True)]
    variables = [t for t, is_asked in zip(own, asked, strict=True) if is_asked]
    found = iter(grad(body.built_on(own)[place], variables, cotangent=g))
    return [next(found) if is_asked else None for is_asked in asked]


CALL = define(
    Op(
        "call",
        _infer,
        _no_kernel,
        vjp=_vjp,
        variadic=True,
        on_host=None,
        attr_names=("function", "result"),
        shapes="those of the function",
    )
)
