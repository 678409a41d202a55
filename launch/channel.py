"""How ranks on other machines leave word: fuelrun listens, and every rank holds a connection to it while it lives.

What comes over a connection is put into the job directory like the records of ranks of this machine, so the rest of
fuelrun knows no difference. And the connection itself tells what no MPI tells reliably:

- It is closed without a last word: that rank is dead.
- It is silent, though the kernel has asked for a sign of life several times (TCP keep-alive, which is answered by the
  other kernel even while a rank computes, holds Python's lock or is stopped): its machine is down or cut off.

The other way it carries signals, and the order to end. A rank that loses it ends itself (`reporting`).

Whoever connects must name the job's random token first, in a line of limited length and within seconds; others are
dropped. The token reaches the ranks through their environment and is on no command line. The connection is not
encrypted, like those of the MPIs.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fuel_parallel.errors import LaunchError
from fuelrun.launch.rank import CHANNEL, HEARTBEAT
from fuelrun.launch.records import Loss, RankRecord
from fuelrun.launch.reporting import keep_alive

LONGEST_HELLO = 1 << 10
LONGEST_LINE = 1 << 22
_HELLO_WITHIN_S = 10.0
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of a rank."""

    token: str
    rank: int
    pid: int
    host: str


class Message(msgspec.Struct, frozen=True):
    """Any other line: a record, or what the rank has noticed on its machine."""

    record: RankRecord | None = None
    note: str = ""


@dataclass
class _Peer:
    """One connection; `rank` is None until it has said who it is."""

    socket: socket.socket
    opened: float
    heard: float
    data: bytearray
    rank: int | None = None
    pid: int = 0
    host: str = ""
    ended: bool = False
    note: str = ""


