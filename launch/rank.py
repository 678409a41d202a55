"""Becoming a rank: `python -m fuelrun.launch.rank [-m] SCRIPT ARGS…`.

This is what mpirun starts, and what `fuelrun script.py` turns itself into when it finds itself inside mpirun or srun.
There is no shell and no extra process in between: a signal for the rank reaches the script.

What is set up before the script's first line: the cores of the rank, one thread a rank (before numpy is imported, which
reads it only then), RANK, WORLD_SIZE and the like, whole lines on standard output, and what happens on failure.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from fuel_parallel import environment, failure
from fuel_parallel.errors import FuelError
from fuelrun.launch import binding, output, placing, processes, rendezvous, script, shared_memory, standard_input
from fuelrun.launch.script import Script

if TYPE_CHECKING:
    from fuelrun.launch.reporting import Reporting

JOB_DIR = "FUEL_JOB_DIR"
CHANNEL = "FUEL_CHANNEL"  # ADDRESS:PORT:TOKEN of a fuelrun that is perhaps on another machine, see `channel`
HEARTBEAT = "FUEL_HEARTBEAT"  # seconds without a sign of life after which the other side counts as lost
SUPERVISOR = "FUEL_SUPERVISOR"
TAG_OUTPUT = "FUEL_TAG_OUTPUT"
THREADS = "FUEL_THREADS"
TRACE = "FUEL_TRACE"  # read by fuel_parallel.runtime.trace
TIMEOUT, LOG_DIR = "FUEL_TIMEOUT", "FUEL_LOG_DIR"  # read by fuel_parallel.comm.watchdog

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_ORPHAN_GRACE_S = 2.0


def thread_variables(environ: dict[str, str], threads: int | None = None) -> dict[str, str]:
    """The thread settings to add: `threads` for all when asked for, else 1 for those that the user left open.

    >>> thread_variables({"OMP_NUM_THREADS": "4"})["OPENBLAS_NUM_THREADS"]    # meant for all of them
    '4'
    """
    if threads is not None:
        return dict.fromkeys(THREAD_VARIABLES, str(threads))
    usual = environ.get("OMP_NUM_THREADS", "1")
    return {name: usual for name in THREAD_VARIABLES if name not in environ}


def rank_command(
    target: Script, *, threads: str | None = None, tag_output: bool = False, settings: Mapping[str, str] | None = None
) -> list[str]:
    """The command line that does what `become_rank` does, with `settings` in its environment."""
    variables = [f"{THREADS}={threads}"] if threads is not None else []
    variables += [f"{TAG_OUTPUT}=1"] if tag_output else []
    variables += [f"{name}={value}" for name, value in (settings or {}).items()]
    return [*(("env", *variables) if variables else ()), sys.executable, "-m", "fuelrun.launch.rank", *target.command()]


def become_rank(target: Script, *, threads: str | None = None, tag_output: bool = False) -> NoReturn:
    """Turn this process into the rank that its launcher says it is, and run `target` to the end of the process.

    Args:
        target: The script.
        threads: Threads for BLAS and OpenMP, or `auto` for a share of the machine's cores; None for 1 unless the
            user's environment says otherwise.
        tag_output: Put `[rank/N]` before every line.
    """
    claim = environment.detect()
    if claim is None or not claim.parallel:
        claim = environment.LauncherClaim("none", 0, 1, 0, 1, ())
    # What is for this process alone must not reach the programs that the script starts.
    job_dir = os.environ.pop(JOB_DIR, None)
    channel = os.environ.pop(CHANNEL, "")
    supervisor = os.environ.pop(SUPERVISOR, "")
    tag_output = bool(os.environ.pop(TAG_OUTPUT, "")) or tag_output
    threads = threads or os.environ.pop(THREADS, None)
    standard_input.take(os.environ.pop(standard_input.STANDARD_INPUT, ""), claim.rank, os.uname().nodename)

    if claim.parallel and (channel or not job_dir) and claim.local_rank in (0, None):
        # Where fuelrun is on this machine it cleans up itself, unless it is killed.
        launcher = _pid_here(supervisor) or os.getppid()
        shared_memory.remove_after(launcher, os.environ.get(processes.JOB_ID, "") if channel else "")
    os.environ.update(thread_variables(dict(os.environ), _thread_count(threads, claim)))
    os.environ.update(rendezvous.of_a_rank(claim, os.environ))
    os.environ.update(claim.rank_variables())
    tag = ""
    log_dir = os.environ.get(LOG_DIR, "")
    if tag_output:
        tag = f"[{claim.rank}] " if claim.world_size is None else f"[{claim.rank}/{claim.world_size}] "
    if log_dir or (claim.parallel and not tag_output):
        output.write_whole_lines()
    elif tag_output:
        output.tag_lines(tag)
    if not faulthandler.is_enabled():
        faulthandler.enable(2, all_threads=False)
    folder = Path(job_dir) if job_dir and not channel else None
    # With a log, what is printed here is tagged on its way; what fuelrun prints for this rank is not.
    failure.install(
        claim.rank, claim.world_size, line_tag=tag if folder or channel or not log_dir else "", record_to=folder
    )
    if log_dir:
        from fuelrun.launch import logs

        try:
            logs.divert(Path(log_dir), claim.rank, claim.world_size, tag=tag)
        except FuelError as error:
            failure.end_rank(error.with_traceback(None))
    reporting = None
    if channel:
        from fuelrun.launch import network

        reporting = _report_to(channel, claim.rank)
        failure.install(claim.rank, claim.world_size, record_to=reporting)
        os.environ.update(network.rank_variables(os.environ))
    if claim.parallel or reporting is not None:
        _end_with_the_launcher(supervisor, reporting)
        try:
            binding.bind(claim, placing.place_rank(claim, binding.cores_of_ranks()))
        except FuelError as error:
            failure.end_rank(error.with_traceback(None))  # it is about an option: where it was read says nothing
    else:
        placing.place_rank(claim, frozenset())
    _run(target, alone=not claim.parallel and reporting is None)


def _report_to(channel: str, rank: int) -> Reporting:
    """The way to the fuelrun of another machine; without it this rank ends the job, for nobody would watch it."""
    from fuelrun.launch.reporting import Reporting

    heartbeat = os.environ.pop(HEARTBEAT, "")
    try:
        return Reporting(channel, rank, int(heartbeat or "10"), os.environ.get(processes.JOB_ID, ""))
    except FuelError as error:
        failure.end_rank(error)


def _thread_count(asked: str | None, claim: environment.LauncherClaim) -> int | None:
    """`auto` is as many as this machine has cores for each of its ranks."""
    if asked == "auto":
        count = len(binding.cores_of_ranks()) if claim.parallel else processes.cores()
        return max(1, processes.granted(count) // (claim.local_size or 1))
    return int(asked) if asked is not None and asked.isascii() and asked.isdecimal() else None


def _run(target: Script, *, alone: bool) -> NoReturn:
    try:
        target.run()
    except SystemExit as error:
        code = failure.exit_code(error)
        if not alone and code:
            failure.end_rank(error)
        failure.write_record(code)
        failure.join_others()
        raise
    except BaseException as error:
        error = error.with_traceback(_users_part(error.__traceback__))
        if not alone:
            failure.end_rank(error)
        # Alone nobody waits: the script's own excepthook and `atexit` have their turn.
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(failure.exit_code(error))
    failure.write_record(0)
    failure.join_others()
    sys.exit(0)


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's own first frame on."""
    ours = {__file__, script.__file__}
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name not in ours and not name.startswith("<frozen "):
            break
        trace = trace.tb_next
    return trace


