"""`DeviceGroup`: the devices of one process, and collectives over tensors that lie on them.

The shards of all devices are handed in together, shard i on device i, and the results are nodes like any other: sums
and copies that the plan shows. Nothing crosses to other ranks. The leader is the first device; it does the work that is
done once. A hop between two vendors goes through the host and is two Copy nodes, one within a vendor is direct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args, overload

import fuel_parallel.lazy as ft
from fuel_parallel.arguments import checked
from fuel_parallel.backends import check_device, hops
from fuel_parallel.comm.communicator import ReduceOp
from fuel_parallel.device_group.algorithms import ByOrder, ByParts, Hands, Order, fold, tree
from fuel_parallel.device_group.hands import Rehearsal, Sized, Tensors, cut
from fuel_parallel.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import gathering
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.runtime.realize import realize
from fuel_parallel.topology import DeviceTopology
from fuel_parallel.topology.work_cost import Work, WorkCost

T = TypeVar("T")
_MOST_DECIDED = 1024
To = Literal["leader", "all"]
Algorithm = Literal["auto", "fold", "tree", "parts"]

_COMBINE: dict[ReduceOp, Callable[[Any, Any], Tensor]] = {
    ReduceOp.SUM: ft.add,
    ReduceOp.PRODUCT: ft.multiply,
    ReduceOp.MIN: ft.minimum,
    ReduceOp.MAX: ft.maximum,
    ReduceOp.AVG: ft.add,
}
_COMBINE_BOOLS: dict[ReduceOp, Callable[[Any, Any], Tensor]] = {
    ReduceOp.SUM: ft.logical_or,
    ReduceOp.PRODUCT: ft.logical_and,
    ReduceOp.MIN: ft.logical_and,
    ReduceOp.MAX: ft.logical_or,
}


class DeviceGroup:
    """Devices of this process, in order; one may be there more than once.

    >>> group = DeviceGroup(["cpu", "cpu"])
    >>> group.all_reduce([ft.ones(2), 2 * ft.ones(2)]).tolist()
    [3.0, 3.0]

    Within `with group:` an operation whose operands lie on several of its devices runs on the one of these that comes
    first in the group: the other operands are copied there, by Copy nodes. That holds for the thread that says so, and
    of groups within each other for the innermost that has all these devices.

    Args:
        devices: Their names.
        topology: What copies between them take. A device that is not in it is taken to hang on PCIe.
        algorithm: `fold`, `tree` or `parts` for all collectives (see `fuel_parallel.device_group.algorithms`), or
            `auto` for the one that takes least by `fuel_parallel.topology.work_cost`. Devices, topology and sizes
            alone decide, so results have the same bits on every run.

    Raises `DeviceError` for a device that cannot be used, `ArgumentError` for none at all, or an unknown algorithm.
    Every method raises `ArgumentError` unless there is one shard for each device, and `DeviceError` unless shard i lies
    on device i. Gradients go back over the same hops.
    """

    @checked
    def __init__(
        self, devices: Sequence[str], *, topology: DeviceTopology | None = None, algorithm: Algorithm = "auto"
    ) -> None:
        if isinstance(devices, str) or not len(devices):
            raise ArgumentError(
                f"a DeviceGroup takes a list of one device or more, such as ['cpu', 'cuda:0'], not {devices!r}"
            )
        if algorithm not in get_args(Algorithm):
            known = ", ".join(map(repr, get_args(Algorithm)))
            raise ArgumentError(f"the algorithm of a DeviceGroup is one of {known}, not {algorithm!r}")
        self.devices = tuple(check_device(device) for device in devices)
        self.algorithm = algorithm
        self.cost = WorkCost(topology)
        self._decided: dict[tuple[Any, ...], tuple[str, Order]] = {}

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def leader(self) -> str:
        """The first device."""
        return self.devices[0]

    def __repr__(self) -> str:
        return f"DeviceGroup({list(self.devices)})"

    def __enter__(self) -> DeviceGroup:
        gathering.set((*gathering.get(), self.devices))
        return self

    def __exit__(self, *_: object) -> None:
        gathering.set(gathering.get()[:-1])

    def place(self, x: Tensor, dim: int = 0) -> list[Tensor]:
        """Cuts a tensor along `dim` into one part for each device, as `partition` does, and puts each in its place."""
        if not -x.ndim <= dim < x.ndim:
            raise ShapeError(f"dim {dim} is out of bounds for shape {x.shape}")
        return [part.to(device) for part, device in zip(cut(x, dim, self.size), self.devices, strict=True)]

    @overload
    def all_reduce(self, shards: Sequence[Tensor], op: ReduceOp = ..., *, to: Literal["leader"] = ...) -> Tensor: ...

    @overload
    def all_reduce(self, shards: Sequence[Tensor], op: ReduceOp = ..., *, to: Literal["all"]) -> list[Tensor]: ...

    def all_reduce(
        self, shards: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, *, to: To = "leader"
    ) -> Tensor | list[Tensor]:
        """All shards combined, element by element: on the leader, or one copy on each device.

        `ShapeError` and `DTypeError` where shards differ; the average is of floats only.
        """
        self._check("all_reduce", shards, to, same_shape=True)
        hands = self._combining("all_reduce", shards, op, None)
        return self._deliver(self._run("all_reduce", shards, to, hands, self.devices), to)

    @overload
    def all_gather(self, shards: Sequence[Tensor], dim: int = ..., *, to: Literal["leader"] = ...) -> Tensor: ...

    @overload
    def all_gather(self, shards: Sequence[Tensor], dim: int = ..., *, to: Literal["all"]) -> list[Tensor]: ...

    def all_gather(self, shards: Sequence[Tensor], dim: int = 0, *, to: To = "leader") -> Tensor | list[Tensor]:
        """The shards one after the other along `dim`, where their extents may differ: on the leader, or on each."""
        self._check("all_gather", shards, to)
        hands = Tensors(ft.add, 0, dim)
        return self._deliver(self._run("all_gather", shards, to, hands, self.devices), to)

    def reduce_scatter(self, shards: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, dim: int = 0) -> list[Tensor]:
        """All shards combined, and of that on device i part i along `dim`, as `partition` cuts."""
        self._check("reduce_scatter", shards, "all", same_shape=True)
        if not -shards[0].ndim <= dim < shards[0].ndim:
            raise ShapeError(f"reduce_scatter: dim {dim} is out of bounds for shape {shards[0].shape}")
        hands = self._combining("reduce_scatter", shards, op, dim)
        return self._run("reduce_scatter", shards, "all", hands, self.devices)

    def broadcast(self, x: Tensor) -> list[Tensor]:
        """A tensor of any device on each device."""
        devices = tuple(dict.fromkeys((x.device, *self.devices)))
        hands = Tensors(ft.add, 0, None, x.shape)
        there = dict(zip(devices, self._run("broadcast", [x], "all", hands, devices), strict=True))
        return [there[device] for device in self.devices]

    def realize(self, *things: Any) -> None:
        """Computes tensors, modules, and nests of them in one plan, whichever devices they lie on."""
        realize(*things)

    # What they share.

    def _check(self, function: str, shards: Sequence[Tensor], to: str, same_shape: bool = False) -> None:
        if to not in ("leader", "all"):
            raise ArgumentError(f"{function}: to is 'leader' or 'all', not {to!r}")
        if len(shards) != self.size:
            raise ArgumentError(
                f"{function}: {len(shards)} shards for the {self.size} devices of {self!r}; expected one for each"
            )
        for n, (x, device) in enumerate(zip(shards, self.devices, strict=True)):
            if not isinstance(x, Tensor):
                raise ArgumentError(f"{function}: shard {n} is a {type(x).__name__}; make it a tensor with asarray")
            if x.device != device:
                raise DeviceError(
                    f"{function}: shard {n} is on {x.device}, but device {n} of the group is {device}; "
                    f"move it with x.to({device!r})"
                )
            if x.dtype != shards[0].dtype:
                raise DTypeError(
                    f"{function}: shard {n} is {x.dtype.name}, but shard 0 is {shards[0].dtype.name}; cast one of them"
                )
            if same_shape and x.shape != shards[0].shape:
                raise ShapeError(f"{function}: shard {n} has shape {x.shape}, but shard 0 has {shards[0].shape}")

    def _combining(self, function: str, shards: Sequence[Tensor], op: ReduceOp, dim: int | None) -> Tensors:
        dtype = shards[0].dtype
        if op is ReduceOp.AVG and not dtypes.is_inexact(dtype):
            raise DTypeError(f"{function}: the average of {dtype.name} is not one of its values; cast it with astype")
        table = _COMBINE_BOOLS if dtype == dtypes.bool_ else _COMBINE
        if op not in table:
            raise ArgumentError(f"{function}: expected one of {', '.join(map(str, table))}, not {op!r}")
        return Tensors(table[op], self.size if op is ReduceOp.AVG else 0, dim, shards[0].shape)

    def _deliver(self, xs: list[Tensor], to: str) -> Tensor | list[Tensor]:
        return xs if to == "all" else xs[0]

    # Which algorithm.

    def _run(
        self, collective: str, xs: Sequence[Tensor], to: str, hands: Tensors, devices: tuple[str, ...]
    ) -> list[Tensor]:
        sizes = tuple(x.node.spec.nbytes for x in xs)
        name, order = self._decision(collective, sizes, to == "all", devices)
        return _RUN[collective](_made(name, hands, devices, order), xs, to == "all")

    def _decision(
        self, collective: str, sizes: tuple[int, ...], to_all: bool, devices: tuple[str, ...]
    ) -> tuple[str, Order]:
        """The algorithm that is named, or of all the one that takes least, the first of equals, and its order."""
        key = (collective, sizes, to_all, devices)
        found = self._decided.get(key)
        if found is None:
            names = get_args(Algorithm)[1:] if self.algorithm == "auto" else (self.algorithm,)
            orders = {name: self._order(name, devices, max(sizes)) for name in names}
            times: dict[str, float] = {}
            for name, order in orders.items():
                rehearsal = Rehearsal()
                values = [Sized(device, size) for device, size in zip(devices, sizes, strict=False)]
                _RUN[collective](_made(name, rehearsal, devices, order), values, to_all)
                times[name] = self.cost.finish_us(rehearsal.works)
            best = min(times, key=lambda name: times[name])
            if len(self._decided) >= _MOST_DECIDED:
                self._decided.clear()
            found = self._decided[key] = best, orders[best]
        return found

    def _order(self, name: str, devices: tuple[str, ...], nbytes: int) -> Order:
        def us(a: int, b: int) -> float:
            ends = [devices[a], *hops(devices[a], devices[b])]
            return sum(self.cost.us(Work(one, other, nbytes)) for one, other in pairwise(ends))

        return tree(len(devices), us) if name == "tree" else fold(len(devices))


def _made(name: str, hands: Hands[T], devices: tuple[str, ...], order: Order) -> ByOrder[T]:
    return (ByParts if name == "parts" else ByOrder)(hands, devices, order)


_RUN: dict[str, Callable[[ByOrder[Any], Sequence[Any], bool], list[Any]]] = {
    "all_reduce": lambda by, xs, to_all: by.all_reduce(xs, to_all),
    "reduce_scatter": lambda by, xs, to_all: by.reduce_scatter(xs),
    "all_gather": lambda by, xs, to_all: by.all_gather(xs, to_all),
    "broadcast": lambda by, xs, to_all: by.broadcast(xs[0]),
}
