"""Compiles sources and runs regions: by CuPy on CUDA and ROCm, or by an array module with CuPy's `RawModule`.

Sources are made once for each program and compiled once for each source and device; CuPy and pyopencl keep compiled
code on disk as well. The kernels run on the current stream. Outputs must not share memory with inputs, but that one may
lie right where an input lies if the pair is `replaceable` and the call says so.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from fuel_parallel.runtime.codegen.dialect import CUDA, CUDA_IN_PLACE, OPENCL, Dialect
from fuel_parallel.runtime.codegen.expressions import Unsupported
from fuel_parallel.runtime.codegen.kernel import ENTRY, Kernel, kernel_for
from fuel_parallel.runtime.codegen.sums import FINISH, FINISH_THREADS
from fuel_parallel.runtime.program import Extent, Program

CUDA_OPTIONS = ("-std=c++17", "--fmad=false")
HIP_OPTIONS = ("-std=c++17", "-ffp-contract=off")
"""Of the compilers. C++17 has hexadecimal floats. A product and a sum stay two operations: a value that two passes
compute must be the same number in both, and the same as on the CPU; what is bound by memory loses nothing."""


_OF_MODULE = {"cupy": CUDA, "opencl": OPENCL}
"""The dialect of the array modules that compile sources, by their names."""


def compiles(xp: Any) -> bool:
    """Whether the array module takes generated kernels."""
    return xp.__name__ in _OF_MODULE


@lru_cache(maxsize=4096)
def kernel_or_reason(program: Program, dialect: Dialect = CUDA) -> Kernel | str:
    """The kernel of a program, or why there is none. Programs live in cached plans, so each is met again."""
    try:
        return kernel_for(program, dialect)
    except Unsupported as reason:
        return str(reason)


def replaceable(program: Program) -> frozenset[tuple[int, int]]:
    """Pairs (output, input register) of which the output may be written over the input on CUDA; see `Kernel`."""
    kernel = kernel_or_reason(program, CUDA)
    return frozenset() if isinstance(kernel, str) else kernel.replaceable


def functions(xp: Any, source: str, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Kernels of a source, compiled for the current device; called as CuPy's are, with grid, block and arguments."""
    return _compiled(xp, _current_device(xp), source, names)


@cache  # never unloaded: a captured graph may run it
def _compiled(xp: Any, device: int, source: str, names: tuple[str, ...]) -> tuple[Any, ...]:
    module = xp.RawModule(code=source, options=_options(xp))
    return tuple(module.get_function(name) for name in names)


def _options(xp: Any) -> tuple[str, ...]:
    if xp.__name__ != "cupy":
        return ()  # the module knows its compiler
    return HIP_OPTIONS if xp.cuda.runtime.is_hip else CUDA_OPTIONS


def _current_device(xp: Any) -> int:
    """CuPy is one module for all devices; others are one for each."""
    return int(xp.cuda.runtime.getDevice()) if xp.__name__ == "cupy" else 0


def launch(xp: Any, outputs: list[Any], arrays: Any, program: Program, in_place: bool = False) -> bool:
    """Fills `outputs` (contiguous) from the region's inputs; False, and nothing done, if there is no kernel for it.

    `in_place` says that outputs may lie where inputs lie.
    """
    dialect = _OF_MODULE[xp.__name__]
    if in_place and dialect is CUDA:
        dialect = CUDA_IN_PLACE
    kernel = kernel_or_reason(program, dialect)
    if isinstance(kernel, str):
        return False
    count = np.int64 if kernel.wide_positions else np.int32
    first, *finish = functions(xp, kernel.source, (ENTRY, FINISH) if kernel.workspaces else (ENTRY,))
    blocks, partial_rows = kernel.blocks(program.rows), kernel.partial_rows(program.rows)
    partials = [
        xp.empty((partial_rows, program.columns) if by_column else (blocks,), dtype=dtype)
        for dtype, by_column in kernel.workspaces
    ]
    inputs = [
        xp.asarray(array) if kind is Extent.SCALAR else xp.ascontiguousarray(array)
        for array, (kind, _) in zip(arrays, program.inputs, strict=True)
    ]
    direct = [outputs[o] for o in kernel.direct]
    first((blocks,), (kernel.arrangement.threads,), (*inputs, *direct, *partials, count(program.rows)))
    if finish:
        summed = [outputs[o] for o in kernel.summed]
        arguments = (*partials, *summed, count(blocks), count(partial_rows))
        finish[0]((kernel.finish_blocks(),), (FINISH_THREADS,), arguments)
    return True
