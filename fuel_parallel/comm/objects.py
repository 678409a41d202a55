"""Small objects between ranks, at once and not in the graph: settings, names, counts; what controls a run.

They travel as MessagePack and not as pickle: what arrives is data, whoever sent it. A rank whose object cannot be
encoded says so in place of it, and every rank raises: none is left waiting for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from fuel_parallel.comm.entries import Entry
from fuel_parallel.errors import ArgumentError, DataError
from fuel_parallel.lazy import effects

if TYPE_CHECKING:
    from fuel_parallel.comm.communicator import Communicator
    from fuel_parallel.comm.transport import Transport


class _Message(NamedTuple):
    """An encoded object, or the reason why there is none."""

    is_object: bool
    payload: bytes


def broadcast_object(comm: Communicator, value: Any, root: int, kind: Any) -> Any:
    """See `Communicator.broadcast_object`."""
    effects.run_unfinished()
    message = _encode(value) if comm.rank == root else _Message(True, b"")
    if comm.world_size > 1:
        with comm.together(Entry("broadcast_object", facts={"root": root})):
            header = comm.transport.broadcast(_header(message), root)
            payload = np.frombuffer(message.payload, np.uint8) if comm.rank == root else np.empty(header[1], np.uint8)
            message = _Message(bool(header[0]), comm.transport.broadcast(payload, root).tobytes())
    return _decode("broadcast_object", message, root, kind)


def all_gather_object(comm: Communicator, value: Any, kind: Any) -> list[Any]:
    """See `Communicator.all_gather_object`."""
    effects.run_unfinished()
    messages = [_encode(value)]
    if comm.world_size > 1:
        mine = bytes([messages[0].is_object]) + messages[0].payload
        with comm.together(Entry("all_gather_object")):
            gathered = all_gather_bytes(comm.transport, mine)
        messages = [_Message(bool(one[0]), one[1:]) for one in gathered]
    return [_decode("all_gather_object", message, rank, kind) for rank, message in enumerate(messages)]


def all_gather_bytes(transport: Transport, mine: bytes) -> list[bytes]:
    """The bytes of all ranks, by rank, through a transport of host arrays."""
    sizes = transport.all_gather(np.array([len(mine)], np.int64), [1] * transport.ranks).tolist()
    payloads = transport.all_gather(np.frombuffer(mine, np.uint8), sizes)
    return [payloads[end - size : end].tobytes() for end, size in zip(np.cumsum(sizes), sizes, strict=True)]


def _header(message: _Message) -> np.ndarray[Any, Any]:
    return np.array([message.is_object, len(message.payload)], np.int64)


def _encode(value: Any) -> _Message:
    try:
        return _Message(True, msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as reason:
        return _Message(False, f"a {type(value).__name__}, which MessagePack cannot hold: {reason}".encode())


def _decode(function: str, message: _Message, rank: int, kind: Any) -> Any:
    if not message.is_object:
        raise ArgumentError(
            f"{function}: rank {rank} gave {message.payload.decode()}; expected None, bools, Python numbers, strings, "
            "bytes, and lists, dicts, dataclasses or msgspec.Structs of these; tensors go by broadcast and all_gather"
        )
    try:
        return msgspec.msgpack.decode(message.payload, type=kind)
    except msgspec.ValidationError as reason:
        raise DataError(
            f"{function}: what rank {rank} gave is no {getattr(kind, '__name__', kind)}: {reason}; give one, or leave "
            "out type"
        ) from None
