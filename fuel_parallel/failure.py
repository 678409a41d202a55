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

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, NoReturn

from fuel_parallel import environment
from fuel_parallel.errors import CollectiveTimeoutError, CommunicatorError, FuelError

TRACEBACK = "FUEL_TRACEBACK"
RANK_PID = "FUEL_RANK_PID"

_OWN_FRAMES = str(Path(__file__).parent) + os.sep
_LAST_WORD_S = 1.2  # how long a rank that failed second waits to be ended by the first
_DRAIN_S = 0.1  # what was printed last gets this long to pass through mpirun, which drops it at MPI_Abort
_ABORT_S = 3.0  # how long MPI_Init and MPI_Abort may take before the rank ends without them


RecordTo = Path | Callable[[Mapping[str, object]], bool]
"""Where records go: a folder, or a call that says whether it could pass one on."""


class _Rank(NamedTuple):
    """Who this process is. One per process; `pid` tells a forked child from the rank itself."""

    rank: int
    world_size: int | None
    pid: int
    started: float
    line_tag: str
    record_to: RecordTo | None


_this_rank: _Rank | None = None
before_the_end: list[Callable[[], None]] = []
"""Called when this rank fails, since `atexit` is not."""

on_report: list[Callable[[str], None]] = []
"""Called with the report that fuelrun prints for this rank."""

at_the_end: list[Callable[[], None]] = []
"""Called in this order when the script has ended well, after its own exit functions."""

PREEMPTED = 75
"""Status of a job that saved and made room (EX_TEMPFAIL of sysexits.h): start it again later."""

reasons: dict[int, str] = {}
"""Why a script ends with some status, where `sys.exit` has only the number."""

_facts: dict[str, float | bool] = {}
_meets_others = False  # whether the end of the script is not yet a good end
_status_of_child = 0  # with which a process that was forked from the rank ends
_ending = False  # a failure of one thread is not taken back by the good end of another


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
    global _this_rank
    earlier = _this_rank if _this_rank is not None and _this_rank.pid == os.getpid() else None
    _this_rank = _Rank(
        rank=rank,
        world_size=world_size,
        pid=os.getpid(),
        started=earlier.started if earlier else time.time(),
        line_tag=line_tag or (earlier.line_tag if earlier else ""),
        record_to=record_to or (earlier.record_to if earlier else None),
    )
    os.environ[RANK_PID] = str(os.getpid())
    write_record()
    sys.excepthook = _excepthook
    if world_size != 1:
        threading.excepthook = _thread_excepthook
        if earlier is None or earlier.world_size == 1:
            _watch_sys_exit()
            _watch_os_exit()


def write_record(code: int | None = None, reason: str = "", report: str = "") -> bool:
    """Leave word for fuelrun: that this rank runs (`code` None), ended well (0) or failed, and why.

    `report` is the traceback, which fuelrun prints: what a rank writes just before MPI_Abort does not always get
    through its launcher. Returns False when no word could be left.

    Written to `rank-R.json` in the job directory, whole or not at all; where nobody watches nothing is written.
    """
    me = _me()
    if me.record_to is None or not _is_this_rank() or (code == 0 and (_ending or _meets_others)):
        return False
    record = {
        "rank": me.rank,
        "pid": me.pid,
        "host": os.uname().nodename,
        "started": me.started,
        "ended": None if code is None else time.time(),
        "code": code,
        "reason": reason,
        "report": report,
        "mpi": _mpi_runs(),
        **_facts,
    }
    if not isinstance(me.record_to, Path):
        return me.record_to(record)
    path = me.record_to / f"rank-{me.rank}.json"
    try:
        draft = path.with_suffix(f".{me.pid}")
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
    return _me().world_size == 1


def meet_others() -> None:
    """From here on a rank has ended well when `met_others` says so, not when its script has."""
    global _meets_others
    _meets_others = True


def met_others() -> None:
    """All ranks have come to the end of their scripts."""
    global _meets_others
    _meets_others = False
    write_record(0)


def started_by_rank() -> str:
    """Who has started this process, if that was a rank: such a process has a rank's variables, and is none."""
    if not _is_this_rank():
        return "was forked from a rank"
    if multiprocessing := sys.modules.get("multiprocessing"):
        parent = multiprocessing.parent_process()
        if parent is not None and RANK_PID in os.environ:
            return "was started by multiprocessing in a rank"
    return "was started by a rank" if os.environ.get(RANK_PID) == str(os.getppid()) else ""


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


def is_watched() -> bool:
    """Whether a fuelrun watches this rank, and notices when a rank is gone."""
    return _me().record_to is not None


def exit_code(error: BaseException) -> int:
    """The status with which a rank ends: 1 for an exception, 130 for Ctrl-C, what `sys.exit` was given.

    124 is for a collective that waited for too long, as of timeout(1).
    A `SystemExit` counts modulo 256, as for every process, but never becomes 0 by that: `sys.exit(256)` is 1.
    """
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, CollectiveTimeoutError):
        return 124
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    if not isinstance(error.code, int):
        return 1
    return (error.code & 0xFF) or (1 if error.code else 0)


