"""The graph behind some tensors as a list of entries: what `show` prints and draws."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from fuel_parallel.lazy.node import OPS, Attrs, Node, Op, Spec, describe_line, graph_lock, topological
from fuel_parallel.lazy.tensor import Tensor

_LONGEST_ATTRIBUTE = 32


@dataclass(frozen=True, slots=True)
class Entry:
    """One node, or step of a plan, in words. `inputs` are places in the list, which is in topological order.

    A copy comes from the device `source`; that is empty for all else.
    """

    op: str
    category: str
    inputs: tuple[int, ...]
    result: str
    attributes: tuple[str, ...]
    device: str
    has_value: bool
    is_output: bool
    line: str
    source: str = ""

    @property
    def place(self) -> str:
        """The device, and of a copy both ends."""
        return f"{self.source} → {self.device}" if self.source else self.device

    @property
    def is_constant(self) -> bool:
        """Whether the entry is a number written in the script."""
        return self.op == "full" and self.result.endswith("[]")


def outline(tensors: Iterable[Tensor]) -> list[Entry]:
    """The entries of all nodes that the tensors wait for, and of the values that those start from; each node once."""
    with graph_lock:
        outputs = {t.node for t in tensors}
        nodes = topological(outputs)
        place = {node: number for number, node in enumerate(nodes)}
        return [_entry(node, place, node in outputs) for node in nodes]


def _entry(node: Node, place: dict[Node, int], is_output: bool) -> Entry:
    has_value = node.value is not None
    return Entry(
        op=node.op.name,
        category=category_of(node.op),
        inputs=() if has_value else tuple(place[i] for i in node.inputs),
        result=repr(node.spec),
        attributes=describe_attributes(node.op, node.attrs, node.spec),
        device=node.spec.device,
        has_value=has_value,
        is_output=is_output,
        line=describe_line(node.line),
        source=node.inputs[0].spec.device if node.op is OPS["copy"] and not has_value else "",
    )


def category_of(op: Op) -> str:
    """The module of the op, as in `reductions`; `collectives` for what crosses ranks, `data` for values."""
    if op.crosses_ranks:
        return "collectives"
    module = op.infer.__module__
    return "data" if module == Op.__module__ else module.rpartition(".")[2]


def describe_attributes(op: Op, attrs: Attrs, spec: Spec) -> tuple[str, ...]:
    """`name=value` for each attribute, but for what the result's spec says already."""
    names = op.attr_names or tuple(f"attribute {i}" for i in range(len(attrs)))
    pairs = zip(names, attrs, strict=False)
    known = {"shape": spec.shape, "dtype": spec.dtype, "device": spec.device}
    told = [(name, value) for name, value in pairs if value is not None and (name not in known or value != known[name])]
    return tuple(_shorten(name, value) for name, value in told)


def _shorten(name: str, value: Any) -> str:
    if isinstance(value, np.dtype | Enum):
        text = value.name
    elif name == "window":
        text = "[" + ", ".join(f"{start}:{start + step * count}:{step}" for start, step, count in value) + "]"
    else:
        text = repr(value)
    text = " ".join(text.split())
    return f"{name}={text if len(text) <= _LONGEST_ATTRIBUTE else text[: _LONGEST_ATTRIBUTE - 1] + '…'}"
