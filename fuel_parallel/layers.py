"""The layers that nearly every model needs. Weights start as small random numbers from the generator that is given."""

from __future__ import annotations

import math
from typing import Any

from fuel_parallel.arguments import checked
from fuel_parallel.lazy.ops import creation, neural
from fuel_parallel.lazy.random import Generator
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module, Parameter


class Linear(Module):
    """x @ weight + bias, with weight [in, out]. Weights start uniform within 1 / sqrt(in), the bias at 0.

    >>> Linear(3, 5, Generator(0))(creation.ones((2, 3))).shape
    (2, 5)
    """

    weight_axis = 0

    @checked
    def __init__(
        self, inputs: int, outputs: int, generator: Generator, *, bias: bool = True, dtype: Any = None
    ) -> None:
        bound = 1 / math.sqrt(inputs) if inputs else 0.0
        self.weight = Parameter(generator.uniform((inputs, outputs), -bound, bound, dtype=dtype))
        self.bias = Parameter(creation.zeros(outputs, dtype=dtype)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class Embedding(Module):
    """A table [vocabulary, dim] of normally distributed rows, looked up by integers of any shape."""

    weight_axis = 1

    @checked
    def __init__(
        self, vocabulary: int, dim: int, generator: Generator, *, std: float = 0.02, dtype: Any = None
    ) -> None:
        self.weight = Parameter(generator.normal((vocabulary, dim), std=std, dtype=dtype))

    def __call__(self, indices: Tensor) -> Tensor:
        """Integers [...] to rows [..., dim]."""
        return self.weight[indices]

    def logits(self, x: Tensor) -> Tensor:
        """[..., dim] to [..., vocabulary], the products with all rows: a head that shares the table.

        Press and Wolf (2017), arXiv:1608.05859.
        """
        return x @ self.weight.mT


class LayerNorm(Module):
    """`layer_norm` over the last dimension with a trained scale and shift."""

    @checked
    def __init__(self, dim: int, *, eps: float = 1e-5, dtype: Any = None) -> None:
        self.weight = Parameter(creation.ones(dim, dtype=dtype))
        self.bias = Parameter(creation.zeros(dim, dtype=dtype))
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., dim] to [..., dim]."""
        return neural.layer_norm(x, self.weight, self.bias, eps=self.eps)


class RMSNorm(Module):
    """`rms_norm` over the last dimension with a trained scale."""

    @checked
    def __init__(self, dim: int, *, eps: float = 1e-6, dtype: Any = None) -> None:
        self.weight = Parameter(creation.ones(dim, dtype=dtype))
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., dim] to [..., dim]."""
        return neural.rms_norm(x, self.weight, eps=self.eps)
