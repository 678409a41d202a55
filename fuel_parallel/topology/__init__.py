"""The model of machines and clusters: which devices there are, how they are linked, and what follows from that.

Names are imported when they are first used: every rank finds its cores with this package before its script begins, and
`fuelrun` starts without numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuel_parallel.topology.algorithms import Collective
    from fuel_parallel.topology.cost import CostModel, Prediction
    from fuel_parallel.topology.groups import LinkedGroup, linked_groups
    from fuel_parallel.topology.mesh_axes import MeshAxis
    from fuel_parallel.topology.model import (
        Cache,
        Connection,
        Description,
        DeviceId,
        DeviceInfo,
        DeviceKind,
        Interconnect,
        Link,
        Nic,
        NumaDomain,
        Origin,
        Switch,
    )
    from fuel_parallel.topology.placement import Placement, place
    from fuel_parallel.topology.planner import Plan, plan
    from fuel_parallel.topology.routes import Route
    from fuel_parallel.topology.topology import DeviceTopology
    from fuel_parallel.topology.transformer import TransformerModel, read_model
    from fuel_parallel.topology.validation import Comparison, Timing, validate

_HOME_OF = {
    "Cache": "model",
    "Collective": "algorithms",
    "Comparison": "validation",
    "Connection": "model",
    "CostModel": "cost",
    "Description": "model",
    "DeviceId": "model",
    "DeviceInfo": "model",
    "DeviceKind": "model",
    "DeviceTopology": "topology",
    "Interconnect": "model",
    "Link": "model",
    "LinkedGroup": "groups",
    "MeshAxis": "mesh_axes",
    "Nic": "model",
    "NumaDomain": "model",
    "Origin": "model",
    "Placement": "placement",
    "Plan": "planner",
    "Prediction": "cost",
    "Route": "routes",
    "Switch": "model",
    "Timing": "validation",
    "TransformerModel": "transformer",
    "linked_groups": "groups",
    "place": "placement",
    "plan": "planner",
    "read_model": "transformer",
    "validate": "validation",
}

__all__ = [
    "Cache",
    "Collective",
    "Comparison",
    "Connection",
    "CostModel",
    "Description",
    "DeviceId",
    "DeviceInfo",
    "DeviceKind",
    "DeviceTopology",
    "Interconnect",
    "Link",
    "LinkedGroup",
    "MeshAxis",
    "Nic",
    "NumaDomain",
    "Origin",
    "Placement",
    "Plan",
    "Prediction",
    "Route",
    "Switch",
    "Timing",
    "TransformerModel",
    "linked_groups",
    "place",
    "plan",
    "read_model",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fuel_parallel.topology' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"fuel_parallel.topology.{_HOME_OF[name]}"), name)
    return value
