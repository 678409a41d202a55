"""Runs a plan: one kernel after the other, each value let go after its last use."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from fuel_parallel.backends import backend_of
from fuel_parallel.errors import FuelError, RealizeError
from fuel_parallel.lazy.node import Node, describe_line
from fuel_parallel.runtime.plan import Plan, Step


def execute(plan: Plan, leaves: list[Any], computed: list[Node]) -> list[Any]:
    """The values of the plan's outputs. `computed` are the nodes that the plan stands for, for messages.

    Raises `RealizeError` with the op and the script's line when a kernel fails.
    """
    values = [*leaves, *plan.constants, *[None] * len(plan.steps)]
    device = ""
    with ExitStack() as active:
        for step in plan.steps:
            if step.spec.device != device:
                device = step.spec.device
                active.close()
                backend = backend_of(device)
                xp = backend.array_module
                active.enter_context(backend.running())
            arguments = [values[slot] for slot in step.inputs]
            try:
                if step.op.variadic:
                    values[step.output] = step.kernel(xp, arguments, *step.attrs)
                else:
                    values[step.output] = step.kernel(xp, *arguments, *step.attrs)
            except FuelError:
                raise
            except Exception as reason:
                raise _failure(step, arguments, computed[step.origin], reason) from reason
            for slot in step.dies:
                values[slot] = None
    return [values[slot] for slot in plan.outputs]


def _failure(step: Step, arguments: list[Any], node: Node, reason: Exception) -> RealizeError:
    inputs = ", ".join(f"{a.dtype.name}{list(a.shape)}" if hasattr(a, "dtype") else str(a) for a in arguments)
    what = f"{step.op.name}({inputs}) -> {step.spec} failed: {type(reason).__name__}: {reason}"
    if isinstance(reason, MemoryError):
        what += f" (the result alone needs {step.spec.nbytes / 2**20:.0f} MiB)"
    return RealizeError(f"{what}\n  built at {describe_line(node.line)}")
