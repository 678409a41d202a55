"""Splitting an ordinary dense model over ranks, layer by layer, as a plan says."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fuel_parallel.arguments import checked
from fuel_parallel.attention import Attention
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.comm.symbolic import SymbolicComm
from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.layers import Embedding, LayerNorm, Linear, RMSNorm
from fuel_parallel.mesh import Mesh
from fuel_parallel.module import Module
from fuel_parallel.tensor_parallel import sequence
from fuel_parallel.tensor_parallel.attention import ParallelAttention
from fuel_parallel.tensor_parallel.embedding import VocabParallelEmbedding
from fuel_parallel.tensor_parallel.linear import ColumnParallel, RowParallel
from fuel_parallel.tensor_parallel.plan import LayerParallelPlan, table

Convert = Callable[..., Module]


@dataclass(frozen=True)
class Style:
    """How layers of one class are split: `convert(layer, comm, **options)` gives this rank's part of one."""

    dense: type[Module]
    convert: Convert
    options: frozenset[str] = frozenset()


STYLES: dict[str, list[Style]] = {
    "column": [
        Style(Linear, ColumnParallel.from_dense, frozenset({"gather_output", "block", "sequence_dim"})),
    ],
    "row": [Style(Linear, RowParallel.from_dense, frozenset({"scatter_input", "block", "sequence_dim"}))],
    "vocab": [Style(Embedding, VocabParallelEmbedding.from_dense, frozenset({"sequence_dim"}))],
    "attention": [Style(Attention, ParallelAttention.from_dense, frozenset({"sequence_dim"}))],
    "sequence": [Style(LayerNorm, sequence.LayerNorm.from_dense), Style(RMSNorm, sequence.RMSNorm.from_dense)],
    "replicate": [Style(Module, lambda layer, comm: layer)],
}
"""The styles of a plan, each with the classes of layers that it can split."""


def register_style(name: str, dense: type[Module], convert: Convert, *, options: tuple[str, ...] = ()) -> None:
    """Adds a style, or a class of layers to one. The last that was registered comes first.

    Args:
        name: What plans call it.
        dense: The class of the dense layer.
        convert: `convert(layer, comm, **options)` gives this rank's part as a module. It reads no values and does not
            talk to other ranks; `tensor_parallel.part_of` cuts a lazy weight.
        options: The names of the options that `convert` takes.
    """
    STYLES.setdefault(name, []).insert(0, Style(dense, convert, frozenset(options)))


@checked
def parallelize(module: Module, plan: LayerParallelPlan, ranks: Communicator | Mesh) -> Module:
    """Puts this rank's parts in place of the layers that the plan names, and returns the module.

    All ranks call it with the same module and plan. Nothing is computed: a weight that is still a lazy draw is drawn by
    each rank for its part alone, and one that is loaded afterwards (`fp.checkpoint.load_huggingface`) is never drawn. A
    layer that several attributes hold is split once.

    Args:
        module: A model of `fp.Linear`, `fp.Embedding`, `fp.Attention` and other modules; changed in place, or, when an
            error is raised, not at all.
        plan: Which layer is split how.
        ranks: The ranks that share each layer, such as `mesh["tp"]`; of a mesh, those of its axis `tp`.

    Raises `ArgumentError` for rules that name no layer, and for layers that a rule cannot split; all that are found.

    >>> import fuel_parallel as fp
    >>> class Block(fp.Module):
    ...     def __init__(self, generator):
    ...         self.up, self.down = fp.Linear(4, 16, generator), fp.Linear(16, 4, generator)
    >>> block = Block(fp.lazy.random.Generator(0))
    >>> plan = LayerParallelPlan({"up": "column", "down": "row"})
    >>> parallelize(block, plan, fp.SymbolicComm(0, 2))
    Block(
      up.weight: float32[4, 8]
      up.bias: float32[8]
      down.weight: float32[8, 4]
      down.bias: float32[4]
    )
    """
    comm = ranks["tp"] if isinstance(ranks, Mesh) else ranks
    converted = {id(one.dense): one.part for one in _converted(module, plan, comm)}
    _replace(module, converted, set())
    return module


