"""What algorithms do with values: with tensors, and with stand-ins that only have a size and a place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import fuel_parallel.lazy as ft
from fuel_parallel.backends import hops
from fuel_parallel.device_group.algorithms import Hands
from fuel_parallel.lazy.node import Shape
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.partitioning import partition
from fuel_parallel.topology.work_cost import Work


class Tensors(Hands[Tensor]):
    """Builds nodes.

    Args:
        combine: Two tensors combined.
        average_over: By how many the end is divided, 0 for not.
        dim: Along which tensors are cut and joined; None cuts them as if they were flat.
        shape: Which shape they get when they were cut so and are joined again.
    """

    def __init__(
        self, combine: Callable[[Any, Any], Tensor], average_over: int, dim: int | None, shape: Shape = ()
    ) -> None:
        self.combine_two, self.average_over, self.dim, self.shape = combine, average_over, dim, shape

    def stops(self, x: Tensor, device: str) -> list[str]:
        """See `Hands.stops`."""
        return hops(x.device, device)

    def copy(self, x: Tensor, device: str) -> Tensor:
        """See `Hands.copy`."""
        return x.to(device)

    def combine(self, a: Tensor, b: Tensor) -> Tensor:
        """See `Hands.combine`."""
        return self.combine_two(a, b)

    def finish(self, x: Tensor) -> Tensor:
        """See `Hands.finish`."""
        return x / self.average_over if self.average_over else x

    def cut(self, x: Tensor, parts: int) -> list[Tensor]:
        """See `Hands.cut`."""
        return cut(ft.reshape(x, (-1,)), 0, parts) if self.dim is None else cut(x, self.dim, parts)

    def join(self, xs: Sequence[Tensor]) -> Tensor:
        """See `Hands.join`."""
        joined = ft.concat(list(xs), axis=self.dim or 0)
        return ft.reshape(joined, self.shape) if self.dim is None else joined


def cut(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    """A tensor cut as `partition` cuts."""
    before: tuple[slice, ...] = (slice(None),) * (dim % x.ndim)
    return [x[(*before, slice(part.start, part.stop))] for part in partition(x.shape[dim], parts)]


@dataclass(frozen=True, slots=True)
class Sized:
    """A value of so many bytes on a device, there when a piece of work is done; at once if that is negative."""

    device: str
    nbytes: int
    made_by: int = -1


class Rehearsal(Hands[Sized]):
    """Writes down the work, and does none of it."""

    def __init__(self, route: Callable[[str, str], list[str]] = hops) -> None:
        self.route = route
        self.works: list[Work] = []

    def stops(self, x: Sized, device: str) -> list[str]:
        """See `Hands.stops`."""
        return self.route(x.device, device)

    def copy(self, x: Sized, device: str) -> Sized:
        """See `Hands.copy`."""
        return self._done(x.device, device, x.nbytes, x.nbytes, x)

    def combine(self, a: Sized, b: Sized) -> Sized:
        """See `Hands.combine`: two are read, one is written."""
        return self._done(a.device, a.device, a.nbytes, 3 * a.nbytes, a, b)

    def finish(self, x: Sized) -> Sized:
        """See `Hands.finish`; no algorithm does it more often than another, so it counts nothing."""
        return x

    def cut(self, x: Sized, parts: int) -> list[Sized]:
        """See `Hands.cut`: each part is read and written."""
        sizes = [part.stop - part.start for part in partition(x.nbytes, parts)]
        return [self._done(x.device, x.device, size, 2 * size, x) for size in sizes]

    def join(self, xs: Sequence[Sized]) -> Sized:
        """See `Hands.join`: all are read and written."""
        total = sum(x.nbytes for x in xs)
        return self._done(xs[0].device, xs[0].device, total, 2 * total, *xs)

    def _done(self, source: str, target: str, nbytes: int, moved: int, *inputs: Sized) -> Sized:
        self.works.append(Work(source, target, moved, tuple(x.made_by for x in inputs if x.made_by >= 0)))
        return Sized(target, nbytes, len(self.works) - 1)
