"""Lion, which steps by a sign."""

from __future__ import annotations

from collections.abc import Sequence

from fuel_parallel.arguments import checked
from fuel_parallel.lazy.ops import elementwise
from fuel_parallel.lazy.ops.call import call
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Parameter
from fuel_parallel.optim.optimizer import Optimizer, PerParameter, check_betas, rebind, zeros_for


class Lion(Optimizer):
    """Steps of exactly the learning rate, by the sign of a mean (Chen et al., 2023, arXiv:2302.06675, algorithm 2).

    p = p - lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p); m = b2 * m + (1 - b2) * g.
    It has one variable for each parameter where AdamW has two. The paper's learning rates are a third to a tenth of
    AdamW's, with a weight decay as much larger.

    Args:
        parameters: What it trains.
        lr: The learning rate.
        betas: The weights of the mean in the step, and in the next mean.
        weight_decay: How much of each parameter a step of rate 1 takes away; one number, or one for each parameter.
        lr_scale: Factors of the learning rate; one number, or one for each parameter.

    >>> import fuel_parallel.lazy as ft
    >>> weight = Parameter([1.0, 1.0])
    >>> Lion([weight], lr=0.25).update([ft.asarray([-3.0, 0.001])])
    >>> weight.tolist()
    [1.25, 0.75]
    """

    elementwise = True

    @checked
    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: PerParameter = 0.0,
        lr_scale: PerParameter = 1.0,
    ) -> None:
        super().__init__(parameters, lr, lr_scale=lr_scale, weight_decay=weight_decay)
        self.betas = check_betas("Lion", betas)
        self.means = zeros_for(self.parameters)

    def _update(self, gradients: list[Tensor]) -> None:
        first, second = self.betas
        scalars = self._scalars(lambda rate, decay: (first, 1 - first, second, 1 - second, rate, 1 - rate * decay))
        for p, m, g, row in zip(self.parameters, self.means, gradients, scalars, strict=True):
            rebind([p, m], call(_lion, [p, m, g, *row]))


def _lion(
    p: Tensor,
    m: Tensor,
    g: Tensor,
    b1: Tensor,
    one_less_b1: Tensor,
    b2: Tensor,
    one_less_b2: Tensor,
    rate: Tensor,
    kept: Tensor,
) -> tuple[Tensor, Tensor]:
    """The new p and m; `kept` is what weight decay leaves of p."""
    return p * kept - elementwise.sign(m * b1 + g * one_less_b1) * rate, m * b2 + g * one_less_b2
