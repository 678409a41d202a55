"""What the ranks of a checkpoint do together: who they are, and being of one mind about success."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import msgspec

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.comm.world import init
from fuel_parallel.errors import CheckpointError
from fuel_parallel.mesh import Mesh


class Outcome(msgspec.Struct):
    """How a part of the work ended on one rank: with a value, or with a problem in words."""

    value: Any = None
    problem: str = ""


def resolve(comm: Communicator | Mesh | None) -> tuple[Communicator, dict[str, int]]:
    """The communicator, by default that of all ranks, and the axes of its mesh."""
    if isinstance(comm, Mesh):
        return comm.comm, dict(comm.axes)
    return (init() if comm is None else comm), {}


def attempt(work: Callable[[], Any]) -> Outcome:
    """What `work` returns, or why it could not be done."""
    try:
        return Outcome(work())
    except OSError as reason:
        where = f"{reason.filename}: " if reason.filename else ""
        return Outcome(problem=f"{where}{reason.strerror or reason}")
    except CheckpointError as reason:
        return Outcome(problem=str(reason))
    except (EOFError, MemoryError) as reason:
        return Outcome(problem=str(reason) or type(reason).__name__)


def on_root(comm: Communicator, work: Callable[[], Any]) -> Any:
    """What `work` returns on rank 0, on every rank. Raises `CheckpointError` on all if it fails. A collective call."""
    mine = attempt(work) if comm.is_root else None
    outcome: Outcome = comm.broadcast_object(mine, type=Outcome)
    if outcome.problem:
        raise CheckpointError(outcome.problem)
    return outcome.value


def on_all(comm: Communicator, mine: Outcome) -> list[Outcome]:
    """The outcomes of all ranks, each problem with the rank that has it. A collective call."""
    if mine.problem:
        here = f"rank {comm.rank} on {socket.gethostname()}: " if comm.world_size > 1 else ""
        mine = Outcome(problem=here + mine.problem)
    return comm.all_gather_object(mine, type=Outcome)


def first_problem(outcomes: list[Outcome]) -> str:
    """That of the lowest rank which has one, and how many others have one, too; empty if there is none."""
    problems = [outcome.problem for outcome in outcomes if outcome.problem]
    more = f" (and {len(problems) - 1} other ranks have problems)" if len(problems) > 1 else ""
    return problems[0] + more if problems else ""
