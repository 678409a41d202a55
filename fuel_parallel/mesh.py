"""`Mesh`: names for the axes along which the ranks of a communicator work together."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from fuel_parallel.arguments import checked, whole
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.comm.identity import IdentityComm
from fuel_parallel.errors import ArgumentError
from fuel_parallel.topology.mesh_axes import MESH, POSITION, filled, parse_axes


class Mesh:
    """The ranks of `comm` in a grid with named axes; the ranks of the last axis are next to each other.

    Args:
        comm: Whose ranks.
        order: The rank at each position, the last axis running fastest; None for the ranks in their own order.
        axes: The size of each axis, outermost first; one of them may be -1 for what is left over.

    `mesh["tp"]` is the communicator of the ranks that differ from this one along `tp` only; `mesh["dp", "tp"]` that of
    two axes flattened into one. Each is made when it is asked for first, which is a collective call, and kept.

    >>> from fuel_parallel import SymbolicComm
    >>> mesh = Mesh(SymbolicComm(5, 8), dp=-1, tp=2)
    >>> mesh
    Mesh(dp=4, tp=2), of which rank 5 is dp=2, tp=1
    >>> mesh["tp"].info, mesh["dp"].rank
    (CommInfo(rank=1, world_size=2), 2)

    Raises `ArgumentError` when the sizes do not multiply to the ranks of `comm`.
    """

    @checked
    def __init__(self, comm: Communicator, /, *, order: Sequence[int] | None = None, **axes: int) -> None:
        self.comm = comm
        self.axes = _sizes(axes, comm.world_size)
        self.order = tuple(range(comm.world_size) if order is None else order)
        if sorted(self.order) != list(range(comm.world_size)):
            raise ArgumentError(f"Mesh: order lists each of the {comm.world_size} ranks once; got {list(self.order)}")
        self._parts: dict[tuple[str, ...], Communicator] = {}

    @classmethod
    def from_environment(cls, comm: Communicator | None = None) -> Mesh:
        """The mesh of `fuelrun --mesh dp=2,tp=4`, over all ranks; with `--topology` in the order of its placement.

        Without `--mesh` it is one axis, `dp`. A collective call if there is a placement.

        >>> Mesh.from_environment(IdentityComm())
        Mesh(dp=1), of which rank 0 is dp=0
        """
        from fuel_parallel.comm.world import init

        comm = init() if comm is None else comm
        sizes = _sizes_in(os.environ.get(MESH) or "dp=-1", MESH)
        position = os.environ.get(POSITION, "")
        order = None
        if comm.world_size > 1 and position.isdecimal():
            positions = comm.all_gather_object(int(position), type=int)
            order = sorted(range(comm.world_size), key=lambda rank: positions[rank])
        return cls(comm, order=order, **sizes)

    @classmethod
    def from_text(cls, text: str, comm: Communicator | None = None) -> Mesh:
        """The mesh that a user writes as `dp=-1,tp=2`, over all ranks: for options of scripts.

        >>> Mesh.from_text("dp=-1,tp=1", IdentityComm())
        Mesh(dp=1, tp=1), of which rank 0 is dp=0, tp=0
        """
        from fuel_parallel.comm.world import init

        return cls(init() if comm is None else comm, order=None, **_sizes_in(text, "--mesh"))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.comm.world_size

    @property
    def coordinates(self) -> dict[str, int]:
        """Where this rank is along each axis."""
        return self.coordinates_of(self.comm.rank)

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Where a rank of `comm` is along each axis."""
        if not 0 <= rank < self.size:
            raise ArgumentError(f"Mesh: there is no rank {rank}; the ranks are 0 to {self.size - 1}")
        rest, found = self.order.index(rank), {}
        for name, size in reversed(self.axes.items()):
            rest, found[name] = divmod(rest, size)
        return dict(reversed(found.items()))

    def rank_at(self, **coordinates: int) -> int:
        """The rank of `comm` at a place; axes that are not named are where this rank is.

        >>> from fuel_parallel import SymbolicComm
        >>> Mesh(SymbolicComm(5, 8), dp=4, tp=2).rank_at(dp=0)
        1
        """
        self._known(tuple(coordinates))
        position = 0
        for name, at in (self.coordinates | coordinates).items():
            if not 0 <= at < self.axes[name]:
                raise ArgumentError(f"Mesh: {name}={at} lies outside of the axis, which has {self.axes[name]} ranks")
            position = position * self.axes[name] + at
        return self.order[position]

    def ranks_along(self, *names: str) -> list[int]:
        """The ranks of `comm` that share this one's place on all other axes, those of the last name fastest."""
        self._known(names)
        strides = dict(zip(self.axes, _strides(self.axes), strict=True))
        here = self.coordinates
        positions = [sum(at * strides[name] for name, at in here.items() if name not in names)]
        for name in names:
            positions = [p + at * strides[name] for p in positions for at in range(self.axes[name])]
        return [self.order[p] for p in positions]

    def __getitem__(self, names: str | tuple[str, ...]) -> Communicator:
        key = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, tuple | list) else (names,)
        if key not in self._parts:
            self._parts[key] = self._part(key)
        return self._parts[key]

    def __contains__(self, name: object) -> bool:
        return name in self.axes

    def __iter__(self) -> None:
        raise TypeError("a Mesh is not iterable; mesh.axes maps the names to the sizes")

    def __repr__(self) -> str:
        sizes, at = (", ".join(f"{name}={n}" for name, n in of.items()) for of in (self.axes, self.coordinates))
        return f"Mesh({sizes}), of which rank {self.comm.rank} is {at}"

    def _part(self, names: tuple[str, ...]) -> Communicator:
        ranks = self.ranks_along(*names)
        if len(ranks) == 1:
            return IdentityComm("*".join(names))
        if ranks == list(range(self.size)):
            return self.comm
        return self.comm.group(ranks, "*".join(names))

    def _known(self, names: tuple[str, ...]) -> None:
        strange = next((name for name in names if name not in self.axes), None)
        if strange is not None or len(set(names)) < len(names):
            said = f"no axis {strange!r}" if strange is not None else f"an axis twice: {', '.join(names)}"
            raise ArgumentError(f"Mesh: {said}; the axes are {', '.join(self.axes)}")


def _sizes_in(text: str, option: str) -> dict[str, int]:
    return {axis.name: axis.size for axis in parse_axes(text, option)}


def _strides(axes: dict[str, int]) -> list[int]:
    sizes = list(axes.values())
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _sizes(axes: dict[str, int], ranks: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, given in axes.items():
        size = whole(given)
        if size is None or (size < 1 and size != -1):
            raise ArgumentError(f"Mesh: {name}={given!r}: expected a whole number of at least 1, or -1 for the rest")
        sizes[name] = size
    if not sizes:
        raise ArgumentError("Mesh: it needs one axis or more, such as Mesh(world, dp=-1, tp=2)")
    found = filled(sizes, ranks)
    if math.prod(found.values()) != ranks:
        text = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ArgumentError(f"Mesh: {text} do not make {ranks} ranks; change a size, the number of ranks, or say -1")
    return found
