"""The communicator of one rank alone: every collective gives back what it got."""

from __future__ import annotations

from typing import Any

from fuel_parallel.comm.communicator import CommInfo, Communicator
from fuel_parallel.comm.transport import NoTransport


class IdentityComm(Communicator):
    """One rank. A script that runs with it runs on N ranks unchanged.

    >>> import fuel_parallel.lazy as ft
    >>> IdentityComm().all_reduce(ft.asarray([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """

    def __init__(self, name: str = "world") -> None:
        super().__init__(CommInfo(0, 1), NoTransport("one rank alone has nobody to talk to"), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return IdentityComm, (self.name,)

    def barrier(self) -> None:
        """Returns at once."""

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Another communicator of one, or None for no color."""
        return None if color is None else IdentityComm(f"{self.name}.split({color})")

    def _group(self, ranks: tuple[int, ...], name: str) -> Communicator:
        return IdentityComm(f"{self.name}.{name}")
