"""Training in 16 bits: float32 masters of the parameters, and a scaled loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fuel_parallel.arguments import checked
from fuel_parallel.comm.communicator import Communicator, ReduceOp
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.ops import binary, creation, elementwise, manipulation, reductions
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.lazy.tree import tensors_of
from fuel_parallel.module import Parameter, Variable
from fuel_parallel.optim.optimizer import Optimizer, check_gradients, rekeyed

FIRST_SCALE = 2.0**15
"""Of float16, whose greatest number is just below 2**16."""
GREATEST_SCALE = 2.0**24


class MixedPrecision(Optimizer):
    """An optimizer of float32 masters, of which bfloat16 and float16 parameters are copies (arXiv:1710.03740).

    A step in 16 bits loses what is smaller than a 256th (bfloat16) or a 2048th (float16) of a weight; a master keeps
    it. Parameters of other dtypes are updated as they are. `scaled(loss)` is what to take the gradients of; `update`
    divides by the scale again, in float32. With float16 parameters the scale is dynamic: it doubles after
    `growth_interval` good steps, and halves after one whose gradients overflowed.

    A step with an infinity or a NaN in the gradients, on any rank of `comm`, is skipped on all of them: parameters and
    state stay as they are. That is decided within the plan; nothing is read.

    Args:
        parameters: Those of the model.
        make: The optimizer of the masters, such as `lambda masters: AdamW(masters, lr=3e-4)`; they have the order of
            the parameters.
        comm: All ranks that train the model together, over all axes of the mesh; None if there is one.
        loss_scale: What to begin with, from 1 to 2**24; None for 2**15 with float16, else for 1 at all steps.
        growth_interval: The number of good steps after which the scale doubles; None for a scale that stays.

    >>> import fuel_parallel.lazy as ft
    >>> from fuel_parallel.optim import SGD
    >>> weight = Parameter(ft.ones((), dtype=ft.bfloat16))
    >>> optimizer = MixedPrecision([weight], lambda masters: SGD(masters, lr=0.001))
    >>> for _ in range(4):
    ...     (gradient,) = ft.grad(optimizer.scaled(weight * 1.0), [weight])
    ...     optimizer.update([gradient])
    >>> weight.item(), round(optimizer.masters[0].item(), 4)
    (0.99609375, 0.996)
    """

    @checked
    def __init__(
        self,
        parameters: Sequence[Parameter],
        make: Callable[[list[Parameter]], Optimizer],
        *,
        comm: Communicator | None = None,
        loss_scale: float | None = None,
        growth_interval: int | None = 2000,
    ) -> None:
        self.parameters = list(parameters)
        self.masters = [_master(p) for p in self.parameters]
        self.optimizer = make(list(self.masters))
        if [id(p) for p in self.optimizer.parameters] != [id(p) for p in self.masters]:
            raise ArgumentError(
                "MixedPrecision: make must return an optimizer of all the parameters that it is given, in their "
                "order, as `lambda masters: AdamW(masters, lr=3e-4)` does"
            )
        self.elementwise = self.optimizer.elementwise
        self.comm = comm
        has_float16 = any(p.dtype is dtypes.float16 for p in self.parameters)
        self.is_dynamic = (has_float16 or loss_scale is not None) and growth_interval is not None
        first = loss_scale if loss_scale is not None else FIRST_SCALE if has_float16 else 1.0
        if not 1 <= first <= GREATEST_SCALE:
            raise ArgumentError(f"MixedPrecision: loss_scale lies between 1 and 2**24, but is {first!r}")
        if growth_interval is not None and not growth_interval >= 1:
            raise ArgumentError(f"MixedPrecision: growth_interval is at least 1, or None, not {growth_interval!r}")
        self.growth_interval = growth_interval
        self.loss_scale = Variable(np.float32(first))
        """By how much the loss is multiplied, a float32 scalar."""
        self.good_steps = Variable(np.int64(0))
        """The number of steps since the scale changed, or one was skipped."""
        self.skipped_steps = Variable(np.int64(0))
        """The number of steps that were skipped."""

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.lr = value

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to take gradients of, in float32 (float64 if it is)."""
        wide = creation.astype(loss, dtypes.float32) if dtypes.is_half(loss.dtype) else loss
        return wide * creation.astype(self.loss_scale, wide.dtype)

    def update(self, gradients: Sequence[Tensor]) -> None:
        """One step of the masters, with the gradients of `scaled(loss)`; the parameters become copies of them."""
        check_gradients("update", self.parameters, gradients)
        by = 1 / self.loss_scale
        unscaled = [
            creation.astype(g, master.dtype) * creation.astype(by, master.dtype)
            for g, master in zip(gradients, self.masters, strict=True)
        ]
        is_finite = self._all_finite(unscaled)
        # Rebinding is what an update is, so the values from before stand in its place where it is skipped.
        before = {id(v): (v, Tensor(v.node)) for v in tensors_of(self.optimizer) if isinstance(v, Variable)}
        self.optimizer.update(unscaled)
        for variable, old in before.values():
            variable.assign(binary.where(is_finite, Tensor(variable.node), old))
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.assign(creation.astype(master, parameter.dtype))
        self._adapt(is_finite)

    def _all_finite(self, gradients: list[Tensor]) -> Tensor:
        here = reductions.all(manipulation.stack([reductions.all(elementwise.isfinite(g)) for g in gradients]))
        return here if self.comm is None else self.comm.all_reduce(here, ReduceOp.MIN)

    def _adapt(self, is_finite: Tensor) -> None:
        """The scale of the next step."""
        self.skipped_steps.assign(self.skipped_steps + binary.where(is_finite, 0, 1).astype(dtypes.int64))
        good = binary.where(is_finite, self.good_steps + 1, 0)
        if not self.is_dynamic:
            self.good_steps.assign(good)
            return
        grows = good >= self.growth_interval
        scale = binary.where(grows, self.loss_scale * 2.0, Tensor(self.loss_scale.node))
        scale = binary.where(is_finite, scale, self.loss_scale * 0.5)
        self.loss_scale.assign(binary.clip(scale, 1.0, GREATEST_SCALE))
        self.good_steps.assign(binary.where(grows, 0, good))

    def __state__(self) -> dict[str, Any]:
        names = dict(zip(self.masters, self.parameters, strict=True))
        state: dict[str, Any] = {
            "masters": {p: m for p, m in zip(self.parameters, self.masters, strict=True) if p is not m},
            "loss_scale": self.loss_scale,
            "good_steps": self.good_steps,
            "skipped_steps": self.skipped_steps,
        }
        return state | {"optimizer": rekeyed(self.optimizer.__state__(), names)}

    def __restore__(self, state: dict[str, Any]) -> None:
        self.optimizer.__restore__(state["optimizer"])

    def __tensors__(self) -> list[Any]:
        return [*self.parameters, *tensors_of(self.optimizer), self.loss_scale, self.good_steps, self.skipped_steps]


def _master(parameter: Parameter) -> Parameter:
    if not dtypes.is_half(parameter.dtype):
        return parameter
    return Parameter(creation.astype(parameter, dtypes.float32), shard=parameter.shard)
