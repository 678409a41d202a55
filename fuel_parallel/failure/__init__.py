"""How a rank fails: one clean traceback, a record of what happened, and the end of the whole job.

An MPI program whose rank 1 raises hangs: rank 0 waits in a collective for a message that never comes. So an uncaught
exception prints once, in one write that no other rank can cut in two, and then ends the job with `MPI_Abort`.

    install(rank=1, world_size=2)
    raise ValueError("learning rate must be positive, got -1")

    [rank 1/2 node3] Traceback (most recent call last):
      File "train.py", line 7, in <module>
    ValueError: learning rate must be positive, got -1

`fp.init()` calls `install`, and so does `fuelrun` before a script's first line, so that a failing import counts too.
When several ranks of a host fail alike at once, the first prints and the others stay quiet.

Neither mpi4py nor numpy is imported here, with one exception: a rank that fails before MPI was initialised, with no
fuelrun watching, initialises it in order to abort; under MPICH the other ranks would wait in `MPI_Init` for ever.
"""

from fuel_parallel.failure.ending import (
    PREEMPTED,
    before_the_end,
    end_rank,
    join_others,
    on_report,
    reasons,
)
from fuel_parallel.failure.hooks import at_the_end, install
from fuel_parallel.failure.rank import (
    RecordTo,
    has_told,
    is_alone,
    is_watched,
    lives,
    meet_others,
    met_others,
    started_by_rank,
    tell,
    write_record,
)
from fuel_parallel.failure.report import describe, exit_code

__all__ = [
    "PREEMPTED",
    "RecordTo",
    "at_the_end",
    "before_the_end",
    "describe",
    "end_rank",
    "exit_code",
    "has_told",
    "install",
    "is_alone",
    "is_watched",
    "join_others",
    "lives",
    "meet_others",
    "met_others",
    "on_report",
    "reasons",
    "started_by_rank",
    "tell",
    "write_record",
]
