"""How a tensor looks where it is printed, and in a notebook. Looking never computes."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from fuel_parallel.backends import backend_of
from fuel_parallel.lazy.node import describe_line
from fuel_parallel.lazy.show import graph
from fuel_parallel.lazy.tensor import Tensor

_MOST_VALUES = 40
_EDGE = 3
_MOST_BOXES = 60


def text(x: Tensor) -> str:
    """The `repr` of a tensor: its value, shortened as numpy does, if it has one, else the op that will make it."""
    node, kind = x.node, type(x).__name__
    facts = f"shape={node.spec.shape}, dtype={node.spec.dtype.name}, device={node.spec.device}"
    value = node.value
    if value is None:
        return f"{kind}({facts}, lazy {node.op.name})"
    return f"{kind}({_values(value, node.spec.device, f'{kind}(')}, {facts})"


def html(x: Tensor) -> str:
    """What a notebook shows of a tensor: what it is, and its value or, if it has none, a picture of its graph."""
    node = x.node
    value = node.value
    facts = [
        ("shape", str(node.spec.shape)),
        ("dtype", node.spec.dtype.name),
        ("device", node.spec.device),
        ("bytes", f"{node.spec.nbytes:,}"),
        ("state", "value" if value is not None else f"lazy {node.op.name}"),
        ("built at", describe_line(node.line)),
    ]
    cells = "".join(f"<tr><th>{name}</th><td>{escape(fact)}</td></tr>" for name, fact in facts)
    if value is not None:
        content = f"<pre>{escape(_values(value, node.spec.device))}</pre>"
    else:
        behind = graph(x)
        content = (
            behind._repr_svg_()
            if len(behind.entries) <= _MOST_BOXES
            else f"<p>{len(behind.entries)} nodes: <code>ft.show(x, 'graph.svg')</code> draws them</p>"
        )
    return f"<div><b>{escape(type(x).__name__)}</b><table>{cells}</table>{content}</div>"


def _values(value: Any, device: str, prefix: str = "") -> str:
    """The numbers. Of a large array only those that are printed come from the device."""
    if value.size > _MOST_VALUES:
        for axis, extent in enumerate(value.shape):
            if extent > 2 * _EDGE + 1:
                # One more than is printed, in whose place numpy puts the dots.
                edges = [*range(_EDGE + 1), *range(extent - _EDGE, extent)]
                value = value[(slice(None),) * axis + (edges,)]
        threshold = 0
    else:
        threshold = _MOST_VALUES
    host = backend_of(device).to_host(value)
    return np.array2string(host, separator=", ", threshold=threshold, edgeitems=_EDGE, prefix=prefix)
