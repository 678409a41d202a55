"""Signals to fuelrun, as a queue that its loop can wait for."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Signals to this process, as a queue and a file descriptor that `select` can wait for."""

    def __init__(self) -> None:
        self.pending: list[int] = []
        self._earlier: dict[int, Any] = {}
        self.fd, self._wake = os.pipe()

    def __enter__(self) -> Self:
        for end in (self.fd, self._wake):
            os.set_blocking(end, False)
        self._earlier_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in (*STOPPING, *PASSED_ON, signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD):
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
