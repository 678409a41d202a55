"""ZeRO-3, or FSDP: parameters are cut by rows over ranks, and whole only while a layer computes with them.

`shard_parameters` leaves a model as it is to its code: where a module reads `self.weight`, an all-gather of the rows of
all ranks stands in the graph (arXiv:1910.02054, section 5.3; arXiv:2304.11277). The backward pass gathers once more, so
that a whole weight lives no longer than its layer. The gradient of a parameter is that of its rows: the mean over
ranks, by a reduce-scatter.
"""

from __future__ import annotations

import weakref
from typing import Any

from fuel_parallel.arguments import checked
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.data_parallel.gathering import gather_rows, mean_gradient
from fuel_parallel.data_parallel.rows import check_same, own_rows, shard_of_rows
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy.node import Node, Shape
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module, Parameter

WHOLE_ELEMENTS = 1024
"""Parameters with fewer elements stay whole: gathering them would take longer than they are worth."""


class ShardedParameter(Parameter):
    """A parameter of a model that `shard_parameters` has cut: this rank's rows of it, or all if it is small.

    Its gradient is the mean over ranks of its rows of the gradient.
    """

    __slots__ = ("_last", "comm", "whole_shape")

    def __init__(self, whole: Parameter, comm: Communicator, *, cut: bool) -> None:
        shard = shard_of_rows(whole.shape, whole.shard, comm) if cut else whole.shard
        super().__init__(own_rows(whole, comm) if cut else Tensor(whole.node), shard=shard)
        self.comm = comm
        self.whole_shape: Shape = whole.shape
        """The shape of what the model computes with."""
        self._last: weakref.ref[Node] | None = None

    def __getstate__(self) -> Any:
        # For copies and pickles, which gather for themselves.
        state: Any = super().__getstate__()
        own, slots = state
        return own, {**slots, "_last": None}

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds some of its rows, and not all."""
        return self.whole_shape != () and self.shape != self.whole_shape

    def whole(self) -> Tensor:
        """The parameter as the model computes with it: an all-gather if it `is_cut`.

        One that is used twice in a graph is gathered once for both, so that gradients add up before they travel.
        """
        node = None if self._last is None else self._last()
        if node is None or node.value is not None or node.inputs != (self.node,):
            made = gather_rows(self, self.comm, self.whole_shape[0]) if self.is_cut else mean_gradient(self, self.comm)
            node = made.node
            self._last = weakref.ref(node)
        return Tensor(node)


@checked
def shard_parameters(model: Module, comm: Communicator, *, whole_elements: int = WHOLE_ELEMENTS) -> None:
    """Cuts all parameters of a model by rows over the ranks of `comm`.

    Afterwards each of `model.parameters()` is a `ShardedParameter`, which ordinary optimizers update, and attributes
    that the model's code reads (`self.weight`) are the whole tensors. Gradients with respect to the parameters are
    means over ranks already. Make the optimizer afterwards.

    Args:
        model: Its parameters are the same on all ranks of `comm`; with tensor parallelism, this rank's parts.
        comm: The ranks that hold the same parameters: `mesh["dp"]`.
        whole_elements: Parameters with fewer elements, or fewer rows than ranks, stay whole.

    A collective call. Raises `ArgumentError` for a model that has been cut already, and `CommunicatorError` where ranks
    have different parameters.

    >>> import fuel_parallel as fp
    >>> from fuel_parallel import SymbolicComm
    >>> layer = fp.Linear(6, 4, fp.lazy.random.Generator(0))
    >>> shard_parameters(layer, SymbolicComm(1, 3), whole_elements=20)
    >>> layer.parameters()[0].shape, layer.weight.shape, layer(fp.lazy.ones((2, 6))).shape
    ((2, 4), (6, 4), (2, 4))
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ShardedParameter):
            raise ArgumentError(f"shard_parameters: {name} has been cut by it before; call it once, on the whole model")
    check_same("shard_parameters", model.parameters(), comm)
    if comm.world_size == 1:
        return
    made: dict[int, ShardedParameter] = {}
    for module in model.named_modules().values():
        attributes = vars(module)
        names = [name for name, value in attributes.items() if _holds_parameters(value)]
        for name in names:
            attributes[name] = _cut(attributes[name], comm, whole_elements, made)
        if names:
            module.__class__ = _reading_wholes(type(module), tuple(names))


def _holds_parameters(value: Any) -> bool:
    """Whether it is a parameter or a container of some, not counting those of modules in it."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(map(_holds_parameters, value))
    return isinstance(value, Parameter)


def _cut(value: Any, comm: Communicator, whole_elements: int, made: dict[int, ShardedParameter]) -> Any:
    def cut(parameter: Any) -> Any:
        if not isinstance(parameter, Parameter):
            return parameter
        if id(parameter) not in made:
            rows = parameter.shape[0] if parameter.ndim else 0
            large = parameter.size >= max(whole_elements, 1) and rows >= comm.world_size
            made[id(parameter)] = ShardedParameter(parameter, comm, cut=large)
        return made[id(parameter)]

    return _mapped(value, cut)


def _whole(value: Any) -> Any:
    return _mapped(value, lambda one: one.whole() if isinstance(one, ShardedParameter) else one)


def _mapped(value: Any, function: Any) -> Any:
    """A parameter or a container of some with `function` of each; all else as it is."""
    if not _holds_parameters(value):
        return value
    if isinstance(value, dict):
        return {key: _mapped(part, function) for key, part in value.items()}
    if isinstance(value, list | tuple):
        items = [_mapped(part, function) for part in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)


_classes: dict[tuple[type[Module], tuple[str, ...]], type[Module]] = {}


def _reading_wholes(cls: type[Module], names: tuple[str, ...]) -> type[Module]:
    """The class, but that reading one of the attributes gives whole tensors. What is stored is found by `vars`."""
    if (cls, names) in _classes:
        return _classes[cls, names]

    def attribute(name: str) -> property:
        def read(self: Module) -> Any:
            return _whole(vars(self)[name])

        def write(self: Module, value: Any) -> None:
            vars(self)[name] = value

        return property(read, write)

    about = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made = type(cls.__name__, (cls,), about | {name: attribute(name) for name in names})
    return _classes.setdefault((cls, names), made)
