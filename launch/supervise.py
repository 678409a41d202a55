"""Watching a job: start mpirun, pass output and signals on, see to it that all ranks end, decide the exit code.

What is promised:

- The exit code is 0 only when every rank left word that it ended well. mpirun's own status is not believed: it is 0
  after `os._exit(0)` in the middle of a job, and 0 when a daemon on another host died.
- A rank that fails ends the job. If mpirun has not ended it a moment later, fuelrun does: SIGTERM, then SIGKILL by
  process id, found by the job's id in the environment of processes, because every rank is in a group of its own.
- Ctrl-C and SIGTERM reach the scripts first; only what is left after the grace time is ended by force.
- Nothing is left behind on this host, neither processes nor the MPI's files in /dev/shm. On other hosts that is the
  MPI's part, and the ranks' own: they end when their launcher is gone.
"""

from __future__ import annotations

import contextlib
import enum
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from fuel_parallel.errors import LaunchError
from fuelrun.launch import processes
from fuelrun.launch.engine import Death
from fuelrun.launch.noise import NoiseFilter
from fuelrun.launch.plan import Plan
from fuelrun.launch.processes import JOB_ID, Watch
from fuelrun.launch.rank import JOB_DIR, SUPERVISOR
from fuelrun.launch.records import RankRecord, read_records
from fuelrun.launch.shared_memory import SharedFiles
from fuelrun.launch.verdict import Ending, Verdict, is_consequence, judge

_MPIRUN_ACTS_S = 1.0  # how long mpirun may take to end a job in which a rank failed
_TERM_S = 1.0  # from SIGTERM to SIGKILL
_MISSED_S = 2.0  # how long the others may take after a rank has left for good
_DRAIN_S = 1.0  # how long output may still come after mpirun has ended
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_SLURM_ENDS_S = 2.0  # SLURM's SIGTERM to a whole job comes right after a SIGCONT


class _Stage(enum.IntEnum):
    """How far the job has been pushed towards its end."""

    RUNNING = 0
    ASKED = 1  # the ranks were told, or failed by themselves: mpirun should end soon
    TERMINATED = 2  # SIGTERM went to mpirun
    KILLED = 3  # SIGKILL went to all


def supervise(plan: Plan) -> Verdict:
    """Run the job to its end. Messages of the verdict are not printed here."""
    with tempfile.TemporaryDirectory(prefix="fuelrun-", ignore_cleanup_errors=True) as folder, _Signals() as signals:
        return _Supervision(plan, Path(folder), signals).run()


