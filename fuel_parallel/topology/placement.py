"""Which device each rank of a mesh gets, so that a step's communication takes least time.

`place` is exact for up to eight devices or so, follows the machine's levels (inside a machine, under a switch, across)
where there are many, and searches by swaps in between. It never returns an assignment that costs more than the devices
in their own order, if that order is allowed at all, and returns the same one on every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from fuel_parallel.errors import ArgumentError, TopologyError
from fuel_parallel.topology.cost import CostModel, best
from fuel_parallel.topology.files.rankfile import numbered, text_of
from fuel_parallel.topology.mesh_axes import MeshAxis, groups_of, ranks_of
from fuel_parallel.topology.model import DeviceId, DeviceKind
from fuel_parallel.topology.routes import likely_width
from fuel_parallel.topology.topology import DeviceTopology

if TYPE_CHECKING:
    from fuel_parallel.topology.network import Array

EXACT = 50_000
"""Up to so many assignments the best one is found with certainty."""

SEARCHED = 48
"""Up to so many devices are swapped."""


class AxisCost(msgspec.Struct, frozen=True):
    """Time in us that an axis' collectives take in a step, None where unknown, and the algorithm that is quickest."""

    axis: str
    us: float | None
    algorithm: str


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The device of each rank, and what that gains.

    Args:
        axes: The mesh.
        devices: By rank; the last axis has its ranks next to each other.
        nodes: The machine of each of these, "" where a topology has no machines.
        before: Costs by axis with the devices in the order of the topology.
        after: Costs by axis as placed.
        method: How it was found: exact, swaps, nested, or order where nothing is known.
        why: In words.
    """

    axes: tuple[MeshAxis, ...]
    devices: tuple[DeviceId, ...]
    nodes: tuple[str, ...]
    before: tuple[AxisCost, ...]
    after: tuple[AxisCost, ...]
    method: str
    why: str

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's place along each axis."""
        found = {}
        for axis in reversed(self.axes):
            rank, found[axis.name] = divmod(rank, axis.size)
        return dict(reversed(found.items()))

    def rank(self, **coordinates: int) -> int:
        """The rank at a place."""
        number = 0
        for axis in self.axes:
            number = number * axis.size + coordinates[axis.name]
        return number

    def before_us(self) -> float | None:
        """All axes with the devices in their own order; None if that is unknown."""
        return _sum(self.before)

    def after_us(self) -> float | None:
        """All axes as placed; None if that is unknown."""
        return _sum(self.after)

    def visible_devices(self) -> list[str]:
        """For each rank the value of CUDA_VISIBLE_DEVICES (or ROCR_VISIBLE_DEVICES): the number of its one device."""
        return [device.rpartition("/")[2].partition(":")[2] for device in self.devices]

    def hosts(self) -> list[str]:
        """For each rank its host, as a host file in Open MPI's and MPICH's `arbitrary` order wants it."""
        return [node or "localhost" for node in self.nodes]

    def rankfile(self) -> str:
        """A rankfile of Open MPI: ranks of one host take its slots in the order of their devices."""
        hosts = self.hosts()
        return text_of(hosts, numbered(hosts, [self._number(rank) for rank in range(len(hosts))]))

    def _number(self, rank: int) -> tuple[int, str]:
        name = self.devices[rank].rpartition(":")[2]
        return (int(name) if name.isdecimal() else 0), self.devices[rank]


def place(
    topology: DeviceTopology | CostModel,
    axes: Sequence[MeshAxis],
    *,
    memory_bytes: int | None = None,
    kind: DeviceKind | None = None,
    devices: Sequence[DeviceId] | None = None,
    likely: bool = False,
    seed: int = 0,
) -> Placement:
    """Assigns devices to the ranks of a mesh, one rank a device.

    Args:
        topology: The machines; or a cost model of them, so that several meshes share its work.
        axes: The mesh, outermost axis first.
        memory_bytes: What each rank needs; devices with less, or of unknown memory, are left out.
        kind: Of the devices to use; if None, all but CPUs where there are others.
        devices: The devices to use; if None, all of that kind.
        likely: Where bandwidths are unknown, place by what such links usually carry, or if nothing at all is known in
            the devices' own order; the costs stay None. Otherwise that raises `TopologyError`.
        seed: Of the search by swaps.

    >>> from fuel_parallel.topology import DeviceInfo, Link
    >>> t = DeviceTopology()
    >>> for n in range(4):
    ...     t.add_device(DeviceInfo(id=f"cuda:{n}", kind=DeviceKind.CUDA))
    >>> for a in range(4):
    ...     for b in range(a):
    ...         t.add_link(f"cuda:{a}", f"cuda:{b}", Link(bandwidth_mb_s=40e3 if a - b == 2 else 10e3))
    >>> placed = place(t, [MeshAxis(name="dp", size=2), MeshAxis(name="tp", size=2, nbytes=64 << 20)])
    >>> placed.devices, placed.method
    (('cuda:0', 'cuda:2', 'cuda:1', 'cuda:3'), 'exact')
    """
    model = topology if isinstance(topology, CostModel) else CostModel(topology)
    ranks = ranks_of(axes)
    usable = _usable(model, ranks, memory_bytes, kind, devices)
    placing = _Placing(model, tuple(axes), ranks, usable, seed)
    try:
        return placing.placement()
    except _UnknownCostError as reason:
        if not likely:
            raise TopologyError(
                f"no placement has a known cost: {reason}; add its bandwidth_mb_s, or measure it"
            ) from None
        return _likely(placing, str(reason))


