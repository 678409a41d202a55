"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Sequence

from fuel_parallel.arguments import checked
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy.ops.call import call
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Parameter
from fuel_parallel.optim.optimizer import Optimizer, PerParameter, rebind, zeros_for


class SGD(Optimizer):
    """Gradient descent, with momentum if it is not 0: v = momentum * v + g; p = p - lr * v.

    Args:
        parameters: What it trains.
        lr: The learning rate.
        momentum: How much of the last step's velocity stays.
        nesterov: Step by g + momentum * v, as if the gradient were taken ahead (Sutskever et al., 2013).
        weight_decay: Times the parameter, is added to the gradient; one number, or one for each parameter.
        lr_scale: Factors of the learning rate; one number, or one for each parameter.

    >>> import fuel_parallel.lazy as ft
    >>> weight = Parameter(1.0)
    >>> SGD([weight], lr=0.5).update([ft.asarray(1.0)])
    >>> weight.item()
    0.5
    """

    elementwise = True

    @checked
    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float = 1e-2,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: PerParameter = 0.0,
        lr_scale: PerParameter = 1.0,
    ) -> None:
        super().__init__(parameters, lr, lr_scale=lr_scale, weight_decay=weight_decay)
        if not 0 <= momentum < 1:
            raise ArgumentError(f"SGD: momentum must lie in [0, 1), but is {momentum!r}")
        if nesterov and not momentum:
            raise ArgumentError("SGD: nesterov=True looks ahead along the momentum, which is 0; give one, such as 0.9")
        self.momentum, self.nesterov = momentum, nesterov
        self.velocities = zeros_for(self.parameters) if momentum else []

    def _update(self, gradients: list[Tensor]) -> None:
        scalars = self._scalars(lambda rate, decay: (rate, decay, self.momentum))
        for index, (p, g, (rate, decay, momentum)) in enumerate(zip(self.parameters, gradients, scalars, strict=True)):
            decays = self.weight_decay[index] != 0
            if self.velocities:
                v = self.velocities[index]
                rebind([p, v], call(_with_momentum, [p, v, g, rate, decay, momentum], decays, self.nesterov))
            else:
                rebind([p], call(_plain, [p, g, rate, decay], decays))


def _plain(p: Tensor, g: Tensor, rate: Tensor, decay: Tensor, decays: bool) -> tuple[Tensor]:
    """The new p."""
    return (p - rate * (g + p * decay if decays else g),)


def _with_momentum(
    p: Tensor, v: Tensor, g: Tensor, rate: Tensor, decay: Tensor, momentum: Tensor, decays: bool, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """The new p and v."""
    g = g + p * decay if decays else g
    v = v * momentum + g
    return p - rate * (g + v * momentum if nesterov else v), v
