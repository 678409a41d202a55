"""Whether replicas still hold the same, to the bit; and if not, who differs, where, and by what."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np

from fuel_parallel.checkpoint.state import Named, named
from fuel_parallel.checkpoint.tensor_file import bytes_of
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import ReplicaError
from fuel_parallel.runtime.realize import realize

BLOCKS = 64
"""Into how many parts a tensor that differs is cut, again and again, to find out where."""

Array = np.ndarray[Any, Any]


def check_replicas(state: Any, comm: Communicator) -> None:
    """Raises `ReplicaError` on all ranks of `comm` if they do not hold the same, to the bit. A collective call.

    Lazy tensors are computed. Each rank reads its tensors once, at some gigabytes per second, and sends one number, so
    that a long run can afford it every few hundred steps. Only where something differs is more sent, a few kilobytes,
    to find the first tensor, the ranks, the first element and its values.

    Bits are compared: NaNs of one bit pattern are the same, 0.0 and -0.0 are not. Checksums have 32 bits: they miss one
    difference in four billion, and none that lies within four bytes of one tensor.

    Args:
        state: A module, an optimizer, or a nest of them, of tensors and of plain values, as a checkpoint takes it. An
            optimizer's state does not hold the parameters: give `[model, optimizer]`.
        comm: The replicas, `mesh["dp"]`: ranks that hold other parts of parameters are not among them.

    >>> import fuel_parallel as fp
    >>> check_replicas(fp.Linear(3, 5, fp.lazy.random.Generator(0)), fp.IdentityComm())
    """
    parts = named(state)
    realize(*parts.lazy())
    if comm.world_size == 1:
        return
    records = _records(parts)
    digest = zlib.crc32(msgspec.msgpack.encode(records))
    if len(set(comm.all_gather_object(digest, type=int))) == 1:
        return
    gathered = comm.all_gather_object(records, type=list[_Record])
    raise ReplicaError(_difference(parts, gathered, comm))


@dataclass(frozen=True)
class _Record:
    """What one rank holds under a name: dtype and shape of a tensor, with its checksum, or a plain value."""

    name: str
    text: str
    checksum: int | None

    def __str__(self) -> str:
        return f"{self.name} = {self.text}" if self.checksum is None else f"{self.name}, {self.text}"


def _records(parts: Named) -> list[_Record]:
    records = []
    for name, held in parts.tensors.items():
        array = held.array()
        records.append(_Record(name, f"{held.dtype.name}{list(array.shape)}", zlib.crc32(bytes_of(array))))
    return records + [_Record(name, repr(value), None) for name, value in parts.values.items()]


def _difference(parts: Named, gathered: Sequence[Sequence[_Record]], comm: Communicator) -> str:
    """The message about the first thing that differs. A collective call, on ranks that have the same `gathered`."""
    columns = list(zip_longest(*gathered))
    differing = [column for column in columns if len(set(column)) > 1]
    first = differing[0]
    if any(record is None or record.checksum is None for record in first) or len({str(record) for record in first}) > 1:
        what = ", but ".join(
            f"{'nothing more' if record is None else record} on {_ranks(who)}" for record, who in _alike(first)
        )
        return f"check_replicas: the replicas do not hold the same things: {what}; build the same model on all of them"
    at, values = _first_element(parts.tensors[first[0].name].array(), comm)
    groups = _alike(record.checksum for record in first)
    most = max(groups, key=lambda group: len(group[1]))[1]
    others = [rank for rank in range(comm.world_size) if rank not in most]
    found = ", ".join(f"{value} on {_ranks(who)}" for value, who in _alike(values))
    return (
        f"check_replicas: {first[0]} differs: {_ranks(others)} from {_ranks(most)}, at first in element {at}, which is "
        f"{found}; {len(differing)} of {len(columns)} differ. Average all gradients, draw the same random numbers on "
        "all replicas, and broadcast the parameters from one of them or load a checkpoint"
    )


def _first_element(array: Array, comm: Communicator) -> tuple[list[int], list[str]]:
    """The position of the first element that differs, and its value on each rank."""
    flat = array.reshape(-1)
    start, stop = 0, flat.size
    while stop - start > BLOCKS:
        step = -(-(stop - start) // BLOCKS)
        cuts = [range(begin, min(begin + step, stop)) for begin in range(start, stop, step)]
        sums = [zlib.crc32(bytes_of(flat[cut.start : cut.stop])) for cut in cuts]
        columns = list(zip(*comm.all_gather_object(sums, type=list[int]), strict=True))
        # If two blocks have one checksum by chance, the last is as good as any.
        cut = next((cut for cut, column in zip(cuts, columns, strict=True) if len(set(column)) > 1), cuts[-1])
        start, stop = cut.start, cut.stop
    texts = comm.all_gather_object([_shown(x) for x in flat[start:stop]], type=list[str])
    columns_of_texts = list(zip(*texts, strict=True))
    inside = next((n for n, column in enumerate(columns_of_texts) if len(set(column)) > 1), 0)
    position = [int(index) for index in np.unravel_index(start + inside, array.shape)]
    return position, list(columns_of_texts[inside])


def _shown(element: Any) -> str:
    """A value and its bits: those of NaNs and zeros may differ where they look the same."""
    return f"{element.item()!r} (0x{element.tobytes()[::-1].hex()})"


def _alike(values: Iterable[Any]) -> list[tuple[Any, list[int]]]:
    """Each value, and the ranks that have it."""
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return list(groups.items())


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"
