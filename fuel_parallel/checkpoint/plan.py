"""What is to be written by whom: a value that is the same on all ranks, made without touching a file.

Each rank lists what it holds. Ranks that hold the same, replicas, have equal lists, of which one travels. The merged
view says for each tensor which boxes of it there are and which ranks hold each; every box is written once, and the
ranks that hold it share that work by bytes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from fuel_parallel.checkpoint.boxes import Box, describe, gap_or_clash, split_rows, whole
from fuel_parallel.checkpoint.state import Named, encoded
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import CheckpointError
from fuel_parallel.lazy import dtypes

PIECE_BYTES = 64 << 20
"""Boxes that several ranks hold are cut into pieces of at most about so many bytes, so that all of them have work."""

_CRUMB = 64  # a piece has at least such a part of PIECE_BYTES, 1 MiB


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as a rank lists it."""

    dtype: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]


class Listing(msgspec.Struct, frozen=True):
    """What a rank holds."""

    tensors: dict[str, Listed]
    values: dict[str, Any]


@dataclass
class Spread:
    """A tensor over all ranks: which ranks hold each of its boxes."""

    dtype: dtypes.DType
    shape: tuple[int, ...]
    first: int
    holders: dict[Box, list[int]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class View:
    """What all ranks hold together."""

    tensors: dict[str, Spread]
    values: dict[str, Any]


class Piece(NamedTuple):
    """A box of a tensor, and the rank that writes it."""

    name: str
    box: Box
    writer: int


def listing_of(named: Named) -> Listing:
    """What this rank holds, in a form that travels."""
    tensors = {
        name: Listed(held.dtype.name, held.global_shape, held.owned.start, held.owned.shape)
        for name, held in sorted(named.tensors.items())
    }
    return Listing(tensors, {name: encoded(value) for name, value in sorted(named.values.items())})


def exchange(listing: Listing, comm: Communicator) -> list[tuple[Listing, list[int]]]:
    """The different listings of all ranks, each with the ranks that have it. A collective call."""
    mine = msgspec.json.encode(listing)
    if comm.world_size == 1:
        return [(msgspec.json.decode(mine, type=Listing), [0])]
    digests = comm.all_gather_object(hashlib.sha256(mine).digest(), type=bytes)
    ranks: dict[bytes, list[int]] = defaultdict(list)
    for rank, digest in enumerate(digests):
        ranks[digest].append(rank)
    found = []
    for group in ranks.values():
        text = comm.broadcast_object(mine if comm.rank == group[0] else None, group[0], type=bytes)
        found.append((msgspec.json.decode(text, type=Listing), group))
    return found


def merge(listings: Iterable[tuple[Listing, list[int]]]) -> View:
    """All listings as one. Raises `CheckpointError` where ranks contradict each other."""
    view = View({}, {})
    first_with: dict[str, int] = {}
    for listing, ranks in listings:
        for name, one in listing.tensors.items():
            dtype = dtypes.dtype(one.dtype)
            spread = view.tensors.setdefault(name, Spread(dtype, one.global_shape, ranks[0]))
            if (spread.dtype, spread.shape) != (dtype, one.global_shape):
                raise CheckpointError(
                    f"checkpoint: ranks differ about {name!r}: rank {spread.first} has "
                    f"{_text(spread.dtype, spread.shape)}, rank {ranks[0]} {_text(dtype, one.global_shape)}; a "
                    "part of a "
                    "larger tensor is said by Parameter(..., shard=fp.Shard(global_shape, start))"
                )
            spread.holders[Box(one.start, one.shape)] += ranks
        for name, value in listing.values.items():
            if name in view.values and view.values[name] != value:
                raise CheckpointError(
                    f"checkpoint: ranks differ about {name!r}: rank {first_with[name]} has {view.values[name]!r}, rank "
                    f"{ranks[0]} {value!r}; give what is each rank's own a name of its own, such as "
                    f"{{f'rank{{world.rank}}': …}}"
                )
            view.values[name] = value
            first_with.setdefault(name, ranks[0])
    for name in view.tensors.keys() & view.values.keys():
        raise CheckpointError(f"checkpoint: {name!r} is a tensor on one rank and a plain value on another")
    return view


def pieces_of(view: View, world_size: int, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Who writes what. Raises `CheckpointError` if a tensor is not held whole, each element once or by replicas."""
    tasks: list[tuple[int, str, Box, list[int]]] = []
    for name, spread in view.tensors.items():
        if problem := gap_or_clash(spread.holders, spread.shape):
            raise CheckpointError(
                f"checkpoint: the parts of {name!r}, {_text(spread.dtype, spread.shape)}, do not make it: {problem}; "
                "correct their Shard(global_shape, start), or save it from all ranks that hold a part"
            )
        # A rank may hold nothing of a tensor. If all do, it has no elements, and yet a shape.
        filled = {box: holders for box, holders in spread.holders.items() if box.size}
        for box, holders in (filled or {whole(spread.shape): [spread.first]}).items():
            itemsize = spread.dtype.itemsize
            for part in _cut(box, itemsize, len(holders), piece_bytes):
                tasks.append((part.size * itemsize, name, part, holders))
    # The largest first, each to the one of its holders who has least: as even as it gets without search.
    load = [0] * world_size
    pieces = []
    for nbytes, name, box, holders in sorted(tasks, key=lambda task: (-task[0], task[1], task[2])):
        writer = min(holders, key=lambda rank: (load[rank], rank))
        load[writer] += nbytes
        pieces.append(Piece(name, box, writer))
    return pieces


def key_of(piece: Piece, shape: tuple[int, ...]) -> str:
    """How a piece is called in its file: as the tensor, and what of it, if that is not all."""
    return piece.name if piece.box == whole(shape) else piece.name + describe(piece.box)


def _cut(box: Box, itemsize: int, holders: int, piece_bytes: int) -> Iterable[Box]:
    """A box in pieces, if several ranks hold it: a share for each of them, but none too large, and no crumbs."""
    nbytes = box.size * itemsize
    largest = max(min(piece_bytes, -(-nbytes // holders)), piece_bytes // _CRUMB)
    if holders == 1 or nbytes <= largest or not box.shape:
        return [box]
    return split_rows(box, max(1, -(-largest * box.shape[0] // nbytes)))


def _text(dtype: dtypes.DType, shape: Sequence[int]) -> str:
    return f"{dtype.name}[{', '.join(map(str, shape))}]"
