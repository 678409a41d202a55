"""Messages between the stages of a pipeline: who sends what to whom, in which shapes, and which receives to post.

A step begins with a *header* from the rank of the first stage to all others: the rows of each micro-batch and a number
for the rest of the batch's shapes. The first activation of its kind to pass from a stage to the next has its shapes
and dtypes sent ahead; from then on both ranks know them, and receives are posted before they are needed.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.comm.posted import PostedReceive, post_send
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Spec
from fuel_parallel.pipeline_parallel.actions import Action, ActionKind
from fuel_parallel.pipeline_parallel.dependencies import partner
from fuel_parallel.pipeline_parallel.run.batch import Batch
from fuel_parallel.pipeline_parallel.schedule import Schedule

Array = Any

MOST_TENSORS = 8
"""Tensors that pass from a stage to the next."""

_SHAPES_BYTES = 1024
_HEADER, _LOSS, _FIRST = 0, 1, 2


class _TensorShape(msgspec.Struct, array_like=True):
    shape: tuple[int, ...]
    dtype: str


class _Shapes(msgspec.Struct, array_like=True):
    """What passes between two stages, of micro-batches with so many rows."""

    rows: int
    tensors: list[_TensorShape]


class Links:
    """The messages of this rank of a pipeline. `comm` is used for nothing else.

    `devices` are those of the stages of this rank, on which activations are received.
    """

    def __init__(self, comm: Communicator, schedule: Schedule, devices: Mapping[int, str]) -> None:
        self.comm, self.schedule, self.devices = comm, schedule, devices
        self.rows: tuple[int, ...] = ()
        self._kind = 0
        self._shapes: dict[tuple[int, int, int], list[Spec]] = {}
        self._posted: dict[Action, list[PostedReceive]] = {}

    # The header and the loss.

    def begin(self, batch: Batch | None) -> tuple[int, ...]:
        """Begins a step with the batch, on the rank of the first stage; the rows of each micro-batch, on all."""
        most = self.schedule.num_microbatches
        if batch is not None:
            header = np.zeros(most + 1, dtype=np.int64)
            header[0] = zlib.crc32(repr(batch.shapes).encode())
            header[1 : len(batch.rows) + 1] = batch.rows
            for rank in range(self.comm.world_size):
                if rank != self.comm.rank:
                    post_send(self.comm, header, rank, _HEADER)
        else:
            header = PostedReceive(self.comm, (most + 1,), dtypes.int64, self.schedule.placement[0], _HEADER).wait()
        self._kind, *rows = header.tolist()
        self.rows = tuple(r for r in rows if r)
        return self.rows

    def send_loss(self, loss: float) -> None:
        """From the rank of the last stage to all others."""
        for rank in range(self.comm.world_size):
            if rank != self.comm.rank:
                post_send(self.comm, np.array([loss]), rank, _LOSS)

    def receive_loss(self) -> PostedReceive:
        """On the others."""
        return PostedReceive(self.comm, (1,), dtypes.float64, self.schedule.placement[-1], _LOSS)

    # Activations and their gradients.

    def send(self, receive: Action, arrays: Sequence[Array]) -> None:
        """Sends what another rank is to receive."""
        rank = self.schedule.placement[receive.stage]
        if receive.kind is ActionKind.RECV_F:
            self._tell_shapes(receive, rank, arrays)
        for n, array in enumerate(arrays):
            post_send(self.comm, array, rank, self._tag(receive, n))

    def expect(self, receive: Action, specs: Sequence[Spec] | None = None) -> None:
        """Posts a receive if its shapes are known. `specs` are those of gradients; activations have theirs told."""
        if receive in self._posted:
            return
        known = self._shapes.get(self._key(receive)) if specs is None else specs
        if known is not None:
            rank = self._source(receive)
            self._posted[receive] = [
                PostedReceive(self.comm, s.shape, s.dtype, rank, self._tag(receive, n), s.device)
                for n, s in enumerate(known)
            ]

    def receive(self, receive: Action, specs: Sequence[Spec] | None = None) -> list[Array]:
        """What another rank has sent, when it is there."""
        while receive not in self._posted and specs is None and self._key(receive) not in self._shapes:
            self._hear_shapes(receive)
        self.expect(receive, specs)
        return [posted.wait() for posted in self._posted.pop(receive)]

    def _source(self, receive: Action) -> int:
        return self.schedule.placement[partner(receive).stage]

    def _tag(self, receive: Action, tensor: int) -> int:
        """Of its own for each message of a step."""
        place = receive.microbatch * self.schedule.num_stages + receive.stage
        return (
            _FIRST
            + self.schedule.num_stages
            + (place * 2 + (receive.kind is ActionKind.RECV_B)) * MOST_TENSORS
            + tensor
        )

    def _key(self, receive: Action) -> tuple[int, int, int]:
        return receive.stage, self.rows[receive.microbatch], self._kind

    def _tell_shapes(self, receive: Action, rank: int, arrays: Sequence[Array]) -> None:
        key = self._key(receive)
        if key in self._shapes:
            return
        if len(arrays) > MOST_TENSORS:
            raise ArgumentError(
                f"a pipeline stage passes {MOST_TENSORS} tensors to the next one at most; stage {receive.stage - 1} "
                f"passes {len(arrays)}: stack some of them"
            )
        self._shapes[key] = []
        tensors = [_TensorShape(a.shape, dtypes.dtype(a.dtype).name) for a in arrays]
        packed = msgspec.msgpack.encode(_Shapes(self.rows[receive.microbatch], tensors))
        message = np.zeros(_SHAPES_BYTES, dtype=np.uint8)
        message[: len(packed) + 2] = np.frombuffer(len(packed).to_bytes(2, "little") + packed, dtype=np.uint8)
        post_send(self.comm, message, rank, _FIRST + receive.stage)

    def _hear_shapes(self, receive: Action) -> None:
        """The next shapes that are told of this stage, of micro-batches like this one or others."""
        source, stage = self._source(receive), receive.stage
        message = PostedReceive(self.comm, (_SHAPES_BYTES,), dtypes.uint8, source, _FIRST + stage).wait()
        length = int.from_bytes(message[:2].tobytes(), "little")
        told = msgspec.msgpack.decode(message[2 : 2 + length].tobytes(), type=_Shapes)
        self._shapes[stage, told.rows, self._kind] = [
            Spec(t.shape, dtypes.dtype(t.dtype), self.devices[stage]) for t in told.tensors
        ]
