"""Gradients summed over micro-batches, without communication."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Parameter, Variable
from fuel_parallel.optim.optimizer import check_gradients


class GradientAccumulator:
    """The sum of the gradients of micro-batches: a large batch in the memory of a small one.

    Realize it after each `add`, and what is held is one sum for each parameter, whatever the number of micro-batches.
    16-bit gradients are summed in float32. Nothing is sent: average once, what `mean` gives. If each loss is the mean
    of a micro-batch, and these are of one size, it is the gradient of the mean loss of them together.

    Args:
        parameters: Of which the gradients are.

    >>> import fuel_parallel.lazy as ft
    >>> weight = Parameter(2.0)
    >>> accumulator = GradientAccumulator([weight])
    >>> for x in (1.0, 5.0):
    ...     accumulator.add(ft.grad(weight * x, [weight]))
    >>> [gradient.item() for gradient in accumulator.mean()], accumulator.count
    ([3.0], 0)
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.count = 0
        """The number of micro-batches since the last `mean`."""
        self._sums = [_zeros_for(p) for p in parameters]

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Takes the gradients of one micro-batch, one for each parameter, in their order. Computes nothing."""
        check_gradients("add", self._sums, gradients)
        for total, gradient in zip(self._sums, gradients, strict=True):
            wide = creation.astype(gradient, total.dtype)
            total.assign(total + wide if self.count else wide)
        self.count += 1

    def mean(self) -> list[Tensor]:
        """The mean of the gradients that were added, lazy; the next `add` begins anew.

        Raises `ArgumentError` if none were.
        """
        count = creation.asarray(np.float64(self.count))  # data: another number of them does not make another plan
        return [total / creation.astype(count, total.dtype) for total in self._take("mean")]

    def sum(self) -> list[Tensor]:
        """The sum of the gradients that were added, lazy; like `mean` otherwise."""
        return self._take("sum")

    def _take(self, function: str) -> list[Tensor]:
        if not self.count:
            raise ArgumentError(
                f"{function}: no gradients were added since the last one; call add for each micro-batch first"
            )
        sums = [Tensor(total.node) for total in self._sums]
        for total in self._sums:
            total.assign(creation.zeros_like(total))
        self.count = 0
        return sums

    def __tensors__(self) -> list[Variable]:
        return self._sums


def _zeros_for(parameter: Parameter) -> Variable:
    wide = dtypes.accumulated_in(parameter.dtype)
    return Variable(creation.zeros(parameter.shape, dtype=wide, device=parameter.device))
