"""Tensors that ranks hold parts of, gathered on rank 0 one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fuel_parallel.checkpoint.boxes import Box, whole
from fuel_parallel.checkpoint.ranks import Outcome, attempt
from fuel_parallel.checkpoint.state import Held
from fuel_parallel.checkpoint.tensor_file import Entry
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import ArgumentError, CheckpointError
from fuel_parallel.lazy.ops import creation
from fuel_parallel.runtime.realize import realize

Array = np.ndarray[Any, Any]


class _Listed(msgspec.Struct):
    dtype: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]


def gathered(tensors: Mapping[str, Held], comm: Communicator) -> list[Entry]:
    """Entries whose `array()` is a collective call that gives the whole tensor on rank 0, and zeros on the others.

    A collective call. Raises `ArgumentError` on all ranks when they hold different tensors.
    """
    realize([held.leaf for held in tensors.values() if not isinstance(held.leaf, np.ndarray)])
    mine = {
        name: _Listed(held.dtype.name, held.global_shape, held.owned.start, held.owned.shape)
        for name, held in tensors.items()
    }
    listed = comm.all_gather_object(mine, type=dict[str, _Listed])
    for rank, other in enumerate(listed):
        if other.keys() != listed[0].keys():
            raise ArgumentError(
                f"export_huggingface: rank {rank} holds other tensors than rank 0: "
                f"{', '.join(sorted(other.keys() ^ listed[0].keys())[:8])}; all ranks of comm give the same model"
            )
        differing = [n for n, one in other.items() if (one.dtype, one.global_shape) != _kind(listed[0][n])]
        if differing:
            raise ArgumentError(
                f"export_huggingface: {differing[0]} is {other[differing[0]].dtype}"
                f"{list(other[differing[0]].global_shape)} on rank {rank} and {listed[0][differing[0]].dtype}"
                f"{list(listed[0][differing[0]].global_shape)} on rank 0"
            )
    boxes = {name: [Box(other[name].start, other[name].shape) for other in listed] for name in mine}
    return [
        Entry(name, tensors[name].dtype, tensors[name].global_shape, _gather(tensors[name], boxes[name], comm))
        for name in sorted(tensors)
    ]


def together(
    comm: Communicator, files: list[list[Entry]], write: Callable[[list[list[Entry]]], list[Path]]
) -> list[Path]:
    """What `write(files)` returns on rank 0, on every rank, while the others take their turns at each entry.

    Raises `CheckpointError` on all ranks when rank 0 fails; it takes the turns that are left, so that nobody waits.
    """
    turns = iter([entry for file in files for entry in file])
    if comm.is_root:
        taken = [[_noted(entry, turns) for entry in file] for file in files]
        mine = attempt(lambda: [str(path) for path in write(taken)])
    else:
        mine = None
    for entry in turns:
        entry.array()
    outcome: Outcome = comm.broadcast_object(mine, type=Outcome)
    if outcome.problem:
        raise CheckpointError(outcome.problem)
    return [Path(path) for path in outcome.value]


def _noted(entry: Entry, turns: Iterator[Entry]) -> Entry:
    """The entry, whose turn is over when it has been asked for."""

    def array() -> Array:
        next(turns)
        return entry.array()

    return Entry(entry.key, entry.dtype, entry.shape, array)


def _kind(one: _Listed) -> tuple[str, tuple[int, ...]]:
    return one.dtype, one.global_shape


def _gather(held: Held, boxes: list[Box], comm: Communicator) -> Callable[[], Array]:
    everything = whole(held.global_shape)

    def array() -> Array:
        if boxes[0] == everything:
            return held.array()
        mine = held.array()[boxes[comm.rank].within(held.box)]
        senders = [rank for rank, box in enumerate(boxes) if rank and box.size and box not in boxes[:rank]]
        if not comm.is_root:
            if comm.rank in senders:
                comm.send(creation.asarray(mine), 0)
                realize()
            return np.broadcast_to(np.zeros((), held.dtype), held.global_shape)
        found = np.empty(held.global_shape, held.dtype)
        found[boxes[0].within(everything)] = mine
        for rank in senders:
            found[boxes[rank].within(everything)] = comm.recv(boxes[rank].shape, held.dtype, rank).numpy()
        return found

    return array
