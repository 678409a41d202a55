"""The axes of a mesh as placement sees them: how many ranks, and what those of a group send each other in a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from fuel_parallel.errors import ArgumentError
from fuel_parallel.topology.algorithms import Collective

if TYPE_CHECKING:
    from fuel_parallel.topology.network import Array


class MeshAxis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A named axis. The last axis of a mesh has its ranks next to each other.

    Args:
        name: As in `Mesh(world, dp=2, tp=4)`.
        size: Ranks along it.
        nbytes: Size in bytes of the array of each collective; `Collective` says of which array.
        collective: What the ranks along it do.
        count: How many such collectives there are in a step.
        within_node: Whether all ranks of a group must be in one machine.
    """

    name: str
    size: int
    nbytes: int = 1 << 20
    collective: Collective = Collective.ALL_REDUCE
    count: float = 1.0
    within_node: bool = False


def ranks_of(axes: Sequence[MeshAxis]) -> int:
    """How many ranks a mesh has. Raises `ArgumentError` when it is none.

    >>> ranks_of([MeshAxis(name="dp", size=2), MeshAxis(name="tp", size=4)])
    8
    """
    names = [axis.name for axis in axes]
    if not axes or len(set(names)) < len(names):
        raise ArgumentError(f"a mesh has one or more axes, each with a name of its own; got {names}")
    for axis in axes:
        if axis.size < 1 or axis.nbytes < 0 or not 0 <= axis.count < math.inf:
            raise ArgumentError(
                f"axis {axis.name!r}: expected size >= 1, nbytes >= 0 and count >= 0, "
                f"got size {axis.size}, nbytes {axis.nbytes}, count {axis.count}"
            )
    return math.prod(axis.size for axis in axes)


def groups_of(axes: Sequence[MeshAxis]) -> list[Array]:
    """For each axis the ranks of its groups, a row for each group."""
    import numpy as np

    ranks = np.arange(ranks_of(axes)).reshape([axis.size for axis in axes])
    return [np.moveaxis(ranks, i, -1).reshape(-1, axis.size) for i, axis in enumerate(axes)]
