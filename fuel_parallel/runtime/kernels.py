"""What computes an op on a device: a kernel in C, that of the registry, or nothing there but the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from fuel_parallel.backends import backend_of
from fuel_parallel.backends.backend import Backend
from fuel_parallel.lazy.node import Attrs, Op, Spec
from fuel_parallel.runtime.codegen.attention import attention, attention_backward
from fuel_parallel.runtime.codegen.attention_paged import paged_attention
from fuel_parallel.runtime.codegen.dialect import CUDA, OPENCL, Dialect
from fuel_parallel.runtime.codegen.expressions import Unsupported
from fuel_parallel.runtime.codegen.launch import kernel_or_reason
from fuel_parallel.runtime.codegen.single import generated
from fuel_parallel.runtime.region import REGION

Kernel = Callable[..., Any]

DIALECTS: dict[str, Dialect] = {"cuda": CUDA, "opencl": OPENCL}
"""By the name that a backend has for its dialect."""

WRITTEN: dict[str, Callable[[Sequence[Spec], Attrs, Spec, Dialect], Kernel]] = {
    "attention": attention,
    "attention_backward": attention_backward,
    "paged_attention": paged_attention,
}
"""Ops for which a kernel is written as a whole. It comes before that of the registry, which is made of many."""


def kernel_of(op: Op, inputs: Sequence[Spec], attrs: Attrs, spec: Spec) -> Kernel | None:
    """The function that computes an op on the device of `spec`, called as `Op.kernel` is; None if there is none."""
    backend = backend_of(spec.device)
    compiles = bool(backend.dialect) and not any(x.dtype.name in backend.lacks for x in (*inputs, spec))
    if compiles and op.name in WRITTEN:
        written = written_or_reason(op.name, tuple(inputs), attrs, spec, backend.dialect)
        if not isinstance(written, str):
            return written
    if op is REGION and not _complete(backend):
        return op.kernel if _has_region(backend, attrs[0]) else None
    if backend.runs(op.name, inputs, attrs):
        return op.kernel
    return _generated(op, tuple(inputs), attrs, spec, backend.dialect) if compiles else None


@lru_cache(maxsize=4096)
def written_or_reason(op: str, inputs: tuple[Spec, ...], attrs: Attrs, spec: Spec, dialect: str) -> Kernel | str:
    """The kernel that is written for an op, or why it does not do for these inputs."""
    try:
        return WRITTEN[op](inputs, attrs, spec, DIALECTS[dialect])
    except Unsupported as reason:
        return str(reason)


def fuses(device: str) -> bool:
    """Whether chains of ops on a device may become regions."""
    backend = backend_of(device)
    return bool(backend.dialect) or _complete(backend)


def _complete(backend: Backend) -> bool:
    """Whether the array module has all of numpy's functions."""
    return type(backend).runs is Backend.runs


def _has_region(backend: Backend, program: Any) -> bool:
    used = {*program.input_dtypes, *(operation.dtype for operation in program.operations)}
    if not backend.dialect or any(dtype.name in backend.lacks for dtype in used):
        return False
    return not isinstance(kernel_or_reason(program, DIALECTS[backend.dialect]), str)


@lru_cache(maxsize=4096)
def _generated(op: Op, inputs: tuple[Spec, ...], attrs: Attrs, spec: Spec, dialect: str) -> Kernel | None:
    return generated(op, inputs, attrs, spec, DIALECTS[dialect])
