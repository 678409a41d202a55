"""What a placement means for one process of a job: its place in the mesh, its device, its cores and network cards.

Every rank works it out for itself, before its script begins and before MPI starts, from the same file: what is the same
input everywhere gives the same placement everywhere, so nobody has to be asked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

import msgspec

from fuel_parallel.errors import ArgumentError, TopologyError
from fuel_parallel.topology.cores import parse_list
from fuel_parallel.topology.mesh_axes import MeshAxis, filled
from fuel_parallel.topology.model import DeviceId, DeviceInfo, DeviceKind
from fuel_parallel.topology.placement import place
from fuel_parallel.topology.topology import DeviceTopology


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process stands in its job, as its launcher says.

    Args:
        host: The name of its machine.
        local_rank: Which of the processes of this machine it is.
        local_size: How many processes this machine has.
        world_size: How many the job has.
        hosts: The machines of the job, where that is known.
    """

    host: str
    local_rank: int
    local_size: int
    world_size: int
    hosts: tuple[str, ...] = ()


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is given.

    Args:
        position: Its place in the mesh, the last axis running fastest.
        device: Its device.
        cores: The cores that are near its device, less those of the other ranks that are near them too; () if unknown.
        nics: The names of the network cards that are nearest to its device, if others are farther.
    """

    position: int
    device: DeviceInfo
    cores: tuple[int, ...] = ()
    nics: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        """The device's number on its machine, as CUDA_VISIBLE_DEVICES wants it."""
        return self.device.id.rpartition("/")[2].partition(":")[2]


def assign(
    topology: DeviceTopology, axes: Sequence[MeshAxis], job: Job, allowed: Collection[int] = frozenset()
) -> Assignment:
    """The assignment of one process. `allowed` are the cores that the ranks of this machine may use; none: any.

    >>> from fuel_parallel.topology import DeviceKind
    >>> t = DeviceTopology()
    >>> for n in range(2):
    ...     t.add_device(DeviceInfo(id=f"cpu:{n}", kind=DeviceKind.CPU, cores=f"{2 * n}-{2 * n + 1}"))
    >>> job = Job(host="laptop", local_rank=1, local_size=2, world_size=2)
    >>> assign(t, [MeshAxis(name="dp", size=-1, count=0)], job).cores
    (2, 3)

    Raises `TopologyError` when this machine is not in the topology, or gets another number of ranks there than it has.
    """
    here = _node_of(topology, job)
    sizes = filled({axis.name: axis.size for axis in axes}, job.world_size)
    if math.prod(sizes.values()) != job.world_size:
        text = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ArgumentError(f"the mesh {text} has {math.prod(sizes.values())} ranks, but the job has {job.world_size}")
    whole = [msgspec.structs.replace(axis, size=sizes[axis.name]) for axis in axes]
    devices = _devices_of_the_job(topology, job)
    placed = place(topology, whole, devices=devices, likely=True)
    mine = [position for position, node in enumerate(placed.nodes) if node == here]
    if len(mine) != job.local_size:
        raise TopologyError(
            f"the placement gives {len(mine)} of its {job.world_size} ranks to this machine, {here or job.host}, but "
            f"the launcher started {job.local_size} here; start as many on each machine as the topology has devices "
            "there, or describe the job's machines only: `fuelrun topology probe -o FILE` inside of the job"
        )
    position = mine[job.local_rank]
    device = topology.device(placed.devices[position])
    together = [topology.device(placed.devices[p]) for p in mine]
    return Assignment(
        position=position,
        device=device,
        cores=_cores(device, together, frozenset(allowed)),
        nics=nearest_nics(topology, device.id),
    )


def nearest_nics(topology: DeviceTopology, device: DeviceId) -> tuple[str, ...]:
    """The names of the network cards of its machine that a device reaches best; () if it reaches all alike.

    The way of most bandwidth counts, then the one over fewest links. Cards without a known way are no candidates.
    """
    node = topology.device(device).node
    ranked = []
    for nic in topology.nics:
        route = topology.route(device, nic.id) if nic.node == node and nic.name else None
        if route is not None:
            ranked.append(((-(route.bandwidth_mb_s or 0.0), len(route.links)), nic.name))
    best = min((key for key, _ in ranked), default=None)
    names = tuple(name for key, name in ranked if key == best)
    return names if len(names) < len(ranked) else ()


def _node_of(topology: DeviceTopology, job: Job) -> str:
    """The machine of the topology that this process runs on."""
    nodes = topology.nodes
    short = job.host.partition(".")[0]
    named = [node for node in nodes if node == job.host] or [n for n in nodes if n.partition(".")[0] == short]
    if len(named) == 1:
        return named[0]
    if not named and len(nodes) <= 1 and job.local_size == job.world_size:
        return nodes[0] if nodes else ""  # one machine, whatever it is called
    some = ", ".join(nodes[:6]) + (", ..." if len(nodes) > 6 else "")
    raise TopologyError(
        f"this machine, {job.host}, is not in the topology{' ' + repr(topology.name) if topology.name else ''}, whose "
        f"machines are {some or 'without names'}; describe the machines of the job by their host names"
    )


def _devices_of_the_job(topology: DeviceTopology, job: Job) -> list[DeviceId] | None:
    """The devices that the ranks can be given; None for all.

    Where a machine has more devices than ranks, the first ones count: as many as this machine has ranks.
    """
    devices = [d for d in topology.devices if d.kind is not DeviceKind.CPU] or topology.devices
    if job.hosts:
        short = {host.partition(".")[0] for host in job.hosts}
        devices = [d for d in devices if not d.node or d.node.partition(".")[0] in short]
    if len(devices) > job.world_size and job.world_size % job.local_size == 0:
        by_node = itertools.groupby(sorted(devices, key=lambda d: d.node), key=lambda d: d.node)
        first = {d.id for _, mine in by_node for d in itertools.islice(mine, job.local_size)}
        devices = [d for d in devices if d.id in first]
    return [d.id for d in devices]


def _cores(device: DeviceInfo, together: list[DeviceInfo], allowed: frozenset[int]) -> tuple[int, ...]:
    """A share of the cores near the device, among the devices of this machine that are near the same ones."""
    from fuel_parallel.topology.binding import share_of_cores

    near = frozenset(parse_list(device.cores)) if device.cores else frozenset()
    usable = near & allowed if allowed else near
    if not usable:
        return ()
    sharing = [other.id for other in together if other.cores == device.cores]
    return share_of_cores(usable, sharing.index(device.id), len(sharing))
