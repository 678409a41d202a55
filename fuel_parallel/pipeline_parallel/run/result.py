"""What a step of a pipeline gives."""

from __future__ import annotations

from fuel_parallel.comm.posted import PostedReceive
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.tensor import Tensor


class PipelineResult:
    """The gradients and the loss of a step on this rank.

    Attributes:
        gradients: Those of the mean loss of the batch, lazy, in the order of `PipelineRunner.parameters()`.
    """

    def __init__(self, gradients: list[Tensor], loss: Tensor | None, awaited: PostedReceive | None) -> None:
        self.gradients = gradients
        self._loss, self._awaited = loss, awaited

    @property
    def loss(self) -> Tensor:
        """The mean loss of the batch, a float64 scalar, on every rank. A wait for the last stage, but no collective."""
        self.settle()
        if self._loss is None:
            raise RuntimeError("a step ended without a loss")
        return self._loss

    def settle(self) -> None:
        """Waits for what is still on its way."""
        if self._awaited is not None:
            self._loss = creation.asarray(self._awaited.wait()[0])
            self._awaited = None
