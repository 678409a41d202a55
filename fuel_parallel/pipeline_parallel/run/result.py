"""What a step of a pipeline gives."""

from __future__ import annotations

from typing import Any

from fuel_parallel.comm.posted import PostedReceive
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.tensor import Tensor


class PipelineResult:
    """The gradients, the loss and the outputs of a step on this rank.

    Attributes:
        gradients: Those of the mean loss of the batch, lazy, in the order of `PipelineRunner.parameters()`; empty
            without a backward.
        outputs: On the rank of the last stage, without a loss: what it returned, the micro-batches joined along
            dimension 0; else None.
    """

    def __init__(
        self, gradients: list[Tensor], loss: Tensor | None, awaited: PostedReceive | None, outputs: Any
    ) -> None:
        self.gradients, self.outputs = gradients, outputs
        self._loss, self._awaited = loss, awaited

    @property
    def loss(self) -> Tensor:
        """The mean loss of the batch, float64, on every rank: a wait, but no collective. Raises `ArgumentError` if none
        was asked for.
        """
        self.settle()
        if self._loss is None:
            raise ArgumentError("PipelineResult.loss: the runner has no loss; give it loss= on the last stage's rank")
        return self._loss

    def settle(self) -> None:
        """Waits for what is still on its way."""
        if self._awaited is not None:
            self._loss = creation.asarray(self._awaited.wait()[0])
            self._awaited = None
