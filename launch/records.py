"""The records that ranks leave in the job directory (written by `fuel_parallel.failure`)."""

from __future__ import annotations

from pathlib import Path

import msgspec


class RankRecord(msgspec.Struct, frozen=True):
    """What one rank says about itself: `code` is None while it runs, 0 when it ended well.

    `report` is what the user should see of its failure: the traceback, ready to be printed. `mpi` tells whether the
    rank had initialised MPI.
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

    @property
    def ended_well(self) -> bool:
        """True when the script ran to its end."""
        return self.code == 0

    @property
    def failed(self) -> bool:
        """True when the rank said that it failed."""
        return self.code is not None and self.code != 0


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
