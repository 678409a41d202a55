"""Starting fuelrun as a user does: as a process of its own, in an empty folder, outside of any job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fuel_parallel.environment import without_launcher
from fuelrun.launch.processes import CLEANER


@dataclass
class Jobs:
    """Runs scripts in `folder`. Every process that it starts carries a mark, by which the ones left over are found."""

    folder: Path
    mark: str
    environ: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def write(self, text: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(text)
        return name

    def start(self, *words: str, command: tuple[str, ...] = (), **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*command, sys.executable, "-m", "fuelrun", *words],
            cwd=self.folder,
            env={**self.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *words: str, command: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, command=command, **environ)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@dataclass
class Launcher(Jobs):
    """Jobs of this machine, and what is left of them."""

    def left(self) -> list[int]:
        """Processes of this test that still live, but for the one that clears /dev/shm some seconds later."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                environ = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
                status = (entry / "status").read_text() if self.mark.encode() in environ else "(zombie)"
                if "(zombie)" not in status and f"Name:\t{CLEANER}" not in status:
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def described(self) -> Iterator[str]:
        """What the processes of this test are at: a rank that waits for a file that somebody has removed shows it."""
        for process in self.started:
            if process.poll() is not None and process.stderr and not process.stderr.closed:
                yield f"  {process.args} ended with {process.returncode}: {process.stderr.read()}"
        for pid in self.left():
            try:
                entry = Path("/proc", str(pid))
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()
                gone = [
                    line.split(None, 5)[5] for line in (entry / "maps").read_text().splitlines() if "/dev/shm" in line
                ]
            except OSError:
                continue
            yield f"  {pid} {state[0]}, {int(state[11]) / 100:.1f} s of CPU, {words}, maps {gone}"

    def nobody_left_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.left():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def wait_for(self, name: str, count: int = 1) -> None:
        """Until the scripts have written `count` files that match `name`."""
        deadline = time.monotonic() + 60  # a machine that does other work takes its time
        while len(list(self.folder.glob(name))) < count:
            assert time.monotonic() < deadline, f"no {name} after 60 s; there are:\n" + "\n".join(self.described())
            time.sleep(0.02)


def launched(folder: Path) -> Iterator[Launcher]:
    """The launcher of one test: what it has started is gone afterwards."""
    ours = ("FUEL_", "FUELRUN_")
    environ = {name: value for name, value in without_launcher(os.environ).items() if not name.startswith(ours)}
    environ["XDG_CONFIG_HOME"] = str(folder / "no defaults")
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TEST_OF": str(folder)}
    launcher = Launcher(folder, f"TEST_OF={folder}", environ)
    yield launcher
    for pid in launcher.left():
        os.kill(pid, 9)
    for process in launcher.started:
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()


def mpirun_here() -> str:
    """The mpirun of the MPI that is installed."""
    from fuelrun.launch.find import library, mpirun_of

    found = mpirun_of(library())
    assert found is not None
    return str(found.path)
