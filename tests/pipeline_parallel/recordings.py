"""Traces of pipelines that never ran: time lines of the simulator, noted as ranks would note them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuel_parallel.pipeline_parallel import Action, ActionKind, Schedule, Span, Timeline, to_csv
from fuel_parallel.pipeline_parallel.dependencies import partner


def with_waits(schedule: Schedule, timeline: Timeline) -> Timeline:
    """The time line with the receives for which ranks stood still, each up to the action that needs it."""
    rows = []
    for spans in timeline.ranks:
        row: list[Span] = []
        for span in spans:
            receive = needed(schedule, span.action)
            if receive is not None:
                row.append(Span(receive, row[-1].end if row else 0.0, span.start))
            row.append(span)
        rows.append(tuple(row))
    return Timeline(tuple(rows), timeline.peak_memory)


def needed(schedule: Schedule, action: Action) -> Action | None:
    """The receive from another rank that an action waits for."""
    if action.kind is ActionKind.FORWARD and action.stage:
        receive = Action(ActionKind.RECV_F, action.stage, action.microbatch)
    elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT) and action.stage < schedule.num_stages - 1:
        receive = Action(ActionKind.RECV_B, action.stage, action.microbatch)
    else:
        return None
    ends = {schedule.placement[end.stage] for end in (receive, partner(receive))}
    return receive if len(ends) == 2 else None


def trace_of(schedule: Schedule, steps: Mapping[int, Timeline], replicas: int = 1) -> dict[str, Any]:
    """A trace of these steps, on as many ranks as replicas of the pipeline have together; seconds become us."""
    ranks: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = [{"name": "run", "ph": "X", "pid": 0, "tid": 0, "cat": "run", "ts": 0.0, "dur": 9.0}]
    for replica in range(replicas):
        for rank in range(schedule.num_ranks):
            world_rank = replica * schedule.num_ranks + rank
            about = {"comm": f"pp({replica})", "rank": rank, "name": schedule.name, "schedule": to_csv(schedule)}
            ranks.append(rank_info(world_rank, schedule.num_ranks * replicas, about))
            for step, timeline in steps.items():
                events += [event(span, world_rank, step, start=100.0 * step) for span in timeline.ranks[rank]]
    return {"displayTimeUnit": "ms", "fuel_parallel": {"version": 1, "ranks": ranks}, "traceEvents": events}


def rank_info(rank: int, size: int, *pipelines: dict[str, Any]) -> dict[str, Any]:
    clock = {"origin_ns": 0, "accuracy_ns": 0, "dropped": 0}
    return {"rank": rank, "world_size": size, "host": "host", "pipelines": list(pipelines), **clock}


def event(span: Span, rank: int, step: int, start: float) -> dict[str, Any]:
    where = {"ph": "X", "pid": rank, "tid": 1000, "cat": "action", "args": {"pipeline": 0, "step": step}}
    return {"name": str(span.action), **where, "ts": (start + span.start) * 1e6, "dur": (span.end - span.start) * 1e6}


def write(path: Path, trace: dict[str, Any]) -> Path:
    path.write_text(json.dumps(trace))
    return path
