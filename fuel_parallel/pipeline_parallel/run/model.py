"""A model in a row of layers, of which this rank keeps those of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fuel_parallel.errors import ArgumentError
from fuel_parallel.module import Module
from fuel_parallel.pipeline_parallel.assignment import StageAssignment
from fuel_parallel.pipeline_parallel.schedule import Schedule


class PipelineModel(Module):
    """The layers of this rank's stages, out of all layers of a model.

    Every rank builds the whole model, which costs nothing as long as it is lazy, and lets go of what is not its own:
    the layers that remain have the values that they have in the whole. `layers` holds them by their number there, as
    text, so that a checkpoint has the same names however many stages there are.

    Args:
        layers: All of them, in order. Each is called with what the one before it returns: a tensor, or a tuple of
            tensors as so many arguments.
        assignment: The layers of each stage.
        schedule: Says which rank has which stages.
        rank: This one.

    Raises `ArgumentError` when the three are not of as many layers and stages.

    >>> import fuel_parallel as fp, fuel_parallel.lazy as ft
    >>> from fuel_parallel.pipeline_parallel import StageAssignment, build
    >>> layers = [fp.RMSNorm(4) for _ in range(6)]
    >>> model = PipelineModel(layers, StageAssignment.uniform(6, 2), build("1f1b", 2, 4), rank=1)
    >>> list(model.stages), [name for name, _ in model.named_parameters()]
    ([1], ['layers.3.weight', 'layers.4.weight', 'layers.5.weight'])
    """

    def __init__(self, layers: Sequence[Module], assignment: StageAssignment, schedule: Schedule, rank: int) -> None:
        if len(layers) != assignment.num_layers or schedule.num_stages != assignment.num_stages:
            raise ArgumentError(
                f"PipelineModel: the assignment is of {assignment.num_layers} layers to {assignment.num_stages} "
                f"stages; got {len(layers)} layers, and {schedule.name} has {schedule.num_stages} stages"
            )
        numbers = {stage: list(assignment.layers_in_stage(stage)) for stage in schedule.stages_of(rank)}
        self.layers = {str(n): layers[n] for stage in numbers for n in numbers[stage]}
        self.stages = {stage: Row([layers[n] for n in numbers[stage]]) for stage in numbers}
        """What `PipelineRunner` is given."""


class Row(Module):
    """Layers, one after the other."""

    def __init__(self, layers: Sequence[Module]) -> None:
        self.layers = list(layers)

    def __call__(self, *x: Any) -> Any:
        """What the last one returns."""
        for layer in self.layers:
            result = layer(*x)
            x = tuple(result) if isinstance(result, tuple | list) else (result,)
        return x[0] if len(x) == 1 else x
