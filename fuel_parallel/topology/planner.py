"""How to split a model over a machine: every choice of dp, pp, tp, micro-batch and recomputation that fits, timed.

`plan` prices thousands of strategies with `memory_of`, `step_time` and the cost model of the topology, and returns the
quickest ones. It runs nothing and needs no device; predictions are as good as the topology's figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from fuel_parallel.errors import ArgumentError, TopologyError
from fuel_parallel.topology.algorithms import Collective
from fuel_parallel.topology.cost import CostModel
from fuel_parallel.topology.memory import Memory, Recompute, Strategy, memory_of
from fuel_parallel.topology.mesh_axes import MeshAxis, axes_text
from fuel_parallel.topology.model import DeviceInfo, DeviceKind
from fuel_parallel.topology.step_time import Efficiency, Layout, StepTime, step_time
from fuel_parallel.topology.topology import DeviceTopology
from fuel_parallel.topology.transformer import Precision, TransformerModel

MOST_TP = 64
MOST_MICRO_BATCH = 16
MOST_CHUNKS = 8


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy and what it is predicted to cost.

    Args:
        strategy: How the model is split.
        mesh: Axes with their traffic in a step, outermost first, for `fp.Mesh` and `place`.
        memory: Bytes on the rank that needs most.
        time: Where a step's time goes, in us.
        step_us: All of it.
        utilization: The model's operations, recomputation not counted, over what all devices could do at their peak.
        why: In words.
    """

    strategy: Strategy
    mesh: tuple[MeshAxis, ...]
    memory: Memory
    time: StepTime
    step_us: float
    utilization: float
    why: str

    def toml(self) -> str:
        """The mesh and the strategy as a TOML file, which `fuelrun --mesh` takes."""
        s = self.strategy
        lines = [
            f'axes = "{axes_text(self.mesh)}"',
            "",
            "[mesh]",
            *(f"{axis.name} = {axis.size}" for axis in self.mesh),
            "",
            "[strategy]",
        ]
        lines += [f"micro_batch = {s.micro_batch}", f"chunks = {s.chunks}", f'recompute = "{s.recompute.value}"']
        lines += [f"sequence_parallel = {str(s.sequence_parallel).lower()}"]
        lines += [f"sharded_optimizer = {str(s.sharded_optimizer).lower()}"]
        return "\n".join(lines) + "\n"


def plan(
    topology: DeviceTopology,
    model: TransformerModel,
    *,
    best: int = 10,
    tflops: float | None = None,
    memory_bytes: int | None = None,
    reserve: float = 0.08,
    efficiency: Efficiency | None = None,
) -> list[Plan]:
    """The quickest strategies, best first. Raises `ArgumentError` when none fits.

    Args:
        topology: The machines; all their devices are used, CPUs only where there is nothing else.
        model: What is to be trained.
        best: How many to return.
        tflops: A device's peak in the model's dtype; if None, as the topology says.
        memory_bytes: A device's memory; if None, as the topology says.
        reserve: Share of the memory that is left to the runtime, to buffers of collectives and to fragments.
        efficiency: Of matrix products.
    """
    from fuel_parallel.topology.nested_order import nested_order

    devices = [d for d in topology.devices if d.kind is not DeviceKind.CPU] or topology.devices
    if not devices:
        raise TopologyError("the topology has no devices to plan for")
    tflops = _least(devices, "tflops", tflops)
    limit = int(_least(devices, "memory_bytes", memory_bytes) * (1 - reserve))
    cost = CostModel(topology)
    order = nested_order(cost.network, [cost.network.index[d.id] for d in devices])
    fitting: list[tuple[Strategy, Memory]] = []
    tightest = math.inf
    for strategy in strategies(model, len(devices)):
        memory = memory_of(model, strategy)
        tightest = min(tightest, memory.total())
        if memory.total() <= limit:
            fitting.append((strategy, memory))
    if not fitting:
        raise ArgumentError(_misfit(model, len(devices), tightest, limit))
    found = _timed(cost, order, model, fitting, tflops, efficiency or Efficiency())
    if not found:
        unknown = cost.unknown([d.id for d in devices])
        raise TopologyError(f"no plan has a known time: {unknown or 'a bandwidth is unknown'}; measure it, or add it")
    found.sort(key=lambda one: (one[0].total(), repr(one[1])))
    peak = len(devices) * tflops * 1e6
    return [_described(model, one, peak, limit, topology) for one in found[:best]]


