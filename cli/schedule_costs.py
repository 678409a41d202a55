"""Where `fuelrun schedule` takes the costs of actions from: units, a trace, or a topology."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fuelrun.topology_input import read

if TYPE_CHECKING:
    from fuel_parallel.pipeline_parallel import Costs, Schedule, Timeline
    from fuel_parallel.topology import DeviceTopology


@dataclass(frozen=True)
class CostOptions:
    """What was said of costs, as given."""

    message: float | None
    trace: Path | None
    topology: str | None
    flops: float | None
    activation_bytes: float | None
    tflops: float | None

    def __post_init__(self) -> None:
        given = {"--message": self.message, "--costs": self.trace, "--topology": self.topology}
        chosen = [name for name, value in given.items() if value is not None]
        if len(chosen) > 1:
            raise click.UsageError(f"{' and '.join(chosen)} exclude each other: each says what actions cost")
        with_topology = {
            "--flops": self.flops,
            "--activation-bytes": self.activation_bytes,
            "--tflops": self.tflops,
        }
        odd = next((name for name, value in with_topology.items() if value is not None), None)
        if self.topology is None and odd is not None:
            raise click.UsageError(f"{odd} goes with --topology")
        if self.topology is not None and (self.flops is None or self.activation_bytes is None):
            raise click.UsageError("--topology needs --flops and --activation-bytes, of the whole batch")

    def source(self) -> Source:
        """Reads what is to be read."""
        if self.trace is not None:
            return Source(_of_trace(self.trace), "ms", 1e3)
        if self.topology is not None:
            work = _of_topology(read(self.topology), self.flops or 0.0, self.activation_bytes or 0.0, self.tflops)
            return Source(work, "ms", 1e-3)
        return Source(None, "", 1.0, self.message or 0.0)


@dataclass(frozen=True)
class Source:
    """Costs, and the unit in which their times are shown; `known` is None for units."""

    known: Callable[[Schedule], Costs] | None
    unit: str
    scale: float
    message: float = 0.0

    def timeline(self, schedule: Schedule, lowered: bool) -> Timeline:
        """A stage's forward and each part of its backward are a unit, if there are units."""
        from fuel_parallel.pipeline_parallel import Costs

        return self._simulated(schedule, self.known or (lambda one: Costs(message=self.message)), lowered)

    def timeline_to_compare(self, schedule: Schedule, lowered: bool) -> Timeline:
        """The forward of a rank's stages together is a unit, so that the work of all schedules is the same."""
        from fuel_parallel.pipeline_parallel import Workload

        ranks, count = schedule.num_ranks, schedule.num_microbatches
        whole = float(ranks * count)
        costs = self.known or Workload(whole, whole, whole, message=self.message * count).costs
        share = ranks / schedule.num_stages  # what a stage holds, where a rank's stages together hold 1
        return self._simulated(schedule, lambda one: replace(costs(one), activations=share), lowered)

    def _simulated(self, schedule: Schedule, costs: Callable[[Schedule], Costs], lowered: bool) -> Timeline:
        from fuel_parallel.pipeline_parallel import lower, simulate

        found = simulate(lower(schedule) if lowered else schedule, costs(schedule))
        return found.scaled(self.scale) if self.unit else found


def _of_trace(path: Path) -> Callable[[Schedule], Costs]:
    from fuel_parallel.pipeline_parallel import read_trace

    measured = read_trace(path)[0].costs()
    return lambda schedule: measured


def _of_topology(
    topology: DeviceTopology, flops: float, activation_bytes: float, tflops: float | None
) -> Callable[[Schedule], Costs]:
    from fuel_parallel.pipeline_parallel.on_topology import pipeline_devices, workload_on

    def costs(schedule: Schedule) -> Costs:
        devices = pipeline_devices(topology, schedule.num_ranks)
        step = workload_on(topology, devices, flops=flops, activation_bytes=activation_bytes, tflops=tflops)
        return step.costs(schedule)

    return costs
