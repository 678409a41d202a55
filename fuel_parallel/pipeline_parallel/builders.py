"""The schedules by name: `build`, and the seed of it all, `PipelineConfig(...).build_schedule(kind)`."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from fuel_parallel.errors import ArgumentError
from fuel_parallel.pipeline_parallel.all_forward import breadth_first, gpipe, inference
from fuel_parallel.pipeline_parallel.one_forward_one_backward import interleaved_1f1b, one_f_one_b, zb_h1, zb_h2
from fuel_parallel.pipeline_parallel.schedule import Schedule
from fuel_parallel.pipeline_parallel.v_shaped import dualpipe_v, zb_v


class ScheduleKind(enum.Enum):
    """The schedules that can be built; the value is the name on the command line."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED_1F1B = "interleaved-1f1b"
    ZB_H1 = "zb-h1"
    ZB_H2 = "zb-h2"
    ZB_V = "zb-v"
    DUALPIPE_V = "dualpipe-v"
    BREADTH_FIRST = "breadth-first"
    INFERENCE = "inference"


_ONE_STAGE_A_RANK: dict[ScheduleKind, Callable[[int, int], Schedule]] = {
    ScheduleKind.GPIPE: gpipe,
    ScheduleKind.ONE_F_ONE_B: one_f_one_b,
    ScheduleKind.ZB_H1: zb_h1,
    ScheduleKind.ZB_H2: zb_h2,
}
_TWO_STAGES_A_RANK: dict[ScheduleKind, Callable[[int, int], Schedule]] = {
    ScheduleKind.ZB_V: zb_v,
    ScheduleKind.DUALPIPE_V: dualpipe_v,
}
_ANY_STAGES_A_RANK: dict[ScheduleKind, tuple[Callable[[int, int, int], Schedule], int]] = {
    ScheduleKind.INTERLEAVED_1F1B: (interleaved_1f1b, 2),
    ScheduleKind.BREADTH_FIRST: (breadth_first, 2),
    ScheduleKind.INFERENCE: (inference, 1),
}


def virtual_stages_of(kind: ScheduleKind) -> tuple[int, bool]:
    """How many stages a rank holds if nothing is said, and whether that can be chosen.

    >>> virtual_stages_of(ScheduleKind.ZB_V)
    (2, False)
    """
    if kind in _ANY_STAGES_A_RANK:
        return _ANY_STAGES_A_RANK[kind][1], True
    return (2 if kind in _TWO_STAGES_A_RANK else 1), False


def build(
    kind: ScheduleKind | str, num_ranks: int, num_microbatches: int, virtual_stages: int | None = None
) -> Schedule:
    """A schedule of forwards and backwards; `lower` puts messages into it.

    Args:
        kind: Which one, or its name.
        num_ranks: The depth of the pipeline.
        num_microbatches: Micro-batches of a step.
        virtual_stages: How many stages each rank holds; None for what the kind has.

    Raises `ArgumentError`.

    >>> print(build("zb-h1", num_ranks=2, num_microbatches=2))
    zb-h1: 2 micro-batches, 2 stages on 2 ranks
    rank 0: 0F0 0F1 0I0 0W0 0I1 0W1
    rank 1: 1F0 1I0 1F1 1I1 1W0 1W1
    """
    kind = kind_of(kind)
    usual, free = virtual_stages_of(kind)
    virtual_stages = usual if virtual_stages is None else virtual_stages
    for name, count in (
        ("num_ranks", num_ranks),
        ("num_microbatches", num_microbatches),
        ("virtual_stages", virtual_stages),
    ):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ArgumentError(f"build({kind.value!r}): {name} is a whole number of at least 1; got {count!r}")
    if not free and virtual_stages != usual:
        choice = ", ".join(other.value for other in _ANY_STAGES_A_RANK)
        raise ArgumentError(
            f"build({kind.value!r}): a rank of it holds {usual} stage{'s' if usual > 1 else ''}, not {virtual_stages}; "
            f"those with any number are {choice}"
        )
    if kind in _ANY_STAGES_A_RANK:
        return _ANY_STAGES_A_RANK[kind][0](num_ranks, num_microbatches, virtual_stages)
    return (_ONE_STAGE_A_RANK | _TWO_STAGES_A_RANK)[kind](num_ranks, num_microbatches)


@dataclass(frozen=True)
class PipelineConfig:
    """The size of a pipeline.

    Args:
        num_stages: Its depth: the ranks, each with one stage, or with `virtual_stages` of them.
        num_microbatches: Micro-batches of a step.
        virtual_stages: How many stages each rank holds; None for what the kind of schedule has.

    >>> schedule = PipelineConfig(num_stages=4, num_microbatches=8).build_schedule(ScheduleKind.ONE_F_ONE_B)
    >>> schedule.total_steps(), round(schedule.bubble_ratio(), 3)
    (33, 0.273)
    """

    num_stages: int
    num_microbatches: int
    virtual_stages: int | None = None

    def build_schedule(self, kind: ScheduleKind | str) -> Schedule:
        """The schedule of a kind. Raises `ArgumentError`."""
        return build(kind, self.num_stages, self.num_microbatches, self.virtual_stages)


def kind_of(kind: ScheduleKind | str) -> ScheduleKind:
    """The kind of a name. Raises `ArgumentError` with the names that there are."""
    try:
        return ScheduleKind(kind)
    except ValueError:
        names = ", ".join(one.value for one in ScheduleKind)
        raise ArgumentError(f"{kind!r} is no kind of schedule; there are {names}") from None
