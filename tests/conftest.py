"""What every test run needs, and what keeps the ranks of an MPI test job together.

Under `mpiexec -n N python -m pytest --with-mpi tests/mpi` each rank is a pytest of its own. Left alone they print over
each other, and a test that fails on one rank leaves the others waiting in a collective. `Lockstep` promises instead:

- The outcome of a test is the job's outcome: failed on one rank is failed on all, and rank 0 alone prints, for each
  failing rank, what went wrong there.
- A rank that fails while the others do not come is not waited for: it prints its failure and ends the job.
- Every rank ends with the same exit status, after rank 0 has printed its closing line.

A rank that is stuck without any failure is ended by pytest-timeout, which prints where each rank stands.
"""

from __future__ import annotations

import hashlib
import io
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
GRACE_SECONDS = 10.0  # how long a rank that failed waits for the others to end the same test
PATIENCE_SECONDS = 60.0  # how long a rank waits for the others before the first test and after the last
OUTCOMES = ("passed", "skipped", "failed")  # from the mildest to the gravest

# Ranks must draw the same examples, and must not shrink alone: both would leave the others in a collective.
settings.register_profile(
    "ranks",
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=(HealthCheck.too_slow,),
)
settings.register_profile("one process", deadline=None)


def claimed(variables: tuple[str, ...]) -> int | None:
    """The number that the launcher put into one of `variables`, or None outside of a launcher."""
    return next((int(os.environ[name]) for name in variables if name in os.environ), None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mpi-record",
        metavar="FILE",
        help="under MPI, rank 0 makes this file when every rank ended well; mpiexec's exit status alone proves nothing",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    rank, size = claimed(RANK_VARIABLES), claimed(SIZE_VARIABLES)
    settings.load_profile("one process" if rank is None else "ranks")
    # What a shell starts in the background ignores Ctrl-C, and so would everything that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if rank is not None:
        # Ranks that clear each other's old temporary folders stumble over what is gone already.
        root = Path(tempfile.gettempdir(), f"pytest-rank-{rank}-of-{os.getuid()}")
        root.mkdir(mode=0o700, exist_ok=True)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(root)
    if rank:
        config.get_terminal_writer()._file = Unheard(rank)
    if size is not None and config.getoption("--with-mpi"):
        for plugin in config.pluginmanager.get_plugins():
            if type(plugin).__name__ == "MPIPlugin":
                plugin._is_testing_mpi = False  # see `pytest_report_header`
        config.pluginmanager.register(Lockstep(size, config.getoption("--mpi-record")), "lockstep")


class Unheard(io.TextIOBase):
    """The terminal of a rank above 0: silent, but for pytest-timeout, which writes from a thread of its own."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def write(self, text: str) -> int:
        if threading.current_thread() is not threading.main_thread():
            tell(self.rank, text)
        return len(text)


def tell(rank: int, text: str) -> None:
    """Writes `text` past all capturing, each line marked with the rank."""
    lines = "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())
    os.write(2, lines.encode())


class Lockstep:
    """Takes all ranks through the same tests, with the same outcomes."""

    def __init__(self, size: int, record: str | None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # mpi4py's own word on a foreign mpiexec; ours is an error, below
            from mpi4py import MPI

        self.library = " ".join(MPI.Get_library_version().strip("\0").splitlines()[0].split())
        if size != MPI.COMM_WORLD.size:
            raise pytest.UsageError(
                f"the launcher started {size} ranks, but MPI ({self.library}) sees {MPI.COMM_WORLD.size}: "
                "start the tests with the mpiexec that belongs to this MPI"
            )
        self.MPI = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank = self.comm.rank
        self.record = record
        self.uncollected: list[str] = []
        self.status = int(pytest.ExitCode.INTERNAL_ERROR)

    def everyone(self, mine: object, patience: float | None, failure: str = "") -> list[Any]:
        """What each rank hands in, by rank; ends the job when they do not all come within `patience` seconds.

        The wait polls and sleeps, so that ranks which share a core get it, and so that it can be given up.
        """
        arrived = self.comm.Ibarrier()
        begin = time.monotonic()
        while not arrived.Test():
            if patience is not None and time.monotonic() - begin > patience:
                self.end_job(f"{failure}\nthe other ranks did not come within {patience:g} s: ending the job")
            time.sleep(0.0002)
        return self.comm.allgather(mine)

    def end_job(self, why: str) -> None:
        tell(self.rank, why)
        self.MPI.COMM_WORLD.Abort(1)

    def pytest_report_header(self) -> str:
        # In place of pytest-mpi's section at the end, which has a NUL byte in the name of the library.
        return f"MPI: {self.comm.size} ranks, {self.library}"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.uncollected.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        names = "\n".join([*self.uncollected, *(item.nodeid for item in session.items)])
        digests = self.everyone(hashlib.sha256(names.encode()).hexdigest(), PATIENCE_SECONDS, "collected its tests")
        if len(set(digests)) > 1:
            self.end_job(f"the ranks collected different tests; here:\n{names}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        where = f"{item.nodeid} ({call.when})"
        text = self.account(report, call) if report.failed else ""
        failure = f"{where} failed:\n{text}"
        votes = self.everyone((where, report.outcome, text), GRACE_SECONDS if report.failed else None, failure)
        if len({place for place, _, _ in votes}) > 1:
            self.end_job(f"the ranks are in different tests: {[place for place, _, _ in votes]}")
        worst = max((outcome for _, outcome, _ in votes), key=OUTCOMES.index)
        if worst == "failed":
            report.outcome = "failed"
            report.longrepr = "\n\n".join(text for _, _, text in votes if text)
            report.sections = []  # they are in the accounts of the ranks that failed
        elif worst == "skipped" and call.when == "setup" and report.passed:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), (item.location[1] or 0) + 1, "Skipped: on another rank")
        return report

    def account(self, report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
        """What went wrong on this rank, with what the test printed here; the first line says it in short."""
        short = call.excinfo.exconly().partition("\n")[0] if call.excinfo else "failed"
        printed = (f"{f' {title} ':-^80}\n{text}" for title, text in report.sections)
        return "\n".join([f"[rank {self.rank}] {short}", report.longreprtext, *printed])

    def pytest_internalerror(self, excrepr: object) -> None:
        tell(self.rank, str(excrepr))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        last = excinfo.traceback[-1]
        tell(self.rank, f"{last.path}:{last.lineno + 1}: {excinfo.exconly()}")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.status = int(exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        # Last of all: rank 0 has printed its summary, and a rank that fails before that could have rank 0 killed.
        sys.stdout.flush()
        broken_off = self.status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        patience = GRACE_SECONDS if broken_off else PATIENCE_SECONDS
        statuses = self.everyone(self.status, patience, f"the tests ended with exit status {self.status}")
        if len(set(statuses)) > 1:
            self.end_job(f"the ranks end with different exit statuses: {statuses}")
        if self.record and self.rank == 0 and not any(statuses):
            Path(self.record).touch()
