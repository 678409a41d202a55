"""What lies between the layers that are cut over ranks, on this rank's part of the sequence.

Norms and dropout treat each position by itself. Where activations between the layers are whole, every rank repeats
them; on parts of the sequence (Korthikanti et al., 2022, arXiv:2205.05198) each rank has its share of that work and
memory, and what was an all-reduce becomes a reduce-scatter and an all-gather of the same number of bytes.
"""

from __future__ import annotations

from typing import Any

from fuel_parallel import layers
from fuel_parallel.arguments import checked
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.lazy.ops import neural
from fuel_parallel.lazy.random import Generator
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.tensor_parallel.mappings import copy_to_ranks


class LayerNorm(layers.LayerNorm):
    """`fp.LayerNorm` on this rank's part of the sequence; gradients of scale and shift are those of the whole."""

    @checked
    def __init__(self, dim: int, comm: Communicator, *, eps: float = 1e-5, dtype: Any = None) -> None:
        super().__init__(dim, eps=eps, dtype=dtype)
        self._comm = comm

    @classmethod
    def from_dense(cls, dense: layers.LayerNorm, comm: Communicator) -> LayerNorm:
        """The same norm, with the parameters of the dense one."""
        layer = cls(dense.weight.shape[0], comm, eps=dense.eps, dtype=dense.weight.dtype)
        layer.weight, layer.bias = dense.weight, dense.bias
        return layer

    def __call__(self, x: Tensor) -> Tensor:
        """[..., dim] to [..., dim]."""
        weight, bias = copy_to_ranks(self.weight, self._comm), copy_to_ranks(self.bias, self._comm)
        return neural.layer_norm(x, weight, bias, eps=self.eps)


class RMSNorm(layers.RMSNorm):
    """`fp.RMSNorm` on this rank's part of the sequence; the gradient of the scale is that of the whole."""

    @checked
    def __init__(self, dim: int, comm: Communicator, *, eps: float = 1e-6, dtype: Any = None) -> None:
        super().__init__(dim, eps=eps, dtype=dtype)
        self._comm = comm

    @classmethod
    def from_dense(cls, dense: layers.RMSNorm, comm: Communicator) -> RMSNorm:
        """The same norm, with the parameters of the dense one."""
        layer = cls(dense.weight.shape[0], comm, eps=dense.eps, dtype=dense.weight.dtype)
        layer.weight = dense.weight
        return layer

    def __call__(self, x: Tensor) -> Tensor:
        """[..., dim] to [..., dim]."""
        return neural.rms_norm(x, copy_to_ranks(self.weight, self._comm), eps=self.eps)


def dropout(x: Tensor, rate: float, generator: Generator, comm: Communicator, dim: int) -> Tensor:
    """`generator.dropout` on this rank's part of the sequence along `dim`: what is dropped is as if x were whole.

    All parts are of one size, and the generator is in the same state on all ranks.
    """
    whole, start = list(x.shape), [0] * x.ndim
    whole[dim] *= comm.world_size
    start[dim] = x.shape[dim] * comm.rank
    return generator.dropout(x, rate, global_shape=tuple(whole), start=tuple(start))
