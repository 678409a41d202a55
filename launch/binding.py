"""Binding a rank to its share of the machine's cores, before its first thread starts.

The rank does it itself, so it is the same under every launcher. What a launcher has bound stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from fuel_parallel.environment import LauncherClaim
from fuel_parallel.errors import ArgumentError, DataError
from fuel_parallel.topology.binding import share_of_cores
from fuel_parallel.topology.cores import format_list, parse_list
from fuel_parallel.topology.sysfs import Sysfs

BIND = "FUEL_BIND"


def bind(claim: LauncherClaim, near: Collection[int] = ()) -> None:
    """Binds this process as `FUEL_BIND` says: `auto` (or nothing), `none`, or lists of cores by local rank.

    Auto is the cores `near` to the rank's device, where there is a placement. Else it is a share of the cores for each
    rank of the machine, and nothing where they have fewer cores than ranks, or where the launcher has bound this rank
    already. Raises `ArgumentError` when a list names cores that this process may not use.
    """
    setting = os.environ.get(BIND, "auto") or "auto"
    if setting == "none" or not hasattr(os, "sched_setaffinity"):
        return
    variables = claim.rank_variables()
    local_rank, local_size = variables.get("LOCAL_RANK"), variables.get("LOCAL_WORLD_SIZE")
    allowed = os.sched_getaffinity(0)
    if setting != "auto":
        lists = cores_by_local_rank(setting)
        mine = lists[int(local_rank or 0) % len(lists)]
        if not set(mine) <= allowed:
            text = ",".join(map(str, sorted(allowed)))
            raise ArgumentError(
                f"{BIND}={setting}: rank {claim.rank} cannot run on all of the cores {sorted(mine)}; it may use {text}"
            )
        os.sched_setaffinity(0, mine)
        return
    if near:
        try:
            os.sched_setaffinity(0, near)
        except OSError as reason:
            raise ArgumentError(
                f"rank {claim.rank} cannot run on the cores {format_list(near)} that its placement gives it: "
                f"{reason.strerror}; --bind none leaves the cores to the launcher"
            ) from None
        return
    if local_rank is None or local_size is None or int(local_size) < 2 or allowed != cores_of_ranks():
        return
    if share := share_of_cores(allowed, int(local_rank), int(local_size)):
        os.sched_setaffinity(0, share)


def cores_by_local_rank(setting: str) -> list[tuple[int, ...]]:
    """The lists of a setting such as 0-3:4-7. Raises `ArgumentError` when it is none.

    >>> cores_by_local_rank("0-1:2,3")
    [(0, 1), (2, 3)]
    """
    try:
        lists = [parse_list(part) for part in setting.split(":")]
    except DataError:
        lists = [()]
    if not all(lists):
        raise ArgumentError(
            f"{BIND}={setting}: expected auto, none, or lists of cores for local rank 0, 1, ..., such as 0-3:4-7"
        )
    return lists


def cores_of_ranks() -> frozenset[int]:
    """The cores that the ranks of this machine may use: those of whoever started them; none if that is not known."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    return Sysfs().allowed_cores(str(os.getppid())) or frozenset(os.sched_getaffinity(0))
