"""Nodes: the lazy graph itself.

A node is an op applied to other nodes: it knows its shape and dtype from the moment it is built, and its value once a
plan has run. Nodes are numbered as they are made; since inputs are older than what is made of them, that number is a
topological order, and for collectives it is the order on the wire.

When a node is realized its inputs are let go, so that memory is bounded by what is held, not by what was computed.
What it once depended on is remembered as a set of numbers (`history`), so that a gradient that would silently miss a
path through a released node is an error instead.

Threads may build nodes side by side. `graph_lock` is held by whoever changes nodes that others may see, which is
`realize`, and by whoever follows nodes to their inputs: `grad`, and what draws or cuts a graph.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from types import CodeType, EllipsisType, FrameType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from fuel_parallel.backends import hops
from fuel_parallel.errors import DeviceError, RealizeError
from fuel_parallel.lazy.dtypes import ALL, DType

Shape = tuple[int, ...]
Attrs = tuple[Any, ...]

graph_lock = threading.RLock()
"""See the module's text."""


class Spec:
    """Shape, dtype and device of a node's value. Interned: equal specs are one object."""

    __slots__ = ("__weakref__", "device", "dtype", "nbytes", "shape", "size")
    shape: Shape
    dtype: DType
    device: str
    size: int
    """Number of elements."""
    nbytes: int
    """Bytes of a dense array of this spec."""

    def __new__(cls, shape: Shape, dtype: DType, device: str = "cpu") -> Spec:
        """The one object that says these three."""
        key = (shape, dtype, device)
        found = _specs.get(key)
        if found is None:
            made = object.__new__(cls)
            made.shape, made.dtype, made.device = key
            made.size = math.prod(shape)
            made.nbytes = made.size * dtype.itemsize
            with _interning:
                found = _specs.setdefault(key, made)
        return found

    def __reduce__(self) -> tuple[type[Spec], tuple[Shape, DType, str]]:
        return Spec, (self.shape, self.dtype, self.device)

    def __repr__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"


_specs: WeakValueDictionary[tuple[Shape, DType, str], Spec] = WeakValueDictionary()
_interning = threading.RLock()


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """One entry of the registry: all that the library knows of an operation.

    - `infer(*input specs, *attrs)` gives the spec of the result or raises the user's error.
    - `kernel(xp, *arrays, *attrs)` computes it with an array module `xp` (numpy, cupy); it may return a view of an
      input and must not write into one.
    - `into(xp, out, *arrays, *attrs)`, if there is one, does so in given memory; `ufunc` names numpy's function for it.
    - `vjp` has for each input a function `(g, y, *inputs, *attrs) -> cotangent of that input`, built of lazy tensors,
      so that it can be differentiated again; for a variadic op one function `(asked, g, y, inputs, *attrs)` gives those
      of all inputs, None where `asked` is False or there is none. `ZERO` says that the derivative is zero wherever it
      exists, `None` that the op has no gradient.

    - `start(xp, *arrays, *attrs, reuse=..., out=...)`, if there is one, starts the op and gives an object with
      `progress()` and `wait()`, of which the latter gives the result; until then inputs must not be written. With
      `reuse` the memory of the first input is given away. `out` is where the result goes, if the op has `into` too.

    - `update(xp, *arrays, *attrs)`, if there is one, writes the result over the first input, which it differs from in
      some elements only. A plan that has the last use of that input does so; the kernel is `by_copy(update)`.

    A variadic op takes its inputs as one tuple everywhere. An `elementwise` op computes each element of the result from
    the elements at its place in the inputs, broadcast. `aliases` is False if the result never shares memory with an
    input. One that is `recomputed` runs again for the backward pass, which then does not hold the value of the forward
    pass. The inputs `on_host` are read there, whatever the device of the others, which is one; with None inputs may be
    anywhere.

    `shapes` says in words what `infer` does with shapes, as in `[..., m, k], [..., k, n] -> [..., m, n]`, and `domain`
    which dtypes it takes for the first input. The reference is made of them.
    """

    name: str
    infer: Callable[..., Spec]
    kernel: Callable[..., Any]
    vjp: Any = None
    variadic: bool = False
    crosses_ranks: bool = False
    has_effect: bool = False
    elementwise: bool = False
    ufunc: str = ""
    into: Callable[..., None] | None = None
    start: Callable[..., Any] | None = None
    update: Callable[..., None] | None = None
    aliases: bool = True
    recomputed: bool = False
    on_host: tuple[int, ...] | None = ()
    attr_names: tuple[str, ...] = ()
    shapes: str = ""
    domain: tuple[DType, ...] = ALL

    def __repr__(self) -> str:
        return f"<op {self.name}>"


