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
        status: mpirun's status, negative for a signal.
        code: The same in the shell's terms.
        death: What mpirun told about the rank that ended the job.
        stopped_by: The signal by which the user ended the job.
        messages: What mpirun said; shown when nothing else explains the failure.
    """

    ranks: int
    records: Mapping[int, RankRecord]
    gone: tuple[int, ...] = ()
    status: int = 0
    code: int = 0
    death: Death | None = None
    stopped_by: int | None = None
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
    if failures:
        first = failures[0]
        names = _ranks([record.rank for record in failures if record.reason == first.reason])
        return Verdict(first.code or 1, f"{names} of {ending.ranks} failed: {first.reason}")
    if ending.death is not None and ending.death.signal is not None:
        return _killed(ending, ending.death, ending.death.signal)
    unwell = [rank for rank in range(ending.ranks) if rank not in ending.records or not ending.records[rank].ended_well]
    if not unwell:
        if ending.code == 0:
            return Verdict(0)
        return Verdict(ending.code, f"all ranks ended well, but mpirun ended with {ending.code}", ending.messages)
    return _vanished(ending, unwell)


def _killed(ending: Ending, death: Death, number: int) -> Verdict:
    by_pid = {record.pid: record.rank for record in ending.records.values()}
    rank = death.rank if death.rank is not None else by_pid.get(death.pid or -1)
    who = f"rank {rank} of {ending.ranks}" if rank is not None else "a rank"
    process = f" (process {death.pid})" if death.pid else ""
    hint = "; if nobody did that, it was perhaps the kernel, out of memory (see dmesg)" if number == 9 else ""
    return Verdict(128 + number, f"{who}{process} was killed by signal {number} ({_name(number)}){hint}")


def _vanished(ending: Ending, unwell: list[int]) -> Verdict:
    code = ending.code or 1
    never = [rank for rank in unwell if rank not in ending.records]
    if never:
        return Verdict(code, f"{_ranks(never)} of {ending.ranks} did not start", ending.messages)
    # The first to go took the others with it.
    first = [rank for rank in ending.gone if rank in unwell][:1] or unwell
    word = "them" if len(first) > 1 else "it"
    status = f" with status {ending.code}" if ending.code else ""
    return Verdict(
        code,
        f"{_ranks(first)} of {ending.ranks} ended{status} before the script did: os._exit, MPI_Abort or a crash ended "
        f"{word}, with no word left",
        ending.messages if len(first) > 1 else (),
    )


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
