"""How long a training step takes: matrix products, communication that nothing hides, and the pipeline's bubble.

After Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM" (2021,
arXiv:2104.04473): two all-reduces over tp in each layer forward and two backward (section 2.3), a send between stages
for each micro-batch and chunk, a bubble of (p-1)/v micro-batches (section 2.2), and the gradients over dp.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from fuel_parallel.topology.algorithms import Collective
from fuel_parallel.topology.cost import CostModel, Line, best
from fuel_parallel.topology.memory import Memory, Recompute, Strategy
from fuel_parallel.topology.mesh_axes import MeshAxis, groups_of
from fuel_parallel.topology.transformer import TransformerModel

if TYPE_CHECKING:
    from fuel_parallel.topology.network import Array


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """What share of a device's peak matrix products reach: `most` for large ones, half of that when one side of the
    product has `half_width` columns. Fitted by hand to the A100's iterations in table 5 of Korthikanti et al. (2022,
    arXiv:2205.05198); for other devices an assumption, so measure yours.

    >>> round(Efficiency().of(tokens=2048, width=1536), 2)
    0.62
    """

    most: float = 0.85
    half_width: float = 300.0

    def of(self, tokens: float, width: float) -> float:
        """For products of so many rows, and so many columns or less."""
        return self.most * tokens / (tokens + self.half_width) * width / (width + self.half_width)


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step's time goes, in us."""

    compute: float
    bubble: float
    tp: float
    pp: float
    dp: float

    def total(self) -> float:
        """All of it."""
        return self.compute + self.bubble + self.tp + self.pp + self.dp


class Layout:
    """A mesh laid along an order of devices: times of collectives along its axes, each worked out once."""

    def __init__(self, cost: CostModel, order: Array, sizes: tuple[tuple[str, int], ...]) -> None:
        self.sizes = sizes
        self._cost = cost
        axes = [MeshAxis(name=name, size=size) for name, size in sizes]
        self._groups = {axis.name: order[groups] for axis, groups in zip(axes, groups_of(axes), strict=True)}
        self._lines: dict[tuple[str, Collective], dict[str, Line]] = {}

    def us(self, axis: str, collective: Collective, nbytes: float) -> float:
        """Along all groups of an axis at the same time; infinite where unknown."""
        if self._groups[axis].shape[1] == 1:
            return 0.0
        key = axis, collective
        if key not in self._lines:
            self._lines[key] = self._cost.lines(collective, self._groups[axis])
        found = best(self._lines[key], nbytes)
        return math.inf if found is None else found.us


def step_time(
    model: TransformerModel, strategy: Strategy, memory: Memory, layout: Layout, tflops: float, efficiency: Efficiency
) -> StepTime:
    """Predicts a step, in us. `tflops` is a device's peak in the model's dtype."""
    b, t, p, m = strategy.micro_batch, strategy.tp, strategy.pp, strategy.micro_batches(model)
    layers = -(-model.layers // p)
    tokens = model.sequence * b
    rate = tflops * 1e6 * efficiency.of(tokens, min(model.hidden, model.ffn_width()) / t)  # operations a us
    again = {
        Recompute.NONE: 0.0,
        Recompute.SELECTIVE: model.attention_flops(b),
        Recompute.FULL: model.layer_flops(b),
    }[strategy.recompute]
    flops = layers * (3 * model.layer_flops(b) + again) + 3 * model.output_flops(b)  # of the last stage
    compute = flops / t / rate
    message = float(tokens * model.hidden * model.width())
    all_reduces = 4 + (2 if strategy.recompute is Recompute.FULL else 0)
    tp = layers * all_reduces * layout.us("tp", Collective.ALL_REDUCE, message)
    # Each rank of tp sends its part of the activations, which the next stage's ranks gather (section 4.1).
    pp = 2 * strategy.chunks * layout.us("pp", Collective.P2P, message / t)
    gradients = float(memory.gradients)
    if strategy.sharded_optimizer:
        dp = layout.us("dp", Collective.REDUCE_SCATTER, gradients) + layout.us(
            "dp", Collective.ALL_GATHER, memory.weights
        )
    else:
        dp = layout.us("dp", Collective.ALL_REDUCE, gradients)
    return StepTime(
        compute=m * compute,
        bubble=(p - 1) / strategy.chunks * (compute + tp + pp) if p > 1 else 0.0,
        tp=m * tp,
        pp=m * pp,
        dp=max(0.0, dp - 2 / 3 * compute),  # the last micro-batch's backward pass hides some of it
    )
