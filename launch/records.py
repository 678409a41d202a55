"""What is known of ranks: the records that they leave in the job directory (written by `fuel_parallel.failure`), and
which of them are gone without a last word (`channel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec


class RankRecord(msgspec.Struct, frozen=True):
    """What one rank says about itself: `code` is None while it runs, 0 when it ended well.

    `report` is what the user should see of its failure: the traceback, ready to be printed. `mpi` tells whether the
    rank had initialised MPI, `progressed` whether it came to the end of a first step, and `grace` how many seconds its
    script wants for ending.
    """

    rank: int
    pid: int
    host: str
    started: float
    ended: float | None
    code: int | None
    reason: str
    report: str = ""
    mpi: bool = False
    progressed: bool = False
    grace: float = 0.0

    @property
    def ended_well(self) -> bool:
        """True when the script ran to its end."""
        return self.code == 0

    @property
    def failed(self) -> bool:
        """True when the rank said that it failed."""
        return self.code is not None and self.code != 0


@dataclass(frozen=True)
class Loss:
    """A rank whose connection ended without a last word.

    Args:
        rank: Which one.
        pid: Its process there.
        host: Its machine's name.
        silent: Its machine gave no sign of life; False when the rank's end was seen.
        when: When that was noticed, in seconds since the epoch.
        heard: When it was last heard, in seconds since the epoch.
        note: What it said before it went.
    """

    rank: int
    pid: int
    host: str
    silent: bool
    when: float
    heard: float
    note: str = ""


_decode = msgspec.json.Decoder(RankRecord).decode


def read_records(directory: Path) -> dict[int, RankRecord]:
    """All records so far, by rank. One that cannot be read counts as not there: it says nothing good."""
    records = {}
    for path in directory.glob("rank-*.json"):
        try:
            record = _decode(path.read_bytes())
        except (OSError, msgspec.DecodeError):
            continue
        records[record.rank] = record
    return records
