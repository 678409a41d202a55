"""Whether ranks can be started here, and with what: the facts behind `fuelrun doctor`.

Everything that could crash or hang (loading MPI, asking it about CUDA, a test launch) happens in child processes.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from fuel_parallel import environment
from fuel_parallel.errors import LaunchError
from fuel_parallel.version import __version__
from fuelrun.launch import allocation, find
from fuelrun.launch.allocation import Allocation
from fuelrun.launch.processes import cores
from fuelrun.launch.rank import THREAD_VARIABLES
from fuelrun.launch.srun import srun_for


class Finding(msgspec.Struct, frozen=True):
    """One fact.

    Args:
        name: What it is about.
        value: How it is.
        ok: False when ranks will not start or not be fast for this reason.
        remedy: What to do about it; also set where nothing is wrong but something could be better.
    """

    name: str
    value: str
    ok: bool = True
    remedy: str = ""


def examine(*, launch: bool = True) -> Iterator[Finding]:
    """All findings, as they are made.

    Args:
        launch: Start two ranks for a try.
    """
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("platform", platform.platform())
    yield Finding("fuel-parallel", __version__)
    yield _cores()
    yield _threads()
    claim = environment.detect()
    yield _launcher(claim)
    try:
        library = find.ask_library()
    except LaunchError as error:
        yield Finding("MPI library", "none", ok=False, remedy=str(error))
        yield from _devices()
        return
    yield Finding("mpi4py", library.mpi4py)
    yield Finding(
        "MPI library", f"{library.flavour or library.text.splitlines()[0]} {library.version} ({library.path})"
    )
    yield from _mpirun(library)
    job, slurm = _slurm(library) if claim is None or not claim.parallel else (None, None)
    if slurm is not None:
        yield slurm
    yield _cuda(library)
    yield from _devices()
    yield _device_transport()
    if claim is not None and claim.parallel:
        yield Finding("two ranks", "not tried: this is a rank already")
    elif launch:
        yield _two_ranks(in_job=job is not None and max(job.tasks, sum(job.slots)) > 1)


def _cores() -> Finding:
    available, machine = cores(), os.cpu_count() or 1
    of = f" of the machine's {machine}" if machine != available else ""
    return Finding("cores", f"{available}{of}")


def _threads() -> Finding:
    chosen = [f"{name}={os.environ[name]}" for name in THREAD_VARIABLES if name in os.environ]
    if not chosen:
        return Finding("threads a rank", "1 (fuelrun's default; --threads K for more)")
    return Finding("threads a rank", f"{', '.join(chosen)} (from your environment)")


def _launcher(claim: environment.LauncherClaim | None) -> Finding:
    if claim is not None:
        size = "an unknown number" if claim.world_size is None else claim.world_size
        return Finding("launcher", f"{claim.launcher}: rank {claim.rank} of {size}")
    return Finding("launcher", "none: fuelrun starts the ranks")


def _slurm(library: find.Library) -> tuple[Allocation | None, Finding | None]:
    """The SLURM job around us, and what starts ranks in it."""
    name = "SLURM job"
    try:
        job, note = allocation.find(os.environ)
    except LaunchError as error:
        return None, Finding(name, os.environ.get("SLURM_JOB_ID", ""), ok=False, remedy=str(error))
    if job is None:
        return None, Finding(name, "none", remedy=note) if note else None
    engine, reason = srun_for(library, job, os.environ)
    if engine is None:
        return job, Finding(name, f"{job.describe()}; ranks are started by mpirun", remedy=reason)
    return job, Finding(name, f"{job.describe()}; ranks are started by {engine.name} {engine.version}")


def _mpirun(library: find.Library) -> Iterator[Finding]:
    given = os.environ.get(find.MPIRUN)
    try:
        engine = find.find_engine()
    except LaunchError as error:
        yield Finding("mpirun", given or "none", ok=False, remedy=str(error))
        return
    yield Finding("engine", find.explain(engine, library))
    found = find.ask_mpirun(engine.mpirun)
    said = f"{found.flavour or 'unknown'} {found.version} ({found.path})"
    if found.belongs_to(library):
        yield Finding("mpirun", f"{said}, belongs to the library")
    elif found.flavour == library.flavour:
        advice = "usually works; if ranks do not start, install the mpirun of the library's version"
        yield Finding("mpirun", f"{said}, of another version than the library", remedy=advice)
    else:
        advice = f"name the mpirun of {library.flavour} in {find.MPIRUN}, or unset it to have it found"
        yield Finding("mpirun", f"{said}, does not belong to the library", ok=False, remedy=advice)
    first = shutil.which("mpirun") or shutil.which("mpiexec")
    if first is not None and Path(first).resolve() != found.path.resolve():
        other = find.ask_mpirun(Path(first))
        if other.flavour != library.flavour:
            yield Finding(
                "mpirun on PATH",
                f"{other.flavour or 'unknown'} {other.version} ({first})",
                remedy=f"start ranks with `fuelrun -n N` or {found.path}: under this one each rank would be alone",
            )


_ASK_CUDA = """
import ctypes, sys
from mpi4py import MPI  # the answer counts only after MPI_Init
library = ctypes.CDLL(sys.argv[1])
print("answer", library.MPIX_Query_cuda_support() if hasattr(library, "MPIX_Query_cuda_support") else "none")
"""


def _run(words: list[str], timeout: float, environ: Mapping[str, str] = os.environ) -> tuple[int, str, str]:
    """Exit status, output and errors of a child outside of any job; -1 when it took too long."""
    try:
        child = subprocess.run(
            words,
            env=environment.without_launcher(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, "", str(error)
    return child.returncode, child.stdout, child.stderr


def _cuda(library: find.Library) -> Finding:
    name = "MPI on device memory"
    if library.path is None:
        return Finding(name, "unknown (the library's path is not known)")
    status, text, _ = _run([sys.executable, "-c", _ASK_CUDA, str(library.path)], timeout=60)
    answer = text.partition("answer ")[2].strip()
    if status != 0 or answer in ("", "none"):
        return Finding(name, "unknown (the library does not say)")
    if answer != "0":
        return Finding(name, "yes (CUDA), by the library's own word")
    return Finding(name, f"no ({_why_no_cuda(library)})")


def _why_no_cuda(library: find.Library) -> str:
    if library.flavour == "Open MPI" and library.path is not None:
        for prefix in library.path.parents[1:3]:
            # The extension list of ompi_info names cuda even in builds without it; only this value counts.
            _, text, _ = _run([str(prefix / "bin" / "ompi_info"), "--parsable", "--all"], timeout=30)
            if "mpi_built_with_cuda_support:value:false" in text:
                return "Open MPI was built without CUDA"
            if "mpi_built_with_cuda_support:value:true" in text:
                return "built with CUDA, but no CUDA device is used here"
    return f"{library.flavour or 'the library'} was built without CUDA or sees no device"


_ASK_DEVICES = """
import json
from fuel_parallel.backends import devices
from fuel_parallel.backends.precision import describe_precision
from fuel_parallel.errors import FuelError
try:
    precision = True, describe_precision()
