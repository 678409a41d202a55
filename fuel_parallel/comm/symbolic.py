"""A communicator that only builds: the graph of any rank of any world, in one process, without data."""

from __future__ import annotations

from typing import Any

from fuel_parallel.comm.communicator import CommInfo, Communicator
from fuel_parallel.comm.transport import NoTransport
from fuel_parallel.errors import ArgumentError, CommunicatorError


class SymbolicComm(Communicator):
    """Rank `rank` of a world of `world_size` that does not exist. Its graphs can be looked at, not realized.

    >>> import fuel_parallel.lazy as ft
    >>> SymbolicComm(3, 512).all_gather(ft.zeros((2, 4))).shape
    (1024, 4)
    """

    def __init__(self, rank: int, world_size: int, name: str = "symbolic") -> None:
        if not 0 <= rank < world_size:
            raise ArgumentError(f"SymbolicComm: rank must lie between 0 and {world_size - 1}, but is {rank}")
        why = f"rank {rank} of {world_size} is symbolic: its graph can be built and shown, but not run"
        super().__init__(CommInfo(rank, world_size), NoTransport(why), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return SymbolicComm, (self.rank, self.world_size, self.name)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Not possible: who else has the color is known to real ranks only."""
        raise CommunicatorError(
            "SymbolicComm.split: the other ranks' colors are not known; use group() or a Mesh, which list the ranks"
        )

    def _group(self, ranks: tuple[int, ...], name: str) -> Communicator:
        return SymbolicComm(ranks.index(self.rank), len(ranks), f"{self.name}.{name}")
