"""Watching a job: start mpirun, pass output and signals on, see to it that all ranks end, decide the exit code.

What is promised:

- The exit code is 0 only when every rank left word that it ended well. mpirun's own status is not believed: it is 0
  after `os._exit(0)` in the middle of a job, and 0 when a daemon on another host died.
- A rank that fails ends the job. If mpirun has not ended it a moment later, fuelrun does: SIGTERM, then SIGKILL by
  process id, found by the job's id in the environment of processes, because every rank is in a group of its own.
- Ctrl-C and SIGTERM reach the scripts first; only what is left after the grace time is ended by force.
- Nothing is left behind on this host, neither processes nor the MPI's files in /dev/shm. On other hosts the ranks end
  themselves, and what they started, when their launcher is gone or fuelrun says so (`channel`).
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
from typing import TYPE_CHECKING

from fuel_parallel.errors import LaunchError
from fuelrun.launch import processes, standard_input
from fuelrun.launch.engine import Death
from fuelrun.launch.plan import Plan
from fuelrun.launch.processes import JOB_ID, OWN, Watch
from fuelrun.launch.rank import JOB_DIR, SUPERVISOR
from fuelrun.launch.records import Loss, RankRecord, read_records
from fuelrun.launch.shared_memory import SharedFiles
from fuelrun.launch.signals import PASSED_ON, Signals
from fuelrun.launch.streams import Streams
from fuelrun.launch.verdict import Ending, Verdict, is_consequence, judge

if TYPE_CHECKING:
    from fuelrun.launch.channel import Channel

_MPIRUN_ACTS_S = 1.0  # how long mpirun may take to end a job in which a rank failed
_TERM_S = 1.0  # from SIGTERM to SIGKILL
_MISSED_S = 2.0  # how long the others may take after a rank has left for good
_DRAIN_S = 1.0  # how long output may still come after mpirun has ended
_HANDLER_S = 0.1  # for a script's own handler of Ctrl-Z
_SLURM_ENDS_S = 2.0  # SLURM's SIGTERM to a whole job comes right after a SIGCONT


class _Stage(enum.IntEnum):
    """How far the job has been pushed towards its end."""

    RUNNING = 0
    ASKED = 1  # the ranks were told, or failed by themselves: mpirun should end soon
    TERMINATED = 2  # SIGTERM went to mpirun
    KILLED = 3  # SIGKILL went to all


def supervise(plan: Plan) -> Verdict:
    """Run the job to its end. Messages of the verdict are not printed here."""
    with tempfile.TemporaryDirectory(prefix="fuelrun-", ignore_cleanup_errors=True) as folder, Signals() as signals:
        return _Supervision(plan, Path(folder), signals).run()


class _Supervision:
    def __init__(self, plan: Plan, folder: Path, signals: Signals) -> None:
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
        self._streams = Streams(plan.engine.banners, verbose=plan.options.verbose)
        self._losses: tuple[Loss, ...] = ()
        self._mpirun_over: float | None = None
        self._channel: Channel | None = None
        if plan.reachable_at:
            from fuelrun.launch.channel import Channel, heartbeat_of

            heartbeat = heartbeat_of({**plan.environ, **plan.added})
            self._channel = Channel(plan.reachable_at, folder, plan.ranks, heartbeat)

    def run(self) -> Verdict:
        environ = {
            **self._plan.environ,
            **self._plan.added,
            JOB_ID: self._job_id,
            SUPERVISOR: f"{self._host}:{os.getpid()}",
            **standard_input.variables(self._host),
        }
        if self._channel is not None:
            environ |= self._channel.variables()
            self._channel.start()
        environ.pop(JOB_DIR, None)
        environ[JOB_DIR] = str(self._folder)  # last: Hydra 5.0 never passes the last variable on, and this is for here
        try:
            self._mpirun = subprocess.Popen(
                self._plan.command,
                env=environ,
                # Where rank 0 may be on another machine, mpirun is left to forward what it can.
                stdin=None
                if self._plan.reachable_at or standard_input.STANDARD_INPUT not in environ
                else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # the terminal's Ctrl-C comes to us alone, and we pass it on
                preexec_fn=processes.ending_with_parent(),
            )
        except OSError as error:
            raise LaunchError(f"cannot start {self._plan.command[0]}: {error.strerror}") from None
        try:
            status = self._watch()
        finally:
            self._kill_leftovers()
            if self._channel is not None:
                self._channel.close()
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
            messages=self._streams.messages,
            losses=self._losses,
            heartbeat=self._channel.heartbeat if self._channel is not None else 0,
        )

    def _watch(self) -> int:
        """Until mpirun has ended and its output is through; returns its status."""
        over: float | None = None
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._signals.fd, selectors.EVENT_READ)
            self._streams.watch(self._mpirun, selector)
            while True:
                for key, _ in selector.select(self._pause()):
                    if isinstance(key.data, Watch):
                        self._note_end(key.data)
                    elif key.data is not None:
                        self._learn(self._streams.copy(key, selector))
                self._streams.release_overdue()
                if self._streams.reader_gone and self._stopped_by is None:
                    self._stop(signal.SIGPIPE, signal.SIGTERM)
                taken = self._signals.take()
                if signal.SIGCONT in taken:
                    self._continued_at = time.monotonic()
                for number in taken:
                    self._signal(number)
                status = self._mpirun.poll()
                if status is None or self._others_live():
                    self._look()
                    self._push()
                    continue
                if over is None:
                    over = time.monotonic()
                    self._note_losses()
                    self._kill_leftovers()
                if not self._streams.open or time.monotonic() - over > _DRAIN_S:
                    break
        self._streams.release_all()
        return status

    def _others_live(self) -> bool:
        """Whether mpirun has ended, but ranks on other machines have not, and why is not known yet.

        Open MPI's mpirun ends with status 0 when one of its daemons is gone. What the ranks' connections then tell
        comes at once, or with the next missing sign of life.
        """
        if self._channel is None or self._stage is not _Stage.RUNNING or not self._channel.living:
            return False
        self._mpirun_over = self._mpirun_over or time.monotonic()
        return time.monotonic() - self._mpirun_over < self._channel.heartbeat + 1

    def _pause(self) -> float:
        starting = len(self._records) < self._plan.ranks
        if starting or self._stage is not _Stage.RUNNING or self._streams.holding:
            return 0.05
        return 0.2

    def _learn(self, messages: list[str]) -> None:
        """How a rank ended, from what mpirun says about it."""
        for message in messages:
            if self._stage < _Stage.TERMINATED:  # later deaths are our own doing
                self._death = self._death or self._plan.engine.death(message)

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
            self._streams.write(2, first.report.encode("utf-8", "backslashreplace"))

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
        self._note_losses()
        if self._all_gone and self._stage is _Stage.ASKED and self._next_push is not None:
            # Whatever time the scripts were given, they need no more of it.
            self._next_push = min(self._next_push, time.monotonic() + _MPIRUN_ACTS_S)
        if self._stage is not _Stage.RUNNING:
            return
        self._look_for_deserters()
        if self._losses or self._reported or vanished or self._all_gone or self._deserters:
            self._stage, self._next_push = _Stage.ASKED, time.monotonic() + _MPIRUN_ACTS_S

    def _note_losses(self) -> None:
        """Which ranks' connections have ended without a last word; later ones are our own doing."""
        if self._channel is not None and self._stage < _Stage.TERMINATED:
            self._losses = self._channel.losses

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
        if number == signal.SIGTSTP:
            self._sleep()
        elif number in PASSED_ON:
            self._send(number)
        elif self._stopped_by is None:
            self._stop(number, number)
        else:  # asked a second time: no more patience
            self._next_push = 0.0

    def _sleep(self) -> None:
        """Ctrl-Z: the ranks of this host stop, then this process, until it is to go on; its clocks stand still.

        Ranks of other machines wait for the others where they need them: one that is stopped could not be woken, for it
        would not read what is sent to it.
        """
        ranks = self._ranks_here()
        processes.send(ranks, signal.SIGTSTP)  # a script may have a handler
        time.sleep(_HANDLER_S)
        processes.send(ranks, signal.SIGSTOP)  # the kernel drops the former where nobody could wake the group
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        asleep = time.monotonic() - began
        processes.send(ranks, signal.SIGCONT)
        for clock in ("_next_push", "_missed_since", "_notice_at", "_mpirun_over"):
            if (at := getattr(self, clock)) is not None:
                setattr(self, clock, at + asleep)

    def _send(self, number: int) -> None:
        """Send a signal to every rank."""
        processes.send(self._ranks_here(), number)
        if self._channel is not None:
            self._channel.signal(number, besides=self._host)

    def _stop(self, reason: int, number: int) -> None:
        """Ask every rank to end, by signal `number`."""
        self._stopped_by = reason
        if not (number == signal.SIGTERM and self._told_by_slurm()):
            self._send(number)
        # Before all ranks are up there is no script yet that could want the time.
        up = len(self._records) == self._plan.ranks
        asked = [record.grace for record in self._records.values()] if number == signal.SIGTERM else []
        grace = max([self._plan.options.grace, *asked]) if up else 0.2
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
            self._streams.say(f"the ranks have {left:.0f} s more to end; Ctrl-C again ends them now")
        # While output still comes through, a job that is over is not over for its readers (`fuelrun … | less`).
        if now < self._next_push or (self._all_gone and now - self._streams.last_output < _MPIRUN_ACTS_S):
            return
        if self._stage is _Stage.ASKED:
            self._stage, self._next_push = _Stage.TERMINATED, time.monotonic() + _TERM_S
            processes.send([self._mpirun.pid], signal.SIGTERM)
        else:
            self._stage, self._next_push = _Stage.KILLED, time.monotonic() + _TERM_S
            if self._channel is not None:
                self._channel.end_ranks()
            processes.send([*processes.of_job(self._job_id), *self._ranks_here(), self._mpirun.pid], signal.SIGKILL)

    def _kill_leftovers(self) -> None:
        """End what outlived mpirun: ranks of a daemon that died, and helpers that scripts started."""
        if self._mpirun.poll() is None:  # an error of our own
            processes.send([self._mpirun.pid], signal.SIGKILL)
            self._mpirun.wait()
        if self._channel is not None:
            self._channel.end_ranks()
        left = processes.of_job(self._job_id)
        cleaners = [pid for pid in left if processes.name_of(pid) == processes.CLEANER]  # waits for our own death only
        processes.send(cleaners, signal.SIGKILL)
        left = [pid for pid in left if pid not in cleaners]
        if self._plan.options.verbose and (named := {p: n for p in left if (n := processes.name_of(p)) not in OWN}):
            names = ", ".join(f"{pid} ({name})" for pid, name in named.items())
            print(f"fuelrun: ending processes that the job left behind: {names}", file=sys.stderr)  # noqa: T201
        processes.send(left, signal.SIGTERM)
        deadline = time.monotonic() + _TERM_S / 2
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = processes.of_job(self._job_id)
        processes.send(left, signal.SIGKILL)
