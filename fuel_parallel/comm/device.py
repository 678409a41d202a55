"""Which transport moves arrays of devices between the ranks of a communicator, and why.

    nccl      each rank has a GPU of its own, and CuPy has NCCL
    mpi       MPI takes device memory, as a try has shown (`cuda_probe`)
    staged    always: through pinned host memory

The first that applies is taken, or the one that `FUEL_TRANSPORT` names. All ranks decide from the same facts, gathered
from all, so they come to the same choice or to the same error. It is made once for each communicator, in its first
collective on an array of a device.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from fuel_parallel.backends.device_memory import DeviceMemory
from fuel_parallel.comm import cuda_probe
from fuel_parallel.comm.background import Background
from fuel_parallel.comm.cuda_probe import Verdict
from fuel_parallel.comm.direct import DirectTransport
from fuel_parallel.comm.mpi import MpiTransport
from fuel_parallel.comm.nccl import NcclTransport, new_communicator
from fuel_parallel.comm.objects import all_gather_bytes
from fuel_parallel.comm.staged import StagedTransport
from fuel_parallel.comm.transport import Transport
from fuel_parallel.errors import ArgumentError, CommunicatorError

if TYPE_CHECKING:
    from mpi4py import MPI

SETTING = "FUEL_TRANSPORT"
SETTINGS = ("auto", "nccl", "mpi", "staged")


@dataclass(frozen=True)
class Choice:
    """How arrays of devices move: "nccl", "mpi" or "staged"."""

    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


class Facts(msgspec.Struct, frozen=True):
    """What one rank knows.

    Args:
        setting: Its `FUEL_TRANSPORT`.
        host: Its machine.
        device: The device of its arrays, as its process numbers it.
        identity: The device, as its machine knows it; "" if unknown.
        nccl: Why it cannot use NCCL; "" if it can.
        threads: Whether its MPI lets threads call it.
    """

    setting: str
    host: str
    device: str
    identity: str
    nccl: str = ""
    threads: bool = True


def choose(comm: MPI.Intracomm, host: Transport, memory: DeviceMemory) -> tuple[Transport, Choice]:
    """The transport for arrays in `memory`, and why it is this one. A collective call; `host` moves host arrays."""
    facts = _share(host, facts_of_this_rank(memory), Facts)
    check_settings(facts)
    obstacle = nccl_obstacle(facts)
    communicator: Any = None
    if not obstacle:
        communicator, obstacle = _meet(host, memory)
    verdicts = _verdicts(host, memory, facts) if obstacle and facts[0].setting in ("auto", "mpi") else []
    choice = decide(facts, obstacle, verdicts)
    return _make(choice, comm, host, memory, communicator, verdicts, all(f.threads for f in facts)), choice


def check_settings(facts: Sequence[Facts]) -> None:
    """Refuses unknown settings, and those that differ between ranks."""
    for rank, one in enumerate(facts):
        if one.setting not in SETTINGS:
            raise ArgumentError(
                f"{SETTING}={one.setting!r} on rank {rank}: expected one of {', '.join(SETTINGS)}; unset it to have "
                "the transport of device arrays chosen"
            )
        if one.setting != facts[0].setting:
            raise ArgumentError(
                f"{SETTING} must be the same on all ranks, but is {facts[0].setting!r} on rank 0 and {one.setting!r} "
                f"on rank {rank}; export it before the ranks are started"
            )


def nccl_obstacle(facts: Sequence[Facts]) -> str:
    """Why NCCL is not tried; "" if it is to be."""
    if facts[0].setting not in ("auto", "nccl"):
        return "not asked for"
    for rank, one in enumerate(facts):
        if one.nccl:
            return f"{one.nccl} (rank {rank})"
        if not one.identity:
            return f"which GPU rank {rank} has is not known"
    owners: dict[tuple[str, str], int] = {}
    for rank, one in enumerate(facts):
        other = owners.setdefault((one.host, one.identity), rank)
        if other != rank:
            return f"ranks {other} and {rank} share {one.device} of {one.host}"
    return ""


def decide(facts: Sequence[Facts], obstacle: str, verdicts: Sequence[Verdict]) -> Choice:
    """The choice, or an error where the setting asks for what is not there. `obstacle` is what NCCL lacks.

    >>> facts = [Facts("auto", "a", "cuda:0", "", nccl="CuPy has no NCCL")]
    >>> print(decide(facts, "CuPy has no NCCL", [Verdict(False, 2, "a try crashed")]))
    staged: NCCL: CuPy has no NCCL; MPI on device memory: a try crashed
    """
    setting = facts[0].setting
    if not obstacle:
        return Choice("nccl", f"each of {len(facts)} ranks has a GPU of its own")
    if setting == "nccl":
        raise CommunicatorError(
            f"{SETTING}=nccl, but NCCL cannot be used: {obstacle}; give each rank a GPU of its own and a CuPy with "
            f"NCCL, or set {SETTING}=auto"
        )
    if setting == "staged":
        return Choice("staged", f"{SETTING}=staged asks for it")
    refusal = next((verdict for verdict in verdicts if not verdict.aware), None)
    if setting == "mpi":
        if refusal is not None:
            raise CommunicatorError(
                f"{SETTING}=mpi, but this MPI cannot be given device memory: {refusal.reason}; start with a CUDA-aware "
                f"MPI (fuelrun doctor tries it anew), or set {SETTING}=auto or staged"
            )
        return Choice("mpi", f"{SETTING}=mpi asks for it, and {verdicts[0].reason}")
    # One rank that sends to itself has not shown that memory of another process is reached.
    doubtful = next((verdict for verdict in verdicts if verdict.ranks < 2), None)
    if refusal is None and doubtful is None and verdicts:
        return Choice("mpi", f"{verdicts[0].reason}; not NCCL, for {obstacle}")
    why = refusal.reason if refusal else f"only {doubtful.reason}" if doubtful else "not tried"
    return Choice("staged", f"NCCL: {obstacle}; MPI on device memory: {why}")


def facts_of_this_rank(memory: DeviceMemory) -> Facts:
    """What this rank tells the others."""
    from mpi4py import MPI

    return Facts(
        setting=os.environ.get(SETTING, "").strip().lower() or "auto",
        host=socket.gethostname(),
        device=memory.device,
        identity=memory.identity(),
        nccl="" if memory.nccl() is not None else "CuPy has no NCCL",
        threads=MPI.Query_thread() == MPI.THREAD_MULTIPLE,
    )


def describe_this_machine() -> str:
    """How arrays of this machine's devices would move between ranks here, and why; MPI is tried anew.

    For one process alone, as `fuelrun doctor` asks. Raises where `FUEL_TRANSPORT` asks for what is not there.
    """
    from fuel_parallel.backends import available_devices, backend_of

    devices = [name for name in available_devices() if backend_of(name).memory is not None]
    setting = os.environ.get(SETTING, "").strip().lower() or "auto"
    check_settings([Facts(setting, socket.gethostname(), "", "")])
    memory = backend_of(devices[0]).memory if devices else None
    if memory is None:
        return f"none needed: no GPU is seen here ({SETTING}={setting})"
    from mpi4py import MPI

    facts = [facts_of_this_rank(memory)]
    obstacle, verdicts = nccl_obstacle(facts), []
    if setting in ("auto", "mpi"):
        verdicts = [cuda_probe.verdict_on(memory, MPI.Get_library_version(), cuda_probe.library_path(), fresh=True)]
    if obstacle:
        return str(decide(facts, obstacle, verdicts))
    where = f"up to {len(devices)} ranks, with a GPU each" if setting == "auto" else f"{SETTING}=nccl asks for it"
    otherwise = decide(facts, "ranks share a GPU", verdicts) if setting == "auto" else ""
    return f"nccl: {where}" + (f"; where ranks share one, {otherwise}" if otherwise else "")


def _make(
    choice: Choice,
    comm: MPI.Intracomm,
    host: Transport,
    memory: DeviceMemory,
    communicator: Any,
    verdicts: Sequence[Verdict],
    threads: bool,
) -> Transport:
    verdict = verdicts[0] if verdicts else Verdict(False, 0, "it was not tried")
    background = None
    if threads:
        own = comm.Dup()
        apart: Transport = StagedTransport(MpiTransport(own), memory)
        if choice.kind == "mpi":
            apart = DirectTransport(own, memory, apart, verdict)
        background = Background(apart, memory)
    staged = StagedTransport(host, memory, background)
    if choice.kind == "nccl":
        return NcclTransport(communicator, memory, staged)
    return DirectTransport(comm, memory, staged, verdict, background) if choice.kind == "mpi" else staged


def _meet(host: Transport, memory: DeviceMemory) -> tuple[Any, str]:
    """The NCCL communicator, or why there is none, on all ranks alike."""
    communicator, problem = None, ""
    try:
        communicator = new_communicator(host, memory)
    except Exception as error:  # whatever NCCL has to say; the ranks go on together without it
        cause = error.__cause__ or error
        problem = f"{error} ({cause})" if cause is not error else f"{type(error).__name__}: {error}"
    problems = _share(host, problem, str)
    first = next((f"NCCL did not start on rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")
    return (None if first else communicator), first


def _verdicts(host: Transport, memory: DeviceMemory, facts: Sequence[Facts]) -> list[Verdict]:
    """One for each machine: its first rank looks, the others wait."""
    first = [one.host for one in facts].index(facts[host.rank].host)
    mine = None
    if first == host.rank:
        from mpi4py import MPI

        mine = cuda_probe.verdict_on(memory, MPI.Get_library_version(), cuda_probe.library_path())
    found = zip(_share(host, mine, Verdict | None), facts, strict=True)
    return [msgspec.structs.replace(v, reason=f"{v.reason} (on {one.host})") for v, one in found if v is not None]


def _share(host: Transport, value: Any, kind: Any) -> list[Any]:
    """The values of all ranks."""
    return [msgspec.msgpack.decode(one, type=kind) for one in all_gather_bytes(host, msgspec.msgpack.encode(value))]
