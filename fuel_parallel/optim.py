"""Optimizers. `update` builds the nodes of the new parameters and rebinds them; `realize` computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.ops import creation, elementwise
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Parameter, Variable


class Optimizer:
    """What optimizers share: the parameters, and the learning rate, which may be set anew before each update."""

    def __init__(self, parameters: Sequence[Parameter], lr: float) -> None:
        self.parameters = list(parameters)
        if not self.parameters:
            raise ArgumentError(f"{type(self).__name__}: expected at least one parameter, got none")
        self._lr = Variable(np.float64(0))
        self.lr = lr

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self._rate

    @lr.setter
    def lr(self, value: float) -> None:
        if not value >= 0:
            raise ArgumentError(f"lr must not be negative, but is {value!r}")
        self._rate = float(value)
        # Data, not a constant of the graph: a new rate does not make a new plan.
        self._lr.assign(creation.asarray(np.float64(value)))

    def update(self, gradients: Sequence[Tensor]) -> None:
        """One step, with a gradient for each parameter in the order in which the parameters were given."""
        if len(gradients) != len(self.parameters):
            raise ArgumentError(f"update: {len(self.parameters)} parameters, but {len(gradients)} gradients")
        for index, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if gradient.shape != parameter.shape:
                raise ShapeError(
                    f"update: parameter {index} has shape {parameter.shape}, its gradient {gradient.shape}"
                )
        self._update([creation.astype(g, p.dtype) for g, p in zip(gradients, self.parameters, strict=True)])

    def _update(self, gradients: list[Tensor]) -> None:
        raise NotImplementedError

    def _rate_for(self, parameter: Parameter) -> Tensor:
        return creation.astype(self._lr, parameter.dtype)

    def __state__(self) -> dict[str, Any]:
        """What a checkpoint keeps: the learning rate, and variables, those of a parameter under that parameter."""
        state: dict[str, Any] = {"lr": self.lr}
        for name, value in vars(self).items():
            if isinstance(value, Variable) and value is not self._lr:
                state[name] = value
            elif isinstance(value, list) and value and value is not self.parameters:
                state[name] = dict(zip(self.parameters, value, strict=True))
        return state

    def __restore__(self, state: dict[str, Any]) -> None:
        """Takes over the learning rate of a checkpoint; variables have their values already."""
        self.lr = state["lr"]

    def __tensors__(self) -> list[Any]:
        return [*self.parameters, *[v for v in _nested(vars(self)) if v is not self._lr]]


def _nested(attributes: dict[str, Any]) -> list[Variable]:
    found: list[Variable] = []
    for value in attributes.values():
        items = value if isinstance(value, list) else [value]
        found += [item for item in items if isinstance(item, Variable) and not isinstance(item, Parameter)]
    return found


class SGD(Optimizer):
    """Gradient descent, with momentum if it is not 0: v = momentum * v + g; p = p - lr * v."""

    def __init__(self, parameters: Sequence[Parameter], lr: float = 1e-2, *, momentum: float = 0.0) -> None:
        super().__init__(parameters, lr)
        self.momentum = momentum
        self.velocities = [Variable(creation.zeros_like(p)) for p in self.parameters] if momentum else []

    def _update(self, gradients: list[Tensor]) -> None:
        for index, (parameter, g) in enumerate(zip(self.parameters, gradients, strict=True)):
            if self.velocities:
                g = self.velocities[index] * self.momentum + g
                self.velocities[index].assign(g)
            parameter.assign(parameter - self._rate_for(parameter) * g)


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2017, arXiv:1711.05101, algorithm 2).

    m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g**2;
    p = p - lr * (m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps) + weight_decay * p).
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, lr)
        if not all(0 <= beta < 1 for beta in betas):
            raise ArgumentError(f"AdamW: betas must lie in [0, 1), but are {betas}")
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.step = Variable(np.float64(0))
        self.means = [Variable(creation.zeros_like(p)) for p in self.parameters]
        self.squares = [Variable(creation.zeros_like(p)) for p in self.parameters]

    def _update(self, gradients: list[Tensor]) -> None:
        first, second = self.betas
        self.step.assign(self.step + 1)
        correction = elementwise.sqrt(1 - second**self.step)
        step_size = self._lr * correction / (1 - first**self.step)
        decay = 1 - self._lr * self.weight_decay
        scalars = (first, 1 - first, second, 1 - second, self.eps * correction, step_size, decay)
        # Made once for each dtype: a model has many parameters, and each scalar would be a node for each of them.
        made = {dtype: [_scalar(s, dtype) for s in scalars] for dtype in {p.dtype for p in self.parameters}}
        for p, m, v, g in zip(self.parameters, self.means, self.squares, gradients, strict=True):
            b1, one_less_b1, b2, one_less_b2, eps, step, kept = made[p.dtype]
            m.assign(m * b1 + g * one_less_b1)
            v.assign(v * b2 + elementwise.square(g) * one_less_b2)
            # The bias corrections are scalars here, so that no pass over the parameters is spent on them.
            p.assign(p * kept - m / (elementwise.sqrt(v) + eps) * step)


def _scalar(value: float | Tensor, dtype: DType) -> Tensor:
    return creation.astype(value, dtype) if isinstance(value, Tensor) else creation.full((), value, dtype=dtype)