class Channel:
    """Listens on `address` for the ranks of a job and writes their records to `folder`.

    Args:
        address: An address of this machine that the others can reach.
        folder: The job directory.
        ranks: Number of ranks.
        heartbeat: Seconds without a sign of life after which a machine counts as lost.
    """

    def __init__(self, address: str, folder: Path, ranks: int, heartbeat: int) -> None:
        self._folder = folder
        self._ranks = ranks
        self.heartbeat = heartbeat
        self._token = secrets.token_hex(16)
        self._peers: dict[socket.socket, _Peer] = {}
        self._by_rank: dict[int, _Peer] = {}
        self._losses: list[Loss] = []
        self._lock = threading.Lock()
        self._closing = False
        self._listener = socket.socket()
        try:
            self._listener.bind((address, 0))
            self._listener.listen(256)
        except OSError as error:
            self._listener.close()
            raise LaunchError(
                f"cannot listen on {address} for the ranks of other machines: {error.strerror}; "
                "--interface names the interface that leads to them"
            ) from None
        self._listener.setblocking(False)
        self._at = f"{address}:{self._listener.getsockname()[1]}"
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="fuelrun-channel", daemon=True)
        _allow_files(ranks + 64)

    def variables(self) -> dict[str, str]:
        """What a rank needs to know."""
        return {CHANNEL: f"{self._at}:{self._token}", HEARTBEAT: str(self.heartbeat)}

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    @property
    def losses(self) -> tuple[Loss, ...]:
        """Ranks that are gone without a last word, in the order in which that was noticed."""
        with self._lock:
            return tuple(self._losses)

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks whose connection is open and that have not said that they ended."""
        with self._lock:
            return tuple(rank for rank, peer in self._by_rank.items() if peer.socket in self._peers and not peer.ended)

    def signal(self, number: int, besides: str) -> None:
        """Send a signal to the ranks of all machines but one: its own are reached without a channel."""
        self._tell(f"signal {number}\n", besides)

    def end_ranks(self) -> None:
        """Have every rank end itself, and all that the job has left on its machine."""
        self._tell("end\n", "")

    def close(self) -> None:
        """Stop listening; ranks that still live see that as the end of the job."""
        if self._thread.is_alive():
            self._closing = True
            self._waker.send(b"!")
            self._thread.join()
        for peer in list(self._peers.values()):
            peer.socket.close()
        for end in (self._listener, self._wake, self._waker):
            end.close()

    def _tell(self, line: str, besides: str) -> None:
        with self._lock:
            peers = [peer for peer in self._peers.values() if peer.rank is not None and peer.host != besides]
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.socket.send(line.encode())

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while not self._closing:
                for key, _ in selector.select(1.0):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.data, _Peer) and not self._read(key.data):
                        self._drop(selector, key.data)
                for peer in self._unknown_since(time.monotonic() - _HELLO_WITHIN_S):
                    self._drop(selector, peer)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._peers) - len(self._by_rank) > self._ranks + 64:  # of strangers, who may wait outside
            connection.close()
            return
        connection.setblocking(False)
        keep_alive(connection, self.heartbeat)
        peer = _Peer(connection, time.monotonic(), time.time(), bytearray())
        with self._lock:
            self._peers[connection] = peer
        selector.register(connection, selectors.EVENT_READ, peer)

    def _unknown_since(self, time_limit: float) -> list[_Peer]:
        return [peer for peer in self._peers.values() if peer.rank is None and peer.opened < time_limit]

    def _read(self, peer: _Peer) -> bool:
        """Take what has come; False when that was the end, or nonsense."""
        try:
            data = peer.socket.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError as error:
            self._note_loss(peer, silent=error.errno in _SILENT)
            return False
        if not data:
            self._note_loss(peer, silent=False)
            return False
        peer.data += data
        peer.heard = time.time()
        while (end := peer.data.find(b"\n")) >= 0:
            line = bytes(peer.data[:end])
            del peer.data[: end + 1]
            if not self._take(peer, line):
                return False
        return len(peer.data) < (LONGEST_HELLO if peer.rank is None else LONGEST_LINE)

    def _take(self, peer: _Peer, line: bytes) -> bool:
        try:
            if peer.rank is None:
                return len(line) < LONGEST_HELLO and self._greet(peer, msgspec.json.decode(line, type=Hello))
            message = msgspec.json.decode(line, type=Message)
        except msgspec.MsgspecError:
            return False
        peer.note = message.note or peer.note
        record = message.record
        if record is None:
            return True
        if record.rank != peer.rank:
            return False
        if record.code is not None:
            peer.ended = True
            record = msgspec.structs.replace(record, ended=peer.heard)  # by this machine's clock
        path = self._folder / f"rank-{record.rank}.json"
        with contextlib.suppress(OSError):
            draft = path.with_suffix(".received")
            draft.write_bytes(msgspec.json.encode(record))
            draft.replace(path)
        return True

    def _greet(self, peer: _Peer, hello: Hello) -> bool:
        known = hmac.compare_digest(hello.token.encode(), self._token.encode())
        if not known or not 0 <= hello.rank < self._ranks or hello.rank in self._by_rank:
            return False
        peer.pid, peer.host = hello.pid, hello.host
        with self._lock:
            peer.rank = hello.rank
            self._by_rank[hello.rank] = peer
        return True

    def _note_loss(self, peer: _Peer, *, silent: bool) -> None:
        if peer.rank is None or (peer.ended and not silent):
            return
        with self._lock:
            self._losses.append(
                Loss(peer.rank, peer.pid, peer.host, silent, time.time(), heard=peer.heard, note=peer.note)
            )

    def _drop(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        selector.unregister(peer.socket)
        with self._lock:
            del self._peers[peer.socket]
        peer.socket.close()


def heartbeat_of(environ: os._Environ[str] | dict[str, str]) -> int:
    """FUEL_HEARTBEAT in whole seconds, 10 unless set. Raises LaunchError."""
    text = environ.get(HEARTBEAT, "10")
    if not text.isascii() or not text.isdigit() or not 2 <= int(text) <= 3600:
        raise LaunchError(
            f"{HEARTBEAT}={text}: expected whole seconds from 2 to 3600, after which a machine that gives no sign of "
            "life counts as lost"
        )
    return int(text)


def _allow_files(count: int) -> None:
    """A descriptor for each rank; the usual limit is 1024, though the machine allows more."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
