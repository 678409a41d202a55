"""What a pipeline at work leaves in the trace of this rank: its schedule, once, and when each action ended.

The notes are laps: an action begins where the one before has ended. A rank notes what it computes, `0F3`, and before it
`0RECV_F3` if it needed a message: for so long it stood still. Sends take no time of their own, for they go on beside.
"""

from __future__ import annotations

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.pipeline_parallel.schedule import Schedule
from fuel_parallel.pipeline_parallel.schedule_file import to_csv
from fuel_parallel.runtime import trace
from fuel_parallel.runtime.laps import Laps


def recording(schedule: Schedule, comm: Communicator) -> Laps | None:
    """Where to note the actions of this rank of `comm`, by `begin_step()` and `end(action)`; None without a trace.

    >>> from fuel_parallel import IdentityComm
    >>> from fuel_parallel.pipeline_parallel import build
    >>> recording(build("1f1b", 1, 4), IdentityComm()) is None
    True
    """
    if trace.recorder is None:
        return None
    return trace.recorder.pipeline(
        {"comm": comm.name, "rank": comm.rank, "name": schedule.name, "schedule": to_csv(schedule)}
    )
