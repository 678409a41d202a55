"""The watchdog: ends a job in which a collective waits for longer than it may, and says who keeps it waiting.

A thread in each rank wakes up now and then. It writes on the node's board where the script is and what it does, so that
others can say it when this process is stopped, deep in a C call, or gone. When this rank has been in one and the same
collective, barrier or receive for `FUEL_TIMEOUT` seconds (300; 0 is for ever), it reports and ends the job with exit
status 124. Time in which the process could not run, as when a laptop sleeps, does not count.

The report tells of all ranks of this node which have arrived and which have not, with line, last collective and
process. Their Python stacks go into `FUEL_LOG_DIR`: a signal makes each rank write its own, from inside of whatever it
does, into a file in memory that the reporting rank reads. A stopped process cannot, and is named as such.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fuel_parallel import failure
from fuel_parallel.comm import guard
from fuel_parallel.comm.board import Board, Seen
from fuel_parallel.comm.guard import Guard
from fuel_parallel.comm.mismatch import in_words
from fuel_parallel.errors import ArgumentError, CollectiveTimeoutError
from fuel_parallel.lazy.node import describe_line, line_of

if TYPE_CHECKING:
    from types import FrameType

TIMEOUT = "FUEL_TIMEOUT"
LOG_DIR = "FUEL_LOG_DIR"
DEFAULT_S = 300.0
DEFAULT_LOG_DIR = "fuelrun-logs"

_TURN_S = 1.0
_STACKS_S = 0.3  # how long the others get to write their stacks
_NEXT_IN_LINE_S = 1.5  # the first rank that waits reports; should it fail to, the next does


def start(board: Board) -> None:
    """Starts this rank's watchdog."""
    timeout = timeout_of(os.environ.get(TIMEOUT, ""))
    board.write(pid=os.getpid(), stack=_listen())
    watchdog = _Watchdog(board, timeout)
    threading.Thread(target=watchdog.run, name="fuel-watchdog", daemon=True).start()


def timeout_of(text: str) -> float:
    """The seconds that FUEL_TIMEOUT says; infinity for 0."""
    try:
        seconds = float(text or DEFAULT_S)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ArgumentError(f"{TIMEOUT} takes seconds, 0 or more (0: wait for ever); got {text!r}")
    return seconds or float("inf")


def _stack_signal() -> int:
    """A signal that neither Python, an MPI nor a scheduler uses; 0 where there are no such signals."""
    return signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else 0


def _listen() -> int:
    """Writes this process's stack when asked by a signal; returns the descriptor of the file, -1 for none."""
    number = _stack_signal()
    if not number or not hasattr(os, "memfd_create"):
        return -1
    with contextlib.suppress(OSError):
        descriptor = os.memfd_create("fuel-parallel-stack")
        faulthandler.register(number, descriptor, all_threads=True)
        return descriptor
    return -1


class _Watchdog:
    def __init__(self, board: Board, timeout: float) -> None:
        self.board, self.timeout = board, timeout
        self.turn = min(_TURN_S, timeout / 20)
        self.process = os.getpid()
        self.since: tuple[object, ...] | None = None
        self.waited = 0.0

    def run(self) -> None:
        """Until the process ends."""
        before = time.monotonic()
        self._write(None)
        while True:
            time.sleep(self.turn)
            now = time.monotonic()
            busy = next((g for g in guard.guards if g.inside >= 0 or g.receiving), None)
            self._write(busy)
            state = None if busy is None else (busy, busy.inside, busy.receiving)
            self.waited = self.waited + min(now - before, 2 * self.turn) if state and state == self.since else 0.0
            self.since, before = state, now
            if busy is not None and self.waited > self.timeout + self._patience(busy):
                failure.end_rank(CollectiveTimeoutError(self._report(busy)))

    def _write(self, busy: Guard | None) -> None:
        last = guard.latest.last() if guard.latest is not None else ""
        doing = f"{busy.doing()} of communicator '{busy.name}'" if busy else ""
        line = "the end of its script" if guard.ended else script_line_of_main_thread()
        self.board.say(line=line, last=last, doing=doing)

    def _patience(self, busy: Guard) -> float:
        """The first rank that has arrived reports at once; the others leave it to that one for a while."""
        waiting = [rank for rank in busy.world_ranks if rank not in self._missing(busy)]
        me = self.board.ranks[self.board.mine]
        return 0.0 if not waiting or me == min(waiting) else _NEXT_IN_LINE_S

    def _missing(self, busy: Guard) -> list[int]:
        """World ranks that have not arrived, or cannot take part since their process is stopped or gone."""
        missing = [busy.world_ranks[rank] for rank in busy.awaited()]
        seen = [one for rank in busy.world_ranks if (one := self.board.read(rank)) is not None]
        return sorted({*missing, *(one.rank for one in seen if state_of(one.pid) != "")})

    def _report(self, busy: Guard) -> str:
        missing = self._missing(busy)
        arrived = [rank for rank in busy.world_ranks if rank not in missing]
        ranks = [one for rank in self.board.ranks if (one := self.board.read(rank)) is not None]
        where = _save_stacks(ranks, self.board.ranks[self.board.mine])
        lines = [
            f"{busy.doing()} of communicator '{busy.name}' has waited for {self.timeout:g} s (--timeout)",
            f"  arrived: {in_words(arrived)}",
            f"  missing: {in_words(missing)}" if missing else f"  missing: {busy.nobody_is_missing()}",
            *(_account(one) for one in ranks),
            *([f"  Python stacks: {where}"] if where else []),
        ]
        return "\n".join(lines)


def _account(one: Seen) -> str:
    state = state_of(one.pid)
    process = f"process {one.pid} on {one.host}{f', {state}' if state else ''}"
    last = f"; last finished {one.last}" if one.last else "; no collective finished yet"
    doing = f"; in {one.doing}" if one.doing else ""
    return f"  rank {one.rank} ({process}): at {one.line or 'an unknown line'}{doing}{last}"


def script_line_of_main_thread() -> str:
    """Where the script is now."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    line = line_of(frame)
    return "" if line is None or line[0].co_filename.startswith("<") else describe_line(line)


def state_of(pid: int) -> str:
    """What keeps a process of this host from running; empty if nothing does."""
    if not failure.lives(pid):
        return "gone"
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": "dead"}.get(letter, "")


def _save_stacks(ranks: Sequence[Seen], me: int) -> str:
    """Writes the Python stacks of the ranks into the log directory; returns its name, empty if none could be had."""
    number = _stack_signal()
    asked = [one for one in ranks if one.stack >= 0]
    for one in asked:
        with contextlib.suppress(OSError):
            os.kill(one.pid, number)
    time.sleep(_STACKS_S)
    folder = Path(os.environ.get(LOG_DIR) or DEFAULT_LOG_DIR).absolute()
    folder /= f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-rank-{me}"
    saved = False
    for one in asked:
        with contextlib.suppress(OSError):
            stack = Path(f"/proc/{one.pid}/fd/{one.stack}").read_bytes()
            text = stack or f"no stack: the process is {state_of(one.pid) or 'not listening'}\n".encode()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"stack-rank-{one.rank}.txt").write_bytes(text)
            saved = True
    return os.path.relpath(folder) if saved else ""
