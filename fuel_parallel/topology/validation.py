"""How near predictions are to what was measured on a machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fuel_parallel.errors import ArgumentError
from fuel_parallel.topology.algorithms import Collective
from fuel_parallel.topology.cost import CostModel
from fuel_parallel.topology.model import DeviceId
from fuel_parallel.topology.topology import DeviceTopology


class Timing(msgspec.Struct, frozen=True):
    """A collective that was timed: its name, how many ranks took part, the size of its array in bytes, and us."""

    collective: str
    ranks: int
    nbytes: int
    us: float


class Comparison(msgspec.Struct, frozen=True):
    """A timing beside its prediction; None where that is unknown."""

    timing: Timing
    predicted_us: float | None
    algorithm: str | None

    def ratio(self) -> float | None:
        """Predicted over measured: 1 is perfect, less means that the machine was slower than predicted."""
        return None if self.predicted_us is None else self.predicted_us / self.timing.us


def validate(
    topology: DeviceTopology,
    timings: Iterable[Timing | tuple[str, int, int, float]],
    devices: Sequence[DeviceId] | None = None,
) -> list[Comparison]:
    """Compares timings with predictions.

    Args:
        topology: The machine, best with measured links.
        timings: What was measured: collective, ranks, bytes, us.
        devices: The device of each rank; if None, in the order of the topology. Fewer ranks use the first of them.

    >>> from fuel_parallel.topology import DeviceInfo, DeviceKind, Link
    >>> pair = DeviceTopology()
    >>> for name in ("cpu:0", "cpu:1"):
    ...     pair.add_device(DeviceInfo(id=name, kind=DeviceKind.CPU))
    >>> pair.add_link("cpu:0", "cpu:1", Link(bandwidth_mb_s=8000.0, latency_us=1.0))
    >>> print(table(validate(pair, [("all_reduce", 2, 2**20, 160.0)])))
    collective  ranks    bytes  measured us  predicted us  ratio  algorithm
    all_reduce      2  1048576        160.0         127.0   0.79  ring
    """
    model = CostModel(topology)
    members = list(topology.device_ids() if devices is None else devices)
    found = []
    for one in timings:
        timing = one if isinstance(one, Timing) else Timing(*one)
        names = [collective.value for collective in Collective]
        if timing.collective not in names:
            raise ArgumentError(
                f"there is no prediction for {timing.collective!r}; there is one for {', '.join(names)}"
            )
        if not 1 <= timing.ranks <= len(members) or not timing.us > 0:
            raise ArgumentError(f"a timing has 1 to {len(members)} ranks and takes more than 0 us, got {timing}")
        predicted = model.predict(Collective(timing.collective), members[: timing.ranks], timing.nbytes)
        found.append(
            Comparison(timing, predicted.us, predicted.algorithm) if predicted else Comparison(timing, None, None)
        )
    return found


def table(comparisons: Iterable[Comparison]) -> str:
    """The comparisons as aligned text."""
    rows = [("collective", "ranks", "bytes", "measured us", "predicted us", "ratio", "algorithm")]
    for one in comparisons:
        ratio = one.ratio()
        predicted = ("unknown", "") if one.predicted_us is None else (f"{one.predicted_us:.1f}", f"{ratio:.2f}")
        t = one.timing
        rows.append((t.collective, str(t.ranks), str(t.nbytes), f"{t.us:.1f}", *predicted, one.algorithm or ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ends = 0, len(widths) - 1  # names stand to the left, numbers to the right
    lines = [
        "  ".join(
            cell.ljust(w) if i in ends else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
