"""The connection between ranks and a fuelrun on another machine, here over this one's loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fuel_parallel.errors import LaunchError
from fuelrun.launch.channel import LONGEST_HELLO, Channel, heartbeat_of
from fuelrun.launch.records import RankRecord, read_records

RANK = """
import os, sys, time
from fuel_parallel import failure
from fuelrun.launch.reporting import Reporting
reporting = Reporting(os.environ["FUEL_CHANNEL"], int(sys.argv[1]), 10, "")
failure.install(int(sys.argv[1]), 2, record_to=reporting)
"""


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    made = Channel("127.0.0.1", tmp_path, 2, 10)
    made.start()
    yield made
    made.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)


def rank(channel: Channel, number: int, then: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RANK + then, str(number)], env={**os.environ, **channel.variables()})


def connect(channel: Channel, *lines: bytes) -> socket.socket:
    address, port, _ = channel.variables()["FUEL_CHANNEL"].split(":")
    connection = socket.create_connection((address, int(port)), timeout=10)
    connection.sendall(b"".join(lines))
    return connection


def hello(channel: Channel, rank: int = 0) -> bytes:
    token = channel.variables()["FUEL_CHANNEL"].rpartition(":")[2]
    return json.dumps({"token": token, "rank": rank, "pid": 7, "host": "n1"}).encode() + b"\n"


def test_records_arrive_as_those_of_this_machine_do(channel: Channel, tmp_path: Path) -> None:
    begin = time.time()
    done = rank(channel, 1, "failure.write_record(0)")
    assert done.wait(30) == 0
    until(lambda: 1 in read_records(tmp_path) and read_records(tmp_path)[1].code == 0)
    record = read_records(tmp_path)[1]
    assert (record.pid, record.host) == (done.pid, socket.gethostname())
    assert begin < (record.ended or 0) < time.time()  # by our clock
    until(lambda: channel.living == ())
    assert channel.losses == ()


def test_a_rank_that_goes_without_a_word_is_lost(channel: Channel, tmp_path: Path) -> None:
    gone = rank(channel, 0, "time.sleep(60)")
    until(lambda: channel.living == (0,))
    gone.kill()
    gone.wait()
    until(lambda: channel.losses)
    (loss,) = channel.losses
    assert (loss.rank, loss.pid, loss.host, loss.silent) == (0, gone.pid, socket.gethostname(), False)
    assert read_records(tmp_path)[0].code is None


def test_a_child_that_was_forked_does_not_keep_a_rank_alive(channel: Channel) -> None:
    gone = rank(channel, 0, "pid = os.fork()\nif not pid: time.sleep(5); os._exit(0)\ntime.sleep(60)")
    until(lambda: channel.living == (0,))
    time.sleep(0.3)
    gone.kill()
    gone.wait()
    until(lambda: channel.losses)


def test_signals_and_the_order_to_end_go_to_the_ranks(channel: Channel, tmp_path: Path) -> None:
    up = tmp_path / "up"
    ready = f"import signal\nsignal.signal(15, lambda *_: sys.exit(3))\nopen({str(up)!r}, 'w')\ntime.sleep(60)"
    heard, told = rank(channel, 0, ready), rank(channel, 1, "time.sleep(60)")
    until(lambda: up.exists() and len(channel.living) == 2)
    channel.signal(signal.SIGTERM, besides=socket.gethostname())  # those are reached without it
    time.sleep(0.2)
    assert (heard.poll(), told.poll()) == (None, None)
    channel.signal(signal.SIGTERM, besides="another machine")
    assert (heard.wait(10), told.wait(10)) == (3, -signal.SIGTERM)


def test_the_order_to_end_is_at_once(channel: Channel) -> None:
    told = rank(channel, 0, "time.sleep(60)")
    until(lambda: channel.living == (0,))
    again = rank(channel, 0, "time.sleep(60)")  # its number is taken: it is not heard, and ends
    assert again.wait(10) == -signal.SIGKILL
    channel.end_ranks()
    assert told.wait(5) == -signal.SIGKILL


def test_ranks_end_when_fuelrun_is_gone(tmp_path: Path) -> None:
    channel = Channel("127.0.0.1", tmp_path, 1, 10)
    channel.start()
    alone = rank(channel, 0, "time.sleep(60)")
    until(lambda: channel.living == (0,))
    channel.close()
    assert alone.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(
    "lines",
    [
        [b"GET / HTTP/1.1\r\n\r\n"],
        [b'{"token": "00", "rank": 0, "pid": 7, "host": "n1"}\n'],
        [b"x" * (LONGEST_HELLO + 1)],
        [b"\xff\n"],
        ["hello", b'{"record": {"rank": 1}}\n'],
        ["hello", b"[]\n"],
        ["hello of rank 2"],
    ],
)
def test_nonsense_and_strangers_are_dropped(channel: Channel, tmp_path: Path, lines: list[bytes | str]) -> None:
    words = {"hello": hello(channel), "hello of rank 2": hello(channel, 2)}
    sent = [words[line] if isinstance(line, str) else line for line in lines]
    with connect(channel, *sent) as stranger, contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    assert read_records(tmp_path) == {}
    good = rank(channel, 1, "failure.write_record(0)")
    assert good.wait(30) == 0
    until(lambda: 1 in read_records(tmp_path))


def test_a_rank_cannot_speak_for_another(channel: Channel, tmp_path: Path) -> None:
    record = RankRecord(1, 7, "n1", 0.0, None, 0, "")
    line = b'{"record": ' + json.dumps({name: getattr(record, name) for name in record.__struct_fields__}).encode()
    with connect(channel, hello(channel, 0), line + b"}\n") as liar:
        assert liar.recv(1) == b""
    assert read_records(tmp_path) == {}


def test_the_token_is_in_no_command_line(channel: Channel) -> None:
    token = channel.variables()["FUEL_CHANNEL"].rpartition(":")[2]
    assert len(token) == 32
    assert not any(token in word for word in sys.argv)


@pytest.mark.parametrize("text", ["1", "0", "-3", "4.5", "soon", "9999"])
def test_a_heartbeat_is_whole_seconds(text: str) -> None:
    with pytest.raises(LaunchError, match="expected whole seconds from 2 to 3600"):
        heartbeat_of({"FUEL_HEARTBEAT": text})


def test_an_address_of_another_machine_cannot_be_listened_on(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.1"):
        Channel("192.0.2.1", tmp_path, 1, 10)
