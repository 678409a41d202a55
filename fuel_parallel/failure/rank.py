"""Who this process is among the ranks, and the word that it leaves for the fuelrun that watches it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

RANK_PID = "FUEL_RANK_PID"

RecordTo = Path | Callable[[Mapping[str, object]], bool]
"""Where records go: a folder, or a call that says whether it could pass one on."""


class Rank(NamedTuple):
    """Who this process is. One per process; `pid` tells a forked child from the rank itself."""

    rank: int
    world_size: int | None
    pid: int
    started: float
    line_tag: str
    record_to: RecordTo | None


_installed: Rank | None = None
_facts: dict[str, float | bool] = {}
_meets_others = False  # whether the end of the script is not yet a good end
_fails = False  # a failure of one thread is not taken back by the good end of another


def me() -> Rank:
    """This rank; a world of one where nothing was installed."""
    if _installed is None:
        return Rank(0, 1, os.getpid(), time.time(), "", None)
    return _installed


def is_this_rank() -> bool:
    """False in a process that was forked from the rank."""
    return me().pid == os.getpid()


def become(rank: int, world_size: int | None, line_tag: str, record_to: RecordTo | None) -> bool:
    """From here on this process is that rank, and leaves word of it; whether it was one among others before.

    What an earlier call said of the tag and the records is kept.
    """
    global _installed
    earlier = _installed if _installed is not None and _installed.pid == os.getpid() else None
    _installed = Rank(
        rank=rank,
        world_size=world_size,
        pid=os.getpid(),
        started=earlier.started if earlier else time.time(),
        line_tag=line_tag or (earlier.line_tag if earlier else ""),
        record_to=record_to or (earlier.record_to if earlier else None),
    )
    os.environ[RANK_PID] = str(os.getpid())
    write_record()
    return earlier is not None and earlier.world_size != 1


def write_record(code: int | None = None, reason: str = "", report: str = "") -> bool:
    """Leave word for fuelrun: that this rank runs (`code` None), ended well (0) or failed, and why.

    `report` is the traceback, which fuelrun prints: what a rank writes just before MPI_Abort does not always get
    through its launcher. Returns False when no word could be left.

    Written to `rank-R.json` in the job directory, whole or not at all; where nobody watches nothing is written.
    """
    this = me()
    if this.record_to is None or not is_this_rank() or (code == 0 and (_fails or _meets_others)):
        return False
    record = {
        "rank": this.rank,
        "pid": this.pid,
        "host": os.uname().nodename,
        "started": this.started,
        "ended": None if code is None else time.time(),
        "code": code,
        "reason": reason,
        "report": report,
        "mpi": mpi_runs(),
        **_facts,
    }
    if not isinstance(this.record_to, Path):
        return this.record_to(record)
    path = this.record_to / f"rank-{this.rank}.json"
    try:
        draft = path.with_suffix(f".{this.pid}")
        draft.write_text(json.dumps(record))
        draft.replace(path)
    except OSError:  # fuelrun is gone, and its directory with it: this rank is about to be ended anyway
        return False
    return True


def tell(**facts: float | bool) -> None:
    """Leave word of more: `progressed`, a first step is done; `grace`, seconds that the script wants at its end."""
    _facts.update(facts)
    write_record()


def has_told(fact: str) -> bool:
    """Whether fuelrun has been told."""
    return fact in _facts


def is_alone() -> bool:
    """Whether there are no other ranks."""
    return me().world_size == 1


def meet_others() -> None:
    """From here on a rank has ended well when `met_others` says so, not when its script has."""
    global _meets_others
    _meets_others = True


def met_others() -> None:
    """All ranks have come to the end of their scripts."""
    global _meets_others
    _meets_others = False
    write_record(0)


def waits_for_others() -> bool:
    """Whether the good end of the script is still to be met by the others."""
    return _meets_others


def note_failure(fails: bool) -> None:
    """Whether this rank fails: then no good end of it counts."""
    global _fails
    _fails = fails


def is_watched() -> bool:
    """Whether a fuelrun watches this rank, and notices when a rank is gone."""
    return me().record_to is not None


def started_by_rank() -> str:
    """Who has started this process, if that was a rank: such a process has a rank's variables, and is none."""
    if not is_this_rank():
        return "was forked from a rank"
    if multiprocessing := sys.modules.get("multiprocessing"):
        parent = multiprocessing.parent_process()
        if parent is not None and RANK_PID in os.environ:
            return "was started by multiprocessing in a rank"
    return "was started by a rank" if os.environ.get(RANK_PID) == str(os.getppid()) else ""


def mpi_runs() -> bool:
    """Whether this process has initialised MPI."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized())


def lives(pid: int) -> bool:
    """Whether a process of this host is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
