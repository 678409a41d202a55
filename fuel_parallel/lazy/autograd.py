"""Gradients: the backward pass is more graph.

`grad` walks from the loss to what was asked for and builds, op by op from the youngest, the cotangent of each node with
the op's own vjp. What it returns are lazy tensors like any other, so gradients of gradients need nothing new.

Across ranks the derivative is that of the *sum of the losses of all ranks*. A collective's vjp is therefore again a
collective, which every rank must take part in even where its own input does not lead to anything it asked for; such
nodes are kept and run with the next plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fuel_parallel.errors import DTypeError, GradientError, ShapeError
from fuel_parallel.lazy import dtypes, effects
from fuel_parallel.lazy.node import Node, apply, built_for, describe_line, graph_lock
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.lazy.tree import flatten, unflatten


def grad(loss: Tensor, wrt: Any, *, cotangent: Tensor | None = None) -> Any:
    """The gradient of the scalar `loss` with respect to `wrt`: a tensor, or any nesting of lists, tuples and dicts.

    The result has the structure of `wrt`. With `cotangent` (of the shape of `loss`) the loss need not be a scalar: the
    result is then the vector-Jacobian product. A tensor that the loss does not depend on has gradient zero.

    Raises `GradientError` when the loss is not a floating scalar, or when a node on the way was realized before its
    gradient was taken and let its graph go.

    >>> x = creation.asarray([1.0, 2.0])
    >>> grad((x * x * x).sum(), x).tolist()
    [3.0, 12.0]
    """
    if not isinstance(loss, Tensor):
        raise GradientError(f"grad: the loss must be a tensor, not {type(loss).__name__}")
    leaves, structure = flatten(wrt)
    _check_loss(loss, cotangent)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or dtypes.kind(leaf.dtype) != "real floating":
            what = f"{leaf.dtype.name} tensor" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise GradientError(f"grad: gradients are taken with respect to floating tensors, not a {what}")
    start = creation.ones_like(loss) if cotangent is None else cotangent
    pullback = Pullback([loss], [start], leaves)
    pullback.finish()
    return unflatten(structure, [pullback.cotangent(leaf) for leaf in leaves])


def value_and_grad(function: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Callable[..., tuple[Any, Any]]:
    """A function that returns `(function(*args), gradient with respect to the arguments argnums)`.

    The function returns the loss, or a tuple whose first element is the loss (the rest is passed through). An argument
    may be any nesting of lists, tuples, dicts and modules of tensors.

    >>> value, slope = value_and_grad(lambda x: x * x)(creation.asarray(3.0))
    >>> value.item(), slope.item()
    (9.0, 6.0)
    """

    def evaluate(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        result = function(*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        gradients = grad(loss, [args[n] for n in numbers])
        return result, gradients[0] if isinstance(argnums, int) else tuple(gradients)

    return evaluate


def _check_loss(loss: Tensor, cotangent: Tensor | None) -> None:
    if dtypes.kind(loss.dtype) != "real floating":
        raise GradientError(f"grad: the loss must be a floating tensor, not {loss.dtype.name}")
    if cotangent is None and loss.shape != ():
        raise GradientError(
            f"grad: the loss must be a scalar, but has shape {loss.shape}; "
            "reduce it with sum or mean, or give a cotangent"
        )
    if cotangent is not None and (cotangent.shape != loss.shape or cotangent.dtype != loss.dtype):
        raise ShapeError(
            f"grad: the cotangent must be like the loss, {loss.dtype.name}{list(loss.shape)}, "
            f"not {cotangent.dtype.name}{list(cotangent.shape)}"
        )


class Pullback:
    """A backward pass that can be taken in parts: from the cotangents of `outputs` to those of `wrt`.

    `through(sources)` goes as far as the cotangents of `sources`, and leaves what lies beside that way undone: the
    gradients of weights, say, while another rank waits for the gradient of the input. `finish` does the rest. Both
    build nodes and compute nothing.

    Args:
        outputs: Floating tensors.
        cotangents: One for each output, of its shape and dtype.
        wrt: Floating tensors.

    Raises `GradientError` like `grad`.

    >>> x, weight = creation.asarray([1.0, 2.0]), creation.asarray([3.0, 4.0])
    >>> pullback = Pullback([x * weight], [creation.ones(2)], [x, weight])
    >>> pullback.through([x])
    >>> pullback.cotangent(x).tolist()
    [3.0, 4.0]
    >>> pullback.finish()
    >>> pullback.cotangent(weight).tolist()
    [1.0, 2.0]
    """

    def __init__(self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor], wrt: Sequence[Tensor]) -> None:
        # Each handle is read once: another thread may point it elsewhere.
        self._node_of = {id(tensor): tensor.node for tensor in wrt}
        self._wanted = set(self._node_of.values())
        with graph_lock:
            sends = effects.take_differentiable()
            self._left, self._dependent = _paths([*[t.node for t in outputs], *sends], self._wanted)
        self._again = _Again(self._left)
        # What was sent is part of other ranks' losses; its cotangent is received, so any value starts it.
        self._cotangents = {send: creation.zeros((0,)) for send in sends}
        for output, cotangent in zip(outputs, cotangents, strict=True):
            _check_loss(output, cotangent)
            before = self._cotangents.get(output.node)
            self._cotangents[output.node] = cotangent if before is None else before + cotangent
        self.passed: list[Tensor] = []
        """The cotangents of what `through` has gone through, the first ones first."""

    def through(self, sources: Iterable[Tensor]) -> None:
        """Goes back through all that depends on `sources`, by integers as well."""
        below = _depending_on({tensor.node for tensor in sources}, self._left)
        self.passed += self._go([node for node in self._left if node in below])
        self._left = [node for node in self._left if node not in below]
        self._dependent.intersection_update(self._left)  # what nobody needs any more is let go

    def finish(self) -> None:
        """Goes back through what is left."""
        self._go(self._left)
        self._left, self.passed = [], []

    def cotangent(self, tensor: Tensor) -> Tensor:
        """That of a wanted tensor, as far as the pass has come; zero if nothing depends on it."""
        found = self._cotangents.get(self._node_of[id(tensor)])
        return creation.zeros_like(tensor) if found is None else found

    def arrived(self) -> list[Tensor]:
        """The cotangents that the pass has come to and not gone on from, those of wanted tensors among them."""
        return list(self._cotangents.values())

    def _go(self, nodes: Sequence[Node]) -> list[Tensor]:
        cotangents, passed = self._cotangents, []
        with graph_lock:
            for node in nodes:
                g = cotangents.get(node) if node in self._wanted else cotangents.pop(node, None)
                if g is None or (not node.inputs and not node.op.crosses_ranks):
                    continue
                _push(node, g, self._dependent, cotangents, self._again)
                passed.append(g)
        return passed


def _depending_on(sources: set[Node], nodes: Sequence[Node]) -> set[Node]:
    """The sources, and of all nodes below `nodes` those that are computed from one."""
    seen: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.inputs)
    found = set(sources)
    for node in sorted(seen, key=lambda n: n.serial):
        if any(i in found for i in node.inputs):
            found.add(node)
    return found


class _Again:
    """What backward passes compute again rather than keep: values of `recomputed` ops, and what is made of these alone.

    `order` are the nodes of the forward pass, the youngest first. Each is made again once, when it is asked for first.
    """

    def __init__(self, order: list[Node]) -> None:
        self.nodes: set[Node] = set()
        self.made: dict[Node, Node] = {}
        if any(node.op.recomputed for node in order):
            for node in reversed(order):
                if node.value is None and (node.op.recomputed or self._is_made_of_such(node)):
                    self.nodes.add(node)

    def _is_made_of_such(self, node: Node) -> bool:
        if node.op.crosses_ranks or node.op.has_effect:
            return False
        # Scalars do no harm: a weight times a constant is made again, and what a layer makes of its input is not.
        return any(i in self.nodes for i in node.inputs) and all(
            i in self.nodes or i.spec.size == 1 for i in node.inputs
        )

    def of(self, node: Node) -> Tensor:
        """The tensor of a node, for use in the backward pass."""
        return Tensor(self._made(node))

    def _made(self, node: Node) -> Node:
        if node not in self.nodes:
            return node
        if node not in self.made:
            made = apply(node.op, tuple(self._made(i) for i in node.inputs), *node.attrs)
            if made.op.crosses_ranks:
                effects.note(made)
            self.made[node] = made
        return self.made[node]


def _push(node: Node, g: Tensor, dependent: set[Node], cotangents: dict[Node, Tensor], again: _Again) -> None:
    """Adds to the cotangents of the inputs what arrives at them through `node`."""
    op = node.op
    if op.vjp is None:
        raise GradientError(f"grad: {op.name} (built at {describe_line(node.line)}) has no gradient")
    if not op.vjp:
        return
    with built_for(node.line):
        y = again.of(node)
        inputs = tuple(again.of(i) for i in node.inputs)
        if not inputs:
            op.vjp[0](g, y, *node.attrs)
            return
        asked = [i in dependent or (op.crosses_ranks and dtypes.is_inexact(i.spec.dtype)) for i in node.inputs]
        parts: Sequence[Tensor | None]
        if op.variadic:
            parts = op.vjp(asked, g, y, inputs, *node.attrs)
        else:
            parts = [op.vjp[n](g, y, *inputs, *node.attrs) if is_asked else None for n, is_asked in enumerate(asked)]
        for source, part, is_asked in zip(node.inputs, parts, asked, strict=True):
            if part is None or not is_asked:
                continue
            if source not in dependent:
                if part is not g:
                    effects.keep(part.node)
                continue
            if part.shape != source.spec.shape or part.dtype is not source.spec.dtype:
                raise DTypeError(f"internal: the vjp of {op.name} gave {part.node.spec} for an input of {source.spec}")
            before = cotangents.get(source)
            cotangents[source] = part if before is None else before + part


def _paths(roots: list[Node], wanted: set[Node]) -> tuple[list[Node], set[Node]]:
    """The nodes below the roots, youngest first, and those of them whose cotangent is needed.

    These are the ones that depend on a wanted node, here or, through a collective, on another rank.
    Raises the user's error when a released node may hide a path.
    """
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op.vjp != ():
            # No cotangent passes an integer: what led to it is a constant, released or not.
            stack.extend(i for i in node.inputs if dtypes.is_inexact(i.spec.dtype))
    order = sorted(seen, key=lambda n: n.serial)
    dependent: set[Node] = set()
    for node in order:
        if node in wanted or any(i in dependent for i in node.inputs) or _reaches_other_ranks(node):
            dependent.add(node)
    _check_released([n for n in order if n.history is not None and n not in wanted], wanted)
    return order[::-1], dependent


def _reaches_other_ranks(node: Node) -> bool:
    return node.op.crosses_ranks and bool(node.op.vjp) and dtypes.is_inexact(node.spec.dtype)


def _check_released(released: list[Node], wanted: set[Node]) -> None:
    if not released:
        return
    below = leaves_below(wanted)
    for node in released:
        if node.history is not None and node.history.may_hold(below):
            raise GradientError(
                "grad: a tensor that depends on what you differentiate by was realized before its gradient was taken, "
                f"and its graph was let go (built at {describe_line(node.line)}). Call grad before realize(), item(), "
                "numpy() or printing; or use stop_gradient if it is to be a constant"
            )


def leaves_below(nodes: Iterable[Node]) -> set[int]:
    """Serials of the leaves that the nodes depend on, through released nodes as well."""
    result: set[int] = set()
    seen: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.inputs:
            stack.extend(node.inputs)
        else:
            result.add(node.serial)
            if node.history is not None:
                result |= node.history.leaves
    return result