def by_copy(update: Callable[..., None], *, variadic: bool = False) -> Callable[..., Any]:
    """The kernel of an op that is said by its `update`."""

    def kernel(xp: Any, x: Any, *others: Any) -> Any:
        result = xp.array(x)
        update(xp, result, *others)
        return result

    def variadic_kernel(xp: Any, inputs: Any, *attrs: Any) -> Any:
        result = xp.array(inputs[0])
        update(xp, (result, *inputs[1:]), *attrs)
        return result

    return variadic_kernel if variadic else kernel


ZERO = ()
OPS: dict[str, Op] = {}


def define(op: Op) -> Op:
    """Enters an op into the registry."""
    if op.name in OPS:
        raise RuntimeError(f"op {op.name!r} is defined twice")
    OPS[op.name] = op
    return op


class History(NamedTuple):
    """The leaves that a released node was computed from, by serial.

    Only the youngest are listed; every leaf up to the serial `forgotten` counts as one of them.
    """

    leaves: frozenset[int]
    forgotten: int = -1

    def may_hold(self, leaves: Iterable[int]) -> bool:
        """Whether the released node may have been computed from one of the leaves."""
        return any(leaf in self.leaves or leaf <= self.forgotten for leaf in leaves)

    @staticmethod
    def of(leaves: Iterable[Node]) -> History:
        """The history of something computed from these leaves, some of which have a history of their own."""
        serials: set[int] = set()
        forgotten = -1
        for leaf in leaves:
            serials.add(leaf.serial)
            if leaf.history is not None:
                serials |= leaf.history.leaves
                forgotten = max(forgotten, leaf.history.forgotten)
        if len(serials) > _HISTORY_LIMIT:
            youngest = sorted(serials)[-_HISTORY_LIMIT:]
            forgotten, serials = max(forgotten, youngest[0] - 1), set(youngest)
        return History(frozenset(serials), forgotten)


_HISTORY_LIMIT = 2048


class Node:
    """One op applied to other nodes. See the module's text.

    No two nodes share a tuple of inputs: `realize` counts the references to a node to see whether others need it.
    """

    __slots__ = ("__weakref__", "attrs", "history", "inputs", "line", "op", "serial", "spec", "value")

    def __init__(
        self, op: Op, inputs: tuple[Node, ...], attrs: Attrs, spec: Spec, value: Any = None, line: Line | None = None
    ) -> None:
        self.op = op
        self.inputs = inputs
        self.attrs = attrs
        self.spec = spec
        self.value = value
        self.line = line
        self.history: History | None = None
        self.serial = next(_serials)

    def release(self, value: Any, history: History | None) -> None:
        """Stores the value and lets the inputs go. `history`: the leaves that it was computed from."""
        self.value = value
        self.op, self.inputs, self.attrs = DATA, (), ()
        self.history = history

    def __repr__(self) -> str:
        return f"<node {self.serial} {self.op.name} {self.spec}>"


Line = tuple[CodeType, int]
_serials = itertools.count()
_inferred: dict[tuple[Any, ...], Spec] = {}
_INFERRED_LIMIT = 1 << 16
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_own_files: dict[str, bool] = {}
_booked_on: ContextVar[Line | EllipsisType | None] = ContextVar("booked_on", default=...)
"""The line of `built_for` in this thread; `...` outside of it."""