def _likely(placing: _Placing, unknown: str) -> Placement:
    """A placement by guesses, which says so and has no costs."""
    guessed = CostModel(with_likely_figures(placing.model.topology))
    how = "placed by what links of their kinds usually carry"
    try:
        placed = _Placing(guessed, placing.axes, placing.ranks, placing.usable, placing.seed).placement()
    except _UnknownCostError:
        placed, how = placing.in_own_order(), "placed in the devices' own order"
    costs = tuple(AxisCost(axis.name, None, "unknown") for axis in placing.axes)
    return msgspec.structs.replace(placed, before=costs, after=costs, why=f"{unknown}; {how}")


class _UnknownCostError(TopologyError):
    """No placement has a known cost; says what is unknown."""


class _Placing:
    def __init__(self, model: CostModel, axes: tuple[MeshAxis, ...], ranks: int, usable: list[int], seed: int) -> None:
        self.model, self.axes, self.ranks, self.usable, self.seed = model, axes, ranks, usable, seed
        self.groups = groups_of(axes)

    def placement(self) -> Placement:
        import numpy as np

        from fuel_parallel.topology.nested_order import nested_order, nestings

        linear = np.array(self.usable[: self.ranks], dtype=np.int64)
        starts = [
            ("the order of the topology", linear),
            *nestings(self.axes, nested_order(self.model.network, self.usable)),
        ]
        costs = [self.cost(start) for _, start in starts]
        at = min(range(len(starts)), key=lambda i: costs[i])
        name, chosen = starts[at]
        method = "nested"
        if len(self.usable) <= SEARCHED:
            method, found = self.searched([start for _, start in starts], chosen)
            if self.cost(found) < costs[at] * (1 - 1e-12):
                name, chosen = "swaps" if method == "swaps" else "trying all", found
        if math.isinf(self.cost(chosen)):
            raise self.hopeless()
        return self.described(linear, chosen, method, name)

    def searched(self, starts: list[Array], chosen: Array) -> tuple[str, Array]:
        import numpy as np

        from fuel_parallel.topology.batch import Batch

        batch = Batch(self.model.network, self.usable, self.axes)
        place_of = {device: i for i, device in enumerate(self.usable)}
        as_places = [np.array([place_of[int(d)] for d in start], dtype=np.int64) for start in starts]
        devices = np.array(self.usable, dtype=np.int64)
        if math.perm(len(self.usable), self.ranks) <= EXACT:
            from fuel_parallel.topology.search_exact import exact, representatives

            known = min(as_places, key=lambda start: float(batch.cost(start[None])[0]))
            names = [self.model.network.devices[i] for i in self.usable]
            found = exact(batch, self.ranks, known, representatives(self.model.topology, names, batch))
            return "exact", devices[found]
        from fuel_parallel.topology.search_local import assigned_by_scipy, local_search

        as_places.append(assigned_by_scipy(batch, self.ranks, self.seed))
        return "swaps", devices[local_search(batch, as_places, self.seed)]

    def cost(self, assignment: Array) -> float:
        return math.fsum(self.axis_cost(i, assignment)[0] for i in range(len(self.axes)))

    def axis_cost(self, i: int, assignment: Array) -> tuple[float, str]:
        axis, groups = self.axes[i], assignment[self.groups[i]]
        machine = self.model.network.machine[groups]
        if axis.within_node and (machine != machine[:, :1]).any():
            return math.inf, "not inside of a machine"
        if not axis.count or axis.size == 1:
            return 0.0, "none"
        found = best(self.model.lines(axis.collective, groups), axis.nbytes)
        return (math.inf, "unknown") if found is None else (found.us * axis.count, found.algorithm)

    def costs(self, assignment: Array) -> tuple[AxisCost, ...]:
        found = [(axis, *self.axis_cost(i, assignment)) for i, axis in enumerate(self.axes)]
        return tuple(AxisCost(axis.name, None if math.isinf(us) else us, algorithm) for axis, us, algorithm in found)

    def in_own_order(self) -> Placement:
        import numpy as np

        linear = np.array(self.usable[: self.ranks], dtype=np.int64)
        return self.described(linear, linear, "order", "the order of the topology")

    def hopeless(self) -> TopologyError:
        kept = [axis for axis in self.axes if axis.within_node]
        network = self.model.network
        sizes = sorted({int((network.machine[self.usable] == m).sum()) for m in set(network.machine[self.usable])})
        for axis in kept:
            if all(size < axis.size for size in sizes):
                return TopologyError(
                    f"axis {axis.name!r} of {axis.size} ranks must stay inside of a machine, but machines have "
                    f"{', '.join(map(str, sizes))} usable device(s); make it smaller or drop within_node"
                )
        unknown = self.model.unknown([network.devices[i] for i in self.usable[: self.ranks]])
        if unknown:
            return _UnknownCostError(unknown)
        return TopologyError(f"no placement keeps {' and '.join(repr(a.name) for a in kept)} inside of machines")

    def described(self, linear: Array, chosen: Array, method: str, name: str) -> Placement:
        network = self.model.network
        before, after = self.costs(linear), self.costs(chosen)
        devices = tuple(network.devices[i] for i in chosen)
        nodes = tuple(self.model.topology.device(device).node for device in devices)
        return Placement(
            axes=self.axes,
            devices=devices,
            nodes=nodes,
            before=before,
            after=after,
            method=method,
            why=self.why(chosen, _sum(before), _sum(after), method, name),
        )

    def why(self, chosen: Array, before: float | None, after: float | None, method: str, name: str) -> str:
        import numpy as np

        said = {
            "exact": "the least of all placements",
            "swaps": "the least that swaps of two ranks lead to",
            "nested": "the least of the orders of the axes along the machine's levels",
            "order": "the devices in their own order",
        }[method]
        words = [f"{after:.1f} us of communication a step, {said}" if after is not None else "the cost is unknown"]
        if before is None or after is None:
            words.append("the cost of the devices in their own order is unknown")
        elif after < before * (1 - 1e-9):
            words.append(
                f"{before / after if after else math.inf:.2f} times less than the devices in their own order; by {name}"
            )
        else:
            words.append("the devices in their own order are as good")
        machine = self.model.network.machine[chosen]
        for i, axis in enumerate(self.axes):
            if axis.size > 1 and len(np.unique(machine)) > 1:
                inside = (machine[self.groups[i]] == machine[self.groups[i]][:, :1]).all(axis=1)
                words.append(f"{int(inside.sum())} of {len(inside)} {axis.name} groups inside of a machine")
        return "; ".join(words)


