"""Whether replicas still hold the same, to the bit; and if not, who differs, where, and by what."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import msgspec
import numpy as np

from fuel_parallel.arguments import checked
from fuel_parallel.checkpoint.boxes import Box
from fuel_parallel.checkpoint.state import Named, named
from fuel_parallel.checkpoint.tensor_file import bytes_of
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import ReplicaError
from fuel_parallel.runtime.realize import realize

BLOCKS = 64
"""Into how many parts a tensor that differs is cut, again and again, to find out where."""

Array = np.ndarray[Any, Any]
T = TypeVar("T")


@checked
def check_replicas(state: Any, comm: Communicator) -> None:
    """Raises `ReplicaError` on all ranks of `comm` if replicas do not hold the same, to the bit. A collective call.

    Lazy tensors are computed. Each rank reads its tensors once, at some gigabytes per second, and sends one number, so
    that a long run can afford it every few hundred steps. Where ranks hold other parts of a tensor each sends a number
    for each tensor, and those are compared that hold the same part. Only where something differs is more sent, a few
    kilobytes, to find the first tensor, the ranks, the first element and its values.

    Bits are compared: NaNs of one bit pattern are the same, 0.0 and -0.0 are not. Checksums have 32 bits: they miss one
    difference in four billion, and none that lies within four bytes of one tensor.

    Args:
        state: A module, an optimizer, or a nest of them, of tensors and of plain values, as a checkpoint takes it. An
            optimizer's state does not hold the parameters: give `[model, optimizer]`.
        comm: The ranks that hold the same things or parts of them: all, or `mesh["dp"]` where stages of a pipeline hold
            other layers.

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
    if problem := _difference(parts, gathered, comm):
        raise ReplicaError(f"check_replicas: {problem}")


@dataclass(frozen=True)
class _Record:
    """What one rank holds under a name: dtype and shape of a tensor, its part of it with a checksum; or a value."""

    name: str
    text: str
    part: Box | None
    checksum: int | None

    def __str__(self) -> str:
        return f"{self.name} = {self.text}" if self.part is None else f"{self.name}, {self.text}"


def _records(parts: Named) -> list[_Record]:
    records = []
    for name, held in parts.tensors.items():
        text = f"{held.dtype.name}{list(held.global_shape)}"
        records.append(_Record(name, text, held.box, zlib.crc32(bytes_of(held.array()))))
    return records + [_Record(name, repr(value), None, None) for name, value in parts.values.items()]


def _difference(parts: Named, gathered: Sequence[Sequence[_Record]], comm: Communicator) -> str:
    """What differs first; empty if nothing does. A collective call, on ranks that have the same `gathered`."""
    drifted: list[tuple[Box, dict[int, _Record]]] = []  # the first part of each tensor that differs
    columns = list(zip_longest(*gathered))
    for column in columns:
        kinds = _alike({rank: "nothing more" if one is None else str(one) for rank, one in enumerate(column)})
        if len(kinds) > 1:
            found = ", but ".join(f"{what} on {_ranks(who)}" for what, who in kinds)
            return f"the replicas do not hold the same things: {found}; build the same model on all of them"
        here = dict(enumerate(column))
        for part, who in _alike({rank: one.part for rank, one in here.items()}):
            held = {rank: here[rank] for rank in who}
            if part is not None and len({one.checksum for one in held.values()}) > 1:
                drifted.append((part, held))
                break
    if not drifted:
        return ""
    part, held = drifted[0]
    name = next(iter(held.values())).name
    at, values = _first_element(parts.tensors[name].array(), part, list(held), comm)
    most = max(_alike({rank: one.checksum for rank, one in held.items()}), key=lambda group: len(group[1]))[1]
    others = [rank for rank in held if rank not in most]
    found = ", ".join(f"{value} on {_ranks(who)}" for value, who in _alike(values))
    return (
        f"{held[most[0]]} differs: {_ranks(others)} from {_ranks(most)}, at first in element {at}, which is "
        f"{found}; {len(drifted)} of {len(columns)} differ. Average all gradients, draw the same random numbers on "
        "all replicas, and broadcast the parameters from one of them or load a checkpoint"
    )


def _first_element(
    array: Array, part: Box, holders: Sequence[int], comm: Communicator
) -> tuple[list[int], dict[int, str]]:
    """The position of the first element of a part that differs, and its value on each of its holders.

    A collective call. What ranks with other parts say is not looked at.
    """
    flat = array.reshape(-1)

    def of_holders(mine: list[Any], type: Any) -> list[tuple[Any, ...]]:
        gathered = comm.all_gather_object(mine, type=type)
        return list(zip(*[gathered[rank] for rank in holders], strict=True))

    start, stop = 0, part.size
    while stop - start > BLOCKS:
        step = -(-(stop - start) // BLOCKS)
        cuts = [slice(begin, min(begin + step, stop)) for begin in range(start, stop, step)]
        sums = of_holders([zlib.crc32(bytes_of(flat[cut])) for cut in cuts], list[int])
        # If two blocks have one checksum by chance, the last is as good as any.
        cut = next((cut for cut, column in zip(cuts, sums, strict=True) if len(set(column)) > 1), cuts[-1])
        start, stop = cut.start, cut.stop
    texts = of_holders([_shown(x) for x in flat[start:stop]], list[str])
    inside = next((n for n, column in enumerate(texts) if len(set(column)) > 1), 0)
    position = np.unravel_index(start + inside, part.shape)
    return (
        [int(index) + first for index, first in zip(position, part.start, strict=True)],
        dict(zip(holders, texts[inside], strict=True)),
    )


def _shown(element: Any) -> str:
    """A value and its bits: those of NaNs and zeros may differ where they look the same."""
    return f"{element.item()!r} (0x{element.tobytes()[::-1].hex()})"


def _alike(values: Mapping[int, T]) -> list[tuple[T, list[int]]]:
    """Each value, and the ranks that have it."""
    groups: dict[T, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return list(groups.items())


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"
