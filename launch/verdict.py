"""How a job ended: its exit code, and one line that names who did not end well. Pure: values in, value out."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from fuelrun.launch.engine import Death
from fuelrun.launch.records import RankRecord


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


@dataclass(frozen=True)
class Verdict:
    """What fuelrun says and returns. `unexplained` are mpirun's messages where no rank explained the failure."""

    code: int
    message: str = ""
    unexplained: tuple[str, ...] = ()


def judge(ending: Ending) -> Verdict:
    """0 only when every rank left word that it ended well."""
    if ending.stopped_by is not None:
        return Verdict(128 + ending.stopped_by)
    failures = sorted((r for r in ending.records.values() if r.failed), key=lambda r: r.ended or 0.0)
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


def _first(ending: Ending, unwell: list[int]) -> list[int]:
    """The rank that ended first, and took the others with it; all that did not end well where nobody can tell."""
    if ending.death is not None and ending.death.rank is not None:
        return [ending.death.rank]
    return [rank for rank in ending.gone if rank in unwell][:1] or unwell


def _who(ending: Ending, ranks: list[int]) -> str:
    """In words: "rank 1 of 2 (process 123)"."""
    pid = ending.records[ranks[0]].pid if len(ranks) == 1 and ranks[0] in ending.records else None
    return f"{_ranks(ranks)} of {ending.ranks}" + (f" (process {pid})" if pid else "")


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
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > 8:
        return f"ranks {', '.join(names[:6])} and {len(names) - 6} more"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
