"""Whether the MPI library takes addresses of device memory: found out by a try, in processes of their own.

What a library says of itself is no more than a hint: builds with CUDA run where CUDA is missing, some do not answer,
and a wrong *yes* is a segmentation fault in the middle of a job. So two ranks of a small job of this host (`cuda_try`)
send and receive, then reduce, and compare values; what crashes, hangs or differs there is not CUDA-aware. Where no
mpirun of the library is found, one process tries it with itself; that is known of the verdict, as `ranks`.

Verdicts are kept in `~/.cache/fuel-parallel/cuda-aware.json`, by library, its path, host, kind of device, and the
variables that tune MPI libraries, for those can switch it off. A file that cannot be read is written anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from fuel_parallel.backends.device_memory import DeviceMemory
from fuel_parallel.comm.thresholds import cache_folder, write_json
from fuel_parallel.environment import without_launcher

TIMEOUT_S = 60.0
"""How long a try may take. CUDA alone needs seconds to start on some machines."""

PROGRAM = ["-m", "fuel_parallel.comm.cuda_try"]

_GRACE_S = 5.0  # for an mpirun to end its ranks

# A batch system's own variables would let mpirun ask it for nodes; the try stays on this one.
_OF_AN_ALLOCATION = re.compile(r"(SLURM|SRUN|PBS|LSB|FLUX|COBALT|LOADL)_.*")
_TUNES_MPI = re.compile(r"(OMPI|PRTE|PMIX|MPICH|MPIR|MV2|MVP|I_MPI|PSP|PSM|PSM2|PSM3|UCX|UCC|FI|LD)_.*")
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Verdict(msgspec.Struct, frozen=True):
    """Whether MPI takes device memory, how many ranks tried it, and what came of it."""

    aware: bool
    ranks: int
    reason: str


def verdict_on(memory: DeviceMemory, library: str, path: str, *, fresh: bool = False) -> Verdict:
    """The verdict on a library (its version text and file) and a kind of device: from the cache, or by a try.

    With `fresh` it is tried anyway, and the cache gets the new verdict.
    """
    key = _key(memory, library, path)
    known = _read()
    if fresh or key not in known:
        verdict = probe(memory, path)
        known = {**_read(), key: verdict}  # others may have written meanwhile
        with contextlib.suppress(OSError):  # a home that cannot be written to costs a try a job, no more
            write_json(cache_path(), known)
    return known[key]


def probe(memory: DeviceMemory, path: str, *, timeout: float = TIMEOUT_S) -> Verdict:
    """Tries it now, with two ranks, or with one where two cannot be started."""
    mpirun = mpirun_beside(path)
    if mpirun is not None:
        verdict = _try(_words(mpirun), memory, 2, timeout)
        if verdict.ranks:
            return verdict
    return _try([], memory, 1, timeout)


def cache_path() -> Path:
    """Where verdicts are kept."""
    return cache_folder() / "cuda-aware.json"


def mpirun_beside(path: str) -> Path | None:
    """The mpiexec or mpirun of the library in `path`: that of its own installation, never another one's."""
    if not path:
        return None
    for prefix in dict.fromkeys([*Path(path).parents[1:4], *Path(path).resolve().parents[1:4]]):
        for name in ("mpiexec", "mpirun"):
            if os.access(prefix / "bin" / name, os.X_OK):
                return prefix / "bin" / name
    return None


def library_path() -> str:
    """The file of the MPI library that this process has loaded; "" where the system does not tell."""
    try:
        with open("/proc/self/maps") as maps:
            names = [line.split(maxsplit=5)[-1].strip() for line in maps if "/libmpi" in line]
    except OSError:
        return ""
    return names[0] if names else ""


# The try.


def _words(mpirun: Path) -> list[str]:
    words = [str(mpirun), "-n", "2"]
    try:
        asked = subprocess.run(
            [mpirun, "--version"],
            env=_environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return words
    if re.search("Open ?MPI|OpenRTE|PRRTE|prterun", asked.stdout + asked.stderr):
        words += ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    return words


def _environ() -> dict[str, str]:
    """The environment of a job on this host that has nothing to do with the one around it."""
    return {k: v for k, v in without_launcher(os.environ).items() if not _OF_AN_ALLOCATION.fullmatch(k)}


def _try(words: list[str], memory: DeviceMemory, ranks: int, timeout: float) -> Verdict:
    """The verdict of a try; with no ranks where they never came to begin."""
    environ = {**_environ(), **_AS_ROOT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [*words, sys.executable, *PROGRAM, _name(memory), memory.device]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            child = subprocess.Popen(
                words,
                env=environ,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return _not_begun(str(error))
        try:
            status = child.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(child)
        output.seek(0)
        text = output.read()
    return _judge(text, status, ranks, timeout)


def _judge(text: str, status: int | None, ranks: int, timeout: float) -> Verdict:
    said = [line.partition("cuda_try: ")[2].strip() for line in text.splitlines() if "cuda_try: " in line]
    if f"begins, {ranks} ranks" not in said:  # another number: an mpirun of another MPI, under which each is alone
        return _not_begun((text.strip().splitlines() or ["no message"])[-1])
    who = "two ranks of this host" if ranks == 2 else "one process alone"
    hint = next((f"; the library says {line.partition(' ')[2]}" for line in said if line.startswith("hint")), "")
    if status == 0 and said.count("right") == ranks:
        return Verdict(True, ranks, f"{who} sent, received and reduced device memory rightly{hint}")
    wrong = next((line for line in said if line.startswith("wrong")), "")
    if status is None:
        what = f"did not end within {timeout:g} s"
    elif wrong:
        what = f"went {wrong}"
    else:
        what = f"ended with {_ending(status, text)}"
    return Verdict(False, ranks, f"a try with {who} {what}{hint}")


def _not_begun(why: str) -> Verdict:
    return Verdict(False, 0, f"a try of it could not be started: {why}")


def _ending(status: int, text: str) -> str:
    crash = re.search(r"[Ss]egmentation [Ff]ault|signal 11|SIGSEGV", text)
    if status == -signal.SIGSEGV or status == 128 + signal.SIGSEGV or crash:
        return "a segmentation fault"
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a try: mpirun ends its ranks if it can, and they end when it does (see `cuda_try`)."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _name(memory: DeviceMemory) -> str:
    return f"{type(memory).__module__}:{type(memory).__qualname__}"


# The cache.


def _key(memory: DeviceMemory, library: str, path: str) -> str:
    tuned = sorted((k, v) for k, v in without_launcher(os.environ).items() if _TUNES_MPI.fullmatch(k))
    digest = hashlib.blake2b(repr(tuned).encode(), digest_size=8).hexdigest()
    return "|".join([" ".join(library.strip("\0").split()), path, socket.gethostname(), _name(memory), digest])


def _read() -> dict[str, Verdict]:
    try:
        return msgspec.json.decode(cache_path().read_bytes(), type=dict[str, Verdict])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
