"""Where ranks of other libraries meet: the same place for all ranks of a job, another for other jobs."""

from __future__ import annotations

import socket

import pytest

from fuel_parallel.environment import LauncherClaim
from fuelrun.launch import rendezvous
from fuelrun.launch.rendezvous import of_a_rank, of_this_machine

MEET = """
import os, socket, time
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(place) as server:
        server.accept()[0].sendall(b"met")
else:
    deadline = time.monotonic() + 30
    while True:
        try:
            print(socket.create_connection(place).recv(3).decode())
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
"""


def claim(rank: int, ranks: int, here: int | None) -> LauncherClaim:
    return LauncherClaim("a launcher", rank, ranks, None, here, ())


@pytest.mark.parametrize("under_mpirun", [False, True])
def test_ranks_meet(fuelrun, mpirun: str, under_mpirun: bool) -> None:
    script = fuelrun.write(MEET)
    words, command = ((script,), (mpirun, "-n", "2")) if under_mpirun else (("-n", "2", script), ())
    done = fuelrun.run(*words, command=command)
    assert (done.returncode, done.stdout) == (0, "met\n"), done.stderr


def test_a_port_that_is_free_is_taken_and_the_users_is_kept() -> None:
    found = of_this_machine({})
    with socket.create_server(("127.0.0.1", int(found["MASTER_PORT"]))):
        pass
    assert of_this_machine({"MASTER_PORT": "1234"}) == {}
    assert of_this_machine({"MASTER_PORT": "1234", "FUEL_JOB_ID": "outer"})["MASTER_PORT"] != "1234"


def test_all_ranks_of_a_slurm_step_find_the_same_place() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[03-04]"}
    first, last = (of_a_rank(claim(rank, 4, 2), {**environ, "SLURM_PROCID": str(rank)}) for rank in (0, 3))
    assert first == last
    assert first["MASTER_ADDR"] == "n03"
    assert rendezvous.FIRST_PORT <= int(first["MASTER_PORT"]) < rendezvous.FIRST_PORT + rendezvous.PORTS
    assert of_a_rank(claim(0, 4, 2), {**environ, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != first["MASTER_PORT"]


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert of_a_rank(claim(0, 4, 2), {"PMIX_NAMESPACE": "prterun-1"}) == {}  # who is the first host?
    assert of_a_rank(claim(0, 1, 1), {}) == {}
    assert of_a_rank(claim(0, 2, 2), {"MASTER_ADDR": "mine"}) == {}
    assert of_a_rank(claim(0, 2, 2), {})["MASTER_ADDR"] == "127.0.0.1"
