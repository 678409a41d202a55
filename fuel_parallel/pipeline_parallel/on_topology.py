"""What a step costs on a machine: a `Workload` from operations and bytes, and what a topology says of its devices.

Times are in microseconds, and as good as the topology's figures: a device reaches a share of its peak, and a message
takes the latency and the bandwidth of its way, as if nothing else were on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from fuel_parallel.errors import ArgumentError, TopologyError
from fuel_parallel.pipeline_parallel.search import Workload
from fuel_parallel.topology import DeviceId, DeviceKind, DeviceTopology
from fuel_parallel.topology.step_time import Efficiency


def workload_on(
    topology: DeviceTopology,
    devices: Sequence[DeviceId],
    *,
    flops: float,
    activation_bytes: float,
    tflops: float | None = None,
    efficiency: float | None = None,
    layers: Sequence[float] = (),
) -> Workload:
    """A step of a model on a whole batch, in us.

    Args:
        topology: The machines.
        devices: That of each rank of the pipeline, in order.
        flops: Of the forward through all layers. Each part of the backward has as many: so do matrix products.
        activation_bytes: What passes from a stage to the next for the whole batch.
        tflops: A device's peak; if None, as the topology says of each.
        efficiency: The share of the peak that is reached; if None, that of large products.
        layers: As in `Workload`.

    Ranks next to each other have messages, and the last and the first if the way between them is known. Raises
    `TopologyError` when a bandwidth between neighbours or a peak is not known.

    >>> from fuel_parallel.topology import DeviceInfo, Link
    >>> pair = DeviceTopology()
    >>> for name, peak in (("cuda:0", 100.0), ("cuda:1", 50.0)):
    ...     pair.add_device(DeviceInfo(id=name, kind=DeviceKind.CUDA, tflops=peak))
    >>> pair.add_link("cuda:0", "cuda:1", Link(bandwidth_mb_s=1000.0, latency_us=5.0))
    >>> found = workload_on(pair, pair.device_ids(), flops=1e12, activation_bytes=2**20, efficiency=0.5)
    >>> found.forward, found.slowness, found.message[0][1], found.latency[0][1]
    (20000.0, (1.0, 2.0), 1000.0, 5.0)
    """
    efficiency = Efficiency().most if efficiency is None else efficiency
    for name, value in (("flops", flops), ("activation_bytes", activation_bytes), ("efficiency", efficiency)):
        if not 0 <= value < inf or (name != "activation_bytes" and not value):
            raise ArgumentError(f"workload_on: {name} must be a positive number, got {value!r}")
    peaks = [_peak(topology, device, tflops) for device in devices]
    if not peaks:
        raise ArgumentError("workload_on: a pipeline has a device at least, got none")
    time = flops / (max(peaks) * efficiency * 1e6)
    messages, latencies = ([[inf] * len(devices) for _ in devices] for _ in range(2))
    for rank, device in enumerate(devices):
        other = (rank + 1) % len(devices)
        for a, b in ((rank, other), (other, rank)):
            least = topology.transfer_time_us(devices[a], devices[b], 0)
            whole = topology.transfer_time_us(devices[a], devices[b], round(activation_bytes))
            if least is not None and whole is not None:
                latencies[a][b], messages[a][b] = least, whole - least
            elif other:  # not every placement has messages from the last rank to the first
                raise TopologyError(
                    f"the bandwidth from {device} to {devices[other]} is unknown; measure it, or add it"
                )
    return Workload(
        forward=time,
        backward_input=time,
        backward_weight=time,
        message=messages,
        latency=latencies,
        layers=layers,
        slowness=tuple(max(peaks) / peak for peak in peaks),
    )


def pipeline_devices(topology: DeviceTopology, num_ranks: int) -> list[DeviceId]:
    """So many devices in a row, those that are near to each other next to each other; CPUs only where nothing else is.

    Raises `ArgumentError` when there are fewer.
    """
    from fuel_parallel.topology.nested_order import nested_order
    from fuel_parallel.topology.network import Network

    devices = [d for d in topology.devices if d.kind is not DeviceKind.CPU] or topology.devices
    if len(devices) < num_ranks:
        raise ArgumentError(f"the topology has {len(devices)} devices, and the pipeline {num_ranks} ranks")
    network = Network(topology)
    number = {network.index[device.id]: device.id for device in devices}
    return [number[one] for one in nested_order(network, list(number))[:num_ranks]]


def _peak(topology: DeviceTopology, device: DeviceId, given: float | None) -> float:
    peak = topology.device(device).tflops if given is None else given
    if peak is None:
        raise TopologyError(f"the tflops of {device} is unknown; add it to the topology, or pass tflops=")
    if not 0 < peak < inf:
        raise ArgumentError(f"tflops must be a positive number, got {peak}")
    return peak
