"""Records of Python's `logging` say which rank they come from, where the script has configured nothing else."""

from __future__ import annotations

import logging
import os
import sys


class RankHandler(logging.Handler):
    """Writes a record as one line to standard error: `[rank 1/4 node3] WARNING data: file is short`.

    In the place of `logging.lastResort`, which is for scripts that do not configure logging; `logging.basicConfig` and
    all handlers of a script work as ever.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(logging.WARNING)
        host = os.uname().nodename.replace("%", "%%")
        self.setFormatter(logging.Formatter(f"[rank {rank}/{world_size} {host}] %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """In one write."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def tag_records(rank: int, world_size: int) -> None:
    """From here on, unless there is only one rank."""
    if world_size > 1:
        logging.lastResort = RankHandler(rank, world_size)
