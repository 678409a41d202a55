"""Parallel machine learning over MPI: lazy tensors, collectives in the graph, and a launcher.

>>> import fuel_parallel as fp
>>> import fuel_parallel.lazy as ft
>>> world = fp.init()                      # MpiComm under MPI, IdentityComm alone
>>> total = world.all_reduce(ft.ones(3))   # a node of the graph: nothing is sent yet
>>> total.shape
(3,)

Names are imported when they are first used, so that `fuelrun` starts without numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fuel_parallel.version import __version__

if TYPE_CHECKING:
    from fuel_parallel import (
        checkpoint,
        context_parallel,
        data_parallel,
        distributed_cache,
        expert_parallel,
        generation,
        lazy,
        optim,
        pipeline_parallel,
        tensor_parallel,
    )
    from fuel_parallel.attention import Attention, Rotary
    from fuel_parallel.backends import default_device, devices
    from fuel_parallel.backends.precision import matmul_precision
    from fuel_parallel.comm import CommInfo, Communicator, IdentityComm, MpiComm, ReduceOp, SymbolicComm, init
    from fuel_parallel.device_group import DeviceGroup
    from fuel_parallel.errors import FuelError
    from fuel_parallel.experts import ExpertParameter, MixtureOfExperts
    from fuel_parallel.layers import Embedding, LayerNorm, Linear, RMSNorm
    from fuel_parallel.mesh import Mesh
    from fuel_parallel.module import Module, Parameter, Shard, Variable
    from fuel_parallel.partitioning import partition
    from fuel_parallel.preemption import on_preempt
    from fuel_parallel.progress_bar import progress
    from fuel_parallel.quantization import StoredWeight, quantize
    from fuel_parallel.runtime.execute import memory_stats
    from fuel_parallel.runtime.realize import realize

_HOME_OF = {
    "Attention": "fuel_parallel.attention",
    "CommInfo": "fuel_parallel.comm",
    "Communicator": "fuel_parallel.comm",
    "Embedding": "fuel_parallel.layers",
    "ExpertParameter": "fuel_parallel.experts",
    "FuelError": "fuel_parallel.errors",
    "IdentityComm": "fuel_parallel.comm",
    "LayerNorm": "fuel_parallel.layers",
    "Linear": "fuel_parallel.layers",
    "Mesh": "fuel_parallel.mesh",
    "MixtureOfExperts": "fuel_parallel.experts",
    "Module": "fuel_parallel.module",
    "MpiComm": "fuel_parallel.comm",
    "Parameter": "fuel_parallel.module",
    "RMSNorm": "fuel_parallel.layers",
    "ReduceOp": "fuel_parallel.comm",
    "Rotary": "fuel_parallel.attention",
    "Shard": "fuel_parallel.module",
    "SymbolicComm": "fuel_parallel.comm",
    "StoredWeight": "fuel_parallel.quantization",
    "Variable": "fuel_parallel.module",
    "DeviceGroup": "fuel_parallel.device_group",
    "default_device": "fuel_parallel.backends",
    "devices": "fuel_parallel.backends",
    "init": "fuel_parallel.comm",
    "matmul_precision": "fuel_parallel.backends.precision",
    "memory_stats": "fuel_parallel.runtime.execute",
    "on_preempt": "fuel_parallel.preemption",
    "partition": "fuel_parallel.partitioning",
    "progress": "fuel_parallel.progress_bar",
    "quantize": "fuel_parallel.quantization",
    "realize": "fuel_parallel.runtime.realize",
}
_SUBMODULES = (
    "checkpoint",
    "context_parallel",
    "data_parallel",
    "distributed_cache",
    "expert_parallel",
    "generation",
    "lazy",
    "optim",
    "pipeline_parallel",
    "tensor_parallel",
)

__all__ = [
    "Attention",
    "CommInfo",
    "Communicator",
    "DeviceGroup",
    "Embedding",
    "ExpertParameter",
    "FuelError",
    "IdentityComm",
    "LayerNorm",
    "Linear",
    "Mesh",
    "MixtureOfExperts",
    "Module",
    "MpiComm",
    "Parameter",
    "RMSNorm",
    "ReduceOp",
    "Rotary",
    "Shard",
    "StoredWeight",
    "SymbolicComm",
    "Variable",
    "__version__",
    "checkpoint",
    "context_parallel",
    "data_parallel",
    "default_device",
    "devices",
    "distributed_cache",
    "expert_parallel",
    "generation",
    "init",
    "lazy",
    "matmul_precision",
    "memory_stats",
    "on_preempt",
    "optim",
    "partition",
    "pipeline_parallel",
    "progress",
    "quantize",
    "realize",
    "tensor_parallel",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"fuel_parallel.{name}")
    if name not in _HOME_OF:
        raise _unknown(name)
    # Bound here for good: a submodule of the same name must not take its place (`progress`, `partition`).
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__


def _unknown(name: str) -> AttributeError:
    from fuel_parallel.names_elsewhere import is_no_mistake, remedy

    if is_no_mistake(name, __path__):
        return AttributeError(name)
    import difflib

    from fuel_parallel import lazy
    from fuel_parallel.errors import UnknownNameError

    near = difflib.get_close_matches(name, __all__, n=1, cutoff=0.75)
    if name in lazy.__all__:
        written = f": it is in fuel_parallel.lazy, as ft.{name}"
    else:
        written = f": is fp.{near[0]} meant?" if near else remedy(name, lazy.__all__)
    return UnknownNameError(f"fuel_parallel has no {name!r}{written}")
