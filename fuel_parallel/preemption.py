"""Making room for another job: save, end, and be started again later.

A scheduler says beforehand that it wants a job's machines: SIGTERM, and SIGKILL some time later; or SIGUSR1 ahead of
the time limit. Ranks hear a signal at different moments of their script, and some may not hear it at all, but a
checkpoint needs all of them at the same step. So a signal is only noted, and the ranks agree where the script says that
a step is over:

    notice = fp.on_preempt(lambda: save(model, optimizer))
    for step in range(steps):
        train(step)
        notice.check()          # save() on every rank, if any of them was told; then the job ends with status 75

`check` is a collective of a few microseconds. A rank inside of an MPI call hears of the signal when the call is over.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np

from fuel_parallel import failure
from fuel_parallel.arguments import checked
from fuel_parallel.comm import Communicator, ReduceOp
from fuel_parallel.comm.entries import Entry
from fuel_parallel.comm.world import init
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy import effects

_ENTRY = Entry("check for preemption")


@checked
def on_preempt(
    callback: Callable[[], object],
    *,
    signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
    grace: float = 60.0,
    comm: Communicator | None = None,
) -> Preemption:
    """From here on the signals are noted; see the module's text. To be called by every rank, in the main thread.

    Args:
        callback: Called by `check` on every rank after one of them got a signal. It may use collectives.
        signals: What the scheduler sends.
        grace: Seconds that fuelrun gives the ranks after SIGTERM before it ends them, if `--grace` is less. A scheduler
            has a time of its own.
        comm: The ranks that end together; None for all.

    Raises:
        ArgumentError: For a signal that cannot be caught, or outside of the main thread.
    """
    return Preemption(callback, tuple(signals), grace, init() if comm is None else comm)


class Preemption:
    """What `on_preempt` returns. As a context manager it gives the signals back at the end."""

    def __init__(
        self, callback: Callable[[], object], signals: tuple[int, ...], grace: float, comm: Communicator
    ) -> None:
        self._callback = callback
        self._comm = comm
        self._told = 0
        self._earlier: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            raise ArgumentError("on_preempt: Python lets only the main thread wait for signals; call it there")
        for number in signals:
            try:
                self._earlier[number] = signal.signal(number, self._note)
            except (ValueError, OSError):
                self.close()
                raise ArgumentError(f"on_preempt: signal {number} cannot be caught; use SIGTERM or SIGUSR1") from None
        failure.tell(grace=grace)

    @property
    def told(self) -> bool:
        """Whether this rank has got a signal. Others may not have: `check` says what holds for all."""
        return self._told != 0

    def check(self) -> None:
        """Where a step is over: if any rank was told to make room, all call the callback and end with status 75.

        A collective call, made at once. Pending sends are started first.
        """
        number = self._agreed()
        if not number:
            return
        self._callback()
        self._comm.barrier()  # nobody ends while another still saves
        name = signal.Signals(number).name
        failure.reasons[failure.PREEMPTED] = f"made room on {name}, after saving"
        sys.exit(failure.PREEMPTED)

    def close(self) -> None:
        """Gives the signals back to what they were for."""
        for number, handler in self._earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._earlier.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _note(self, number: int, _: FrameType | None) -> None:
        self._told = self._told or number

    def _agreed(self) -> int:
        """The signal that some rank got; 0 if none did."""
        if self._comm.world_size == 1:
            return self._told
        effects.run_pending()
        with self._comm.together(_ENTRY):
            told = np.array([self._told], np.int64)
            return int(self._comm.transport.all_reduce(told, ReduceOp.MAX, told)[0])
