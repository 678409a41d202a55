"""Jobs over two machines: places of ranks, the way that messages take, and every way in which a machine is lost."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from fuelrun.launch.find import library

PLACES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "WISHED")
SUMS = f"""
import json, os, socket, sys
import fuel_parallel as fp, fuel_parallel.lazy as ft
world = fp.init()
total = world.all_reduce(ft.full((300_000,), float(world.rank + 1))).numpy()
print(json.dumps([socket.gethostname(), float(total.min()), float(total.max()), os.getcwd(), sys.argv[1:],
    [os.environ.get(name) for name in {PLACES}]]), flush=True)
"""
ENDLESS = """
import os, subprocess, time
import fuel_parallel as fp, fuel_parallel.lazy as ft
world = fp.init()
subprocess.Popen(["sleep", "500"], start_new_session=True)
with open(f"up-{world.rank}", "w") as file: file.write(str(os.getpid()))
while True: world.all_reduce(ft.ones(1000)).numpy()
"""
OPEN_MPI = library().flavour == "Open MPI"
HEARTBEAT_S = 3
LONG = os.environ.get("FUEL_STRESS_HOSTS")


def test_ranks_on_two_machines_add_up_and_know_their_places(network) -> None:
    script = network.write(SUMS)
    done = network.run("-H", f"{network.hosts}:2", "--env", "WISHED=2", script, "one argument")
    assert (done.returncode, done.stderr) == (0, "")
    said = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda words: words[-1][0])
    common = [6.0, 6.0, str(network.folder), ["one argument"]]
    assert said == [
        ["first", *common, ["0", "0", "1", "0", "10.77.0.1", "2"]],
        ["second", *common, ["1", "0", "2", "1", "10.77.0.1", "2"]],
        ["second", *common, ["2", "1", "2", "1", "10.77.0.1", "2"]],
    ]
    assert network.nobody_left_within(1)


def start(network, *words: str, **environ: str):
    """An endless job of three ranks, two on the second machine, that is in the middle of its work."""
    script = network.write(ENDLESS)
    settings = {"FUEL_HEARTBEAT": str(HEARTBEAT_S), **environ}
    process = network.start("-H", f"{network.hosts}:2", *words, script, **settings)
    network.wait_for("up-*", 3)
    time.sleep(0.3)
    return process


def ends(network, process, within: float) -> tuple[int, str]:
    begin = time.monotonic()
    _, err = process.communicate(timeout=60)
    took = time.monotonic() - begin
    assert took < within, f"took {took:.1f} s: {err}"
    assert network.nobody_left_within(max(within - took, 0.5)), "somebody is left"
    assert err.count("fuelrun: ") == 1, err
    return process.returncode, err


def rank_1_on_the_second(network) -> int:
    """Its process, as it is called outside."""
    inside = (network.folder / "up-1").read_text()
    for pid in network.living(network.machines[1], "fuelrun.launch.rank"):
        with open(f"/proc/{pid}/status") as status:
            numbers = next(line.split()[1:] for line in status if line.startswith("NSpid:"))
        if numbers[-1] == inside:
            return pid
    raise AssertionError("rank 1 is not there")


def test_a_rank_that_is_killed_on_the_other_machine(network) -> None:
    process = start(network)
    os.kill(rank_1_on_the_second(network), signal.SIGKILL)
    status, err = ends(network, process, within=5)
    assert status == 137, err
    assert "rank 1 of 3 (process " in err
    assert " on second) was killed by signal 9 (SIGKILL)" in err


def test_the_launchers_daemon_on_the_other_machine_is_killed(network) -> None:
    """mpirun of Open MPI calls it a success, mpiexec of MPICH waits for ever."""
    process = start(network)
    daemon = "prted" if OPEN_MPI else "hydra_pmi_proxy"
    (pid,) = network.living(network.machines[1], daemon)
    os.kill(pid, signal.SIGKILL)
    status, err = ends(network, process, within=7)
    assert status == 1, err
    assert f"on second ended without a word: the launcher's process there ({daemon}) is gone" in err


def test_everything_on_the_other_machine_is_killed(network) -> None:
    process = start(network)
    for pid in network.living(network.machines[1]):
        os.kill(pid, signal.SIGKILL)
    status, err = ends(network, process, within=5)
    assert status in (1, 137), err
    assert "on second" in err


def test_the_cable_is_cut(network) -> None:
    process = start(network)
    network.cut()
    status, err = ends(network, process, within=HEARTBEAT_S + 6)
    assert status == 1, err
    assert f"second gave no sign of life for {HEARTBEAT_S} s, with ranks 1 and 2 of 3 on it (last word at " in err
    assert "it is down, or the way to it is cut" in err


def test_fuelrun_is_killed(network) -> None:
    process = start(network)
    (pid,) = network.living(network.machines[0], "-m\0fuelrun\0")
    os.kill(pid, signal.SIGKILL)
    process.wait()
    assert network.nobody_left_within(6)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_ranks_on_both_machines(network, number: int) -> None:
    script = f"""
import signal, sys
def note(*_):
    open(f"heard-{{world.rank}}", "w").close()
    sys.exit(0)
import fuel_parallel as fp, time
world = fp.init()
signal.signal({int(number)}, note)
open(f"up-{{world.rank}}", "w").close()
while True: time.sleep(0.05)
"""
    process = network.start("-H", network.hosts, network.write(script))
    network.wait_for("up-*", 2)
    (pid,) = network.living(network.machines[0], "-m\0fuelrun\0")
    os.kill(pid, number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert sorted(path.name for path in network.folder.glob("heard-*")) == ["heard-0", "heard-1"]
    assert network.nobody_left_within(3)