def end_rank(error: BaseException) -> NoReturn:
    """Report `error` and end this rank, and with it the job. Does not return and runs no `finally` or `atexit`."""
    global _ending
    code = exit_code(error)
    if not _is_this_rank():  # a forked child speaks for itself only
        if not isinstance(error, SystemExit):
            sys.__excepthook__(type(error), error, error.__traceback__)
        _flush()
        os._exit(code)
    _ending = code != 0
    _flush()
    if code != 0 and _me().world_size != 1:
        # MPI_Init waits for all other ranks and MPI_Abort for the launcher: neither may keep this rank alive.
        timer = threading.Timer(_ABORT_S, os._exit, args=(code,))
        timer.daemon = True
        timer.start()
    for call in before_the_end:
        with contextlib.suppress(Exception):
            call()
    summary = _one_line(error)
    report = _tagged(describe(error))
    told = write_record(code, summary or reasons.get(code, f"sys.exit({code})"), report)
    if told:
        for tell_it in on_report:
            tell_it(report)
    elif report:
        if _first_to_fail():
            _write(report)
        else:
            with contextlib.suppress(Exception):
                _initialised_mpi()  # the first rank cannot abort before all have come this far
            time.sleep(_LAST_WORD_S)
            _write(_tagged(summary + "\n"))
    _end_job(code)


def describe(error: BaseException) -> str:
    """The traceback as a user wants to read it, ending in a newline.

    An error that fuel-parallel raised on purpose is about the caller's line, so the library's own frames are left
    out of it; with FUEL_TRACEBACK=full in the environment all are shown.
    """
    if isinstance(error, KeyboardInterrupt):
        return _one_line(error) + "\n"
    if isinstance(error, SystemExit):
        return _one_line(error) + "\n" if _one_line(error) else ""
    report = traceback.TracebackException.from_exception(error)
    if isinstance(error, FuelError) and os.environ.get(TRACEBACK) != "full":
        for part in _chain(report):
            users = [frame for frame in part.stack if not frame.filename.startswith(_OWN_FRAMES)]
            part.stack = traceback.StackSummary.from_list(users)
        if not report.stack:  # found out after the script's end
            return "".join(report.format_exception_only())
    return "".join(report.format())


def _chain(report: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    pending, seen = [report], set[int]()
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        pending += [link for link in (part.__cause__, part.__context__) if link is not None]
        pending += part.exceptions or []


def _one_line(error: BaseException) -> str:
    """What happened in one line; empty for a `sys.exit` with a number, which has nothing to say."""
    if isinstance(error, SystemExit):
        return "" if error.code is None or isinstance(error.code, int) else str(error.code)
    if isinstance(error, KeyboardInterrupt):
        frames = traceback.extract_tb(error.__traceback__)
        where = f" at {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
        return f"interrupted{where}"
    return traceback.format_exception_only(error)[-1].strip().partition("\n")[0]


def _me() -> _Rank:
    if _this_rank is None:
        return _Rank(0, 1, os.getpid(), time.time(), "", None)
    return _this_rank


def _is_this_rank() -> bool:
    """False in a process that was forked from the rank."""
    return _me().pid == os.getpid()


def _tagged(text: str) -> str:
    me = _me()
    if me.world_size != 1 and text:
        of = "" if me.world_size is None else f"/{me.world_size}"
        text = f"[rank {me.rank}{of} {os.uname().nodename}] {text}"
    return "".join(me.line_tag + line for line in text.splitlines(keepends=True))


def _write(text: str) -> None:
    """To standard error, in one write as far as the kernel takes it, so that no other rank gets in between."""
    data = text.encode("utf-8", "backslashreplace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a closed or broken stream must not hide the failure itself
            stream.flush()


_claim: Any = None  # kept open for as long as this process lives


def _first_to_fail() -> bool:
    """True on the first rank of this host and job that asks. The ranks of a host have the same parent."""
    global _claim
    if _me().world_size == 1:
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
    _flush()
    if _me().world_size != 1:
        time.sleep(_DRAIN_S)
    if code != 0 and _me().world_size != 1:
        with contextlib.suppress(Exception):
            mpi = _initialised_mpi()
            if mpi is not None:
                mpi.COMM_WORLD.Abort(code)
    os._exit(code)


def _mpi_runs() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized())


def _initialised_mpi() -> ModuleType | None:
    """`mpi4py.MPI` when it can abort; None when it cannot or when fuelrun watches and ends the job anyway."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        return None if mpi.Is_finalized() else mpi
    claim = environment.detect()
    if _me().record_to is not None or claim is None or not claim.parallel:
        return None
    if mpi is None:
        mpi = importlib.import_module("mpi4py.MPI")  # which initialises MPI, unless told otherwise
    if not mpi.Is_initialized():
        mpi.Init()
    # Another MPI's launcher: each rank is alone in its world, and only its exit status tells the launcher.
    return mpi if mpi.COMM_WORLD.size > 1 else None


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    error = error if error.__traceback__ is trace else error.with_traceback(trace)
    if _is_this_rank() and _me().world_size == 1:
        # Alone there is nobody to end, so Python's own shutdown goes on: `finally`, `atexit`, exit status.
        if isinstance(error, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            _flush()
            _write(describe(error))
        return
    end_rank(error)


def _thread_excepthook(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or isinstance(args.exc_value, SystemExit):
        return
    if not _is_this_rank():
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
                if _is_this_rank():
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
        if status == 0 and _meets_others and _is_this_rank():
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
    if not _is_this_rank():
        _flush()
        os._exit(_status_of_child)  # mpi4py would finalize the MPI of the rank
    try:
        for call in at_the_end:
            call()
    except BaseException as error:
        end_rank(error)