except FuelError as error:
    precision = False, str(error)
print("answer", json.dumps({"devices": devices().rows(), "precision": precision}))
"""


class _Devices(msgspec.Struct, frozen=True):
    devices: list[tuple[str, str]]
    precision: tuple[bool, str]


def _devices() -> Iterator[Finding]:
    """All that `fp.devices()` knows, and how matrices are multiplied on them."""
    status, text, errors = _run([sys.executable, "-c", _ASK_DEVICES], timeout=240)
    answer = next((line.partition(" ")[2] for line in text.splitlines() if line.startswith("answer ")), "")
    if not answer:
        last = (errors.strip().splitlines() or [f"exit status {status}"])[-1]
        yield Finding("devices", "unknown", ok=False, remedy=f"finding out failed: {last}")
        return
    said = msgspec.json.decode(answer, type=_Devices)
    yield from (Finding(f"device {name}", what) for name, what in said.devices)
    good, precision = said.precision
    yield Finding("matmul precision", precision if good else "none", ok=good, remedy="" if good else precision)


_ASK_TRANSPORT = """
from fuel_parallel.comm.device import describe_this_machine
from fuel_parallel.errors import FuelError
try:
    print("answer", describe_this_machine())
except FuelError as error:
    print("refused", error)
"""


def _device_transport() -> Finding:
    """How arrays of GPUs move between ranks, and why: what the library itself would choose."""
    name = "transport of GPU arrays"
    status, text, errors = _run([sys.executable, "-c", _ASK_TRANSPORT], timeout=240)
    for line in text.splitlines():
        kind, _, said = line.partition(" ")
        if kind == "answer":
            return Finding(name, said)
        if kind == "refused":
            return Finding(name, "none", ok=False, remedy=said)
    last = (errors.strip().splitlines() or [f"exit status {status}"])[-1]
    return Finding(name, "unknown", ok=False, remedy=f"finding out failed: {last}")


_TRY = """
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.rank + 1)
if world.rank == 0:
    print("sum", total, "of", world.size, flush=True)
"""


def _two_ranks(*, in_job: bool) -> Finding:
    """A try; outside of a SLURM job that has no room for two."""
    environ = os.environ if in_job else allocation.without_job(os.environ)
    with tempfile.TemporaryDirectory(prefix="fuelrun-doctor-") as folder:
        script = Path(folder, "two_ranks.py")
        script.write_text(_TRY)
        begin = time.monotonic()
        command = [sys.executable, "-m", "fuelrun", "--quiet", "-n", "2", str(script)]
        status, text, errors = _run(command, timeout=60, environ=environ)
        took = time.monotonic() - begin
    if status == 0 and "sum 3 of 2" in text:
        return Finding("two ranks", f"started, summed and ended in {took:.1f} s")
    if status == 0:
        said = text.strip().replace("\n", "; ")
        return Finding("two ranks", f"ended, but said: {said}", ok=False, remedy="the ranks do not see each other")
    last = (errors.strip().splitlines() or ["no message"])[-1]
    return Finding(
        "two ranks", f"failed with exit status {status}", ok=False, remedy=f"{last}; more with: fuelrun -v -n 2 SCRIPT"
    )
