"""One stage of a model at work: the forward and backward passes of single micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuel_parallel.backends import device_of
from fuel_parallel.data_parallel.accumulation import GradientAccumulator
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy import dtypes, effects
from fuel_parallel.lazy.autograd import Pullback
from fuel_parallel.lazy.node import Node, Spec, data_node
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module, Parameter
from fuel_parallel.pipeline_parallel.run.residuals import Residuals, reached
from fuel_parallel.runtime.realize import hold, realize

Array = Any
Loss = Callable[[Any, Any], Tensor]


@dataclass
class _InFlight:
    """A micro-batch between its forward and the end of its backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    pullback: Pullback | None = None


class StageRun:
    """A stage at work. Arrays go in and out; what lies between is held until the backward has come.

    Args:
        module: Called with the tensors that the stage before returned, or with a part of the batch.
        loss: On the last stage, `loss(output, targets)`: a floating scalar, the mean over the rows of a micro-batch.
        is_first: Whether its input is the batch itself, of which there is no gradient.
        recompute: Whether a backward computes the stage's forward again, so that only its input is held.
    """

    def __init__(self, module: Module, *, loss: Loss | None, is_first: bool, recompute: bool) -> None:
        self.module, self.loss, self.is_first, self.recompute = module, loss, is_first, recompute
        self.parameters: list[Parameter] = module.parameters() if isinstance(module, Module) else []
        self.accumulator = GradientAccumulator(self.parameters)
        self._residuals = Residuals()
        self._in_flight: dict[int, _InFlight] = {}

    @property
    def device(self) -> str:
        """Where its input is to be."""
        return self.parameters[0].device if self.parameters else "cpu"

    def infer(self, arrays: Sequence[Array], targets: Any) -> list[Array]:
        """The outputs for a micro-batch that has no backward; its loss where there are targets."""
        outputs = self._outputs(_leaves(arrays), targets)
        realize(outputs)
        return [output.node.value for output in outputs]

    def forward(self, microbatch: int, arrays: Sequence[Array], targets: Any) -> list[Array]:
        """The outputs for a micro-batch, or its loss."""
        inputs = _leaves(arrays)
        outputs = self._outputs(inputs, targets)
        self._in_flight[microbatch] = _InFlight(inputs, outputs)

        def choose(computed: list[Node]) -> list[int]:
            return [] if self.recompute else self._residuals.choose(computed, lambda: self._look_ahead(inputs, outputs))

        return hold(outputs, choose)

    def cotangent_specs(self, microbatch: int) -> list[Spec] | None:
        """What `backward` is to be given for a micro-batch; None before its forward."""
        state = self._in_flight.get(microbatch)
        return None if state is None else [t.node.spec for t in floating(state.outputs)]

    def backward(self, microbatch: int, cotangents: Sequence[Array], weight: float) -> list[Array]:
        """Adds the gradients of the weights, and returns those of the floating inputs.

        `cotangents` are those of the floating outputs; on the last stage none, and `weight` is that of the loss.
        """
        state = self._in_flight.pop(microbatch)
        pullback = self._pullback(state.inputs, state.outputs, self._cotangents(state, cotangents, weight))
        pullback.finish()
        wanted = [pullback.cotangent(x) for x in self._wanted(state.inputs)]
        self.accumulator.add([pullback.cotangent(p) for p in self.parameters])
        del state, pullback
        realize(wanted, self.accumulator)
        return [x.node.value for x in wanted]

    def backward_input(self, microbatch: int, cotangents: Sequence[Array], weight: float) -> list[Array]:
        """The first part of `backward`: returns the gradients of the floating inputs."""
        state = self._in_flight[microbatch]
        pullback = self._pullback(state.inputs, state.outputs, self._cotangents(state, cotangents, weight))
        pullback.through(state.inputs)
        state.pullback = pullback
        wanted = [pullback.cotangent(x) for x in self._wanted(state.inputs)]
        # What gradients of weights will be made of: cotangents of activations, on the first stage for nothing else.
        beside = _made_of(pullback.arrived(), pullback.passed)
        state.outputs = []
        return hold([*wanted, *beside], lambda computed: _places(computed, beside))[: len(wanted)]

    def backward_weight(self, microbatch: int) -> None:
        """The second part: adds the gradients of the weights."""
        pullback = self._in_flight.pop(microbatch).pullback
        if pullback is None:
            raise RuntimeError(f"the weight gradients of micro-batch {microbatch} come before its input gradient")
        pullback.finish()
        self.accumulator.add([pullback.cotangent(p) for p in self.parameters])
        del pullback
        realize(self.accumulator)

    def _outputs(self, inputs: list[Tensor], targets: Any) -> list[Tensor]:
        result = self.module(*inputs)
        if self.loss is None or targets is None:
            return _as_list(result)
        value = self.loss(result, targets)
        if not isinstance(value, Tensor) or value.shape != () or dtypes.kind(value.dtype) != "real floating":
            got = f"{value.dtype.name}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ArgumentError(f"loss: expected a floating scalar, the mean over the rows of a micro-batch; got {got}")
        return [value]

    def _cotangents(self, state: _InFlight, arrays: Sequence[Array], weight: float) -> list[Tensor]:
        if self.loss is not None:
            return _leaves([np.asarray(weight, state.outputs[0].dtype)])
        return _leaves(arrays)

    def _pullback(self, inputs: list[Tensor], outputs: list[Tensor], cotangents: Sequence[Tensor]) -> Pullback:
        return Pullback(floating(outputs), cotangents, [*self._wanted(inputs), *self.parameters])

    def _wanted(self, inputs: list[Tensor]) -> list[Tensor]:
        return [] if self.is_first else floating(inputs)

    def _look_ahead(self, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        """The results of a backward pass, built to be looked at."""
        with effects.dry_run():
            pullback = self._pullback(inputs, outputs, [creation.zeros_like(t) for t in floating(outputs)])
            pullback.finish()
            return [pullback.cotangent(t) for t in [*self._wanted(inputs), *self.parameters]]


def floating(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those that have gradients."""
    return [t for t in tensors if dtypes.kind(t.dtype) == "real floating"]


def _as_list(result: Any) -> list[Tensor]:
    outputs = list(result) if isinstance(result, tuple | list) else [result]
    for output in outputs:
        if not isinstance(output, Tensor):
            raise ArgumentError(
                f"a pipeline stage returns a tensor or a tuple of tensors, which is what the next one is called with; "
                f"got {type(output).__name__}"
            )
    return outputs


def _leaves(arrays: Sequence[Array]) -> list[Tensor]:
    return [Tensor(data_node(a, Spec(a.shape, dtypes.dtype(a.dtype), device_of(a)))) for a in arrays]


def _made_of(results: Sequence[Tensor], passed: Sequence[Tensor]) -> list[Tensor]:
    """Those of the cotangents `passed`, views left out, that `results` are made of without another one between."""
    nodes = {t.node for t in passed if t.node.op.name not in ("reshape", "permute_dims", "broadcast_to")}
    return [Tensor(node) for node in sorted(reached(results, nodes), key=lambda n: n.serial)]


def _places(computed: list[Node], tensors: Sequence[Tensor]) -> list[int]:
    nodes = {t.node for t in tensors}
    return [n for n, node in enumerate(computed) if node in nodes]
