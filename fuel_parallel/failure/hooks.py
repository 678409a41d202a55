"""Where Python tells of an end: uncaught exceptions, `sys.exit`, `os._exit` and the end of the script."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from fuel_parallel.errors import CommunicatorError
from fuel_parallel.failure.ending import end_rank
from fuel_parallel.failure.rank import RecordTo, become, is_this_rank, me, waits_for_others
from fuel_parallel.failure.report import describe, exit_code, flush, write

at_the_end: list[Callable[[], None]] = []
"""Called in this order when the script has ended well, after its own exit functions."""

_status_of_child = 0  # with which a process that was forked from the rank ends


def install(rank: int, world_size: int | None, *, line_tag: str = "", record_to: RecordTo | None = None) -> None:
    """From here on an uncaught exception in any thread of this rank ends the whole job.

    Calling it again replaces rank and size: `fuelrun` installs what the launcher claims, `fp.init()` what MPI says.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks; None when the launcher does not say. In a world of one, tracebacks carry no tag
            and other threads may fail.
        line_tag: Put before every line that is printed here; for `fuelrun --tag-output`. An earlier one is kept.
        record_to: The job directory of the fuelrun that watches this rank, or the way to one on another machine. An
            earlier one is kept.
    """
    was_among_others = become(rank, world_size, line_tag, record_to)
    sys.excepthook = _excepthook
    if world_size != 1:
        threading.excepthook = _thread_excepthook
        if not was_among_others:
            _watch_sys_exit()
            _watch_os_exit()


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    error = error if error.__traceback__ is trace else error.with_traceback(trace)
    if is_this_rank() and me().world_size == 1:
        # Alone there is nobody to end, so Python's own shutdown goes on: `finally`, `atexit`, exit status.
        if isinstance(error, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            flush()
            write(describe(error))
        return
    end_rank(error)


def _thread_excepthook(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or isinstance(args.exc_value, SystemExit):
        return
    if not is_this_rank():
        threading.__excepthook__(args)
        return
    end_rank(args.exc_value)


def _watch_sys_exit() -> None:
    """Make `sys.exit(3)` on one rank end the others too, where no runner of ours catches it.

    Python tells nobody that a `SystemExit` got through: no excepthook runs, and `MPI_Finalize` then waits for the
    other ranks at exit. What can be seen is who drops the exception. A script that catches it drops it in one of its
    own frames; one that went all the way up is dropped by the interpreter itself, with no frame left.
    """

    class WatchedExit(SystemExit):
        def __del__(self) -> None:
            global _status_of_child
            code = exit_code(self)
            if code and sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
                if is_this_rank():
                    end_rank(self)
                _status_of_child = code

    def watched_exit(status: object = None, /) -> NoReturn:
        raise WatchedExit(status)  # from the runner of fuelrun none gets through

    WatchedExit.__name__ = WatchedExit.__qualname__ = "SystemExit"
    watched_exit.__name__ = "exit"
    watched_exit.__doc__ = sys.exit.__doc__
    sys.exit = watched_exit


def _watch_os_exit() -> None:
    """Make `os._exit(0)` on a rank that others still need a failure: MPICH's mpiexec calls the job a success."""
    leave = os._exit

    def watched_exit(status: int) -> NoReturn:
        if status == 0 and waits_for_others() and is_this_rank():
            why = "the script called os._exit(0), and the other ranks have not come to their ends; use sys.exit(0)"
            end_rank(CommunicatorError(why))
        leave(status)

    watched_exit.__name__ = watched_exit.__qualname__ = "_exit"
    watched_exit.__doc__ = leave.__doc__
    os._exit = watched_exit


@atexit.register
def _end_of_script() -> None:
    """Registered when this module is imported, so that it comes after what the script registers.

    A script may use collectives in its exit functions, and a rank that leaves in one of them is missed by the others.
    """
    if not is_this_rank():
        flush()
        os._exit(_status_of_child)  # mpi4py would finalize the MPI of the rank
    try:
        for call in at_the_end:
            call()
    except BaseException as error:
        end_rank(error)
