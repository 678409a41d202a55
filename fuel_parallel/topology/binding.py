"""Which cores of a machine each of its ranks gets."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fuel_parallel.partitioning import partition
from fuel_parallel.topology.sysfs import Sysfs


def share_of_cores(
    allowed: Collection[int], local_rank: int, local_size: int, root: Path = Path("/")
) -> tuple[int, ...]:
    """The cores of one of the ranks of this machine: a share of those that all of them may use, apart from the others'.

    Neighbouring ranks get neighbouring cores. A share does not cross NUMA domains unless it must, and both threads of a
    core belong to one rank. With more ranks than cores there are no shares: () says so.

    >>> share_of_cores({0, 1, 2, 3}, 1, 2, root=Path("/nowhere"))
    (2, 3)
    >>> share_of_cores({0}, 1, 2)
    ()
    """
    sysfs = Sysfs(root)
    cores = _physical(allowed, sysfs)
    if local_size > len(allowed):
        return ()
    if local_size > len(cores):
        cores = [(core,) for whole in cores for core in whole]
    domains = _domains(cores, sysfs)
    if local_size % len(domains) == 0 and all(len(d) >= local_size // len(domains) for d in domains):
        # As many ranks in each domain.
        each = local_size // len(domains)
        cores, local_rank, local_size = domains[local_rank // each], local_rank % each, each
    else:
        cores = [whole for domain in domains for whole in domain]
    part = partition(len(cores), local_size)[local_rank]
    return tuple(sorted(core for whole in cores[part.start : part.stop] for core in whole))


def _physical(allowed: Collection[int], sysfs: Sysfs) -> list[tuple[int, ...]]:
    """The allowed cores, the threads of one together, ascending."""
    found: dict[tuple[int, ...], None] = {}
    for core in sorted(allowed):
        siblings = sysfs.cores(f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") | {core}
        found[tuple(sorted(c for c in siblings if c in allowed))] = None
    return list(found)


def _domains(cores: list[tuple[int, ...]], sysfs: Sysfs) -> list[list[tuple[int, ...]]]:
    """The cores by NUMA domain; one domain where nothing is known."""
    domain_of = {core: domain for domain, mine in sysfs.domains().items() for core in mine}
    found: dict[int, list[tuple[int, ...]]] = {}
    for whole in cores:
        found.setdefault(domain_of.get(whole[0], 0), []).append(whole)
    return [found[domain] for domain in sorted(found)]
