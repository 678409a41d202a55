"""Adam, and AdamW, whose weight decay stands beside the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from fuel_parallel.arguments import checked
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy.ops import elementwise
from fuel_parallel.lazy.ops.call import call
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Parameter, Variable
from fuel_parallel.optim.optimizer import Optimizer, PerParameter, check_betas, rebind, zeros_for


class Adam(Optimizer):
    """Steps of about the learning rate in each element (Kingma and Ba, 2014, arXiv:1412.6980, algorithm 1).

    m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g**2;
    p = p - lr * m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps).

    Args:
        parameters: What it trains.
        lr: The learning rate.
        betas: How slowly the means of g and of g**2 follow.
        eps: Keeps the quotient finite.
        weight_decay: Times the parameter, is added to g; one number, or one for each parameter.
        lr_scale: Factors of the learning rate; one number, or one for each parameter.

    >>> import fuel_parallel.lazy as ft
    >>> weight = Parameter(1.0)
    >>> Adam([weight], lr=0.25).update([ft.asarray(100.0)])
    >>> weight.item()
    0.75
    """

    elementwise = True
    decoupled: ClassVar[bool] = False
    """Whether weight decay acts on the parameter itself, and not through the gradient."""

    @checked
    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: PerParameter = 0.0,
        lr_scale: PerParameter = 1.0,
    ) -> None:
        super().__init__(parameters, lr, lr_scale=lr_scale, weight_decay=weight_decay)
        if not eps >= 0:
            raise ArgumentError(f"{type(self).__name__}: eps must be 0 or more, but is {eps!r}")
        self.betas, self.eps = check_betas(type(self).__name__, betas), eps
        self.step = Variable(np.float64(0))
        self.means = zeros_for(self.parameters)
        self.squares = zeros_for(self.parameters)

    def _update(self, gradients: list[Tensor]) -> None:
        first, second = self.betas
        self.step.assign(self.step + 1)
        correction = elementwise.sqrt(1 - second**self.step)
        bias = 1 - first**self.step
        eps = self.eps * correction

        def make(rate: Tensor, decay: float) -> tuple[float | Tensor, ...]:
            moments = (first, 1 - first, second, 1 - second)
            return *moments, eps, rate * correction / bias, 1 - rate * decay if self.decoupled else decay

        rows = zip(self.parameters, self.means, self.squares, gradients, self._scalars(make), strict=True)
        for index, (p, m, v, g, scalars) in enumerate(rows):
            decays = self.decoupled or self.weight_decay[index] != 0
            rebind([p, m, v], call(_adam, [p, m, v, g, *scalars], self.decoupled, decays))


def _adam(
    p: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    b1: Tensor,
    one_less_b1: Tensor,
    b2: Tensor,
    one_less_b2: Tensor,
    least: Tensor,
    step: Tensor,
    decay: Tensor,
    decoupled: bool,
    decays: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new p, m and v. `least` is eps and `step` the rate, both with the bias corrections: these are scalars, so
    that no pass over the parameters is spent on them. `decay` is what p keeps, or if not decoupled what g gets of it.
    """
    if decays and not decoupled:
        g = g + p * decay
    m = m * b1 + g * one_less_b1
    v = v * b2 + elementwise.square(g) * one_less_b2
    kept = p * decay if decoupled else p
    return kept - m / (elementwise.sqrt(v) + least) * step, m, v


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2017, arXiv:1711.05101, algorithm 2).

    m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g**2;
    p = p - lr * (m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps) + weight_decay * p).

    Args:
        parameters: What it trains.
        lr: The learning rate.
        betas: How slowly the means of g and of g**2 follow.
        eps: Keeps the quotient finite.
        weight_decay: How much of each parameter a step of rate 1 takes away; one number, or one for each parameter.
        lr_scale: Factors of the learning rate; one number, or one for each parameter.

    >>> import fuel_parallel.lazy as ft
    >>> weight = Parameter(1.0)
    >>> AdamW([weight], lr=0.25, weight_decay=0.5).update([ft.asarray(0.0)])
    >>> weight.item()
    0.875
    """

    decoupled = True

    @checked
    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: PerParameter = 0.01,
        lr_scale: PerParameter = 1.0,
    ) -> None:
        super().__init__(parameters, lr, betas=betas, eps=eps, weight_decay=weight_decay, lr_scale=lr_scale)
