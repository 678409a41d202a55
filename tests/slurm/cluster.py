"""A SLURM of two nodes on this machine: real daemons with a folder of their own, beside any SLURM that is installed.

munged, slurmctld and two slurmd run from a temporary folder with their own key, socket and ports, and no service of the
system is touched. Accounting is off, as on small clusters; each node has four cores and two devices that pass for GPUs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fuelrun.launch.processes import ending_with_parent

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scontrol", "scancel", "sinfo")
FOLDERS = "/usr/sbin:/usr/local/sbin:/sbin"
NODES = ("n1", "n2")
_DAEMONS = ("munged", "slurmctld", "slurmscriptd", "slurmd")
REQUEUE_S = 5
"""How long a requeued job waits: as long as its credential may still be in use."""

_CONF = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue}
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
TmpFS={folder}/tmp.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmctldTimeout=300
SlurmdTimeout=300
InactiveLimit=0
KillWait=8
MinJobAge=300
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1} CPUs=4 RealMemory=4000 Gres=gpu:fake:2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_2} CPUs=4 RealMemory=4000 Gres=gpu:fake:2 State=UNKNOWN
PartitionName=usual Nodes=n[1-2] Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=n[1-2] MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""
_GRES = """\
NodeName=n[1-2] Name=gpu Type=fake File=/dev/tty1
NodeName=n[1-2] Name=gpu Type=fake File=/dev/tty2
"""


class NotHere(Exception):
    """Why there is no SLURM for these tests."""


def program(name: str) -> str:
    """Its path; the daemons are in folders that only root has on PATH."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{FOLDERS}")
    if path is None:
        raise NotHere(f"there is no {name}; Debian: apt-get install slurmctld slurmd slurm-client munge libpmix-dev")
    return path


def wait_until(holds: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@dataclass
class Cluster:
    """The daemons, and the commands of their users."""

    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environ(self) -> dict[str, str]:
        """What makes the commands of SLURM speak to these daemons, and the mark of what jobs of tests start."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "TEST_SLURM": str(self.folder)}

    def run(self, *words: str, environ: Mapping[str, str] | None = None) -> str:
        """The output of a command of SLURM."""
        done = subprocess.run(
            [program(words[0]), *words[1:]],
            env={**(os.environ if environ is None else environ), **self.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def fields(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        text = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def state(self, job: str) -> str:
        return self.fields(job)["JobState"]

    def wait_for_state(self, job: str, *states: str, seconds: float = 40.0) -> str:
        try:
            wait_until(lambda: self.state(job) in states, seconds, f"job {job}")
        except TimeoutError as problem:
            raise TimeoutError(f"{problem}: it is {self.state(job)} and not {states}") from None
        return self.state(job)

    def wait_for_end(self, job: str, seconds: float = 40.0) -> str:
        return self.wait_for_state(
            job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", seconds=seconds
        )

    def empty(self) -> None:
        """End all jobs."""
        with contextlib.suppress(RuntimeError):
            self.run("scancel", "--signal=KILL", "--full", "--user=root")
            self.run("scancel", "--user=root")
        with contextlib.suppress(RuntimeError, TimeoutError):
            wait_until(lambda: not self.run("squeue", "--noheader").strip(), 15, "jobs are left")

    def left(self) -> list[int]:
        """Processes that were started by the daemons or their jobs and still live."""
        mark, found = f"TEST_SLURM={self.folder}".encode(), []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and int(entry.name) != os.getpid():
                    living = "(zombie)" not in (entry / "status").read_text()
                    if living and mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def left_of_jobs(self) -> list[int]:
        """Those that are no daemons; given a moment to end."""

        def living() -> list[int]:
            found = []
            for pid in self.left():
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{pid}/comm").read_text().strip() not in _DAEMONS:
                        found.append(pid)
            return found

        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not living(), 10, "processes are left")
        return living()

    def start(self) -> None:
        host = socket.gethostname().partition(".")[0]
        ctld_port, port_1, port_2 = _free_ports(3)
        for name in ("state", *(f"{kind}.{node}" for kind in ("spool", "tmp") for node in NODES)):
            (self.folder / name).mkdir()
        conf = _CONF.format(
            folder=self.folder, host=host, ctld_port=ctld_port, port_1=port_1, port_2=port_2, requeue=REQUEUE_S
        )
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "gres.conf").write_text(_GRES)
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        key = self.folder / "munge.key"
        subprocess.run([program("mungekey"), "--create", f"--keyfile={key}"], check=True, capture_output=True)
        names = ("socket", "pid-file", "log-file", "seed-file")
        files = [f"--{name}={self.folder}/munge.{name.partition('-')[0]}" for name in names]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *files)
        wait_until((self.folder / "munge.socket").exists, 10, "munged")
        self._daemon("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
        for node in NODES:
            self._daemon("slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", node, host=node)
        wait_until(self._is_up, 30, f"SLURM: {self.logs()}")

    def _daemon(self, name: str, *words: str, host: str = "") -> None:
        """With `host`, the daemon and its jobs see another host name: to them it is a machine of its own."""
        named = [program("unshare"), "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh"] if host else []
        with (self.folder / f"{name}.{len(self.daemons)}.out").open("wb") as out:
            self.daemons.append(
                subprocess.Popen(
                    [*named, program(name), *words],
                    env={**os.environ, **self.environ},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    preexec_fn=ending_with_parent(),  # a test run that is killed leaves no daemons
                )
            )

    def _is_up(self) -> bool:
        with contextlib.suppress(RuntimeError):
            return self.run("sinfo", "--noheader", "--format=%D %t", "--partition=usual").split() == ["2", "idle"]
        return False

    def logs(self) -> str:
        texts = (path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.out"))
        return "\n".join(texts)

    def stop(self) -> None:
        """Leaves neither processes nor files."""
        if len(self.daemons) > 1:
            self.empty()
        for daemon in reversed(self.daemons):
            daemon.kill()  # in order they would take ten seconds, and nothing of theirs is kept
            daemon.wait()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def start_cluster() -> Cluster:
    """Raises `NotHere` where that cannot be."""
    if os.uname().sysname != "Linux" or os.getuid() != 0:
        raise NotHere("slurmd needs Linux and root")
    for name in PROGRAMS:
        program(name)
    if not Path("/dev/tty2").exists():
        raise NotHere("there is no /dev/tty2 that could pass for a GPU")
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="slurm-")))  # a short path: that of a socket has some 100 characters
    try:
        cluster.start()
    except (TimeoutError, subprocess.SubprocessError) as problem:
        logs = cluster.logs()
        cluster.stop()
        raise NotHere(f"SLURM does not start: {problem}\n{logs}") from None
    return cluster
