"""`Optimizer`, what all of them share. `update` builds the nodes of the new parameters and rebinds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fuel_parallel.arguments import checked
from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.ops import creation, manipulation
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Parameter, Variable

PerParameter = float | Sequence[float]
"""A number for all parameters, or one for each in their order."""


class Optimizer:
    """What optimizers share: the parameters, and the learning rate, which may be set anew before each update.

    Args:
        parameters: What it trains.
        lr: The learning rate.
        lr_scale: By how much it is multiplied for a parameter.
        weight_decay: How strongly a parameter is drawn to 0; each optimizer says how.

    `lr_scale` and `weight_decay` are one number, or one for each parameter, so that these can be told apart by
    whatever a script knows of them: `weight_decay=[0.1 if p.ndim > 1 else 0.0 for p in parameters]`.
    """

    elementwise: bool
    """Whether an element's update depends on the gradients of that element only, so that parts are updated alike."""

    @checked
    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float,
        *,
        lr_scale: PerParameter = 1.0,
        weight_decay: PerParameter = 0.0,
    ) -> None:
        self.parameters = list(parameters)
        if not self.parameters:
            raise ArgumentError(f"{type(self).__name__}: expected at least one parameter, got none")
        if len(set(map(id, self.parameters))) < len(self.parameters):
            raise ArgumentError(
                f"{type(self).__name__}: a parameter is listed twice and would be updated twice; model.parameters() "
                "lists each once"
            )
        self.lr_scale = self._for_each("lr_scale", lr_scale)
        self.weight_decay = self._for_each("weight_decay", weight_decay)
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

    @checked
    def update(self, gradients: Sequence[Tensor]) -> None:
        """One step, with a gradient for each parameter in the order in which the parameters were given."""
        check_gradients("update", self.parameters, gradients)
        self._update([creation.astype(g, p.dtype) for g, p in zip(gradients, self.parameters, strict=True)])

    def _update(self, gradients: list[Tensor]) -> None:
        """Rebinds parameters and state; gradients have the shapes and dtypes of the parameters."""
        raise NotImplementedError

    def _scalars(self, make: Callable[[Tensor, float], Sequence[float | Tensor]]) -> list[list[Tensor]]:
        """`make(learning rate, weight decay)` for each parameter, in its dtype and on its device.

        Made once for all that are alike: a model has many parameters, and each scalar would be a node for each of them.
        """
        made: dict[tuple[DType, str, float, float], list[Tensor]] = {}
        rows = []
        for parameter, scale, decay in zip(self.parameters, self.lr_scale, self.weight_decay, strict=True):
            key = (parameter.dtype, parameter.device, scale, decay)
            if key not in made:
                rate = self._lr if scale == 1 else self._lr * scale
                scalars = [_scalar(value, parameter.dtype) for value in make(rate, decay)]
                made[key] = scalars if parameter.device == "cpu" else _together(scalars, parameter.device)
            rows.append(made[key])
        return rows

    def _for_each(self, name: str, value: PerParameter) -> tuple[float, ...]:
        count = len(self.parameters)
        found = tuple(value) if isinstance(value, Sequence) else (value,) * count
        if len(found) != count:
            raise ArgumentError(
                f"{type(self).__name__}: {name} has {len(found)} values for {count} parameters; give one number, or "
                "one for each parameter in their order"
            )
        for index, one in enumerate(found):
            if not 0 <= one < float("inf"):
                raise ArgumentError(
                    f"{type(self).__name__}: {name} must be 0 or more, but is {one!r} for parameter {index}"
                )
        return tuple(map(float, found))

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


def check_gradients(function: str, parameters: Sequence[Tensor], gradients: Sequence[Tensor], remedy: str = "") -> None:
    """Raises the user's error, in the name of a function, where there is not one gradient for each parameter."""
    if len(gradients) != len(parameters):
        raise ArgumentError(f"{function}: {len(parameters)} parameters, but {len(gradients)} gradients")
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if gradient.shape != parameter.shape:
            raise ShapeError(
                f"{function}: parameter {index} has shape {parameter.shape}, its gradient {gradient.shape}{remedy}"
            )


def zeros_for(parameters: Sequence[Parameter]) -> list[Variable]:
    """State of an optimizer: a variable for each parameter, like it."""
    return [Variable(creation.zeros_like(p)) for p in parameters]


def rebind(variables: Sequence[Variable], values: Sequence[Tensor]) -> None:
    """Each variable takes its value."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def rekeyed(state: Any, other: Mapping[Parameter, Parameter]) -> Any:
    """The state of an optimizer, with what it keeps of a parameter under the other one: for one inside of another."""
    if not isinstance(state, dict):
        return state
    return {
        other.get(key, key) if isinstance(key, Parameter) else key: rekeyed(part, other) for key, part in state.items()
    }


def check_betas(name: str, betas: tuple[float, float]) -> tuple[float, float]:
    """Two rates of decay of moving averages.

    Raises `ArgumentError` for others than numbers from 0 to below 1.
    """
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ArgumentError(f"{name}: betas must lie in [0, 1), but are {betas}")
    return betas


def _nested(attributes: dict[str, Any]) -> list[Variable]:
    found: list[Variable] = []
    for value in attributes.values():
        items = value if isinstance(value, list) else [value]
        found += [item for item in items if isinstance(item, Variable) and not isinstance(item, Parameter)]
    return found


def _together(scalars: list[Tensor], device: str) -> list[Tensor]:
    """The scalars on a device, by one copy."""
    there = creation.to_device(manipulation.stack(scalars), device)
    return [there[n] for n in range(len(scalars))]


def _scalar(value: float | Tensor, dtype: DType) -> Tensor:
    return creation.astype(value, dtype) if isinstance(value, Tensor) else creation.full((), value, dtype=dtype)