def apply(op: Op, inputs: tuple[Node, ...], *attrs: Any) -> Node:
    """Builds the node `op(*inputs, *attrs)`; its shape and dtype are inferred here, or the user's error is raised."""
    key = (op, attrs, *[node.spec for node in inputs])
    spec = _inferred.get(key)
    if spec is None:
        specs = key[2:]
        if len(inputs) > 1 and op.on_host is not None:
            together = _on_one_device(op, inputs, op.on_host)
            if together is not inputs:
                return apply(op, together, *attrs)
        spec = op.infer(specs, *attrs) if op.variadic else op.infer(*specs, *attrs)
        if len(_inferred) >= _INFERRED_LIMIT:
            _inferred.clear()
        _inferred[key] = spec
    return Node(op, inputs, attrs, spec, None, script_line())


gathering: ContextVar[tuple[tuple[str, ...], ...]] = ContextVar("gathering", default=())
"""The devices of the groups in whose `with` blocks this thread is: operands are copied to the first that any is on."""


def _on_one_device(op: Op, inputs: tuple[Node, ...], on_host: tuple[int, ...]) -> tuple[Node, ...]:
    """The inputs, if all but those `on_host` are on one device, or copied as a group says; else the user's error."""
    found = {node.spec.device for n, node in enumerate(inputs) if n not in on_host}
    if len(found) < 2:
        return inputs
    for devices in reversed(gathering.get()):
        if found <= set(devices):
            device = min(found, key=devices.index)
            return tuple(node if n in on_host else copied(node, device) for n, node in enumerate(inputs))
    raise DeviceError(
        f"{op.name}: operands are on {' and '.join(sorted(found))}; move them to one device with x.to(...), or say "
        "`with group:` of a DeviceGroup of these devices, which copies them"
    )


def copied(node: Node, device: str) -> Node:
    """A node's value on another device, through the host between two vendors."""
    for stop in hops(node.spec.device, device):
        node = apply(OPS["copy"], (node,), stop)
    return node


def data_node(value: Any, spec: Spec) -> Node:
    """A leaf that holds an array."""
    return Node(DATA, (), (), spec, value, script_line())


def script_line() -> Line | None:
    """Code and line number of the innermost frame outside this package: the line the user wrote."""
    line = _booked_on.get()
    return line_of(sys._getframe(2)) if line is ... else line


def line_of(frame: FrameType | None) -> Line | None:
    """The user's line in a stack, from its innermost frame on."""
    while frame is not None:
        code = frame.f_code
        own = _own_files.get(code.co_filename)
        if own is None:
            own = _own_files[code.co_filename] = code.co_filename.startswith(_PACKAGE)
        if not own:
            return code, frame.f_lineno
        frame = frame.f_back
    return None


@contextmanager
def built_for(line: Line | None) -> Iterator[None]:
    """Nodes built inside are booked on `line`: a backward op belongs to the line of its forward op."""
    before = _booked_on.set(line)
    try:
        yield
    finally:
        _booked_on.reset(before)


def describe_line(line: Line | None) -> str:
    """`train.py:12`, as short as it stays findable."""
    if line is None:
        return "<unknown line>"
    code, number = line
    name = code.co_filename
    try:
        relative = os.path.relpath(name)
    except ValueError:
        relative = name
    return f"{relative if not relative.startswith('..') else name}:{number}"


def lose(node: Node) -> None:
    """Marks a leaf whose memory was overwritten by a plan that then failed: it cannot be computed again."""
    node.op, node.value = LOST, None


def _is_lost(*_: Any) -> Any:
    raise RealizeError(
        "this value was being replaced in place when an earlier realize failed, and is lost; load it again, "
        "for example from a checkpoint"
    )


def _data_has_no_kernel(*_: Any) -> Any:
    raise RuntimeError("a data node holds its value and is never computed")


LOST = define(Op("lost", infer=_is_lost, kernel=_is_lost, vjp=ZERO, shapes="of the value that was lost"))
DATA = define(Op("data", infer=_data_has_no_kernel, kernel=_data_has_no_kernel, vjp=ZERO, shapes="of the value"))


def topological(roots: Iterable[Node]) -> list[Node]:
    """All nodes below `roots` that have no value yet, and the leaves they need, oldest first."""
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if node.value is None:
                stack.extend(node.inputs)
    return sorted(seen, key=attrgetter("serial"))
