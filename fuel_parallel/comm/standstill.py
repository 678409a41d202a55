"""Waiting for other ranks, and finding out that a wait cannot end.

Two things can be seen on the node's board: that ranks wait for each other in a circle, and that a process is gone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from fuel_parallel import failure
from fuel_parallel.comm.board import Board, Seen
from fuel_parallel.comm.node_local import ranks_of_my_node
from fuel_parallel.errors import CollectiveMismatchError, CommunicatorError

if TYPE_CHECKING:
    from mpi4py import MPI

_YIELDS = 32  # between two calls that drive other work forward
_LOOK_AROUND_S = 0.05  # from here on a wait is worth asking why
_PATIENT_S = 1.0  # later than that nobody minds half a millisecond
_STANDSTILL_S = 0.5  # a circle of waiting ranks that lasts so long does not end
_GONE_S = 1.0  # a process that is gone for so long will not be reported by the launcher any more

_yield_core = os.sched_yield if hasattr(os, "sched_yield") else lambda: time.sleep(0)

_board: Board | None = None
_waits = 0


def start(world: MPI.Intracomm) -> Board:
    """Makes the board of this node. A collective call."""
    global _board
    local = ranks_of_my_node(world)
    ranks = local.allgather(world.rank)
    _board = Board.of(local, ranks)
    local.Free()
    return _board


def wait_until(
    ready: Callable[[], bool], drive: Callable[[], None], look: Callable[[Standstill], None], doing: Callable[[], str]
) -> None:
    """Returns when `ready`. Meanwhile it calls `drive`, for what others wait for, and `look` if it takes long.

    `doing` says what this rank waits in; whatever `look` raises ends the wait.
    """
    began = looked = 0.0
    yielded = 0
    watch: Standstill | None = None
    try:
        while not ready():
            _yield_core()
            yielded += 1
            if yielded % _YIELDS:
                continue
            drive()
            now = time.monotonic()
            began = began or now
            if now - began > _PATIENT_S:
                time.sleep(0.0005)
            if now - max(began, looked) > _LOOK_AROUND_S:
                looked = now
                watch = watch or Standstill(doing())
                look(watch)
    finally:
        if watch is not None:
            watch.over()


class Standstill:
    """One long wait. `doing` says in words what this rank waits in."""

    def __init__(self, doing: str) -> None:
        global _waits
        _waits += 1
        self.doing = doing
        self.circle: list[tuple[int, int]] = []
        self.since = 0.0
        self.gone_since = 0.0

    def look(self, missing: list[int]) -> None:
        """Raises when the ranks wait for each other in a circle, or one that is waited for has died."""
        board = _board
        if board is None or not missing:
            return
        board.say(doing=self.doing)
        board.write(waits_for=missing[0], wait=_waits)
        circle = _circle(board)
        seen = [(one.rank, one.wait) for one in circle]
        if not seen or seen != self.circle:
            self.circle, self.since = seen, time.monotonic()
        elif time.monotonic() - self.since > _STANDSTILL_S:
            rows = "\n".join(f"  rank {one.rank} waits for rank {one.waits_for} in {one.doing}" for one in circle)
            raise CollectiveMismatchError(
                f"the ranks wait for each other in a circle\n{rows}\n"
                "  Likely cause: the same collectives in another order, or a send or recv without its other half"
            )
        self._look_for_the_dead(board, missing)

    def _look_for_the_dead(self, board: Board, missing: list[int]) -> None:
        said = [] if failure.is_watched() else [board.read(rank) for rank in missing]
        dead = [one for one in said if one and not failure.lives(one.pid)]
        if not dead:
            self.gone_since = 0.0
            return
        self.gone_since = self.gone_since or time.monotonic()
        if time.monotonic() - self.gone_since > _GONE_S:
            who = ", ".join(f"rank {one.rank} (process {one.pid}, last seen at {one.line})" for one in dead)
            raise CommunicatorError(f"{who} is gone, without a word: killed, or ended by os._exit")

    def over(self) -> None:
        """The wait has ended."""
        if _board is not None:
            _board.say(doing="")
            _board.write()


def _circle(board: Board) -> list[Seen]:
    """Ranks of this node of which each waits for the next, from me and back to me; empty if there is none."""
    me = board.ranks[board.mine]
    chain: list[Seen] = []
    rank: int | None = me
    while rank is not None and (seen := board.read(rank)) is not None:
        chain.append(seen)
        rank = seen.waits_for
        if rank == me:
            return chain
        if any(rank == one.rank for one in chain):
            break
    return []