def describe(module: Module, plan: LayerParallelPlan, world_size: int) -> str:
    """What each of `world_size` ranks would hold, as a table; the module stays as it is.

    >>> import fuel_parallel as fp
    >>> generator = fp.lazy.random.Generator(0)
    >>> class Block(fp.Module):
    ...     def __init__(self):
    ...         self.up, self.down = fp.Linear(4, 15, generator, bias=False), fp.Linear(15, 4, generator)
    >>> print(describe(Block(), LayerParallelPlan({"up": "column", "down": "row"}), 2))
    layer  style   class           whole      bytes of rank 0, 1, ...
    up     column  ColumnParallel  240 bytes  128 112
    down   row     RowParallel     256 bytes  144 128
    all                            496 bytes  272 240
    """
    ranks = [_converted(module, plan, SymbolicComm(rank, world_size)) for rank in range(world_size)]
    rows = [("layer", "style", "class", "whole", "bytes of rank 0, 1, ...")]
    whole = _bytes(module)
    totals = [whole] * world_size
    for layer in zip(*ranks, strict=True):
        dense = _bytes(layer[0].dense)
        parts = [_bytes(one.part) for one in layer]
        totals = [total - dense + part for total, part in zip(totals, parts, strict=True)]
        rows.append((layer[0].name, layer[0].style, type(layer[0].part).__name__, f"{dense:,} bytes", _spread(parts)))
    rows.append(("all", "", "", f"{whole:,} bytes", _spread(totals)))
    return table(rows)


@dataclass(frozen=True)
class _Converted:
    name: str
    style: str
    dense: Module
    part: Module


def _converted(module: Module, plan: LayerParallelPlan, comm: Communicator) -> list[_Converted]:
    """The layers that the plan names, with their parts."""
    layers = {name: layer for name, layer in module.named_modules().items() if name}
    found, problems = [], []
    inside: set[int] = set()  # what lies in a layer that has been split
    used: set[str] = set()
    for name, layer in layers.items():
        rule = plan.rule_for(name)
        used |= {one.layers for one in plan.rules if one.names(name)}
        if rule is None or id(layer) in inside:
            continue
        inside |= set(map(id, layer.named_modules().values()))
        try:
            found.append(_Converted(name, rule.style, layer, _convert(name, layer, rule.style, rule.options, comm)))
        except (ArgumentError, ShapeError) as problem:
            problems.append(str(problem))
    for rule in plan.rules:
        if rule.layers not in used and not rule.optional:
            problems.append(_unused(rule.layers, module, list(layers)))
    if problems:
        raise ArgumentError("parallelize: " + "; ".join(problems))
    return found


def _convert(name: str, layer: Module, style: str, options: Any, comm: Communicator) -> Module:
    if style not in STYLES:
        raise ArgumentError(f"{name}: there is no style {style!r}; there are {', '.join(STYLES)}")
    fitting = next((one for one in STYLES[style] if isinstance(layer, one.dense)), None)
    if fitting is None:
        classes = " or ".join(one.dense.__name__ for one in STYLES[style])
        within = [f"{name}.{inner}" for inner, one in layer.named_modules().items() if inner and _can_be_split(one)]
        remedy = f"name the layers in it: {', '.join(within[:6])}" if within else "register_style can add the class"
        raise ArgumentError(f"{name}: style {style!r} splits {classes}, and this is {type(layer).__name__}; {remedy}")
    strange = sorted(set(options) - fitting.options)
    if strange:
        known = ", ".join(sorted(fitting.options)) or "none"
        raise ArgumentError(f"{name}: style {style!r} has no option {', '.join(strange)}; it has {known}")
    try:
        return fitting.convert(layer, comm, **options)
    except (ArgumentError, ShapeError) as problem:
        raise ArgumentError(f"{name}, style {style!r}, {comm.world_size} ranks: {problem}") from None


def _can_be_split(layer: Module) -> bool:
    return any(one.dense is not Module and isinstance(layer, one.dense) for ways in STYLES.values() for one in ways)


def _unused(layers: str, module: Module, names: list[str]) -> str:
    parameters = [name for name in module.named_variables() if LayerParallelPlan({layers: "column"}).rule_for(name)]
    if parameters:
        return f"{layers!r} names the parameter {parameters[0]}; name its layer, {parameters[0].rpartition('.')[0]}"
    near = difflib.get_close_matches(layers, names, n=4, cutoff=0.3)
    return f"{layers!r} names no layer; near are {', '.join(near) or ', '.join(names[:8])}"


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _replace(value: Any, converted: dict[int, Module], seen: set[int]) -> Any:
    """The value with parts in place of dense modules; modules, lists and dicts are changed in place."""
    if id(value) in converted:
        return converted[id(value)]
    if isinstance(value, Module):
        if id(value) not in seen:
            seen.add(id(value))
            _replace(vars(value), converted, seen)
    elif isinstance(value, tuple):
        items = [_replace(item, converted, seen) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    elif isinstance(value, dict | list):
        for key, item in list(_items(value)):
            value[key] = _replace(item, converted, seen)
    return value


def _bytes(module: Module) -> int:
    return sum(variable.nbytes for variable in module.named_variables().values())


def _spread(sizes: list[int]) -> str:
    return " ".join(f"{size:,}" for size in sizes) if len(sizes) <= 8 else f"{min(sizes):,} to {max(sizes):,}"
