"""Which schedule takes least time: every kind, number of micro-batches and of virtual stages is timed, and sorted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isinf

from fuel_parallel.errors import ArgumentError
from fuel_parallel.pipeline_parallel.assignment import StageAssignment
from fuel_parallel.pipeline_parallel.builders import ScheduleKind, build, kind_of, virtual_stages_of
from fuel_parallel.pipeline_parallel.lower import lower
from fuel_parallel.pipeline_parallel.schedule import Schedule
from fuel_parallel.pipeline_parallel.simulate import Costs, Timeline, simulate

PerLink = float | Sequence[Sequence[float]]

TRAINING = tuple(kind for kind in ScheduleKind if kind is not ScheduleKind.INFERENCE)


@dataclass(frozen=True)
class Workload:
    """One step of a whole model on a whole batch, in any one unit of time and any one of memory.

    Args:
        forward: The forward of the batch through all layers.
        backward_input: The part of the backward for the inputs of layers.
        backward_weight: The part for their weights.
        message: The activations of the batch, from one rank to another: a number, or a table, `message[a][b]` from
            rank a to rank b. Where there and back differ, the longer counts.
        latency: What each message takes besides, however small; likewise.
        overhead: What each forward and each part of a backward of a stage takes besides, however small.
        activations: What all layers hold of the batch for the backward.
        layers: The shares of the layers, as numbers in any unit; () for a model that can be cut anywhere. Stages are
            then as even as `StageAssignment.by_times` can make them.
        blocking: Whether ranks stand still while they send and receive.
        slowness: For each rank, how many times as long its work takes as is said above; () for equal ranks. Stages are
            not made smaller for it.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    message: PerLink = 0.0
    latency: PerLink = 0.0
    overhead: float = 0.0
    activations: float = 1.0
    layers: Sequence[float] = ()
    blocking: bool = False
    slowness: Sequence[float] = ()

    def costs(self, schedule: Schedule) -> Costs:
        """What the actions of a schedule cost.

        Raises `ArgumentError` when there are fewer layers than stages, when `slowness` or a table is of other ranks, or
        when a message that is needed takes for ever.
        """
        self._check_ranks(schedule)
        stages, count = schedule.num_stages, schedule.num_microbatches
        shares = [1 / stages] * stages
        if self.layers:
            assignment, total = StageAssignment.by_times(self.layers, stages), sum(self.layers)
            parts = [assignment.layers_in_stage(stage) for stage in range(stages)]
            shares = [sum(self.layers[layer] for layer in part) / total for part in parts]
        slowness = [self.slowness[rank] if self.slowness else 1.0 for rank in schedule.placement]
        forward, of_input, of_weight = (
            [slow * (share * whole / count + self.overhead) for share, slow in zip(shares, slowness, strict=True)]
            for whole in (self.forward, self.backward_input, self.backward_weight)
        )
        return Costs(
            forward=forward,
            backward_input=of_input,
            backward_weight=of_weight,
            message=[
                _between(self.message, a, b) / count + _between(self.latency, a, b)
                for a, b in pairwise(schedule.placement)
            ],
            activations=[share * self.activations / count for share in shares],
        )

    def _check_ranks(self, schedule: Schedule) -> None:
        ranks = schedule.num_ranks
        if self.slowness and len(self.slowness) != ranks:
            raise ArgumentError(
                f"Workload: slowness has a number for each of the {ranks} ranks of {schedule.name}; got {self.slowness}"
            )
        for name, cost in (("message", self.message), ("latency", self.latency)):
            if not isinstance(cost, int | float) and [len(row) for row in cost] != [ranks] * ranks:
                raise ArgumentError(
                    f"Workload: {name} is a number or a table of {ranks} rows of {ranks}, from each rank of "
                    f"{schedule.name} to each; got rows of {[len(row) for row in cost]}"
                )


def _between(cost: PerLink, a: int, b: int) -> float:
    if isinstance(cost, int | float):
        return float(cost)
    longer = 0.0 if a == b else max(cost[a][b], cost[b][a])
    if isinf(longer):
        raise ArgumentError(f"Workload: the schedule sends from rank {a} to rank {b}, and that has no finite time")
    return longer


@dataclass(frozen=True)
class Candidate:
    """A schedule and the time line that it has with a workload."""

    kind: ScheduleKind
    virtual_stages: int
    schedule: Schedule
    timeline: Timeline

    @property
    def peak_memory(self) -> float:
        """Of the rank whose activations take most."""
        return max(self.timeline.peak_memory)


def search(
    num_ranks: int,
    workload: Workload,
    *,
    num_microbatches: Sequence[int],
    kinds: Sequence[ScheduleKind | str] = TRAINING,
    virtual_stages: Sequence[int] = (2,),
    most_memory: float = inf,
) -> list[Candidate]:
    """All schedules whose activations fit into memory, the quickest first.

    Args:
        num_ranks: The depth of the pipeline.
        workload: What is computed in a step.
        num_microbatches: Into how many micro-batches the batch may be cut.
        kinds: Which schedules may be used.
        virtual_stages: How many stages a rank may hold, with those kinds where that can be chosen.
        most_memory: What the activations on a rank may take, in the unit of `Workload.activations`.

    Ways that need more stages than there are layers are left out. Raises `ArgumentError` when none is left.

    >>> best = search(4, Workload(overhead=0.001), num_microbatches=[4, 8, 16, 64], kinds=["gpipe", "1f1b", "zb-h1"])[0]
    >>> best.kind.value, best.schedule.num_microbatches
    ('zb-h1', 16)
    """
    found: list[Candidate] = []
    for kind in map(kind_of, kinds):
        usual, free = virtual_stages_of(kind)
        for virtual in virtual_stages if free else [usual]:
            if workload.layers and len(workload.layers) < num_ranks * virtual:
                continue
            for count in num_microbatches:
                schedule = build(kind, num_ranks, count, virtual)
                run = lower(schedule) if workload.blocking else schedule
                found.append(Candidate(kind, virtual, schedule, simulate(run, workload.costs(schedule))))
    fitting = [one for one in found if one.peak_memory <= most_memory]
    if not fitting:
        least = min((one.peak_memory for one in found), default=None)
        said = f"the least that any needs is {least:g}" if least is not None else "each needs more stages than layers"
        raise ArgumentError(
            f"search: no schedule on {num_ranks} ranks is left with most_memory={most_memory:g}: {said}"
        )
    return sorted(fitting, key=lambda one: (one.timeline.total, one.peak_memory))