class _Signals:
    """Signals to this process, as a queue and a file descriptor that `select` can wait for."""

    def __init__(self) -> None:
        self.pending: list[int] = []
        self._earlier: dict[int, Any] = {}
        self.fd, self._wake = os.pipe()

    def __enter__(self) -> Self:
        for end in (self.fd, self._wake):
            os.set_blocking(end, False)
        self._earlier_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in (*_STOPPING, *_PASSED_ON, signal.SIGCONT, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGCHLD:  # nohup stays nohup
                self._earlier[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        signal.set_wakeup_fd(self._earlier_wake)
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._wake)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.pending.append(number)

    def take(self) -> list[int]:
        """The signals since the last call."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 512):
                pass
        taken, self.pending = self.pending, []
        return taken


class _Supervision:
    def __init__(self, plan: Plan, folder: Path, signals: _Signals) -> None:
        self._plan = plan
        self._folder = folder
        self._signals = signals
        self._job_id = folder.name
        self._host = socket.gethostname()
        self._records: dict[int, RankRecord] = {}
        self._watches: dict[int, Watch] = {}
        self._shared_files = SharedFiles()
        self._gone: list[int] = []  # ranks of this host, in the order in which they ended
        self._seen = -1
        self._all_gone = False
        self._reported = False
        self._open_pipes = 0
        self._last_output = 0.0
        self._stage = _Stage.RUNNING
        self._next_push: float | None = None
        self._missed_since: float | None = None
        self._deserters: list[int] = []
        self._stopped_by: int | None = None
        self._notice_at: float | None = None
        self._continued_at = -_SLURM_ENDS_S
        self._death: Death | None = None
        self._seen_death: Death | None = None  # for when mpirun does not tell
        self._lost: Death | None = None  # the first rank of this host that ended, and when that was seen
        self._lost_at = 0.0
        self._noise = {fd: NoiseFilter(plan.engine.banners) for fd in (1, 2)}
        self._deaf = False  # nobody reads our output any more

    def run(self) -> Verdict:
        environ = {
            **self._plan.environ,
            **self._plan.added,
            JOB_ID: self._job_id,
            JOB_DIR: str(self._folder),
            SUPERVISOR: f"{self._host}:{os.getpid()}",
        }
        try:
            self._mpirun = subprocess.Popen(
                self._plan.command,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # the terminal's Ctrl-C comes to us alone, and we pass it on
                preexec_fn=processes.end_with_parent,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {self._plan.command[0]}: {error.strerror}") from None
        try:
            status = self._watch()
        finally:
            self._kill_leftovers()
            for watch in self._watches.values():
                watch.close()
        self._seen = -1
        self._read()
        verdict = judge(self._ending(status))
        self._shared_files.remove(failed=verdict.code != 0)
        return verdict

    def _ending(self, status: int) -> Ending:
        death, seen = self._death or self._seen_death, self._seen_death
        if death is not None and death.rank is None and seen is not None and death.signal == seen.signal:
            death = seen
        return Ending(
            ranks=self._plan.ranks,
            records=self._records,
            gone=tuple(self._gone),
            code=0 if self._stage >= _Stage.TERMINATED else self._plan.engine.exit_code(status),
            death=death,
            mpirun_killed_by=-status if status < 0 and self._stage < _Stage.TERMINATED else None,
            stopped_by=self._stopped_by,
            deserters=tuple(self._deserters),
            lost=self._lost,
            lost_at=self._lost_at,
            messages=tuple(text for noise in self._noise.values() for text in noise.taken if text.strip()),
        )

    def _watch(self) -> int:
        """Until mpirun has ended and its output is through; returns its status."""
        over: float | None = None
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._signals.fd, selectors.EVENT_READ)
            for pipe, target in ((self._mpirun.stdout, 1), (self._mpirun.stderr, 2)):
                if pipe is not None:
                    selector.register(pipe, selectors.EVENT_READ, target)
                    self._open_pipes += 1
            while True:
                for key, _ in selector.select(self._pause()):
                    if isinstance(key.data, Watch):
                        self._note_end(key.data)
                    elif key.data is not None and not self._pass_on(key.fd, key.data):
                        selector.unregister(key.fileobj)
                        self._open_pipes -= 1
                for fd, noise in self._noise.items():
                    self._write(fd, noise.overdue())
                taken = self._signals.take()
                if signal.SIGCONT in taken:
                    self._continued_at = time.monotonic()
                for number in taken:
                    self._signal(number)
                status = self._mpirun.poll()
                if status is None:
                    self._look()
                    self._push()
                    continue
                if over is None:
                    over = time.monotonic()
                    self._kill_leftovers()
                if not self._open_pipes or time.monotonic() - over > _DRAIN_S:
                    break
        for fd, noise in self._noise.items():
            self._write(fd, noise.end())
        return status

    def _pause(self) -> float:
        starting = len(self._records) < self._plan.ranks
        if starting or self._stage is not _Stage.RUNNING or any(noise.holding for noise in self._noise.values()):
            return 0.05
        return 0.2

    def _pass_on(self, source: int, target: int) -> bool:
        """Copy what has come from mpirun to our own output; False at its end."""
        data = os.read(source, 1 << 16)
        if not data:
            return False
        noise = self._noise[target]
        taken = len(noise.taken)
        passed = noise.feed(data)
        self._write(target, passed)
        self._last_output = time.monotonic()
        for message in noise.taken[taken:]:
            if self._stage < _Stage.TERMINATED:  # later deaths are our own doing
                self._death = self._death or self._plan.engine.death(message)
            if self._plan.options.verbose:
                self._write(target, message.encode())
        return True

    def _write(self, fd: int, data: bytes) -> None:
        while data and not self._deaf:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                time.sleep(0.005)
            except BrokenPipeError:  # `fuelrun … | head` has seen enough
                self._deaf = True
                self._stop(signal.SIGPIPE, signal.SIGTERM)

    def _read(self) -> None:
        """What the ranks have written since; the first failure is shown at once."""
        with contextlib.suppress(OSError):
            changed = self._folder.stat().st_mtime_ns
            # A time stamp may be some milliseconds coarse: two changes within one look like one.
            if changed != self._seen or time.time_ns() - changed < 100_000_000:
                self._seen = changed
                self._records = read_records(self._folder)
        failures = [record for record in self._records.values() if record.failed]
        if failures and not self._reported:
            self._reported = True  # the others failed alike, or because of it
            first = min(failures, key=lambda record: record.ended or 0.0)
            if is_consequence(first, self._records, self._lost, self._lost_at):
                return  # MPI's error about a rank that is gone says less than the verdict
            self._write(2, first.report.encode("utf-8", "backslashreplace"))

    def _look(self) -> None:
        """Read records, see which ranks are gone, and find out whether the job has to be ended."""
        self._read()
        for rank, record in self._records.items():
            if record.host == self._host and rank not in self._watches:
                watch = self._watches[rank] = Watch(record.pid)
                if watch.fd is not None:
                    self._selector.register(watch.fd, selectors.EVENT_READ, watch)
        for rank, watch in self._watches.items():
            if rank not in self._gone and watch.fd is None and watch.ended():
                self._note_end(watch)
        vanished = any(not self._records[rank].ended_well for rank in self._gone)
        if not self._shared_files.names or (self._gone and self._stage is _Stage.RUNNING):
            self._shared_files.note(self._ranks_here())
        # MPICH's mpiexec waits for ever for what a rank has left in the background with its output open.
        self._all_gone = len(self._gone) == self._plan.ranks
        if self._stage is not _Stage.RUNNING:
            return
        self._look_for_deserters()
        if self._reported or vanished or self._all_gone or self._deserters:
            self._stage, self._next_push = _Stage.ASKED, time.monotonic() + _MPIRUN_ACTS_S

    def _look_for_deserters(self) -> None:
        """Ranks whose script ended well, and which are gone though others still need them.

        A rank that has initialised MPI waits for the others in MPI_Finalize, so it is gone too early if one of them is
        still at work, or does not get out of MPI_Finalize itself. One that has not is missed by whoever is in MPI_Init.
        """
        gone = [rank for rank in self._gone if self._records[rank].ended_well]
        here = {r: record for r, record in self._records.items() if record.host == self._host and r not in self._gone}
        finalized = [rank for rank in gone if self._records[rank].mpi]
        strangers = [rank for rank in gone if not self._records[rank].mpi]
        missed: list[int] = []
        if finalized and here:
            missed = finalized
        elif strangers and any(record.mpi or processes.has_loaded_mpi(record.pid) for record in here.values()):
            missed = strangers
        if not missed:
            self._missed_since = None
            return
        self._missed_since = self._missed_since or time.monotonic()
        if time.monotonic() - self._missed_since > _MISSED_S:
            self._deserters = missed

    def _note_end(self, watch: Watch) -> None:
        """A rank of this host is gone. The first one counts, so this follows the order of events."""
        rank = next(rank for rank, other in self._watches.items() if other is watch)
        if rank not in self._gone:
            if not self._gone and self._stage is _Stage.RUNNING:
                self._lost, self._lost_at = Death(rank, signal=processes.killed_by(watch.pid)), time.time()
                self._seen_death = self._lost if self._lost.signal else None
            self._gone.append(rank)
            self._seen = -1  # its last word may have been written since
        if watch.fd is not None:
            self._selector.unregister(watch.fd)
            watch.close()

    def _ranks_here(self) -> list[int]:
        """Process ids of the living ranks of this host."""
        records = (record for rank, record in self._records.items() if rank not in self._gone)
        return [record.pid for record in records if record.host == self._host]

    def _signal(self, number: int) -> None:
        self._look()
        if number == signal.SIGCONT:
            return
        if number in _PASSED_ON:
            processes.send(self._ranks_here(), number)
        elif self._stopped_by is None:
            self._stop(number, number)
        else:  # asked a second time: no more patience
            self._next_push = 0.0

    def _stop(self, reason: int, number: int) -> None:
        """Ask every rank to end, by signal `number`."""
        self._stopped_by = reason
        if not (number == signal.SIGTERM and self._told_by_slurm()):
            processes.send(self._ranks_here(), number)
        # Before all ranks are up there is no script yet that could want the time.
        grace = self._plan.options.grace if len(self._records) == self._plan.ranks else 0.2
        if self._stage < _Stage.TERMINATED:
            self._stage, self._next_push = _Stage.ASKED, time.monotonic() + grace
            if reason == signal.SIGINT and grace > 1:
                self._notice_at = time.monotonic() + 0.8

    def _told_by_slurm(self) -> bool:
        """Whether SLURM is ending the job: then the ranks have got this signal from it, and are not to get it twice."""
        return self._plan.told_by_slurm and time.monotonic() - self._continued_at < _SLURM_ENDS_S

    def _push(self) -> None:
        """When the time for the last step is over, take the next."""
        if self._next_push is None:
            return
        now = time.monotonic()
        if self._notice_at is not None and now > self._notice_at:
            self._notice_at = None
            left = max(0.0, self._next_push - now)
            self._write(2, f"fuelrun: the ranks have {left:.0f} s more to end; Ctrl-C again ends them now\n".encode())
        # While output still comes through, a job that is over is not over for its readers (`fuelrun … | less`).
        if now < self._next_push or (self._all_gone and now - self._last_output < _MPIRUN_ACTS_S):
            return
        if self._stage is _Stage.ASKED:
            self._stage, self._next_push = _Stage.TERMINATED, time.monotonic() + _TERM_S
            processes.send([self._mpirun.pid], signal.SIGTERM)
        else:
            self._stage, self._next_push = _Stage.KILLED, time.monotonic() + _TERM_S
            processes.send([*processes.of_job(self._job_id), *self._ranks_here(), self._mpirun.pid], signal.SIGKILL)

    def _kill_leftovers(self) -> None:
        """End what outlived mpirun: ranks of a daemon that died, and helpers that scripts started."""
        if self._mpirun.poll() is None:  # an error of our own
            processes.send([self._mpirun.pid], signal.SIGKILL)
            self._mpirun.wait()
        left = processes.of_job(self._job_id)
        if left and self._plan.options.verbose:
            names = ", ".join(f"{pid} ({processes.name_of(pid)})" for pid in left)
            print(f"fuelrun: ending processes that the job left behind: {names}", file=sys.stderr)  # noqa: T201
        processes.send(left, signal.SIGTERM)
        deadline = time.monotonic() + _TERM_S / 2
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = processes.of_job(self._job_id)
        processes.send(left, signal.SIGKILL)
