"""Two machines on one: namespaces for network, names, processes, memory and mounts, joined by a cable (veth).

Ranks on them meet over TCP only. Each has a bridge with the same address, as docker makes it, in which an MPI is lost
that takes it for the way to the other. Killing a machine's first process ends all that runs on it, like a power cut.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fuel_parallel.environment import without_launcher
from fuelrun.launch import processes
from tests.launcher import Jobs

REMOTE_SHELL = Path(__file__).parent / "remote_shell.py"
NAMES = ("first", "second")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLES = ("e1", "ens2")  # ends of one cable, by other names as on real machines
SPACES = ("--net", "--uts", "--pid", "--ipc", "--mount")


@dataclass
class Machine:
    """One of the two; `init` is the process, as seen from outside, that everything on it descends from."""

    name: str
    address: str
    cable: str
    init: subprocess.Popen[bytes]
    pid: int

    def enter(self, *spaces: str) -> list[str]:
        """The words before a command that runs it on this machine."""
        return ["nsenter", "-t", str(self.pid), *(spaces or SPACES), "--"]

    def run(self, *words: str) -> None:
        subprocess.run([*self.enter(), *words], check=True, capture_output=True)

    def kill_all(self) -> None:
        self.init.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.init.wait()


@dataclass
class Network(Jobs):
    """The two machines, and jobs that are started on the first."""

    machines: list[Machine] = field(default_factory=list)

    @property
    def hosts(self) -> str:
        return ",".join(ADDRESSES)

    def start(self, *words: str, command: tuple[str, ...] = (), **environ: str) -> subprocess.Popen[str]:
        go = ("sh", "-c", 'cd "$0" && exec "$@"', str(self.folder))
        return super().start(*words, command=(*self.machines[0].enter(), *go, *command), **environ)

    def cut(self) -> None:
        """Pull the cable."""
        self.machines[1].run("ip", "link", "set", CABLES[1], "down")

    def living(self, machine: Machine, name: str = "") -> list[int]:
        """Processes of jobs on a machine, by their numbers outside; those with a word in their command line."""
        space = os.readlink(f"/proc/{machine.pid}/ns/pid")
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or os.readlink(entry / "ns" / "pid") != space:
                    continue
            except OSError:
                continue
            line = line_of(int(entry.name))
            own = not line or int(entry.name) == machine.pid or str(REMOTE_SHELL) in line  # no line: a zombie
            own = own or processes.name_of(int(entry.name)) in processes.OWN  # clears /dev/shm some seconds later
            if not own and name in line:
                found.append(int(entry.name))
        return found

    def left_after(self, seconds: float) -> list[str]:
        """Ranks, daemons and what scripts start, on either machine, if they are still there at the end of that time."""
        deadline = time.monotonic() + seconds
        while left := [(machine, pid) for machine in self.machines for pid in self.living(machine)]:
            if time.monotonic() > deadline:
                return [f"{machine.name}: {line_of(pid)}" for machine, pid in left]
            time.sleep(0.05)
        return []

    def wait_for(self, name: str, count: int, process: subprocess.Popen[str]) -> None:
        """Until the scripts of a job have written so many files."""
        deadline = time.monotonic() + 60
        while len(list(self.folder.glob(name))) < count:
            late = time.monotonic() > deadline
            if late or process.poll() is not None:
                process.kill()
                raise AssertionError(f"no {count} {name}, status {process.poll()}: {process.communicate()}")
            time.sleep(0.02)


def line_of(pid: int) -> str:
    """The command line of a process, "" if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


@pytest.fixture(scope="session")
def why_no_namespaces() -> str:
    """Why two machines cannot be made here, "" if they can."""
    missing = [name for name in ("ip", "nsenter", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"no program {' and '.join(missing)}"
    if os.geteuid() != 0:
        return "not root"
    made = subprocess.run(
        ["unshare", *SPACES, "--fork", "ip", "link", "add", "probe", "type", "veth"], capture_output=True
    )
    return made.stderr.decode().strip()


@pytest.fixture
def network(tmp_path: Path, why_no_namespaces: str) -> Iterator[Network]:
    if why_no_namespaces:
        pytest.skip(f"two machines need network namespaces: {why_no_namespaces}")
    agent = tmp_path / "agent"
    agent.write_text(f'#!/bin/sh\nexec /usr/bin/env python3 -S -E {REMOTE_SHELL} "$@"\n')
    agent.chmod(0o755)
    folder = tmp_path / "job"
    folder.mkdir()
    ours = ("FUEL_", "FUELRUN_")
    environ = {name: value for name, value in without_launcher(os.environ).items() if not name.startswith(ours)}
    environ |= {"XDG_CONFIG_HOME": str(tmp_path / "no defaults"), "FUEL_LAUNCH_AGENT": str(agent)}
    environ["TMPDIR"] = str(tmp_path / NAMES[0])
    network = Network(folder, str(tmp_path), environ)
    try:
        network.machines = [_machine(*who) for who in zip(NAMES, ADDRESSES, CABLES, strict=True)]
        _connect(network.machines, tmp_path)
        yield network
    finally:
        for machine in network.machines:
            machine.kill_all()
        for process in network.started:
            process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe:
                    pipe.close()


def _machine(name: str, address: str, cable: str) -> Machine:
    # Who ignores SIGCHLD leaves no zombies, as the first process of a machine should.
    start = f"hostname {name}; mount -t sysfs sysfs /sys; trap '' CHLD; exec sleep 1000"
    init = subprocess.Popen(
        ["unshare", *SPACES, "--fork", "--mount-proc", "--kill-child", "sh", "-c", start],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    children = Path(f"/proc/{init.pid}/task/{init.pid}/children")
    deadline = time.monotonic() + 10
    while True:
        pids = children.read_text().split()
        if pids and Path(f"/proc/{pids[0]}/comm").read_text() == "sleep\n":
            return Machine(name, address, cable, init, int(pids[0]))
        assert time.monotonic() < deadline, "no namespace"
        time.sleep(0.01)


def _connect(machines: list[Machine], folder: Path) -> None:
    ends = [f"fuel{os.getpid()}{end}" for end in "ab"]  # as they are called until each is on its machine
    subprocess.run(["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]], check=True)
    for machine, end in zip(machines, ends, strict=True):
        subprocess.run(["ip", "link", "set", end, "netns", str(machine.pid), "name", machine.cable], check=True)
        machine.run(
            "sh",
            "-ec",
            f"ip link set lo up; ip addr add {machine.address}/24 dev {machine.cable}; ip link set {machine.cable} up; "
            "ip link add docker0 type veth peer name inside; ip addr add 172.17.0.1/16 dev docker0; "
            "ip link set docker0 up; ip link set inside up",
        )
    for machine in machines:
        (folder / machine.name).mkdir()  # process ids begin anew on each machine, and are part of names in /tmp
        shell = [sys.executable, "-S", "-E", str(REMOTE_SHELL)]
        subprocess.Popen(
            [*machine.enter(), *shell, "serve", machine.address, str(folder / machine.name)], stdin=subprocess.DEVNULL
        ).returncode = 0
        probe = [*machine.enter(), *shell, machine.address, "true"]
        deadline = time.monotonic() + 10
        while subprocess.run(probe, capture_output=True).returncode:
            assert time.monotonic() < deadline, f"no remote shell on {machine.name}"
