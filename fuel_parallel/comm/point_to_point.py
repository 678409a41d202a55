"""Sends and receives as ops. A send's value is an empty tensor: it is run for its effect."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuel_parallel.backends import backend_of, memory_of
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import ZERO, Op, Shape, Spec, define
from fuel_parallel.lazy.tensor import Tensor


def _send_kernel(xp: Any, x: Any, comm: Communicator, dest: int, tag: int) -> Any:
    if comm.guard is not None:
        comm.guard.ledger.send(dest, tag)
    array = xp.ascontiguousarray(x).reshape(x.shape)
    transport = comm.transport if xp is np else comm.messenger_of(memory_of(array))
    transport.send(array, dest, tag)
    return xp.zeros(0, dtype=np.float32)


def _send_op(name: str, vjp: Any) -> Op:
    return define(
        Op(
            name,
            infer=lambda x, comm, dest, tag: Spec((0,), dtypes.float32, x.device),
            kernel=_send_kernel,
            vjp=vjp,
            crosses_ranks=True,
            aliases=False,
            has_effect=True,
            attr_names=("comm", "dest", "tag"),
            shapes="[...] -> [0]",
        )
    )


def _recv_op(name: str, vjp: Any) -> Op:
    def kernel(xp: Any, comm: Communicator, shape: Shape, dtype: DType, source: int, tag: int, device: str) -> Any:
        if comm.guard is not None:
            comm.guard.await_message(source, tag)
        return comm.messenger_of(backend_of(device).memory).recv(shape, dtype, source, tag)

    return define(
        Op(
            name,
            infer=lambda comm, shape, dtype, source, tag, device: Spec(shape, dtype, device),
            kernel=kernel,
            vjp=vjp,
            crosses_ranks=True,
            aliases=False,
            attr_names=("comm", "shape", "dtype", "source", "tag", "device"),
            shapes="-> shape",
        )
    )


def _send_vjp(g: Tensor, y: Tensor, x: Tensor, comm: Communicator, dest: int, tag: int) -> Tensor:
    return comm.recv(x.shape, x.dtype, dest, tag, differentiable=True, device=x.device)


def _recv_vjp(
    g: Tensor, y: Tensor, comm: Communicator, shape: Shape, dtype: DType, source: int, tag: int, device: str
) -> None:
    comm.send(g, source, tag, differentiable=True)


SEND = _send_op("send", ZERO)
RECV = _recv_op("recv", ZERO)
SEND_DIFFERENTIABLE = _send_op("send_differentiable", (_send_vjp,))
RECV_DIFFERENTIABLE = _recv_op("recv_differentiable", (_recv_vjp,))
