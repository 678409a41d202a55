"""What mpirun and the ranks print, on its way through fuelrun to our own standard output and standard error."""

from __future__ import annotations

import os
import selectors
import subprocess
import time

from fuelrun.launch.engine import Banner
from fuelrun.launch.noise import NoiseFilter


class Streams:
    """Copies the output of a job and takes mpirun's own messages out of it.

    Args:
        banners: The shapes of those messages.
        verbose: Show them as well.
    """

    def __init__(self, banners: tuple[Banner, ...], *, verbose: bool) -> None:
        self._verbose = verbose
        self._noise = {fd: NoiseFilter(banners) for fd in (1, 2)}
        self.open = 0  # pipes whose end has not come
        self.last_output = 0.0
        self.reader_gone = False  # nobody reads our output any more

    def watch(self, process: subprocess.Popen[bytes], selector: selectors.BaseSelector) -> None:
        """Have `selector` wait for output; the data of its keys is for `copy`."""
        for pipe, target in ((process.stdout, 1), (process.stderr, 2)):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, target)
                self.open += 1

    def copy(self, key: selectors.SelectorKey, selector: selectors.BaseSelector) -> list[str]:
        """Copy what has come, or stop waiting for more; returns mpirun's messages among it."""
        data = os.read(key.fd, 1 << 16)
        if not data:
            selector.unregister(key.fileobj)
            self.open -= 1
            return []
        noise = self._noise[key.data]
        known = len(noise.taken)
        self.write(key.data, noise.feed(data))
        self.last_output = time.monotonic()
        messages = noise.taken[known:]
        for message in messages if self._verbose else ():
            self.write(key.data, message.encode())
        return messages

    @property
    def holding(self) -> bool:
        """Whether something is kept back that may turn out to be a message."""
        return any(noise.holding for noise in self._noise.values())

    @property
    def messages(self) -> tuple[str, ...]:
        """All of mpirun's messages so far."""
        return tuple(text for noise in self._noise.values() for text in noise.taken if text.strip())

    def release_overdue(self) -> None:
        """Write what was kept back for too long; to be called now and then."""
        for fd, noise in self._noise.items():
            self.write(fd, noise.overdue())

    def release_all(self) -> None:
        """Write what was kept back: nothing more will come."""
        for fd, noise in self._noise.items():
            self.write(fd, noise.end())

    def write(self, fd: int, data: bytes) -> None:
        """Write to our own standard output (1) or error (2)."""
        while data and not self.reader_gone:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                time.sleep(0.005)
            except BrokenPipeError:  # `fuelrun … | head` has seen enough
                self.reader_gone = True

    def say(self, text: str) -> None:
        """A line of fuelrun's own, on standard error."""
        self.write(2, f"fuelrun: {text}\n".encode())
