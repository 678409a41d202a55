"""The rank's end of the channel to a fuelrun on another machine: records go out, signals and the order to end come in.

A rank whose channel ends is alone: fuelrun is gone, or the way to it is cut. Then it ends itself, what it has started
here, and the daemon of the MPI that started it, which may otherwise wait for a lost link for a quarter of an hour.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from typing import NoReturn

from fuel_parallel.errors import LaunchError
from fuelrun.launch import processes

_CONNECT_S = 10.0
_GRACE_S = 1.0  # what has just been printed may still pass
_DAEMONS = ("prted", "orted", "hydra_pmi_proxy", "hydra_bstrap_pr")  # as /proc has them, cut at 15 characters


class Reporting:
    """A connection to the fuelrun at `channel`, ADDRESS:PORT:TOKEN; to be called with records (`failure.install`)."""

    def __init__(self, channel: str, rank: int, heartbeat: int, job_id: str) -> None:
        self._job_id = job_id
        self._pid = os.getpid()
        self._lock = threading.Lock()
        address, port, token = channel.split(":")
        try:
            self._socket = socket.create_connection((address, int(port)), timeout=_CONNECT_S)
        except OSError as error:
            raise LaunchError(
                f"{socket.gethostname()} cannot reach fuelrun at {address}:{port} ({error.strerror or error}): "
                "a firewall between the machines may be in the way, or --interface names a better way"
            ) from None
        self._socket.settimeout(None)
        keep_alive(self._socket, heartbeat)
        # A copy in a forked child would keep the connection open when this rank is gone.
        os.register_at_fork(after_in_child=self._socket.close)
        self._send({"token": token, "rank": rank, "pid": self._pid, "host": socket.gethostname()})
        threading.Thread(target=self._listen, name="fuelrun-channel", daemon=True).start()

    def __call__(self, record: Mapping[str, object]) -> bool:
        """Send a record; False when it cannot be."""
        return self._send({"record": record})

    def note(self, text: str) -> None:
        """Say what was noticed on this machine."""
        self._send({"note": text})

    def _send(self, message: Mapping[str, object]) -> bool:
        try:
            with self._lock:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def _listen(self) -> None:
        data = b""
        while True:
            try:
                new = self._socket.recv(4096)
            except OSError:
                new = b""
            *lines, data = (data + new).split(b"\n")
            for line in lines:
                word, _, rest = line.partition(b" ")
                if word == b"signal" and rest.isdigit():
                    os.kill(self._pid, int(rest))
                elif word == b"end":
                    end_here(self._job_id)
            if not new:
                break
        if os.getpid() == self._pid:  # not in a child that was forked from this rank
            time.sleep(_GRACE_S)
            end_here(self._job_id)


def end_here(job_id: str) -> NoReturn:
    """End this rank, at once and without a word, with all that the job has on this machine."""
    parent = os.getppid()
    if processes.name_of(parent) in _DAEMONS:
        processes.send([parent], signal.SIGKILL)
    left = processes.of_job(job_id) if job_id else []
    processes.send([pid for pid in left if processes.name_of(pid) not in processes.OWN], signal.SIGKILL)
    while True:
        os.kill(os.getpid(), signal.SIGKILL)


def keep_alive(connection: socket.socket, seconds: int) -> None:
    """Let the kernel end a connection whose other side gives no sign of life for so many seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = max(1, seconds // 2)
    for name, value in {
        "TCP_KEEPIDLE": idle,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": max(1, seconds - idle),
        "TCP_USER_TIMEOUT": 1000 * seconds,
    }.items():
        with contextlib.suppress(AttributeError, OSError):  # not every system has each of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
