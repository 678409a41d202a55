"""One process, N devices: collectives over tensors that lie on different devices of this process.

The shards of all devices are handed in together, shard i on device i, and the results are nodes like any other: sums
and copies that the plan shows. Nothing crosses to other ranks. The leader is the first device; it does the work that is
done once. A hop between two vendors goes through the host and is two Copy nodes, one within a vendor is direct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Literal, overload

import fuel_parallel.lazy as ft
from fuel_parallel.backends import check_device
from fuel_parallel.comm.communicator import ReduceOp
from fuel_parallel.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.partitioning import partition
from fuel_parallel.runtime.realize import realize

To = Literal["leader", "all"]

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

    Raises `DeviceError` for a device that cannot be used, `ArgumentError` for none at all. Every method raises
    `ArgumentError` unless there is one shard for each device, and `DeviceError` unless shard i lies on device i.
    Gradients go back over the same hops.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        if isinstance(devices, str) or not len(devices):
            raise ArgumentError(
                f"a DeviceGroup takes a list of one device or more, such as ['cpu', 'cuda:0'], not {devices!r}"
            )
        self.devices = tuple(check_device(device) for device in devices)

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

    def place(self, x: Tensor, dim: int = 0) -> list[Tensor]:
        """Cuts a tensor along `dim` into one part for each device, as `partition` does, and puts each in its place."""
        return [part.to(device) for part, device in zip(self._cut(x, dim), self.devices, strict=True)]

    @overload
    def all_reduce(self, shards: Sequence[Tensor], op: ReduceOp = ..., *, to: Literal["leader"] = ...) -> Tensor: ...

    @overload
    def all_reduce(self, shards: Sequence[Tensor], op: ReduceOp = ..., *, to: Literal["all"]) -> list[Tensor]: ...

    def all_reduce(
        self, shards: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, *, to: To = "leader"
    ) -> Tensor | list[Tensor]:
        """All shards combined, element by element in the order of devices: on the leader, or one copy on each device.

        `ShapeError` and `DTypeError` where shards differ; the average is of floats only.
        """
        self._check("all_reduce", shards, to, same_shape=True)
        return self._deliver(self._reduced("all_reduce", shards, op), to)

    @overload
    def all_gather(self, shards: Sequence[Tensor], dim: int = ..., *, to: Literal["leader"] = ...) -> Tensor: ...

    @overload
    def all_gather(self, shards: Sequence[Tensor], dim: int = ..., *, to: Literal["all"]) -> list[Tensor]: ...

    def all_gather(self, shards: Sequence[Tensor], dim: int = 0, *, to: To = "leader") -> Tensor | list[Tensor]:
        """The shards one after the other along `dim`, where their extents may differ: on the leader, or on each."""
        self._check("all_gather", shards, to)
        return self._deliver(ft.concat([x.to(self.leader) for x in shards], axis=dim), to)

    def reduce_scatter(self, shards: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, dim: int = 0) -> list[Tensor]:
        """All shards combined, and of that on device i part i along `dim`, as `partition` cuts."""
        self._check("reduce_scatter", shards, "all", same_shape=True)
        return self.place(self._reduced("reduce_scatter", shards, op), dim)

    def broadcast(self, x: Tensor) -> list[Tensor]:
        """A tensor of any device on each device."""
        return [x.to(device) for device in self.devices]

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

    def _reduced(self, function: str, shards: Sequence[Tensor], op: ReduceOp) -> Tensor:
        dtype = shards[0].dtype
        if op is ReduceOp.AVG and not dtypes.is_inexact(dtype):
            raise DTypeError(f"{function}: the average of {dtype.name} is not one of its values; cast it with astype")
        table = _COMBINE_BOOLS if dtype == dtypes.bool_ else _COMBINE
        if op not in table:
            raise ArgumentError(f"{function}: expected one of {', '.join(map(str, table))}, not {op!r}")
        total = reduce(table[op], [x.to(self.leader) for x in shards])
        return total / self.size if op is ReduceOp.AVG else total

    def _deliver(self, x: Tensor, to: str) -> Tensor | list[Tensor]:
        return self.broadcast(x) if to == "all" else x

    def _cut(self, x: Tensor, dim: int) -> list[Tensor]:
        if not -x.ndim <= dim < x.ndim:
            raise ShapeError(f"dim {dim} is out of bounds for shape {x.shape}")
        before: tuple[slice, ...] = (slice(None),) * (dim % x.ndim)
        return [x[(*before, slice(part.start, part.stop))] for part in partition(x.shape[dim], self.size)]