def _end_with_the_launcher(supervisor: str, reporting: Reporting | None) -> None:
    """End this rank when mpirun or fuelrun is gone, killed say: nobody would end it otherwise.

    Open MPI's ranks are left to themselves when mpirun is killed, and go on computing.
    """
    watched = [os.getppid()]
    if (pid := _pid_here(supervisor)) is not None:
        watched.append(pid)
        reporting = None  # of what happens here fuelrun knows more
    me, daemon = os.getpid(), processes.name_of(watched[0])

    def wait() -> None:
        _wait_for_any(watched)
        if reporting is not None and os.getpid() == me and os.getppid() != watched[0]:
            reporting.note(f"the launcher's process there ({daemon}) is gone")
        time.sleep(_ORPHAN_GRACE_S)
        if os.getpid() == me:
            os.kill(me, signal.SIGKILL)

    threading.Thread(target=wait, name="fuelrun-watch", daemon=True).start()


def _pid_here(supervisor: str) -> int | None:
    """The process of fuelrun, if it is one of this machine."""
    host, _, pid = supervisor.rpartition(":")
    return int(pid) if host == os.uname().nodename and pid.isdigit() else None


def _wait_for_any(pids: list[int]) -> None:
    """Return when one of the processes, our parent first, is gone. Costs nothing where the kernel can tell (Linux)."""
    if hasattr(os, "pidfd_open"):
        poll = select.poll()
        try:
            for pid in pids:
                poll.register(os.pidfd_open(pid), select.POLLIN)
            poll.poll()
            return
        except ProcessLookupError:
            return
        except OSError:
            pass  # a kernel or sandbox without it
    while all(failure.lives(pid) for pid in pids) and pids[0] == os.getppid():
        time.sleep(1.0)


def main() -> NoReturn:
    """Entry of `python -m fuelrun.launch.rank`."""
    become_rank(Script.from_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
