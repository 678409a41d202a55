"""The end of a rank that fails, and with it that of the job."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from fuel_parallel import environment
from fuel_parallel.failure.rank import is_this_rank, is_watched, me, note_failure, write_record
from fuel_parallel.failure.report import describe, exit_code, flush, one_line, tagged, write

_LAST_WORD_S = 1.2  # how long a rank that failed second waits to be ended by the first
_DRAIN_S = 0.1  # what was printed last gets this long to pass through mpirun, which drops it at MPI_Abort
_ABORT_S = 3.0  # how long MPI_Init and MPI_Abort may take before the rank ends without them

before_the_end: list[Callable[[], None]] = []
"""Called when this rank fails, since `atexit` is not."""

on_report: list[Callable[[str], None]] = []
"""Called with the report that fuelrun prints for this rank."""

PREEMPTED = 75
"""Status of a job that saved and made room (EX_TEMPFAIL of sysexits.h): start it again later."""

reasons: dict[int, str] = {}
"""Why a script ends with some status, where `sys.exit` has only the number."""


def end_rank(error: BaseException) -> NoReturn:
    """Report `error` and end this rank, and with it the job. Does not return and runs no `finally` or `atexit`."""
    code = exit_code(error)
    if not is_this_rank():  # a forked child speaks for itself only
        if not isinstance(error, SystemExit):
            sys.__excepthook__(type(error), error, error.__traceback__)
        flush()
        os._exit(code)
    note_failure(code != 0)
    flush()
    if code != 0 and me().world_size != 1:
        # MPI_Init waits for all other ranks and MPI_Abort for the launcher: neither may keep this rank alive.
        timer = threading.Timer(_ABORT_S, os._exit, args=(code,))
        timer.daemon = True
        timer.start()
    for call in before_the_end:
        with contextlib.suppress(Exception):
            call()
    summary = one_line(error)
    report = tagged(describe(error))
    told = write_record(code, summary or reasons.get(code, f"sys.exit({code})"), report)
    if told:
        for tell_it in on_report:
            tell_it(report)
    elif report:
        if _first_to_fail():
            write(report)
        else:
            with contextlib.suppress(Exception):
                _initialised_mpi()  # the first rank cannot abort before all have come this far
            time.sleep(_LAST_WORD_S)
            write(tagged(summary + "\n"))
    _end_job(code)


def join_others() -> None:
    """For a script that ends without MPI where nobody watches: others may wait in `MPI_Init` for this rank.

    They learn from it that this one will not come; see `fp.init()`. If no rank needs MPI, nothing else happens.
    """
    claim = environment.detect()
    if is_watched() or claim is None or not claim.parallel or "mpi4py.MPI" in sys.modules:
        return
    with contextlib.suppress(ImportError, RuntimeError):
        mpi = importlib.import_module("mpi4py.MPI")
        if mpi.Is_initialized():
            mpi.COMM_WORLD.allreduce(0, mpi.MIN)


_claim: Any = None  # kept open for as long as this process lives


def _first_to_fail() -> bool:
    """True on the first rank of this host and job that asks. The ranks of a host have the same parent."""
    global _claim
    if me().world_size == 1:
        return True
    import socket  # not at every start of a rank
    import tempfile

    key = f"fuel-parallel-{os.getuid()}-{os.getppid()}"
    if os.uname().sysname == "Linux":  # an abstract socket vanishes with its process
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0{key}")
        except OSError as problem:
            claim.close()
            return problem.errno != errno.EADDRINUSE
        _claim = claim
        return True
    path = Path(tempfile.gettempdir(), key)
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > 60:  # of an earlier job whose launcher had the same process id
            path.unlink()
    return _create(path)


def _create(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _end_job(code: int) -> NoReturn:
    """End every rank of the job. With status 0 only this one ends: `MPI_Abort(0)` would call the job a success."""
    flush()
    if me().world_size != 1:
        time.sleep(_DRAIN_S)
    if code != 0 and me().world_size != 1:
        with contextlib.suppress(Exception):
            mpi = _initialised_mpi()
            if mpi is not None:
                mpi.COMM_WORLD.Abort(code)
    os._exit(code)


def _initialised_mpi() -> ModuleType | None:
    """`mpi4py.MPI` when it can abort; None when it cannot or when fuelrun watches and ends the job anyway."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        return None if mpi.Is_finalized() else mpi
    claim = environment.detect()
    if me().record_to is not None or claim is None or not claim.parallel:
        return None
    if mpi is None:
        mpi = importlib.import_module("mpi4py.MPI")  # which initialises MPI, unless told otherwise
    if not mpi.Is_initialized():
        mpi.Init()
    # Another MPI's launcher: each rank is alone in its world, and only its exit status tells the launcher.
    return mpi if mpi.COMM_WORLD.size > 1 else None