def strategies(model: TransformerModel, devices: int) -> Iterator[Strategy]:
    """All that divide the model, its batch and the devices evenly."""
    heads = math.gcd(model.heads, model.kv_heads or model.heads)
    for tp in (t for t in range(1, min(devices, MOST_TP) + 1) if devices % t == 0 and heads % t == 0):
        if model.ffn_width() % tp:
            continue
        for pp in (p for p in range(1, devices // tp + 1) if devices // tp % p == 0 and p <= model.layers):
            dp = devices // tp // pp
            if model.global_batch % dp or model.layers % pp:
                continue
            for micro_batch in (1 << k for k in range(MOST_MICRO_BATCH.bit_length())):
                if model.global_batch // dp % micro_batch:
                    break
                yield from _choices(model, dp, pp, tp, micro_batch)


def _choices(model: TransformerModel, dp: int, pp: int, tp: int, micro_batch: int) -> Iterator[Strategy]:
    count = model.global_batch // (dp * micro_batch)
    chunks = [1]
    if pp > 1 and count % pp == 0:
        chunks += [v for v in range(2, MOST_CHUNKS + 1) if model.layers // pp % v == 0]
    for v in chunks:
        for recompute in Recompute:
            for sequence_parallel in (False, True) if tp > 1 and model.sequence % tp == 0 else (False,):
                for sharded in (False, True) if dp > 1 else (False,):
                    yield Strategy(
                        dp=dp,
                        pp=pp,
                        tp=tp,
                        micro_batch=micro_batch,
                        chunks=v,
                        recompute=recompute,
                        sequence_parallel=sequence_parallel,
                        sharded_optimizer=sharded,
                    )


Timed = tuple[StepTime, Strategy, Memory, Layout]


def _timed(
    cost: CostModel,
    order: list[int],
    model: TransformerModel,
    fitting: list[tuple[Strategy, Memory]],
    tflops: float,
    efficiency: Efficiency,
) -> list[Timed]:
    import numpy as np

    devices = np.array(order, dtype=np.int64)
    layouts: dict[tuple[int, int, int], list[Layout]] = {}
    found: list[Timed] = []
    for strategy, memory in fitting:
        sizes = strategy.dp, strategy.pp, strategy.tp
        if sizes not in layouts:
            dp, pp, tp = zip(("dp", "pp", "tp"), sizes, strict=True)
            orders = [(dp, pp, tp)] if 1 in sizes[:2] else [(dp, pp, tp), (pp, dp, tp)]
            layouts[sizes] = [Layout(cost, devices, axes) for axes in orders]
        timed = [(step_time(model, strategy, memory, layout, tflops, efficiency), layout) for layout in layouts[sizes]]
        time, layout = min(timed, key=lambda one: one[0].total())
        if math.isfinite(time.total()):
            found.append((time, strategy, memory, layout))
    return found


def _described(model: TransformerModel, timed: Timed, peak: float, limit: int, topology: DeviceTopology) -> Plan:
    time, strategy, memory, layout = timed
    return Plan(
        strategy=strategy,
        mesh=_mesh(model, strategy, memory, layout),
        memory=memory,
        time=time,
        step_us=time.total(),
        utilization=model.step_flops() / (peak * time.total()),
        why=_why(strategy, memory, time, limit, topology),
    )


def _mesh(model: TransformerModel, strategy: Strategy, memory: Memory, layout: Layout) -> tuple[MeshAxis, ...]:
    count = strategy.micro_batches(model)
    width = 4 if model.dtype is Precision.FLOAT32 else 2
    message = model.sequence * strategy.micro_batch * model.hidden * width
    layers = model.layers // strategy.pp
    traffic = {
        "dp": (memory.gradients, Collective.ALL_REDUCE, 1),
        "pp": (
            message // strategy.tp,
            Collective.P2P,
            2 * strategy.chunks * count,
        ),
        "tp": (message, Collective.ALL_REDUCE, (6 if strategy.recompute is Recompute.FULL else 4) * layers * count),
    }
    return tuple(
        MeshAxis(name=name, size=size, nbytes=traffic[name][0], collective=traffic[name][1], count=traffic[name][2])
        for name, size in layout.sizes
    )


def _why(strategy: Strategy, memory: Memory, time: StepTime, limit: int, topology: DeviceTopology) -> str:
    nodes = topology.nodes
    in_node = min((len(topology.devices_of_node(node)) for node in nodes[:1]), default=0)
    words = []
    if strategy.tp > 1 and in_node:
        words.append("tp stays inside a machine" if in_node % strategy.tp == 0 else "tp crosses machines")
    shares = {"tp": time.tp, "pp": time.pp, "dp": time.dp, "bubble": time.bubble}
    total = time.total()
    words += [f"{name} {share / total:.0%}" for name, share in shares.items() if share / total >= 0.005]
    words.append(f"memory {memory.total() / limit:.0%} of what is usable")
    if strategy.recompute is not Recompute.NONE:
        words.append(f"recomputes {'attention' if strategy.recompute is Recompute.SELECTIVE else 'all layers'}")
    return ", ".join(words)


def _least(devices: list[DeviceInfo], field: str, given: float | None) -> float:
    """The least of all devices, for a step waits for the slowest."""
    values = [given if given is not None else getattr(device, field) for device in devices]
    unknown = next((device.id for device, value in zip(devices, values, strict=True) if value is None), None)
    if unknown is not None:
        raise TopologyError(f"the {field} of {unknown} is unknown; add it to the topology, or pass {field}=")
    least = min(float(value) for value in values if value is not None)
    if not 0 < least < math.inf:
        raise ArgumentError(f"{field} must be a positive number, got {least}")
    return least


def _misfit(model: TransformerModel, devices: int, tightest: float, limit: int) -> str:
    if math.isinf(tightest):
        return (
            f"no dp x pp x tp divides {devices} devices, {model.layers} layers, {model.heads} heads and a global batch "
            f"of {model.global_batch} evenly; change the global batch or the number of devices"
        )
    return (
        f"the model does not fit on {devices} devices: the most frugal strategy needs {tightest / 2**30:.1f} GiB "
        f"a device, and {limit / 2**30:.1f} GiB are usable; take more devices or a smaller model"
    )
