"""Which positions of a sequence each rank holds.

| layout | rank r of n holds |
|---|---|
| `contiguous` | part r of n |
| `zigzag` | parts r and 2n - 1 - r of 2n |

Where every position sees those before it, the last of contiguous parts sees n times as much as the first; the two parts
of a zigzag together see the same on all ranks (as the striped order of Brandon et al., 2023, arXiv:2311.09431, does).
In both layouts rank r holds as many positions as part r of `partition(length, n)`.
"""

from __future__ import annotations

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.lazy.ops import creation, manipulation
from fuel_parallel.lazy.ops.attention import check_attention
from fuel_parallel.lazy.ops.reductions import normalize_axis
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.partitioning import partition

LAYOUTS = ("contiguous", "zigzag")


def sequence_chunks(length: int, ranks: int, layout: str = "contiguous") -> list[tuple[range, ...]]:
    """The ranges of positions that each rank holds, in their order.

    >>> sequence_chunks(10, 2)
    [(range(0, 5),), (range(5, 10),)]
    >>> sequence_chunks(10, 2, "zigzag")
    [(range(0, 3), range(8, 10)), (range(3, 6), range(6, 8))]
    """
    if layout not in LAYOUTS:
        raise ArgumentError(f"context_parallel: layout is one of {', '.join(map(repr, LAYOUTS))}, not {layout!r}")
    parts = partition(length, ranks)
    if layout == "contiguous":
        return [(part,) for part in parts]
    chunks: list[tuple[range, ...]] = []
    first, last = 0, length
    for part in parts:
        front, back = len(part) - len(part) // 2, len(part) // 2
        chunks.append((range(first, first + front), range(last - back, last)))
        first, last = first + front, last - back
    return chunks


def sequence_positions(length: int, comm: Communicator, layout: str = "contiguous") -> Tensor:
    """The positions [my length] that this rank holds: for rotary or learned embeddings of positions.

    >>> from fuel_parallel import SymbolicComm
    >>> sequence_positions(6, SymbolicComm(0, 2), "zigzag").tolist()
    [0, 1, 5]
    """
    mine = sequence_chunks(length, comm.world_size, layout)[comm.rank]
    return manipulation.concat([creation.arange(part.start, part.stop) for part in mine])


def sequence_part(x: Tensor, comm: Communicator, dim: int, layout: str = "contiguous") -> Tensor:
    """This rank's positions of an `x` that every rank has: of a batch, before the first layer.

    >>> from fuel_parallel import SymbolicComm
    >>> sequence_part(creation.arange(6), SymbolicComm(1, 2), 0).tolist()
    [3, 4, 5]
    """
    dim = normalize_axis("sequence_part", dim, x.ndim)
    mine = sequence_chunks(x.shape[dim], comm.world_size, layout)[comm.rank]
    return _joined(x, dim, mine)


def join_sequence(
    x: Tensor, comm: Communicator, dim: int, layout: str = "contiguous", *, length: int | None = None
) -> Tensor:
    """The parts of all ranks in the order of the positions, on every rank; the inverse of `sequence_part`.

    `length` is that of the whole; None when all parts have one length. vjp: my part of the sum of all cotangents.
    """
    dim = normalize_axis("join_sequence", dim, x.ndim)
    whole = whole_length("join_sequence", x.shape[dim], comm, length)
    gathered = comm.all_gather(x, dim, size=whole)
    found: list[tuple[int, range]] = []
    start = 0
    for mine in sequence_chunks(whole, comm.world_size, layout):
        for part in mine:
            found.append((part.start, range(start, start + len(part))))
            start += len(part)
    return _joined(gathered, dim, tuple(place for _, place in sorted(found, key=lambda f: (f[0], f[1].stop))))


def check_sequence(function: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises the user's error, in the name of a function, where queries, keys and values are not of one sequence."""
    check_attention(function, query, key, value)
    if query.shape[-2] != key.shape[-2]:
        raise ShapeError(
            f"{function}: queries and keys are of one sequence, so that a rank holds as many of each; got query "
            f"{query.shape} and key {key.shape}"
        )


def whole_length(function: str, mine: int, comm: Communicator, length: int | None) -> int:
    """The length of the sequence of which this rank holds `mine` positions. Raises `ShapeError` if it cannot be."""
    whole = mine * comm.world_size if length is None else length
    wanted = len(partition(whole, comm.world_size)[comm.rank])
    if wanted != mine:
        raise ShapeError(
            f"{function}: of a sequence of length {whole}, rank {comm.rank} of {comm.world_size} holds {wanted} "
            f"positions, but the tensor has {mine}; cut it with sequence_part"
        )
    return whole


def _joined(x: Tensor, dim: int, parts: tuple[range, ...]) -> Tensor:
    before = (slice(None),) * dim
    return manipulation.concat([x[(*before, slice(part.start, part.stop))] for part in parts], axis=dim)
