"""`StageAssignment`: which layers of a model make up which stage."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from fuel_parallel.errors import ArgumentError
from fuel_parallel.partitioning import partition


@dataclass(frozen=True)
class StageAssignment:
    """Consecutive layers for each stage: stage s has the layers from `bounds[s]` to `bounds[s + 1]` - 1.

    >>> assignment = StageAssignment.uniform(num_layers=10, num_stages=4)
    >>> assignment.layers_per_stage(), assignment.layers_in_stage(1), assignment.stage_of(9)
    ([3, 3, 2, 2], range(3, 6), 3)
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in zip(self.bounds, self.bounds[1:], strict=False))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or not rising:
            raise ArgumentError(
                f"StageAssignment({self.bounds!r}): expected the first layer of each stage, from 0 up, and at the end "
                "the number of layers; each stage has one layer or more"
            )

    @classmethod
    def uniform(cls, num_layers: int, num_stages: int) -> StageAssignment:
        """As many layers in each stage, the first ones having one more. Raises `ArgumentError`."""
        _enough(num_layers, num_stages)
        return cls((0, *(part.stop for part in partition(num_layers, num_stages))))

    @classmethod
    def by_parameters(
        cls, parameters: Sequence[float], num_stages: int, *, first: float = 0, last: float = 0, tied: float = 0
    ) -> StageAssignment:
        """The assignment whose largest stage has the fewest parameters.

        Args:
            parameters: The parameters of each layer.
            num_stages: How many stages there are.
            first: Parameters before the first layer, those of an embedding; they belong to the first stage.
            last: Parameters after the last layer, those of a head; they belong to the last stage.
            tied: Parameters that the first stage and the last both hold, those of an embedding that is the head, too.

        Raises `ArgumentError`.

        >>> StageAssignment.by_parameters([10] * 8, 4, tied=20).layers_per_stage()
        [1, 3, 3, 1]
        """
        extra = tied if num_stages > 1 else tied / 2  # one stage that is first and last holds them once
        return cls.by_times(parameters, num_stages, first=first + extra, last=last + extra)

    @classmethod
    def by_times(
        cls,
        times: Sequence[float],
        num_stages: int,
        *,
        first: float = 0,
        last: float = 0,
        memory: Sequence[float] | None = None,
        first_memory: float = 0,
        last_memory: float = 0,
        most_memory: float | Sequence[float] = float("inf"),
    ) -> StageAssignment:
        """The assignment whose slowest stage takes least time, of those whose stages fit into memory.

        Found by dynamic programming over the stages, in the square of the layers for each.

        Args:
            times: What each layer takes, forward and backward, in any unit.
            num_stages: How many stages there are.
            first: What the first stage does before its layers, an embedding for instance.
            last: What the last stage does after its layers, a head and the loss.
            memory: What each layer needs; None: nothing is said about memory.
            first_memory: What the first stage needs besides its layers; of tied embeddings both ends need their own.
            last_memory: What the last stage needs besides its layers.
            most_memory: What a stage may need, or that of each stage.

        Raises `ArgumentError`, with the stage in question where no assignment fits into memory.

        >>> StageAssignment.by_times([1, 1, 1, 1, 4], 3).layers_per_stage()
        [2, 2, 1]
        """
        _enough(len(times), num_stages)
        limits = [float(most_memory)] * num_stages if isinstance(most_memory, int | float) else list(most_memory)
        needs = [0.0] * len(times) if memory is None else list(memory)
        if len(needs) != len(times) or len(limits) != num_stages:
            raise ArgumentError(
                f"StageAssignment: memory has a number for each of {len(times)} layers and most_memory one for each of "
                f"{num_stages} stages; got {len(needs)} and {len(limits)}"
            )
        for name, values in (("times", [*times, first, last]), ("memory", [*needs, first_memory, last_memory])):
            if not all(0 <= value < float("inf") for value in values):
                raise ArgumentError(f"StageAssignment: {name} are numbers of 0 or more; got {values}")
        time_of = _Ranges(times, first, last, num_stages)
        memory_of = _Ranges(needs, first_memory, last_memory, num_stages)
        return cls(_bounds(time_of, memory_of, limits))

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.bounds) - 1

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return self.bounds[-1]

    def stage_of(self, layer: int) -> int:
        """The stage of a layer. Raises `ArgumentError`."""
        if not 0 <= layer < self.num_layers:
            raise ArgumentError(f"stage_of({layer}): there are the layers 0 to {self.num_layers - 1}")
        return bisect.bisect_right(self.bounds, layer) - 1

    def layers_in_stage(self, stage: int) -> range:
        """The layers of a stage. Raises `ArgumentError`."""
        if not 0 <= stage < self.num_stages:
            raise ArgumentError(f"layers_in_stage({stage}): there are the stages 0 to {self.num_stages - 1}")
        return range(self.bounds[stage], self.bounds[stage + 1])

    def layers_per_stage(self) -> list[int]:
        """How many layers each stage has."""
        return [len(self.layers_in_stage(stage)) for stage in range(self.num_stages)]


class _Ranges:
    """Sums over consecutive layers, with what the first and the last stage have besides."""

    def __init__(self, values: Sequence[float], first: float, last: float, stages: int) -> None:
        self.sums = [0.0, *accumulate(map(float, values))]
        self.first, self.last, self.stages = first, last, stages

    def of(self, stage: int, start: int, stop: int) -> float:
        ends = self.first * (stage == 0) + self.last * (stage == self.stages - 1)
        return self.sums[stop] - self.sums[start] + ends


def _bounds(time_of: _Ranges, memory_of: _Ranges, limits: Sequence[float]) -> tuple[int, ...]:
    """best[stop]: for the stages so far over the layers before `stop`, the slowest one's time, and the bounds."""
    layers, stages = len(time_of.sums) - 1, len(limits)
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for stage in range(stages):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for stop in range(stage + 1, layers - (stages - stage - 1) + 1):
            ways = [
                (max(slowest, time_of.of(stage, start, stop)), (*bounds, stop))
                for start, (slowest, bounds) in best.items()
                if start < stop and memory_of.of(stage, start, stop) <= limits[stage]
            ]
            if ways:
                longer[stop] = min(ways)
        if not longer or (stage == stages - 1 and layers not in longer):
            raise ArgumentError(
                f"StageAssignment: no assignment of {layers} layers to {stages} stages fits into memory: stage {stage} "
                f"may need {limits[stage]:g}; allow more, or take more stages"
            )
        best = longer
    return best[layers][1]


def _enough(layers: int, stages: int) -> None:
    if stages < 1 or layers < stages:
        raise ArgumentError(
            f"StageAssignment: each stage has one layer or more; got {layers} layers for {stages} stages"
        )
