"""Pipeline parallelism: schedules as data. One list of actions for each rank is built, proven, timed, drawn and run.

>>> from fuel_parallel.pipeline_parallel import build, check, lower, simulate
>>> schedule = lower(build("1f1b", num_ranks=4, num_microbatches=8))
>>> check(schedule)
>>> simulate(schedule).total
33.0
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fuel_parallel.pipeline_parallel.actions import Action, ActionKind, parse_action, parse_actions, text_of
from fuel_parallel.pipeline_parallel.assignment import StageAssignment
from fuel_parallel.pipeline_parallel.builders import PipelineConfig, ScheduleKind, build
from fuel_parallel.pipeline_parallel.check import check
from fuel_parallel.pipeline_parallel.lower import lower, with_reductions
from fuel_parallel.pipeline_parallel.measured import Difference, Measurement, differences
from fuel_parallel.pipeline_parallel.schedule import Schedule, ScheduleStep, StageOp, loop, v_shape
from fuel_parallel.pipeline_parallel.schedule_file import from_csv, read_csv, to_csv
from fuel_parallel.pipeline_parallel.search import Candidate, Workload, search
from fuel_parallel.pipeline_parallel.simulate import Costs, Span, Timeline, simulate
from fuel_parallel.pipeline_parallel.trace_file import read_trace

if TYPE_CHECKING:
    from fuel_parallel.pipeline_parallel.run import PipelineModel, PipelineResult, PipelineRunner

# What has tensors is imported when it is first used: schedules are for the launcher, too.
_AT_WORK = frozenset({"PipelineModel", "PipelineResult", "PipelineRunner"})

__all__ = [
    "Action",
    "ActionKind",
    "Candidate",
    "Costs",
    "Difference",
    "Measurement",
    "PipelineConfig",
    "PipelineModel",
    "PipelineResult",
    "PipelineRunner",
    "Schedule",
    "ScheduleKind",
    "ScheduleStep",
    "Span",
    "StageAssignment",
    "StageOp",
    "Timeline",
    "Workload",
    "build",
    "check",
    "differences",
    "from_csv",
    "loop",
    "lower",
    "parse_action",
    "parse_actions",
    "read_csv",
    "read_trace",
    "search",
    "simulate",
    "text_of",
    "to_csv",
    "v_shape",
    "with_reductions",
]


def __getattr__(name: str) -> Any:
    if name not in _AT_WORK:
        raise AttributeError(f"module 'fuel_parallel.pipeline_parallel' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module("fuel_parallel.pipeline_parallel.run"), name)
    return value