def with_likely_figures(t: DeviceTopology) -> DeviceTopology:
    """The same with a guess for each bandwidth that is unknown: to compare ways by, not to predict times."""
    return t.with_links(lambda _, __, link: msgspec.structs.replace(link, bandwidth_mb_s=likely_width(link)))


def _usable(
    model: CostModel,
    ranks: int,
    memory_bytes: int | None,
    kind: DeviceKind | None,
    listed: Sequence[DeviceId] | None,
) -> list[int]:
    devices = model.topology.devices if listed is None else [model.topology.device(d) for d in listed]
    if kind is None:
        others = [d for d in devices if d.kind is not DeviceKind.CPU]
        devices = others or devices
    else:
        devices = [d for d in devices if d.kind is kind]
    fitting = [d for d in devices if memory_bytes is None or (d.memory_bytes or 0) >= memory_bytes]
    if len(fitting) < ranks:
        needs = "" if memory_bytes is None else f" with {memory_bytes} bytes of memory or more"
        only_cpus = all(d.kind is DeviceKind.CPU for d in fitting)
        remedy = (
            "; `fuelrun topology probe --per-rank -n N` describes one for each rank" if only_cpus and fitting else ""
        )
        raise ArgumentError(
            f"the mesh has {ranks} ranks and each takes a device, but there are {len(fitting)} usable devices{needs}"
            f"{remedy}"
        )
    return [model.network.index[d.id] for d in fitting]


def _sum(costs: Sequence[AxisCost]) -> float | None:
    known = [one.us for one in costs if one.us is not None]
    return math.fsum(known) if len(known) == len(costs) else None
