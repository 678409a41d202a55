"""How a job ended: its exit code, and one line that names who did not end well. Pure: values in, value out."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fuel_parallel.failure import PREEMPTED
from fuelrun.launch.engine import Death
from fuelrun.launch.records import Loss, RankRecord

_AT_ONCE_S = 0.2  # within this, ranks of one machine went together


@dataclass(frozen=True)
class Ending:
    """All that is known when mpirun has ended.

    Args:
        ranks: How many ranks there should have been.
        records: What they left, by rank.
        gone: Ranks of this host in the order in which they were seen to end.
        code: mpirun's exit status in the shell's terms; 0 when fuelrun had to end it.
        death: What mpirun told about the rank that ended the job.
        mpirun_killed_by: The signal that ended mpirun itself.
        stopped_by: The signal by which the user ended the job.
        deserters: Ranks that ended well, but left others that wait for them.
        lost: The first rank of this host that was seen to end, and its signal where that is known.
        lost_at: When that was seen, in seconds since the epoch.
        messages: What mpirun said; shown when nothing else explains the failure.
        losses: Ranks whose connection to fuelrun ended without a last word, where a job has other machines.
        heartbeat: Seconds without a sign of life after which a machine counts as lost.
        when: When all was over, in seconds since the epoch.
    """

    ranks: int
    records: Mapping[int, RankRecord]
    gone: tuple[int, ...] = ()
    code: int = 0
    death: Death | None = None
    mpirun_killed_by: int | None = None
    stopped_by: int | None = None
    deserters: tuple[int, ...] = ()
    lost: Death | None = None
    lost_at: float = 0.0
    messages: tuple[str, ...] = ()
    losses: tuple[Loss, ...] = ()
    heartbeat: int = 0
    when: float = field(default_factory=time.time)

    def cause(self) -> RankRecord | None:
        """The first rank that said that it failed, unless a rank or machine that went without a word was before it."""
        first = min((r for r in self.records.values() if r.failed), key=lambda r: r.ended or 0.0, default=None)
        if first is None or (self.losses and self.losses[0].when < (first.ended or 0.0)):
            return None
        return None if is_consequence(first, self.records, self.lost, self.lost_at) else first


@dataclass(frozen=True)
class Verdict:
    """What fuelrun says and returns.

    Args:
        code: fuelrun's exit status.
        message: Who did not end well, and how.
        unexplained: mpirun's messages where no rank explained the failure.
        lost_hosts: Machines that gave no sign of life any more.
        final: The job was asked to end, by its user or a scheduler.
        ending: What the verdict is about; None in one that `judge` has not made.
    """

    code: int
    message: str = ""
    unexplained: tuple[str, ...] = ()
    lost_hosts: tuple[str, ...] = ()
    final: bool = False
    ending: Ending | None = field(default=None, compare=False)


def judge(ending: Ending) -> Verdict:
    """0 only when every rank left word that it ended well."""
    return replace(_judge(ending), ending=ending)


def _judge(ending: Ending) -> Verdict:
    cause = ending.cause()
    if cause is not None and cause.code == PREEMPTED and not cause.reason.startswith("sys.exit"):
        return Verdict(PREEMPTED, f"the ranks {cause.reason}", final=True)
    if ending.stopped_by is not None:
        return Verdict(128 + ending.stopped_by, final=True)
    if any(loss.silent for loss in ending.losses):
        return _silent(ending)
    failures = sorted((r for r in ending.records.values() if r.failed), key=lambda r: r.ended or 0.0)
    if failures and ending.losses and ending.losses[0].when < (failures[0].ended or 0.0):
        return _gone(ending)
    if failures and is_consequence(failures[0], ending.records, ending.lost, ending.lost_at):
        return _lost(ending)
    if failures:
        code, reason = failures[0].code, failures[0].reason
        alike = [record.rank for record in failures if record.reason == reason]
        return Verdict(code or 1, f"{_ranks(alike)} of {ending.ranks} failed: {reason}")
    if ending.death is not None and ending.death.aborted:
        with_code = f"({ending.code})" if ending.code else ""
        return Verdict(ending.code or 1, f"{_who(ending, _first(ending, []))} called MPI_Abort{with_code}")
    if (number := ending.mpirun_killed_by) is not None:
        return Verdict(ending.code, f"mpirun was killed by signal {number} ({_name(number)}); the ranks were ended")
    if ending.deserters:
        return _deserted(ending)
    unwell = [rank for rank in range(ending.ranks) if rank not in ending.records or not ending.records[rank].ended_well]
    if not unwell:
        if ending.code == 0:
            return Verdict(0, unexplained=ending.messages)
        if ending.death is not None and ending.death.signal is not None:  # while it shut down
            return _killed(ending, _first(ending, []) or list(range(ending.ranks)), ending.death.signal)
        return Verdict(ending.code, f"all ranks ended well, but mpirun ended with {ending.code}", ending.messages)
    never = [rank for rank in unwell if rank not in ending.records]
    if ending.losses and not never:
        return _gone(ending)
    first = _first(ending, unwell)
    if ending.death is not None and ending.death.signal is not None:
        return _killed(ending, first, ending.death.signal)
    if not never and 0 < ending.code - 128 < signal.NSIG:  # mpirun's message has not come through
        return _killed(ending, first, ending.code - 128)
    if never:
        return Verdict(ending.code or 1, f"{_ranks(never)} of {ending.ranks} did not start", ending.messages)
    return _vanished(ending, first)


def is_consequence(failure: RankRecord, records: Mapping[int, RankRecord], lost: Death | None, lost_at: float) -> bool:
    """Whether a rank failed after another one of its machine had gone without a word: MPI raised an error for it."""
    gone = records.get(lost.rank) if lost is not None and lost.rank is not None else None
    return gone is not None and gone.code is None and gone.host == failure.host and lost_at < (failure.ended or 0.0)


def _lost(ending: Ending) -> Verdict:
    """A rank that went without a word, and took others with it."""
    ranks = [ending.lost.rank] if ending.lost is not None and ending.lost.rank is not None else []
    known = (death.signal for death in (ending.lost, ending.death) if death is not None and death.signal is not None)
    number = next(known, None)
    return _vanished(ending, ranks) if number is None else _killed(ending, ranks, number)


def _silent(ending: Ending) -> Verdict:
    """A machine that is down or cut off."""
    silent = [loss for loss in ending.losses if loss.silent]
    hosts = tuple(dict.fromkeys(loss.host for loss in silent))
    ranks = _ranks([loss.rank for loss in silent if loss.host == hosts[0]])
    heard = time.strftime("%H:%M:%S", time.localtime(max(loss.heard for loss in silent if loss.host == hosts[0])))
    more = f"; nor did {_listed(hosts[1:])}" if hosts[1:] else ""
    return Verdict(
        1,
        f"{hosts[0]} gave no sign of life for {ending.heartbeat} s, with {ranks} of {ending.ranks} on it (last word at "
        f"{heard}){more}: it is down, or the way to it is cut; the other ranks were ended",
        lost_hosts=hosts,
    )


def _gone(ending: Ending) -> Verdict:
    """A rank, on whichever machine, that went without a word and was missed by its connection."""
    first = ending.losses[0]
    together = [loss for loss in ending.losses if loss.host == first.host and loss.when - first.when < _AT_ONCE_S]
    death = ending.death
    if death is not None and death.signal is not None and death.rank in (None, first.rank):
        return _killed(ending, [first.rank], death.signal)
    if ending.lost is not None and ending.lost.rank == first.rank and ending.lost.signal is not None:
        return _killed(ending, [first.rank], ending.lost.signal)
    if len(together) == 1:
        who = _who(ending, [first.rank])
    else:
        who = f"{_ranks([loss.rank for loss in together])} of {ending.ranks} on {first.host}"
    why = next((loss.note for loss in together if loss.note), "killed, crashed, or ended by os._exit")
    return Verdict(ending.code or 1, f"{who} ended without a word: {why}; the other ranks were ended", ending.messages)


def _first(ending: Ending, unwell: list[int]) -> list[int]:
    """The rank that ended first, and took the others with it; all that did not end well where nobody can tell."""
    if ending.death is not None and ending.death.rank is not None:
        return [ending.death.rank]
    return [rank for rank in ending.gone if rank in unwell][:1] or unwell


def _who(ending: Ending, ranks: list[int]) -> str:
    """In words: "rank 1 of 2 (process 123)"."""
    record = ending.records.get(ranks[0]) if len(ranks) == 1 else None
    if record is None:
        return f"{_ranks(ranks)} of {ending.ranks}"
    there = f" on {record.host}" if len({one.host for one in ending.records.values()}) > 1 else ""
    return f"{_ranks(ranks)} of {ending.ranks} (process {record.pid}{there})"


def _killed(ending: Ending, ranks: list[int], number: int) -> Verdict:
    who = _who(ending, ranks) if len(ranks) == 1 else f"one of {ending.ranks} ranks"
    hint = "; if nobody did that, it was perhaps the kernel, out of memory (see dmesg)" if number == 9 else ""
    return Verdict(128 + number, f"{who} was killed by signal {number} ({_name(number)}){hint}")


def _vanished(ending: Ending, ranks: list[int]) -> Verdict:
    return Verdict(
        ending.code or 1,
        f"{_who(ending, ranks)} ended before the script did, by os._exit or a crash below Python",
        ending.messages if len(ranks) > 1 else (),
    )


def _deserted(ending: Ending) -> Verdict:
    who = _ranks(list(ending.deserters))
    if any(ending.records[rank].mpi for rank in ending.deserters):
        why = "left before MPI_Finalize, by os._exit or a crash at the end of its script"
    else:
        why = "ended without MPI, and others wait for it in MPI_Init; call fp.init() on every rank, or on none"
    return Verdict(ending.code or 1, f"{who} of {ending.ranks} {why}")


def _ranks(ranks: list[int]) -> str:
    """In words: "rank 2", "ranks 0, 1 and 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {_listed([str(rank) for rank in sorted(ranks)])}"


def _listed(names: Sequence[str]) -> str:
    """In words: "0, 1 and 3"."""
    if len(names) == 1:
        return names[0]
    if len(names) > 8:
        return f"{', '.join(names[:6])} and {len(names) - 6} more"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
