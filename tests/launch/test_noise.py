"""What is taken out of the ranks' output, and what never is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fuelrun.launch.engine import Death
from fuelrun.launch.mpich import Mpich
from fuelrun.launch.noise import NoiseFilter
from fuelrun.launch.openmpi import OpenMpi

RULE = b"-" * 74 + b"\n"
OPEN_MPI = OpenMpi(Path("mpirun"), "5.0.11")
HYDRA = Mpich(Path("mpiexec"), "5.0.2")
ABORT = RULE + b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n\nNOTE: it says more\n" + RULE
SIGNAL = RULE + b"prterun noticed that process rank 1 with PID 62 on node n exited on\nsignal 9 (Killed).\n" + RULE
NONZERO = (
    RULE
    + b"prterun detected that one or more processes exited with non-zero status,\nthus causing the job to end.\n\n"
    + b"   Process name: [prterun-n-6235@1,1]\n   Exit code:    9\n"
    + RULE
)
PMIX = b"[n:100] PMIX ERROR: PMIX_ERR_UNREACH in file a/b.c at line 103\n"
BAD = (
    b"\n" + b"=" * 83 + b"\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 63 RUNNING AT n\n"
    b"=   EXIT CODE: 9\n" + b"=" * 83 + b"\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
    b"This typically refers to a problem with your application.\n"
    b"Please see the FAQ page for debugging suggestions\n"
)
CALLED = b"Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 7) - process 1\n"
PROXY = b"[proxy:0@n] HYDU_sock_write (a/sock.c:250): write error (Bad file descriptor)\n"
MESSAGES = [(OPEN_MPI, text) for text in (ABORT, SIGNAL, NONZERO, PMIX)]
MESSAGES += [(HYDRA, text) for text in (BAD, CALLED, PROXY)]


@pytest.mark.parametrize(("engine", "message"), MESSAGES)
@pytest.mark.parametrize("piece", [1, 7, 100_000])
def test_a_message_is_taken_out_in_whatever_pieces_it_comes(engine, message: bytes, piece: int) -> None:
    if message in (PMIX, CALLED, PROXY):
        piece = 100_000  # one line, which comes in one write
    noise = NoiseFilter(engine.banners)
    data = b"epoch 1\n" + message + b"epoch 2\n"
    passed = b"".join(noise.feed(data[at : at + piece]) for at in range(0, len(data), piece)) + noise.end()
    assert (passed, len(noise.taken)) == (b"epoch 1\nepoch 2\n", 1)


@pytest.mark.parametrize(
    "text",
    [
        RULE + b"results\n" + RULE,
        RULE + RULE + RULE,
        b"\n\n\n",
        b"\n" + b"=" * 83 + b"\n=   GOOD\n",
        b"Abort(7) I say\n",
        b"50 %\r60 %\r",
        b"x" * 200_000,
        RULE + b"MPI_ABORT was invoked on rank 1, I said, and went on\n",
        b"no end of line" + RULE,
    ],
)
@pytest.mark.parametrize("engine", [OPEN_MPI, HYDRA])
@pytest.mark.parametrize("piece", [1, 100_000])
def test_what_a_script_prints_passes(engine, text: bytes, piece: int) -> None:
    noise = NoiseFilter(engine.banners)
    step = piece if len(text) < 1000 else 1000
    passed = b"".join(noise.feed(text[at : at + step]) for at in range(0, len(text), step)) + noise.end()
    assert (passed, noise.taken) == (text, [])


def test_a_progress_bar_passes_at_once() -> None:
    noise = NoiseFilter(OPEN_MPI.banners)
    assert noise.feed(b"\r50 %") == b"\r50 %"


def test_an_unfinished_message_is_not_kept_for_ever() -> None:
    noise = NoiseFilter(OPEN_MPI.banners)
    assert noise.feed(RULE) == b""
    assert noise.overdue() == b""
    time.sleep(0.3)
    assert noise.overdue() == RULE


@pytest.mark.parametrize(
    ("engine", "message", "death"),
    [
        (OPEN_MPI, ABORT, Death(1, aborted=True)),
        (OPEN_MPI, SIGNAL, Death(1, signal=9)),
        (OPEN_MPI, NONZERO, Death(1)),
        (HYDRA, BAD, Death(signal=9)),
        (HYDRA, CALLED, Death(1, aborted=True)),
    ],
)
def test_what_a_message_says_about_the_rank(engine, message: bytes, death: Death) -> None:
    assert engine.death(message.decode()) == death
