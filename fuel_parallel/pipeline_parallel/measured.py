"""Steps of a pipeline as they ran: their time line, what its actions cost, and how far that is from a prediction.

A rank notes what it computes, and how long it stood still for a message; `read_trace` reads that from a file. Medians
are over steps, without the first ones, in which plans are made: a step that was disturbed moves none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from fuel_parallel.errors import DataError
from fuel_parallel.pipeline_parallel.actions import COMPUTE, RECEIVES, Action, ActionKind, text_of
from fuel_parallel.pipeline_parallel.dependencies import known_as, partner
from fuel_parallel.pipeline_parallel.schedule import Schedule
from fuel_parallel.pipeline_parallel.simulate import Costs, Span, Timeline

FIRST_STEPS = 2
"""That do not count, if there are others: they make plans, and hear of shapes."""


@dataclass(frozen=True)
class Measurement:
    """Some steps of a schedule, as they ran, in seconds.

    Args:
        schedule: What was run.
        steps: By its number, the time line of each step that all ranks have noted to its end. It begins at 0 with the
            first action of any rank; receives in it are the times for which a rank stood still.

    Raises `DataError` when there is no step, or one whose actions are not those of the schedule.

    >>> from fuel_parallel.pipeline_parallel import build, simulate
    >>> schedule = build("1f1b", 2, 4)
    >>> ran = Measurement(schedule, {0: simulate(schedule, Costs(9, 9, 9)), 1: simulate(schedule, Costs(2, 3, 3))})
    >>> ran.timeline().total, ran.timeline(step=0).total, ran.costs().forward, ran.costs().backward
    (40.0, 135.0, [2.0, 2.0], [6.0, 6.0])
    """

    schedule: Schedule
    steps: Mapping[int, Timeline]

    def __post_init__(self) -> None:
        name = self.schedule.name
        if not self.steps:
            raise DataError(f"{name}: there is no step; expected one at least that all ranks have ended")
        for step, timeline in self.steps.items():
            for rank, (spans, order) in enumerate(zip(timeline.ranks, self.schedule.orders, strict=True)):
                ran = [span.action for span in spans if span.action.kind in COMPUTE]
                if ran != [action for action in order if action.kind in COMPUTE]:
                    raise DataError(
                        f"{name}: in step {step}, rank {rank} has run {text_of(ran)}, which is not its order in the "
                        f"schedule, {text_of(order)}"
                    )

    def counted(self) -> list[Timeline]:
        """The steps that medians are of: all but the first ones."""
        ordered = [self.steps[step] for step in sorted(self.steps)]
        return ordered[min(FIRST_STEPS, len(ordered) - 1) :]

    def timeline(self, step: int | None = None) -> Timeline:
        """The time line of a step, or that whose actions begin and end at the medians. Raises `DataError`."""
        if step is None:
            return median_timeline(self.counted())
        if step not in self.steps:
            known = f"{min(self.steps)} to {max(self.steps)}"
            raise DataError(f"{self.schedule.name}: there is no whole step {step}; there are those from {known}")
        return self.steps[step]

    def costs(self) -> Costs:
        """What actions of each stage took, medians over micro-batches and steps, in seconds.

        Parts of backwards are known where the schedule has them. If some stages have them and others do not, those of
        the others are taken in the same ratio; a whole backward that nobody ran is both parts together. A message is
        counted from the end of what made it to where a rank that stood still for it has it; if none did, as the time
        that it took to take one which was there.
        """
        steps, schedule = self.counted(), self.schedule
        took: dict[ActionKind, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for span in (span for step in steps for spans in step.ranks for span in spans):
            took[span.action.kind][span.action.stage].append(span.end - span.start)
        typical = {kind: {s: median(times) for s, times in stages.items()} for kind, stages in took.items()}
        stages = range(schedule.num_stages)

        def of(kind: ActionKind) -> dict[int, float]:
            return typical.get(kind, {})

        inputs, weights = of(ActionKind.BACKWARD_INPUT), of(ActionKind.BACKWARD_WEIGHT)
        whole = {s: inputs[s] + weights[s] for s in inputs} | of(ActionKind.BACKWARD)
        split = sum(inputs.values()) + sum(weights.values())
        ratio = sum(inputs.values()) / split if split else 0.5
        known = bool(inputs)
        return Costs(
            forward=[of(ActionKind.FORWARD)[s] for s in stages],
            backward_input=[inputs.get(s, whole[s] * ratio) for s in stages] if known else None,
            backward_weight=[weights.get(s, whole[s] * (1 - ratio)) for s in stages] if known else None,
            backward=[whole[s] for s in stages] if whole else None,
            message=[_message(steps, s) for s in stages[:-1]],
            reduce=[of(ActionKind.REDUCE_GRAD).get(s, 0.0) for s in stages],
        )


def median_timeline(steps: Sequence[Timeline]) -> Timeline:
    """Each action from the median of its beginnings to that of its ends. All steps are of one schedule.

    Actions keep their order and do not overlap: what holds for each step, holds for medians.
    """
    ranks = [
        tuple(
            Span(same[0].action, median(one.start for one in same), median(one.end for one in same))
            for same in zip(*(step.ranks[rank] for step in steps), strict=True)
        )
        for rank in range(len(steps[0].ranks))
    ]
    return Timeline(tuple(ranks), steps[0].peak_memory)


@dataclass(frozen=True)
class Difference:
    """A figure, as predicted and as measured. Times are in the unit of the time lines."""

    name: str
    predicted: float
    measured: float

    @property
    def share(self) -> float | None:
        """How much more was measured than predicted, as a share of what was predicted; None where that is 0."""
        return self.measured / self.predicted - 1 if self.predicted else None


def differences(predicted: Timeline, measured: Timeline) -> list[Difference]:
    """The total, the bubble, the idle time of each rank, and the mean time of each kind of action.

    >>> from fuel_parallel.pipeline_parallel import build, simulate
    >>> schedule = build("gpipe", 2, 2)
    >>> for one in differences(simulate(schedule), simulate(schedule, Costs(forward=1.5))):
    ...     print(f"{one.name}: {one.predicted:.3g}, {one.measured:.3g}, {one.share:+.0%}")
    total: 9, 10.5, +17%
    bubble ratio: 0.333, 0.333, +0%
    idle, rank 0: 3, 3.5, +17%
    idle, rank 1: 3, 3.5, +17%
    mean F: 1, 1.5, +50%
    mean B: 2, 2, +0%
    """
    both = predicted, measured
    found = [
        Difference("total", *(one.total for one in both)),
        Difference("bubble ratio", *(one.bubble_ratio() for one in both)),
    ]
    for rank in range(len(predicted.ranks)):
        found.append(Difference(f"idle, rank {rank}", *(one.total - one.busy(rank) for one in both)))
    means = [_means(one) for one in both]
    for kind in ActionKind:
        if kind in COMPUTE | {ActionKind.REDUCE_GRAD} and all(kind in mean for mean in means):
            found.append(Difference(f"mean {kind.value}", *(mean[kind] for mean in means)))
    return found


def _means(timeline: Timeline) -> dict[ActionKind, float]:
    times: dict[ActionKind, list[float]] = defaultdict(list)
    for span in (span for spans in timeline.ranks for span in spans):
        times[span.action.kind].append(span.end - span.start)
    return {kind: fmean(some) for kind, some in times.items()}


def _message(steps: Sequence[Timeline], stage: int) -> float:
    """Of a message between a stage and the next one, either way."""
    awaited: list[float] = []
    there: list[float] = []
    for step in steps:
        spans = [span for row in step.ranks for span in row]
        made = {known_as(span.action): span.end for span in spans if span.action.kind in COMPUTE}
        receives = (span for span in spans if span.action.kind in RECEIVES)
        for span in (one for one in receives if min(one.action.stage, partner(one.action).stage) == stage):
            ready = made[_maker(span.action)]
            if span.start <= ready:
                awaited.append(max(span.end - ready, 0.0))
            else:
                there.append(span.end - span.start)
    return median(awaited or there or [0.0])


def _maker(receive: Action) -> Action:
    """The action that made what is received."""
    send = partner(receive)
    kind = ActionKind.FORWARD if send.kind is ActionKind.SEND_F else ActionKind.BACKWARD_INPUT
    return Action(kind, send.stage, send.microbatch)
