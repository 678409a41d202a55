"""Standard input of the ranks: rank 0 reads that of fuelrun itself, the others read nothing.

MPIs are to forward it to rank 0. Open MPI 5 forwards neither a file nor a pipe, nor that there is nothing
(openpmix/prrte#2373), and under Hydra the other ranks wait for ever: a script that reads to the end would never end. So
a rank on fuelrun's machine opens what fuelrun reads; a debugger can be used on rank 0, too.
"""

from __future__ import annotations

import os
import sys

STANDARD_INPUT = "FUEL_STANDARD_INPUT"


def variables(host: str) -> dict[str, str]:
    """What tells the ranks of this machine where fuelrun reads from; nothing where the system does not show that."""
    # Closed, as by `<&-`: what has the number 0 by now is something else.
    path = os.devnull if sys.stdin is None else f"/proc/{os.getpid()}/fd/0"
    return {STANDARD_INPUT: f"{host}:{_read_so_far()}:{path}"} if os.path.exists(path) else {}


def _read_so_far() -> int:
    """What a shell, say, has read of a file before fuelrun began."""
    try:
        return os.lseek(0, 0, os.SEEK_CUR)
    except OSError:
        return 0  # not a file


def take(told: str, rank: int, host: str) -> None:
    """Makes it this process's standard input. What cannot be opened, a socket say, is left as the MPI has it.

    Args:
        told: The variable's value.
        rank: Whose standard input; only rank 0 reads anything.
        host: This machine's name.
    """
    if not told:
        return
    where, begin, path = told.split(":", 2)
    if rank:
        begin, path = "0", os.devnull
    elif where != host:
        return
    try:
        # Not the terminal of this session: the rank has none, and Ctrl-C is fuelrun's.
        opened = os.open(path, os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return
    if int(begin):
        os.lseek(opened, int(begin), os.SEEK_SET)
    os.dup2(opened, 0)
    os.close(opened)
